"""What is watched: everything that a rank does, from before it meets the others until it ends."""

from __future__ import annotations

import json
import threading
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shardwright.stages.train import worker
from shardwright.stages.train.ranks.watchdog import SLOW, Watchdog, overdue, watch_process, with_beats
from tests.ranks import run_ranks
from tests.snapshot_runs import job, write_programs


def fires(dog_of: Any) -> list[str]:
    told: list[str] = []
    fired = threading.Event()
    dog_of(lambda what: (told.append(what), fired.set()))
    assert fired.wait(600)
    return told


def test_a_step_that_does_not_come_is_told() -> None:
    told = fires(lambda tell: Watchdog(0.05, tell).beat("step 7"))
    assert told == ["step 7 was not finished within 0.05 s (`hang_s`): a rank hangs"]


def test_it_watches_from_its_start() -> None:
    told = fires(lambda tell: Watchdog(0.05, tell))
    assert told == ["the start was not finished within 0.2 s (4 times `hang_s`): a rank hangs"]


def test_what_may_take_its_time_has_longer() -> None:
    assert [bool(overdue(("x", False, 100.0), 10, at)) for at in (109, 111)] == [False, True]
    assert [bool(overdue(("x", True, 100.0), 10, 100 + SLOW * 10 + more)) for more in (-1, 1)] == [False, True]


def test_items_that_come_one_by_one_are_progress() -> None:
    beats: list[int] = []
    seen = [(item, len(beats)) for item in with_beats("abc", lambda: beats.append(1))]
    assert seen == [("a", 1), ("b", 2), ("c", 3)] and len(beats) == 4


def test_a_hang_on_the_way_out_does_not_hide_what_went_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    monkeypatch.setattr("shardwright.stages.train.ranks.watchdog.end_process", ended.set)
    (tmp_path / "error-1.txt").write_text("it broke")
    watch_process(0.05, tmp_path, 1)
    assert ended.wait(600) and (tmp_path / "error-1.txt").read_text() == "it broke"
    ended.clear()
    watch_process(0.05, tmp_path, 0)
    assert ended.wait(600) and (tmp_path / "error-0.txt").read_text().startswith("the start was not finished")


class Recorded(Watchdog):
    """Of a rank that is watched without a limit."""

    def __init__(self) -> None:
        self.beats: list[tuple[str, bool]] = []
        super().__init__()

    def beat(self, what: str, slow: bool = False) -> None:
        self.beats.append((what, slow))


def a_whole_run(folder: str) -> list[tuple[str, bool, int]]:
    """On the only rank: what was under way, one thing after another, whether slow, and how many beats of it came."""
    given = job(Path(folder), "one", 2, every=1)
    given["train"] |= {"export": True, "evaluate": {"every": 1, "batches": 3}}
    given["data"]["held_out"] = given["data"]["dataset"]
    (Path(folder) / "job.json").write_text(json.dumps(given))
    dog = Recorded()
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RANK", "0")
        patched.setattr(worker, "watch_process", lambda limit_s, work, rank: dog)
        patched.setattr(worker, "join", lambda device, timeout: None)  # it has been done
        patched.setattr(dist, "destroy_process_group", lambda: None)  # it is done later
        worker.main(Path(folder))
    assert dog.ended.is_set()
    return [(*key, len(list(beats))) for key, beats in groupby(dog.beats)]


def test_every_part_of_a_run_is_watched(tmp_path: Path) -> None:
    write_programs(tmp_path, ("one",))
    (found,) = run_ranks(1, a_whole_run, str(tmp_path))
    *others, (exported, _, tensors), end = found
    assert others == [
        ("the start", True, 1),
        ("meeting the other ranks", True, 1),
        ("building the model", True, 1),
        ("going on from a snapshot", True, 1),
        ("step 0", True, 1),
        ("a batch of the evaluation after step 0", True, 4),
        ("the snapshot or the comparison after step 0", True, 1),
        ("step 1", False, 2),
        ("a batch of the evaluation after step 1", False, 4),
        ("the snapshot or the comparison after step 1", True, 1),
        ("step 2", False, 1),
        ("the last snapshot", True, 1),
    ]
    assert exported == "a tensor of the exported weights" and tensors > 20 and end == ("the end", True, 1)
