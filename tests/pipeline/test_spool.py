"""The spool: what is written can be read whatever happened in between, and executions are told apart."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.base.signals import is_dvc
from pipeline.tracking import spool
from pipeline.tracking.spool import MetricPoint, SendState, Spool, StageRecord

LOG = logging.getLogger("test")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def box(tmp_path):
    return Spool(tmp_path, "one", LOG)


def test_record_comes_back_as_written(box, tmp_path):
    file = tmp_path / "graph.json"
    file.write_text("first")
    entry = StageRecord(
        "trace",
        params={"model": "gpt", "layers": 4, "tied": True, "seed": None},
        figures={"nodes": 12, "time": 0.5, "kind": "chain"},
        artifacts=(file, tmp_path / "missing.json"),
        started=1.0,
        ended=2.0,
    )
    name = box.record(entry)
    file.write_text("second")
    back = box.records()[name]
    assert [path.read_text() for path in back.artifacts] == ["first"]
    assert replace(back, artifacts=entry.artifacts) == entry


def test_artifacts_of_one_name_are_all_kept(box, tmp_path):
    paths = tuple(tmp_path / folder / "plan.json" for folder in "ab")
    for path in paths:
        path.parent.mkdir()
        path.write_text(path.parent.name)
    name = box.record(StageRecord("solve", artifacts=paths))
    back = box.records()[name]
    assert {path.name: path.read_text() for path in back.artifacts} == {"plan.json": "a", "plan-2.json": "b"}


def test_scalars_of_numpy_are_numbers(box):
    np = pytest.importorskip("numpy")
    name = box.record(StageRecord("x", figures={"a": np.float32(0.5), "b": np.int64(3)}))
    assert box.records()[name].figures == {"a": 0.5, "b": 3}


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe", b"[]", b'{"version": 99}', b'{"version": 1}', b'{"version": 1, "stage": 3}']
)
def test_damaged_record_is_set_aside_once_and_the_others_are_read(box, caplog, content):
    good = box.record(StageRecord("trace"))
    path = box.folder / "records" / "00000000000000000001-1-solve.json"
    path.write_bytes(content)
    for _ in range(2):
        assert list(box.records()) == [good]
    assert len(caplog.messages) == 1 and "solve.json" in caplog.messages[0]
    assert path.with_name(path.name + ".damaged").read_bytes() == content


@pytest.mark.parametrize("content", ["", "null", '{"version": 1}', '{"version": 1, "done": 3}'])
def test_damaged_state_starts_afresh(box, caplog, content):
    box.save(SendState(run_id="r"))
    (box.folder / "state.json").write_text(content)
    assert box.state() == SendState() == box.state()
    assert len(caplog.messages) == 1


def test_state_round_trip(box):
    state = SendState("s", "1", "r", ("a",), {"a": 3}, "RUNNING", True, 5.0)
    box.save(state)
    assert box.state() == state
    path = box.folder / "state.json"  # with what an earlier version wrote beside it
    path.write_text(json.dumps(json.loads(path.read_text()) | {"end": None, "end_after": ""}))
    assert box.state() == state


def test_live_points_and_offsets(box):
    descriptor = box.open_live("train")
    [path] = box.live_files()
    for step in range(3):
        spool.append(descriptor, (step, 10.0 + step, {"loss": 1.0}))
    os.write(descriptor, b'[3, 13.0, {"lo')
    stage, points, offset = box.points(path, 0, limit=2)
    assert (stage, [point.step for point in points]) == ("train", [0, 1])
    _, points, offset = box.points(path, offset)
    assert [point.step for point in points] == [2]
    os.write(descriptor, b'ss": 0.5}]\n')
    _, points, offset = box.points(path, offset)
    assert points == [MetricPoint(3, {"loss": 0.5}, 13.0)]
    assert offset == path.stat().st_size
    os.close(descriptor)


def test_torn_line_of_a_dead_writer_is_skipped(box, caplog):
    descriptor = box.open_live("train")
    spool.append(descriptor, (0, 1.0, {"loss": 1.0}))
    os.write(descriptor, b"[1, 2.0,")
    os.close(descriptor)
    [path] = box.live_files()
    _, points, offset = box.points(path, 0)
    assert [point.step for point in points] == [0]
    assert offset == path.stat().st_size and len(caplog.messages) == 1


def test_unreadable_live_file_is_set_aside(box, caplog):
    os.close(box.open_live("train"))
    [path] = box.live_files()
    path.write_bytes(b"garbage\n")
    assert box.points(path, 0) is None and box.live_files() == []
    assert len(caplog.messages) == 1


def test_status_follows_what_the_stages_did(box):
    descriptor = box.open_live("train")
    assert box.wanted_status() == "RUNNING"
    os.close(descriptor)
    assert box.wanted_status() == "KILLED"
    box.record(StageRecord("train", "failed", error="no memory"))
    assert box.wanted_status() == "FAILED"
    box.record(StageRecord("train"))
    assert box.wanted_status() == "FINISHED"


def test_lock_is_for_one(box, tmp_path):
    with box.lock() as first, Spool(tmp_path, "one", LOG).lock(0.1) as second:
        assert first and not second
    with box.lock() as again:
        assert again


def test_prune_keeps_the_newest_and_the_unsent(tmp_path):
    for index in range(6):
        box = Spool(tmp_path, f"e{index}", LOG)
        name = box.record(StageRecord("trace"))
        if index != 1:
            box.save(SendState(done=(name,), status="FINISHED"))
        os.utime(box.folder, (index, index))
    spool.prune(tmp_path, LOG, keep=2)
    assert set(spool.executions(tmp_path)) == {"e1", "e4", "e5"}


@pytest.mark.parametrize("name", ["../../etc", "a/b", "..", ".", "it's", "ü", "x" * 300, "-rf"])
def test_any_execution_name_stays_in_its_folder(tmp_path, name):
    box = Spool(tmp_path, name, LOG)
    box.record(StageRecord(name))
    assert box.folder.parent == tmp_path / "runs" / "tracking"
    assert box.folder.is_dir() and len(box.records()) == 1
    assert Spool(tmp_path, box.folder.name, LOG).folder == box.folder


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("dvc repro", True),
        ("/usr/bin/python3 /home/me/.venv/bin/dvc exp run", True),
        ("python3.11 -m dvc repro", True),
        ("python -X dev -Im dvc repro", True),
        ("python -c dvc", False),
        ("python -m dvclive", False),
        ("python -m stages.train dvc", False),
        ("python train.py dvc", False),
        ("sh -c dvc", False),
        ("make dvc", False),
        ("", False),
    ],
)
def test_is_dvc(line, expected):
    assert is_dvc(line.split()) is expected


PRINT_ID = "from pipeline.tracking.execution import execution_id; print(execution_id())"


def environment(**more):
    kept = {key: value for key, value in os.environ.items() if key != "SHARDWRIGHT_EXECUTION"}
    return kept | {"PYTHONPATH": str(ROOT)} | more


def test_stages_of_one_dvc_process_share_an_execution(tmp_path):
    (tmp_path / "stage.py").write_text(PRINT_ID)
    script = tmp_path / "dvc"  # stands for dvc: starts two stages, each through a shell
    script.write_text(
        "import os, subprocess, sys\n"
        "print(os.getpid(), flush=True)\n"
        "for _ in range(2):\n"
        f"    subprocess.run(['sh', '-c', '\"$0\" {tmp_path}/stage.py; true', sys.executable], check=True)\n"
    )
    runs = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, str(script), "repro"], env=environment(), capture_output=True, text=True, check=True
        )
        pid, first, second = done.stdout.split()
        assert first == second and first.startswith(f"dvc-{pid}-")
        runs.append(first)
    assert runs[0] != runs[1]


def test_execution_without_dvc_and_by_name():
    def ask(**more):
        done = subprocess.run(
            [sys.executable, "-c", "import os; print(os.getpid());" + PRINT_ID],
            env=environment(**more),
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.split()

    assert ask(SHARDWRIGHT_EXECUTION="nightly-7")[1] == "nightly-7"
    pid, name = ask()
    assert name.startswith((f"run-{pid}-", "dvc-"))  # the tests themselves may run under dvc


def test_files_carry_a_version(box):
    box.describe("name", "experiment")
    box.describe("other", "other")
    box.record(StageRecord("trace"))
    box.save(SendState())
    files = [path for path in box.folder.rglob("*.json")]
    assert len(files) == 3 and all(json.loads(path.read_text())["version"] == 1 for path in files)
    assert box.description()["run_name"] == "name"
    assert not list(box.folder.rglob("*.tmp"))
