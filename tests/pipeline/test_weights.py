"""Files of weights: any shard of any tensor is read as it is, and files that are not the model's are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from shardwright.pipeline.ir.layout import Layout
from shardwright.pipeline.user.weights import TYPES, WeightsError, match_names, open_weights, read_shard, write_weights

STATE = {
    "token.weight": torch.arange(48.0).view(8, 6),
    "norm.count": torch.tensor(3),
    "kernel": torch.arange(32, dtype=torch.int32).view(2, 4, 2, 2),
    "half": torch.randn(4, 4).bfloat16(),
}


def write_safetensors(folder: Path) -> Path:
    save_file(STATE, folder / "model.safetensors")
    return folder / "model.safetensors"


def write_parts(folder: Path) -> Path:
    places = {}
    for number, name in enumerate(STATE):
        places[name] = f"part-{number % 2}.safetensors"
        both = [n for i, n in enumerate(STATE) if i % 2 == number % 2]
        save_file({n: STATE[n] for n in both}, folder / places[name])
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return index


def write_state_dict(folder: Path) -> Path:
    torch.save(STATE, folder / "model.pt")
    return folder / "model.pt"


def write_old_state_dict(folder: Path) -> Path:
    torch.save(STATE, folder / "old.bin", _use_new_zipfile_serialization=False)
    return folder / "old.bin"


FORMS = [write_safetensors, write_parts, write_state_dict, write_old_state_dict]


def whole(tensor: Tensor) -> tuple:
    return tuple(((0, size),) for size in tensor.shape)


@pytest.mark.parametrize("write", FORMS)
def test_every_form_gives_names_shapes_and_shards(tmp_path: Path, write) -> None:
    weights = open_weights(write(tmp_path), "here")
    assert weights.shapes == {name: tuple(tensor.shape) for name, tensor in STATE.items()}
    for name, tensor in STATE.items():
        found = read_shard(weights, name, whole(tensor))
        assert found.dtype == tensor.dtype and torch.equal(found, tensor)
    found = read_shard(weights, "token.weight", (((0, 2), (4, 1)), ((1, 1), (3, 2))))
    assert torch.equal(found, STATE["token.weight"][[0, 1, 4]][:, [1, 3, 4]])
    assert read_shard(weights, "token.weight", (((2, 1),), ((0, 6),))).untyped_storage().nbytes() <= 6 * 4


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_shards_of_layouts_are_those_of_the_tensor(tmp_path_factory, data) -> None:
    sizes, shape = (2, 3), (12, 36)
    states = ["R", "S(0)", "S(1)", "S(0:2)", "S(1:3)"]
    text = ",".join(data.draw(st.sampled_from(states)) for _ in sizes)
    tensor = torch.arange(12 * 36.0).view(shape)
    path = tmp_path_factory.mktemp("weights") / "one.safetensors"
    save_file({"x": tensor}, path)
    layout = Layout.parse(text)
    if not layout.fits(shape, sizes):
        return
    rank = tuple(data.draw(st.integers(0, size - 1)) for size in sizes)
    runs = layout.runs(shape, sizes, rank)
    rows, columns = ([i for start, count in dim for i in range(start, start + count)] for dim in runs)
    assert torch.equal(read_shard(open_weights(path, ""), "x", runs), tensor[rows][:, columns])


# ------------------------------------------------------------------------------------------------------------- writing


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_what_is_written_is_read_by_safetensors(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {
        "a": torch.arange(6).view(2, 3).t().to(dtype),
        "b": torch.tensor(1).to(dtype),
        "c": torch.zeros(0, 4).to(dtype),
    }
    specs = {name: (dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    path = tmp_path / "deep" / "model.safetensors"
    write_weights(path, specs, iter(tensors.values()), {"format": "pt"})
    found = load_file(path)
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == dtype and torch.equal(raw(found[name]), raw(tensor))


def raw(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    def tensors():
        yield torch.zeros(2)
        raise RuntimeError("a rank is gone")

    path = tmp_path / "model.safetensors"
    with pytest.raises(RuntimeError, match="gone"):
        write_weights(path, {n: (torch.float32, (2,)) for n in "ab"}, tensors(), {})
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------------------ refusals


def refused(given, names: dict[str, str], shapes: dict[str, tuple[int, ...]]) -> str:
    with pytest.raises(WeightsError) as refusal:
        match_names(given, names, shapes, "conf/train/x.yaml: init_from")
    line = refusal.value.line()
    assert "\n" not in line and line.startswith("conf/train/x.yaml: init_from: ")
    return line


@pytest.fixture
def weights(tmp_path: Path):
    return open_weights(write_safetensors(tmp_path), "here")


NAMES = {name: name for name in STATE}
SHAPES = {name: tuple(tensor.shape) for name, tensor in STATE.items()}


def test_all_that_is_wrong_is_told_in_one_line(weights) -> None:
    assert match_names(weights, NAMES, SHAPES, "") == NAMES
    less = {name: name for name in list(STATE)[1:]}
    assert "the model has no token.weight" in refused(weights, less, SHAPES)
    more = {**NAMES, **{f"layer.{n}": f"layer.{n}" for n in range(5)}}
    line = refused(weights, more, {**SHAPES, **{f"layer.{n}": (2,) for n in range(5)}})
    assert "it has no layer.0, layer.1, layer.2 and 2 more" in line
    line = refused(weights, less, {**SHAPES, "half": (4, 5)})
    assert "half has shape [4, 4] instead of [4, 5]" in line and "the model has no" in line


def test_of_tied_weights_any_name_will_do(weights) -> None:
    tied = {"first": "first", "token.weight": "first", **{n: n for n in list(STATE)[1:]}}
    shapes = {**SHAPES, "first": (8, 6)}
    assert match_names(weights, tied, shapes, "")["first"] == "token.weight"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("cut.safetensors", b"\x10\x00\x00\x00\x00\x00\x00\x00{"),
        ("cut.pt", b"PK\x03\x04 nothing"),
        ("no.safetensors.index.json", b"{}"),
    ],
)
def test_a_broken_file_is_one_line(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(WeightsError) as refusal:
        open_weights(tmp_path / name, "here")
    assert "cannot be read" in refusal.value.line() and refusal.value.remedy


def test_an_index_does_not_lead_out_of_its_folder(tmp_path: Path) -> None:
    write_weights(tmp_path / "a.safetensors", {"a": (torch.float32, (2,))}, [torch.zeros(2)], {})
    index = tmp_path / "inner" / "model.safetensors.index.json"
    index.parent.mkdir()
    for place in ("../a.safetensors", str(tmp_path / "a.safetensors")):
        index.write_text(json.dumps({"weight_map": {"a": place}}))
        with pytest.raises(WeightsError, match="lies outside of its folder"):
            open_weights(index, "here")


def test_code_in_a_state_dict_is_not_run(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "boom",))

    torch.save({"x": Bomb()}, tmp_path / "bomb.pt")
    with pytest.raises(WeightsError, match="cannot be read"):
        open_weights(tmp_path / "bomb.pt", "here")
    assert not (tmp_path / "boom").exists()
    torch.save([torch.zeros(2)], tmp_path / "list.pt")
    with pytest.raises(WeightsError, match="no mapping"):
        open_weights(tmp_path / "list.pt", "here")
