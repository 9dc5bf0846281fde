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

from shardwright.pipeline.base.signals import is_dvc
from shardwright.pipeline.tracking import spool
from shardwright.pipeline.tracking.spool import SendState, Spool, StageRecord

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
    box.record(entry)
    file.write_text("second")
    [back] = box.records().values()
    assert [path.read_text() for path in back.artifacts] == ["first"]
    assert replace(back, artifacts=entry.artifacts) == entry


def test_artifacts_of_one_name_are_all_kept(box, tmp_path):
    paths = tuple(tmp_path / folder / "plan.json" for folder in "ab")
    for path in paths:
        path.parent.mkdir()
        path.write_text(path.parent.name)
    box.record(StageRecord("solve", artifacts=paths))
    [back] = box.records().values()
    assert {path.name: path.read_text() for path in back.artifacts} == {"plan.json": "a", "plan-2.json": "b"}


def test_scalars_of_numpy_are_numbers(box):
    np = pytest.importorskip("numpy")
    box.record(StageRecord("x", figures={"a": np.float32(0.5), "b": np.int64(3)}))
    assert [entry.figures for entry in box.records().values()] == [{"a": 0.5, "b": 3}]


def write(box, file, content):
    with (box.folder / file).open("ab") as opened:
        opened.write(content)


@pytest.mark.parametrize(
    "content",
    [b"{", b"\xff\xfe", b"[]", b"null", b"3", b'{"version": 99}', b'{"version": 2}', b'{"version": 2, "stage": 3}'],
)
def test_damaged_record_is_no_record_and_the_others_are_read(box, content):
    box.record(StageRecord("trace"))
    write(box, spool.RECORDS, content)
    assert len(box.records()) == 1  # it may still be written
    box.record(StageRecord("solve"))
    first, damaged, last = box.records().values()
    assert (first.stage, damaged, last.stage) == ("trace", None, "solve")
    assert box.wanted_status() == "FINISHED" and box.pending(SendState())


@pytest.mark.parametrize("name", ["../../../plan.json", "/etc/passwd", ".."])
def test_copies_of_a_damaged_record_lie_below_its_folder(box, name):
    box.record(StageRecord("trace"))
    line = json.loads((box.folder / spool.RECORDS).read_text())
    write(box, spool.RECORDS, json.dumps(line | {"copies": name, "artifacts": [name]}).encode() + b"\n")
    for path in (path for entry in box.records().values() for path in entry.artifacts):
        assert path.parent.parent == box.folder / "artifacts"


@pytest.mark.parametrize("content", ["", "null", "{}", '{"done": 3}', '{"done": ["a"]}'])
def test_damaged_state_starts_afresh(box, caplog, content):
    box.save(SendState(run_id="r"))
    (box.folder / spool.SENT).write_text(content)
    assert box.state() == SendState() == box.state()
    assert len(caplog.messages) == 1


def test_state_round_trip(box):
    state = SendState("s", "1", "r", (7,), 3, "RUNNING", True, 5.0)
    box.save(state)
    assert box.state() == state
    path = box.folder / spool.SENT  # with what a later version wrote beside it
    path.write_text(json.dumps(json.loads(path.read_text()) | {"end": None, "end_after": ""}))
    assert box.state() == state


def test_points_and_offsets(box):
    file = box.open_points("train")
    for step in range(3):
        spool.append(file, (step, 10.0 + step, {"loss": 1.0}))
    file.write(b'[3, 13.0, {"lo')
    (_, first), (end, second), _ = box.lines(spool.POINTS)
    assert (first[0], second[0]) == (0, 1)
    [(end, third)] = box.lines(spool.POINTS, end)
    assert third[0] == 2
    file.write(b'ss": 0.5}]\n')
    [(end, last)] = box.lines(spool.POINTS, end)
    assert last == [3, 13.0, {"loss": 0.5}]
    assert end == (box.folder / spool.POINTS).stat().st_size
    file.close()


def test_what_a_killed_writer_left_of_a_line_costs_no_other(box):
    file = box.open_points("train")
    spool.append(file, (0, 1.0, {"loss": 1.0}))
    file.write(b"[1, 2.0,")
    file.close()
    again = box.open_points("train")
    spool.append(again, (2, 3.0, {"loss": 1.0}))
    again.close()
    assert [line and line[0] for _, line in box.lines(spool.POINTS)] == [0, None, 2]


def test_points_go_when_all_are_sent_and_nobody_logs_more(box):
    file = box.open_points("train")
    spool.append(file, (0, 1.0, {"loss": 1.0}))
    [(end, _)] = box.lines(spool.POINTS)
    box.drop_points(SendState(points=end))
    assert list(box.lines(spool.POINTS)), "it is still written to"
    file.close()
    box.drop_points(SendState())
    assert list(box.lines(spool.POINTS)), "it has not been sent"
    box.drop_points(SendState(points=end))
    assert not list(box.lines(spool.POINTS)) and box.state().points == 0


def test_a_full_disk_is_an_error():
    with open("/dev/full", "ab", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        spool.append(file, {})


def test_status_follows_what_the_stages_did(box):
    file = box.open_points("train")
    assert box.wanted_status() == "RUNNING"
    file.close()
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
        box.record(StageRecord("trace"))
        if index != 1:
            box.save(SendState(done=tuple(box.records()), status="FINISHED"))
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
        ("python -m shardwright.stages.train dvc", False),
        ("python train.py dvc", False),
        ("sh -c dvc", False),
        ("make dvc", False),
        ("", False),
    ],
)
def test_is_dvc(line, expected):
    assert is_dvc(line.split()) is expected


PRINT_ID = "from shardwright.pipeline.tracking.execution import execution_id; print(execution_id())"


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


def test_the_first_record_says_what_the_run_is_called(tmp_path):
    for name in ("name", "other"):
        Spool(tmp_path, "one", LOG, {"run_name": name}).record(StageRecord("trace"))
    assert Spool(tmp_path, "one", LOG).first_run() == {"run_name": "name"}
    for damaged in ({"run": "text"}, {"run": {"run_name": 3}}, [], 7):
        box = Spool(tmp_path, str(len(str(damaged))), LOG)
        box.record(StageRecord("trace"))
        (box.folder / spool.RECORDS).write_text(json.dumps(damaged) + "\n")
        assert box.first_run() == {}
