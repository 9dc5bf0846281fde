"""What ranks tell one another beside training: after which step all end, and who hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shardwright.stages.train.loop import Loop
from shardwright.stages.train.ranks import peers as module
from shardwright.stages.train.ranks.peers import Peers, who_hangs
from shardwright.stages.train.snapshots.manifest import snapshots_in
from shardwright.stages.train.worker import make_engine
from tests.ranks import run_ranks
from tests.snapshot_runs import job, write_programs

HOSTS = ["a", "a", "b"]


@pytest.fixture
def three() -> Iterator[list[Peers]]:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found = [Peers(server, rank, HOSTS) for rank in range(3)]
    yield found
    del server


def listening(found: list[Peers]) -> list[str]:
    silent: list[str] = []
    for each in found:
        each.listen(silent.append, lambda: "step 3")
    return silent


def test_all_end_after_the_same_step(three: list[Peers]) -> None:
    """Ranks wait for one another in every step, and are told in the midst of it."""
    assert listening(three) == []
    step, ended = threading.Barrier(3), {}

    def train(rank: int) -> None:
        done = 0
        while not three[rank].ends(done):
            if rank == 1 and done == 5:
                three[2].call("stop 15")
            step.wait(600)
            time.sleep(0.01 * rank)
            done += 1
        ended[rank] = done

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert len(set(ended.values())) == 1 and len(ended) == 3 and ended[0] >= 6
    assert [each.signal for each in three] == [15, 15, 15]


def test_a_rank_that_does_not_answer_is_named(three: list[Peers], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_S", 2.0)
    silent = listening(three[:2])
    said = three[0].explain("step 3 was not finished")
    assert said == "step 3 was not finished: rank 2 on b does not answer: stopped or gone"
    three[0].call("stop 15")
    deadline = time.monotonic() + 600
    while len(silent) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert silent == ["rank 2 on b did not answer when the run was told to end by SIGTERM"] * 2


def test_a_rank_ends_when_it_is_told_to_and_the_first_is_gone() -> None:
    """Torchrun tells it so when the first was killed; in the midst of a long step it would go on for as long."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rank = Peers(server, 2, HOSTS)
    silent = listening([rank])
    del server
    rank.ask_all(15)
    assert silent == ["rank 0 on a, with which the ranks meet, is gone"]


def test_who_hangs() -> None:
    def status(at: str, waits: bool) -> dict[str, Any]:
        return {"what": "step 3", "at": at, "waits": waits}

    found = {0: status("x.py:1", True), 1: status("data.py:7, reading sample 12", False), 2: status("x.py:1", True)}
    assert who_hangs("step 3", HOSTS, found) == "step 3: rank 1 on a hangs at data.py:7, reading sample 12"
    alike = {rank: status("x.py:1", True) for rank in range(3)}
    assert who_hangs("step 3", HOSTS, alike).startswith("step 3: rank 0 on a is at x.py:1, rank 1 on a is at")
    assert who_hangs("step 3", HOSTS, None).startswith("step 3: rank 0 on a, or the host on which ranks meet, does not")


class Asked:
    """To end after two steps."""

    def ends(self, done: int) -> bool:
        return done == 2


def a_run_that_is_ended(folder: str, every: int) -> tuple[dict[str, Any], list[str], list[dict[str, Any]]]:
    given = job(Path(folder), "one", 6, every=every)
    loop = Loop(make_engine(given), given, Path(folder), peers=Asked())  # type: ignore[arg-type]
    lines: list[dict[str, Any]] = []
    loop.journal.write = lines.extend  # type: ignore[method-assign]
    found = loop.run()
    return found, [path.name for path in snapshots_in(Path(given["safety"]["folder"]))], lines[-1:]


def both_runs(folder: str) -> list[Any]:
    return [a_run_that_is_ended(folder, every) for every in (100, 0)]


def test_a_run_that_is_ended_leaves_a_snapshot_of_its_last_step(tmp_path: Path) -> None:
    write_programs(tmp_path, ("one",))
    ((saved, none),) = run_ranks(1, both_runs, str(tmp_path))
    assert saved == ({}, ["step-000002"], [{"stopped": 2, "kept": 2, "asked": True}])
    assert none[0] == {} and none[2][0]["asked"] is False
