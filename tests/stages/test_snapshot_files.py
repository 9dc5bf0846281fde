"""Snapshots as folders and as boxes of tensors; which runs go on from them, and what is told."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import tempfile
from collections.abc import Iterator
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as settings_of_tests
from hypothesis import strategies as st

from benchmarks.forged_snapshots import FILES, about, read_all, snapshot
from shardwright.pipeline.base.artifacts import Artifact
from shardwright.pipeline.base.errors import TrainError
from shardwright.pipeline.base.stage import Inputs
from shardwright.pipeline.config import load_config
from shardwright.pipeline.ir.layout import Layout, R, S
from shardwright.stages.train.journal import tell
from shardwright.stages.train.ranks.safety import checksum, difference
from shardwright.stages.train.snapshots import manifest, writer
from shardwright.stages.train.snapshots.boxes import (
    BoxedTensor,
    TensorFiles,
    boxes_of,
    check_boxes,
    file_of,
    read_table,
    shared_out,
    tiles,
    write_boxes,
    write_table,
)
from shardwright.stages.train.snapshots.manifest import (
    Damaged,
    Unreadable,
    check_files,
    name_of,
    read_manifest,
    snapshots_in,
    write_manifest,
)
from shardwright.stages.train.snapshots.starting import differing, digest_of_run, launch_of, prepare, settings_of
from shardwright.stages.train.snapshots.writer import not_seen

PROJECT = Path(__file__).parents[2]
CONFIG = load_config(PROJECT)
EVERY = {"snapshots": dataclasses.replace(CONFIG.train.snapshots, every=2)}


@pytest.fixture(scope="module", autouse=True)
def no_waiting_for_the_disk() -> Iterator[None]:
    """Nothing here loses power."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


# ---- boxes


@given(st.tuples(*[st.sampled_from([R, S(0), S(1), S(0, 2), S(0, 4), S(1, 3)])] * 2))
def test_the_boxes_of_all_ranks_are_the_tensor(states: tuple) -> None:
    """Each element as often as there are replicas, and where it belongs."""
    layout, sizes, shape = Layout(states), (2, 3), (48, 36)
    if not layout.fits(shape, sizes):
        return
    whole = np.arange(48 * 36).reshape(shape)
    seen = np.zeros(shape, dtype=int)
    for rank in product(range(2), range(3)):
        runs = layout.runs(shape, sizes, rank)
        indices = [[i for start, length in dim for i in range(start, start + length)] for dim in runs]
        shard = whole[np.ix_(*indices)]
        for box in boxes_of(runs):
            there = tuple(slice(o, o + s) for o, s in zip(*box.place, strict=True))
            assert (shard[box.within] == whole[there]).all()
            seen[there] += 1
    assert (seen == 6 // layout.shards(sizes)).all()


def test_a_number_is_one_box_and_nothing_is_none() -> None:
    assert [box.within for box in boxes_of(())] == [()]
    assert boxes_of([((0, 0),), ((0, 4),)]) == ()


# ---- folders


def test_a_snapshot_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = snapshot(tmp_path, 40)
    assert path.name == name_of(40) == "step-000040"
    found = read_manifest(path)
    assert found["about"] == about(40) and set(found["files"]) == set(FILES)
    for part in range(2):
        check_files(path, found, part, 2)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _turn_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("file", [*FILES[1:], "manifest.json"])
@pytest.mark.parametrize("harm", [_cut, _turn_a_bit, Path.unlink])
def test_any_damage_is_found(tmp_path: Path, file: str, harm: Any) -> None:
    path = snapshot(tmp_path, 40)
    harm(path / file)
    with pytest.raises(Damaged, match=file):
        check_files(path, read_manifest(path))


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("losses", [1.0] * 3),
        ("losses", [1.0] * 3 + [1e300]),
        ("seconds", []),
        ("seconds", [0.1] * 5),
        ("seconds", [0.0]),
        ("evaluated", [[2]]),
        ("peak_bytes", [-1]),
        ("ranks", 2.0),
        ("samples", True),
        ("settings", []),
    ],
)
def test_numbers_of_a_snapshot_are_those_of_its_steps(tmp_path: Path, name: str, wrong: Any) -> None:
    path = snapshot(tmp_path, 4)
    write_manifest(path, about(4, **{name: wrong}), read_manifest(path)["files"])
    with pytest.raises(Damaged, match=f"its {name} are not those of a run"):
        read_manifest(path)


def _write_version_1(path: Path) -> None:
    found = json.loads(path.read_text())
    path.write_text(json.dumps({**found, "version": 1}))


def _make_unreadable(path: Path) -> None:
    """A folder stands for a file that the system will not give."""
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("file", "happens", "told"),
    [
        (
            "manifest.json",
            _write_version_1,
            "version 1, this program reads version 2: go on with the program that wrote",
        ),
        ("manifest.json", _make_unreadable, "manifest.json cannot be read .Is a directory.: try again, or move"),
        (
            "rank-00001.safetensors",
            _make_unreadable,
            "rank-00001.safetensors cannot be read .Is a directory.: try again, or move",
        ),
    ],
)
def test_what_may_be_whole_is_not_called_damaged(tmp_path: Path, file: str, happens: Any, told: str) -> None:
    path = snapshot(tmp_path, 40)
    happens(path / file)
    with pytest.raises(Unreadable, match=told):
        check_files(path, read_manifest(path))


def test_the_first_host_sees_every_file_or_says_which_it_does_not(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(writer, "SEEN_S", 0.0)
    path = snapshot(tmp_path, 40)
    files = read_manifest(path)["files"]
    assert not_seen(path, files) == ""
    _cut(path / "rank-00001.safetensors")
    assert not_seen(path, files).startswith(
        "the first host does not see rank-00001.safetensors, which another one wrote; put runs"
    )
    (path / "rank-00001.safetensors").unlink()
    assert "rank-00001.safetensors" in not_seen(path, files)


def test_the_newest_are_kept_and_leftovers_swept(tmp_path: Path) -> None:
    for step in (8, 100, 9, 1_000):
        snapshot(tmp_path, step)
    (tmp_path / ".step-000200").mkdir()
    (tmp_path / "notes").mkdir()
    assert [path.name for path in snapshots_in(tmp_path)] == [name_of(step) for step in (1_000, 100, 9, 8)]
    manifest.set_aside(tmp_path / name_of(1_000))
    manifest.sweep(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir() if p.name[0] in ".d") == ["damaged-step-001000"]
    manifest.keep_newest(tmp_path, 2)
    manifest.remove_replaced(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["damaged-step-001000", "notes", "step-000009", "step-000100"]
    snapshot(tmp_path, 1_000)
    manifest.remove_replaced(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["notes", "step-000009", "step-000100", "step-001000"]


@pytest.mark.parametrize("harm", [_cut, Path.unlink])
def test_an_older_one_stays_while_a_newer_one_lacks_a_file(tmp_path: Path, harm: Any) -> None:
    for step in (2, 4):
        snapshot(tmp_path, step)
    harm(tmp_path / name_of(4) / FILES[0])
    manifest.keep_newest(tmp_path, 1)
    assert [path.name for path in snapshots_in(tmp_path)] == [name_of(4), name_of(2)]


def test_what_is_in_the_way_is_set_aside_each_time(tmp_path: Path) -> None:
    for _ in range(3):
        path = snapshot(tmp_path, 4)
    check_files(path, read_manifest(path))
    assert sorted(os.listdir(tmp_path)) == ["damaged-step-000004", "damaged-step-000004-2", "step-000004"]
    manifest.remove_replaced(tmp_path)
    assert os.listdir(tmp_path) == ["step-000004"]


# ---- from anywhere


@pytest.mark.parametrize("file", ["manifest.json", *FILES])
def test_a_link_or_a_pipe_is_no_file_of_a_snapshot(tmp_path: Path, file: str) -> None:
    path = snapshot(tmp_path, 4)
    os.rename(path / file, tmp_path / "elsewhere")
    (path / file).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Damaged, match=f"{file} is a link or a device"):
        read_all(path)
    (path / file).unlink()
    os.mkfifo(path / file)
    with pytest.raises(Damaged, match=f"{file} is a link or a device"):
        read_all(path)


TYPES = (
    torch.float32,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.uint16,
    torch.bool,
    torch.float8_e4m3fn,
)


@given(st.sampled_from(TYPES), st.integers(0, 2**32), st.data())
@settings_of_tests(max_examples=30, deadline=None)
def test_any_shard_is_filled_from_any_boxes(dtype: torch.dtype, seed: int, data: Any) -> None:
    """Written by ranks of one cut, replicas once, and read in another: also numbers of no dims and of no elements."""
    shape = data.draw(st.sampled_from([(), (0, 3), (5,), (4, 6), (7, 2, 3)]))
    whole = torch.randint(0, 2**7, (*shape, dtype.itemsize), generator=torch.Generator().manual_seed(seed))
    whole = (whole.to(torch.uint8) % 2 if dtype == torch.bool else whole.to(torch.uint8)).view(dtype).view(shape)
    cuts = [data.draw(cuts_of(shape)) for _ in range(2)]
    shards = [_shards(whole, cut) for cut in cuts]
    with tempfile.TemporaryDirectory() as folder:
        shared = shared_out([[shard.offer()] for shard in shards[0]])
        for rank, shard in enumerate(shards[0]):
            mine = {place for place, file in shared["a"].boxes.items() if file == file_of(rank)}
            write_boxes(Path(folder) / file_of(rank), [shard], {"a": mine})
        write_table(Path(folder), shared)
        table = read_table(Path(folder), os.listdir(folder))
        check_boxes(Path(folder), table)
        files = TensorFiles(Path(folder), table)
        for shard in shards[1]:
            wanted = shard.tensor.clone()
            shard.tensor.zero_()
            files.fill(shard)
            assert torch.equal(_bytes(shard.tensor), _bytes(wanted))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


@st.composite
def cuts_of(draw: Any, shape: tuple[int, ...]) -> list[list[int]]:
    """Of each dim the indices at which it is cut."""
    return [sorted(draw(st.sets(st.sampled_from(range(1, size)), max_size=2))) if size > 1 else [] for size in shape]


def _shards(whole: torch.Tensor, cut: list[list[int]]) -> list[BoxedTensor]:
    """As many ranks as boxes, and one more that holds the first again."""
    ends = [[0, *dim, size] for dim, size in zip(cut, whole.shape, strict=True)]
    runs = product(*[[((a, b - a),) for a, b in pairwise(dim)] for dim in ends])
    found = []
    for dims in runs:
        there = tuple(slice(start, start + length) for ((start, length),) in dims)
        found.append(BoxedTensor("a", whole[there].clone(), tuple(whole.shape), str(cut), boxes_of(dims)))
    return [*found, dataclasses.replace(found[0], tensor=found[0].tensor.clone())]


def test_replicas_share_out_what_is_written() -> None:
    """By bytes: the wide one is as much as the four others."""
    sizes = {"wide": (8, torch.float64), **{name: (4, torch.float32) for name in "abcd"}}
    offer = [BoxedTensor.whole(name, torch.zeros(size, dtype=dtype)).offer() for name, (size, dtype) in sizes.items()]
    shared = shared_out([offer, offer])
    written = {name: next(iter(saved.boxes.values())) for name, saved in shared.items()}
    assert written == {"wide": file_of(0), **dict.fromkeys("abcd", file_of(1))}


def test_boxes_that_tile() -> None:
    assert tiles((), [((), ())]) and not tiles((), [])
    assert tiles((0, 3), []) and tiles((4,), [((0,), (1,)), ((1,), (3,))])
    assert not tiles((4,), [((0,), (2,)), ((1,), (2,))])
    pinwheel = [((0, 0), (2, 1)), ((0, 1), (1, 2)), ((1, 2), (2, 1)), ((2, 0), (1, 2)), ((1, 1), (1, 1))]
    assert tiles((3, 3), pinwheel) and not tiles((3, 3), pinwheel[:-1])


# ---- which run


def settings(**train: Any) -> dict[str, Any]:
    given = {"steps": 10, "seed": 1, "optimizer": {"lr": 0.1}, "hang_s": 5, "resume": "auto", **train}
    return settings_of({"batch": 2}, {"seed": 0}, given)


def test_what_makes_a_run_what_it_is() -> None:
    same, other = settings(hang_s=9, resume="never", steps=20), settings(seed=2)
    assert settings() == same and differing(settings(), other) == ["train.seed"]
    assert differing(settings(), settings(optimizer={"lr": 0.2})) == ["train.optimizer.lr"]
    assert digest_of_run(same, "graph", None) == digest_of_run(settings(), "graph", None)
    digests = {digest_of_run(s, g, o) for s in (same, other) for g in ("graph", "other") for o in (None, "origin")}
    assert len(digests) == 8


def test_a_password_does_not_stand_in_a_snapshot(tmp_path: Path, log: tuple[logging.Logger, list[str]]) -> None:
    told = prepared(tmp_path, log[0], optimizer={"_target_": "x.y", "of": "https://user:word@host"})["settings"]
    assert told["train.optimizer.of"] == "https://***@host"


def test_steps_matter_where_the_rate_falls_until_the_last() -> None:
    falls = {"decay": "linear", "decay_steps": None}
    assert settings(schedule=falls) != settings(schedule=falls, steps=20)
    assert settings(schedule={**falls, "decay_steps": 5}) == settings(schedule={**falls, "decay_steps": 5}, steps=20)


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname}: {record.getMessage()}")


@pytest.fixture
def log() -> tuple[logging.Logger, list[str]]:
    logger, handler = logging.Logger("train"), Lines()
    logger.addHandler(handler)
    return logger, handler.lines


def prepared(root: Path, log: logging.Logger, **train: Any) -> dict[str, Any]:
    config = dataclasses.replace(CONFIG, train=dataclasses.replace(CONFIG.train, **train))
    graph = Artifact("graph", {}, {}, None, "sha256:graph")
    return prepare(Inputs(root, {"graph": graph}, log, None), config)  # type: ignore[arg-type]


def test_a_run_goes_on_until_it_is_finished(tmp_path: Path, log) -> None:
    folder = Path(prepared(tmp_path, log[0])["folder"])
    assert folder.parent == tmp_path / "runs/train/snapshots"
    snapshot(folder, 4)
    assert Path(prepared(tmp_path, log[0], steps=99)["folder"]) == folder and snapshots_in(folder)
    assert Path(prepared(tmp_path, log[0], seed=99)["folder"]) != folder and snapshots_in(folder)
    assert Path(prepared(tmp_path, log[0], steps=4)["folder"]) == folder  # all are taken, what follows them is not
    with pytest.raises(TrainError, match=r"adamw.yaml: steps: 3 steps are asked for, .* come to step 4; raise `steps`"):
        prepared(tmp_path, log[0], steps=3)
    manifest.finish(folder)
    prepared(tmp_path, log[0])
    assert not folder.exists() and kept(folder) == ["step-000004"]
    snapshot(folder, 6)
    prepared(tmp_path, log[0], resume="never")
    assert not folder.exists() and kept(folder) == ["step-000004", "step-000006"]


def kept(folder: Path) -> list[str]:
    """Of the runs before."""
    return [path.name for run in manifest.earlier_runs(folder) for path in snapshots_in(run)]


def test_snapshots_of_the_run_before_stay_until_another_has_come_as_far(tmp_path: Path, log) -> None:
    """However often it is killed before that; and they can be named, as any other."""
    folder = Path(prepared(tmp_path, log[0], **EVERY)["folder"])
    snapshot(folder, 4)
    manifest.finish(folder)
    for _ in range(3):
        prepared(tmp_path, log[0], **EVERY)
        assert kept(folder) == ["step-000004"] and not snapshots_in(folder)
    name = f"runs/train/snapshots/{folder.name}.earlier"
    assert log[1][0] == f"INFO: training begins anew: {name} has the run before until this one has come as far"
    assert prepared(tmp_path, log[0], resume=f"{name}/step-000004")["origin"] == str(tmp_path / name / "step-000004")
    snapshot(folder, 2)
    manifest.remove_replaced(folder)
    assert kept(folder) == ["step-000004"]
    prepared(tmp_path, log[0], **EVERY, resume="never")
    assert kept(folder) == ["step-000004", "step-000002"]
    (manifest.earlier_runs(folder)[0] / "best").mkdir()
    snapshot(folder, 4)
    manifest.remove_replaced(folder)
    assert [path.name for path in snapshots_in(folder)] == ["step-000004"] and kept(folder) == []
    assert [os.listdir(run) for run in manifest.earlier_runs(folder)] == [["best"]]  # which is not of our making


def test_a_run_before_stays_with_all_its_snapshots_until_the_last_of_them_is_reached(tmp_path: Path, log) -> None:
    folder = Path(prepared(tmp_path, log[0], **EVERY)["folder"])
    for step in (2, 4):
        snapshot(folder, step)
    prepared(tmp_path, log[0], **EVERY, resume="never")
    snapshot(folder, 3)
    manifest.remove_replaced(folder)
    assert kept(folder) == ["step-000004", "step-000002"]


def test_damaged_snapshots_and_the_user_s_own_files_are_put_aside_as_well(tmp_path: Path, log) -> None:
    folder = Path(prepared(tmp_path, log[0], **EVERY)["folder"])
    (folder / "damaged-step-000004").mkdir(parents=True)
    prepared(tmp_path, log[0], **EVERY, resume="never")
    (folder / "best").mkdir(parents=True)
    prepared(tmp_path, log[0], **EVERY, resume="never")
    assert [os.listdir(run) for run in manifest.earlier_runs(folder)] == [["damaged-step-000004"], ["best"]]


def test_a_launcher_that_starts_the_stage_again_has_its_snapshots_back(tmp_path: Path, log, monkeypatch) -> None:
    """Whatever `resume` says, and also when rank 0 had come to its end; but not those of another job."""

    def start(job: str, count: int, **train: Any) -> Path:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", job)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(count))
        return Path(prepared(tmp_path, log[0], **EVERY, **train)["folder"])

    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    snapshot(start("one", 0, resume="never"), 4)
    folder = start("one", 1, resume="never")
    assert [path.name for path in snapshots_in(folder)] == ["step-000004"]
    manifest.finish(folder)
    start("one", 2)
    assert [path.name for path in snapshots_in(folder)] == ["step-000004"]
    start("two", 1)  # its first start did not come so far
    assert snapshots_in(folder) == [] and kept(folder) == ["step-000004"]


def test_which_launch_this_is() -> None:
    assert launch_of({}) == ("", False)
    assert launch_of({"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "0"}) == ("a", False)
    assert launch_of({"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "2"}) == ("a", True)
    requeued = {"TORCHELASTIC_RUN_ID": "a", "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}
    assert launch_of(requeued) == ("7", True)


def test_a_run_that_begins_from_a_snapshot_is_another_run(tmp_path: Path, log) -> None:
    plain = prepared(tmp_path, log[0])
    path = snapshot(Path(plain["folder"]), 4)
    found = json.loads((path / "manifest.json").read_text())
    write_manifest(path, about(4, settings={**plain["settings"], "train.seed": 7}), found["files"])
    name = str(path.relative_to(tmp_path))
    begun = prepared(tmp_path, log[0], resume=name)
    assert begun["origin"] == str(path) and begun["folder"] != plain["folder"]
    assert log[1] == [f"INFO: the run begins from {name} with other settings of train.seed"]
    with pytest.raises(TrainError, match=r"conf/train/adamw.yaml: resume: there is no snapshot nowhere"):
        prepared(tmp_path, log[0], resume="nowhere")
    _cut(path / "manifest.json")
    with pytest.raises(TrainError, match="not a whole snapshot"):
        prepared(tmp_path, log[0], resume=name)


def test_what_is_told(tmp_path: Path, log) -> None:
    notes: list[dict[str, Any]] = [
        {"snapshot": 4},
        {"snapshot": 8, "problem": "No space left on device"},
        {"damaged": "step-000008: gone"},
        {"resumed": 4, "restart": 0, "losses": [], "from": str(tmp_path / "runs/step-000004")},
        {"resumed": 0, "restart": 2},
        {"untraced": 9},
        {"python_calls": "g++ cannot build the calls of kernels", "failed": 2, "ranks": 8},
        {"not_captured": "it reads what it computes"},
    ]
    for note in notes:
        tell(log[0], tmp_path, note)
    assert log[1] == [
        "INFO: snapshot after 4 steps is on the disk",
        "WARNING: the snapshot after step 8 could not be written: No space left on device; those before it stay, and"
        " training goes on",
        "WARNING: snapshot step-000008: gone; the one before it is taken",
        "INFO: going on after 4 steps, from runs/step-000004",
        "WARNING: a rank failed: all ranks go on from the start (restart 2)",
        "WARNING: step 9 is not traced: its memory is measured, and none follows",
        "WARNING: on 2 of 8 ranks g++ cannot build the calls of kernels",
        "WARNING: steps are not captured as a CUDA graph: it reads what it computes",
    ]


# ---- replicas


@given(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool]), st.integers(0, 11))
def test_any_bit_changes_the_checksum(dtype: torch.dtype, place: int) -> None:
    tensor = torch.ones(3, 4, dtype=dtype)
    other = tensor.clone()
    other.view(-1)[place] = 0
    assert checksum(tensor) == checksum(tensor.t().contiguous().t()) != checksum(other)


def test_only_equal_places_are_compared() -> None:
    seen = [{("a", 0): 1, ("b", 0): 2}, {("a", 1): 3, ("b", 0): 2}, {("b", 0): 4}]
    assert difference(seen[:2]) == "" and difference(seen) == "b differs between rank 0 and rank 2"


# ---- copies on the host


def test_copies_on_the_host_are_made_of_what_is_written_here_and_into_the_same_memory() -> None:
    staging = writer._Staging()
    state = {"weights/a": torch.ones(2), "weights/b": torch.ones(3), "optimizer/a/exp_avg": torch.ones(2)}
    given = [BoxedTensor.whole(name, tensor) for name, tensor in state.items()]
    first = staging.copied(given)
    assert first.keys() == state.keys() and staging.not_finite() == ""
    staging.wrote(first, ["weights/a", "optimizer/a/exp_avg"])  # another rank has b
    state["weights/a"][0] = 7.0
    again = staging.copied(given)
    assert again.keys() == {"weights/a", "optimizer/a/exp_avg"} and again["weights/a"].tensor.tolist() == [7.0, 1.0]
    assert again["weights/a"].tensor is first["weights/a"].tensor is not state["weights/a"]
    later = staging.copied([*given, BoxedTensor.whole("optimizer/b/exp_avg", torch.zeros(3))])
    assert later.keys() == {*again, "optimizer/b/exp_avg"}  # of a state that is new nobody knows yet who writes it


@pytest.mark.parametrize(
    ("name", "number", "told"),
    [
        ("weights/a", "inf", "weights/a is infinite"),
        ("optimizer/a/exp_avg", "-inf", "optimizer/a/exp_avg is infinite"),
        ("weights/mask", "-inf", ""),  # which nobody trains
        ("weights/mask", "nan", "weights/mask is not a number"),
    ],
)
def test_what_no_training_goes_on_from_is_no_snapshot(name: str, number: str, told: str) -> None:
    staging = writer._Staging()
    state = {key: torch.ones(2) for key in ("weights/a", "weights/mask", "optimizer/a/exp_avg")}
    state[name][1] = float(number)
    staging.copied([BoxedTensor.whole(key, tensor) for key, tensor in state.items()])
    assert staging.not_finite() == told
