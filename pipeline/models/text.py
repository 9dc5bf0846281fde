"""A text file as training data for a language model, with the two smallest tokenizers.

| `tokens`     | a token is                                       | `vocab_size` of the model                |
|--------------|--------------------------------------------------|------------------------------------------|
| `bytes`      | a byte of the file: any text, in any language    | at least 256                             |
| `characters` | a character that occurs in the file, by its rank | at least one more than there are of them |

Token 0 of `characters` is for all others: in text that came from elsewhere (`decode` shows it as `?`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

BYTES, CHARACTERS = "bytes", "characters"


@dataclass(frozen=True)
class Bytes:
    size: int = 256

    def read(self, path: str) -> Tensor:
        """They stay in the file, of which the system reads what is asked for: it may be larger than memory."""
        size = Path(path).stat().st_size
        return torch.from_file(path, size=size, dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")


@dataclass(frozen=True)
class Characters:
    known: str  # in the order of their tokens, which begin with 1

    @staticmethod
    def of(text: str) -> Characters:
        return Characters("".join(sorted(set(text))))

    @property
    def size(self) -> int:
        return len(self.known) + 1

    def read(self, path: str) -> Tensor:
        return torch.tensor(self.encode(Path(path).read_text(encoding="utf-8")), dtype=torch.int32)

    def encode(self, text: str) -> list[int]:
        places = {letter: place for place, letter in enumerate(self.known, start=1)}
        return [places.get(letter, 0) for letter in text]

    def decode(self, tokens: list[int]) -> str:
        return "".join(self.known[token - 1] if token else "?" for token in tokens)


class TextFile(Dataset[dict[str, Tensor]]):
    """Windows of `length` tokens that lie one after another, each with the tokens that follow as its labels.

    `begin` and `end` are the part of the file that is taken: data that is held out is the part that training leaves.
    The path is one from the project's folder. `vocabulary` is the file that the characters are taken from, where that
    is another one.
    """

    def __init__(
        self,
        path: str,
        length: int,
        vocab_size: int,
        tokens: str = BYTES,
        begin: float = 0.0,
        end: float = 1.0,
        vocabulary: str | None = None,
    ) -> None:
        if not 0 <= begin < end <= 1:
            raise ValueError(f"the part from {begin} to {end} is none of the file: 0 <= begin < end <= 1")
        self.length = length
        self.tokenizer = tokenizer_of(tokens, vocabulary or path)
        if self.tokenizer.size > vocab_size:
            raise ValueError(f"{path} has tokens up to {self.tokenizer.size - 1}, and vocab_size is {vocab_size}")
        whole = self.tokenizer.read(path)
        self.tokens = whole[round(begin * len(whole)) : round(end * len(whole))]
        if len(self) < 1:
            raise ValueError(f"{path} has {len(self.tokens)} tokens there, and a sample needs {length + 1}")

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = self.tokens[index * self.length : (index + 1) * self.length + 1].long()
        return {"input_ids": window[:-1], "labels": window[1:]}


def tokenizer_of(tokens: str, path: str) -> Bytes | Characters:
    if tokens == BYTES:
        return Bytes()
    if tokens == CHARACTERS:
        return Characters.of(Path(path).read_text(encoding="utf-8"))
    raise ValueError(f"tokens is {tokens!r}: it can be {BYTES} or {CHARACTERS}")
