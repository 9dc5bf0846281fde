"""Snapshots as folders and as boxes of tensors; which runs go on from them, and what is told."""

from __future__ import annotations

import dataclasses
import json
import logging
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.artifacts import Artifact
from pipeline.config import load_config
from pipeline.errors import TrainError
from pipeline.ir.layout import Layout, R, S
from pipeline.stage import Inputs
from stages.train import manifest, snapshots
from stages.train.manifest import (
    Damaged,
    Unreadable,
    check_files,
    digest_of,
    name_of,
    read_manifest,
    snapshots_in,
    write_manifest,
)
from stages.train.pieces import boxes_of
from stages.train.replicas import checksum, difference
from stages.train.snapshots import not_seen
from stages.train.starting import launch_of, prepare
from stages.train.tell import tell
from stages.train.trajectory import differing, digest_of_run, settings_of

PROJECT = Path(__file__).parents[2]
EVERY = {"snapshots": dataclasses.replace(load_config(PROJECT).train.snapshots, every=2)}

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
        piece = whole[np.ix_(*indices)]
        for box in boxes_of(runs):
            there = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
            assert (piece[box.within] == whole[there]).all()
            seen[there] += 1
    assert (seen == 6 // layout.pieces(sizes)).all()


def test_a_number_is_one_box_and_nothing_is_none() -> None:
    assert [box.within for box in boxes_of(())] == [()]
    assert boxes_of([((0, 0),), ((0, 4),)]) == ()


# ---- folders


def snapshot(folder: Path, step: int) -> Path:
    temporary = manifest.unfinished(folder, step)
    temporary.mkdir(parents=True)
    for name in ("__0_0.distcp", "__1_0.distcp"):
        (temporary / name).write_bytes(name.encode() * 100)
    files = {path.name: digest_of(path) for path in temporary.iterdir()}
    write_manifest(temporary, {"step": step}, files)
    return manifest.publish(temporary, step)


def test_a_snapshot_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = snapshot(tmp_path, 40)
    assert path.name == name_of(40) == "step-000040"
    found = read_manifest(path)
    assert found["about"] == {"step": 40} and set(found["files"]) == {"__0_0.distcp", "__1_0.distcp"}
    for part in range(2):
        check_files(path, found, part, 2)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _turn_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("file", ["__0_0.distcp", "__1_0.distcp", "manifest.json"])
@pytest.mark.parametrize("harm", [_cut, _turn_a_bit, Path.unlink])
def test_any_damage_is_found(tmp_path: Path, file: str, harm: Any) -> None:
    path = snapshot(tmp_path, 40)
    harm(path / file)
    with pytest.raises(Damaged, match=file):
        check_files(path, read_manifest(path))


def _write_version_2(path: Path) -> None:
    found = json.loads(path.read_text())
    path.write_text(json.dumps({**found, "version": 2}))


def _make_unreadable(path: Path) -> None:
    """A folder stands for a file that the system will not give."""
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("file", "happens", "told"),
    [
        (
            "manifest.json",
            _write_version_2,
            "version 2, this program reads version 1: go on with the program that wrote",
        ),
        ("manifest.json", _make_unreadable, "manifest.json cannot be read .Is a directory.: try again, or move"),
        ("__1_0.distcp", _make_unreadable, "__1_0.distcp cannot be read .Is a directory.: try again, or move"),
    ],
)
def test_what_may_be_whole_is_not_called_damaged(tmp_path: Path, file: str, happens: Any, told: str) -> None:
    path = snapshot(tmp_path, 40)
    happens(path / file)
    with pytest.raises(Unreadable, match=told):
        check_files(path, read_manifest(path))


def test_the_first_host_sees_every_file_or_says_which_it_does_not(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(snapshots, "SEEN_S", 0.0)
    path = snapshot(tmp_path, 40)
    files = read_manifest(path)["files"]
    assert not_seen(path, files) == ""
    _cut(path / "__1_0.distcp")
    assert not_seen(path, files).startswith(
        "the first host does not see __1_0.distcp, which another one wrote; put runs"
    )
    (path / "__1_0.distcp").unlink()
    assert "__1_0.distcp" in not_seen(path, files)


def test_the_newest_are_kept_and_leftovers_swept(tmp_path: Path) -> None:
    for step in (8, 100, 9, 1_000_000):
        snapshot(tmp_path, step)
    (tmp_path / ".step-000200").mkdir()
    (tmp_path / "notes").mkdir()
    assert [path.name for path in snapshots_in(tmp_path)] == [name_of(step) for step in (1_000_000, 100, 9, 8)]
    manifest.set_aside(tmp_path / name_of(1_000_000))
    manifest.sweep(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir() if p.name[0] in ".d") == ["damaged-step-1000000"]
    manifest.keep_newest(tmp_path, 2)
    assert (tmp_path / "damaged-step-1000000").exists()  # until there is one that is whole
    manifest.remove_replaced(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "step-000009", "step-000100"]


def test_a_damaged_one_is_replaced(tmp_path: Path) -> None:
    _cut(snapshot(tmp_path, 4) / "__0_0.distcp")
    path = snapshot(tmp_path, 4)
    check_files(path, read_manifest(path))
    assert [p.name for p in tmp_path.iterdir()] == ["step-000004"]


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


def test_steps_matter_where_the_rate_falls_until_the_last() -> None:
    falls = {"decay": "linear", "until": None}
    assert settings(schedule=falls) != settings(schedule=falls, steps=20)
    assert settings(schedule={**falls, "until": 5}) == settings(schedule={**falls, "until": 5}, steps=20)


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
    config = load_config(PROJECT)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, **train))
    graph = Artifact("graph", {}, {}, None, "sha256:graph")
    return prepare(Inputs(root, {"graph": graph}, log, None), config)  # type: ignore[arg-type]


def test_a_run_goes_on_until_it_is_finished(tmp_path: Path, log) -> None:
    folder = Path(prepared(tmp_path, log[0])["folder"])
    assert folder.parent == tmp_path / "runs/train/snapshots"
    snapshot(folder, 4)
    assert Path(prepared(tmp_path, log[0], steps=99)["folder"]) == folder and snapshots_in(folder)
    assert Path(prepared(tmp_path, log[0], seed=99)["folder"]) != folder and snapshots_in(folder)
    with pytest.raises(TrainError, match=r"adamw.yaml: steps: 3 steps are asked for, .* come to step 4; raise `steps`"):
        prepared(tmp_path, log[0], steps=3)
    manifest.finish(folder)
    prepared(tmp_path, log[0])
    assert not folder.exists() and kept(folder) == ["step-000004"]
    snapshot(folder, 6)
    prepared(tmp_path, log[0], resume="never")
    assert not folder.exists() and kept(folder) == ["step-000006"]


def kept(folder: Path) -> list[str]:
    """Of the run before."""
    return [path.name for path in snapshots_in(manifest.earlier(folder))]


def test_snapshots_of_the_run_before_stay_until_there_is_another(tmp_path: Path, log) -> None:
    """However often it is killed before that; and they can be named, as any other."""
    folder = Path(prepared(tmp_path, log[0], **EVERY)["folder"])
    snapshot(folder, 4)
    manifest.finish(folder)
    for _ in range(3):
        prepared(tmp_path, log[0], **EVERY)
        assert kept(folder) == ["step-000004"] and not snapshots_in(folder)
    name = f"runs/train/snapshots/{folder.name}.earlier"
    assert log[1][0] == f"INFO: training begins anew: the run before is in {name} until this one has a snapshot"
    write_manifest(tmp_path / name / "step-000004", {"settings": {}}, {})
    assert prepared(tmp_path, log[0], resume=f"{name}/step-000004")["origin"] == str(tmp_path / name / "step-000004")
    snapshot(folder, 2)
    manifest.remove_replaced(folder)
    assert not manifest.earlier(folder).exists() and [path.name for path in snapshots_in(folder)] == ["step-000002"]


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
    write_manifest(path, {"settings": {**plain["settings"], "train.seed": 7}}, found["files"])
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
