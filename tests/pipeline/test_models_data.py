"""Data sets of our own: text in windows, and samples that depend on their index alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright.pipeline.models.data import ClassImages, ClassVectors, TokenSequences
from shardwright.pipeline.models.text import Bytes, Characters, TextFile

TEXT = "Grüße, 世界! one two\n" * 9


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT.encode())
    return str(path)


@pytest.mark.parametrize("tokens", ["bytes", "characters"])
def test_windows_cover_the_file_and_labels_follow(file: str, tokens: str) -> None:
    data = TextFile(file, length=10, vocab_size=256, tokens=tokens)
    whole = data.tokenizer.encode(TEXT)
    assert data.tokenizer.decode(whole) == TEXT and len(data) == (len(whole) - 1) // 10
    samples = [data[index] for index in range(len(data))]
    assert torch.cat([sample["input_ids"] for sample in samples]).tolist() == whole[: 10 * len(data)]
    assert torch.cat([sample["labels"] for sample in samples]).tolist() == whole[1 : 10 * len(data) + 1]
    assert all(sample["labels"].dtype == sample["input_ids"].dtype == torch.int64 for sample in samples)


@given(st.text(max_size=40), st.text(max_size=40))
def test_tokens_can_be_read_back(text: str, other: str) -> None:
    assert Bytes().decode(Bytes().encode(text)) == text
    known = Characters.of(text)
    assert known.decode(known.encode(text)) == text
    assert max(known.encode(text), default=0) < known.size and 0 not in known.encode(text)
    assert all((token == 0) == (letter not in text) for letter, token in zip(other, known.encode(other), strict=True))


def test_what_is_held_out_is_not_trained_on(file: str, tmp_path: Path) -> None:
    both = [TextFile(file, 5, 256, begin=begin, end=end).tokens.tolist() for begin, end in ((0, 0.7), (0.7, 1))]
    assert bytes(both[0] + both[1]) == TEXT.encode()
    other = tmp_path / "other.txt"
    other.write_text("one §")
    found = TextFile(str(other), 4, 256, "characters", vocabulary=file)
    assert found.tokenizer.decode(found.tokens.tolist()) == "one ?"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"vocab_size": 255}, "tokens up to 255, and vocab_size is 255"),
        ({"tokens": "words"}, "tokens is 'words': it can be bytes or characters"),
        ({"begin": 0.5, "end": 0.5}, "0 <= begin < end <= 1"),
        ({"length": 1000}, "and a sample needs 1001"),
    ],
)
def test_a_file_that_cannot_be_used(file: str, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        TextFile(**{"path": file, "length": 8, "vocab_size": 256, **changes})


@pytest.mark.parametrize("kind", [TokenSequences, ClassVectors, ClassImages])
def test_a_sample_depends_on_its_index_alone_and_held_out_ones_go_on(kind: Any) -> None:
    sizes = {
        TokenSequences: {"vocab_size": 16, "length": 6},
        ClassVectors: {"features": 6, "classes": 3},
        ClassImages: {"size": 8, "classes": 3, "channels": 2},
    }[kind]
    whole, rest = kind(**sizes, samples=20), kind(**sizes, samples=8, first=12)
    assert len(whole) == 20 and len(rest) == 8
    for index in (7, 0):
        for name, tensor in rest[index].items():
            assert torch.equal(tensor, whole[12 + index][name])
            assert torch.equal(tensor, rest[index][name])


def test_images_are_of_the_asked_size_and_classes_differ() -> None:
    data = ClassImages(size=8, classes=3, samples=30, channels=2, noise=0.0)
    samples = [data[index] for index in range(30)]
    assert all(sample["images"].shape == (2, 8, 8) for sample in samples)
    assert {int(sample["labels"]) for sample in samples} == {0, 1, 2}
    alike = [s["images"] / s["images"].norm() for s in samples if s["labels"] == 1]
    torch.testing.assert_close(alike[0], alike[-1])  # but for how light they are
