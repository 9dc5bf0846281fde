"""Runs on real ranks that stop and go on, under the same plan and others: the losses of a run that never stopped."""

from __future__ import annotations

import contextlib
import json
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipeline.errors import TrainError
from pipeline.launch import run_ranks as launch
from stages.train import replicas
from stages.train.manifest import snapshots_in
from stages.train.planned import Planned
from stages.train.resume import find, restore
from stages.train.snapshots import Snapshots
from tests.ranks import run_ranks
from tests.snapshot_runs import Faulty, job, train, write_programs

STEPS = 14
# Under each of these plans up to that step; the one in the middle is for four ranks, in a square of data and tensor.
STOPS = {"ddp": 2, "zero1": 4, "zero3": 6, "ddp_tp": 8, "piped": 10, "tp": 12}
ON_TWO = ("ddp", "zero1", "zero3"), ("piped", "tp")
SAME, NEAR = 1e-6, 1e-5


def notes(work: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (work / "steps.jsonl").read_text().splitlines())
    return [line for line in lines if "step" not in line]


def on_two_ranks(folder: str) -> dict[str, Any]:
    here = Path(folder)
    found: dict[str, Any] = {"plain": train(job(here, "zero1", STEPS), here / "plain")["losses"]}
    found |= travel(folder, *ON_TWO[0])
    return found | {"same": same_plan(here), "full": full_disk(here), **faults(here)}


def travel(folder: str, *names: str) -> dict[str, list[float]]:
    """On under each of these plans, from where the one before has stopped."""
    here = Path(folder)
    return {
        name: train(job(here, name, STOPS[name], every=2, compare_every=2), here / "journey")["losses"]
        for name in names
    }


def same_plan(here: Path) -> list[float]:
    """Interrupted between two snapshots; written while training waits."""
    given = {"folder": str(here / "same"), "every": 3, "background": False}
    train(job(here, "zero1", 5, **given), here / "a")
    for path in (here / "same").glob("step-000005"):  # as if killed after step 5: one was written at the end
        if dist.get_rank() == 0:
            (path / "manifest.json").write_text("cut")
    dist.barrier()
    return list(train(job(here, "zero1", STEPS, **given), here / "b")["losses"])


def full_disk(here: Path) -> list[float]:
    """A limit on the size of files stands for a disk that is full."""
    given = {"folder": str(here / "full"), "every": 1}
    train(job(here, "ddp", 2, **given), here / "full_work")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        return list(train(job(here, "ddp", 4, **given), here / "full_work")["losses"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def faults(here: Path) -> dict[str, Any]:
    given = job(here, "ddp", 6, every=1, folder=str(here / "runs/train/snapshots/wild"))
    given["train"]["optimizer"]["lr"] = 1e30
    with pytest.raises(TrainError) as wild:
        train(given, here / "wild")
    engine = Planned(job(here, "ddp", 1))
    equal = replicas.compare(engine)
    if dist.get_rank() == 1:
        with torch.no_grad():
            next(iter(engine.parameters.values())).view(-1)[0] += 1e-6
    return {"wild": str(wild.value), "equal": equal, "differs": replicas.compare(engine), "streams": streams(here)}


def streams(here: Path) -> tuple[bool, bool, list[float]]:
    """Random numbers after a snapshot: of this rank under the same program, and of rank 0 under another.

    And the next ones under another whose ranks draw apart, as pieces of a pipeline do.
    """
    engine, folder = Planned(job(here, "ddp", 1)), here / "streams"
    torch.manual_seed(dist.get_rank())
    expected = torch.get_rng_state()
    snapshots = Snapshots(folder, 1, True, 60)
    about = {"ranks": 2, "program": "this"}
    snapshots.take(engine, 1, about)
    torch.rand(3)
    assert snapshots.done(wait=True).problem == ""
    path = find(folder, None, "").path
    restore(engine, path, about, "this")
    same = torch.equal(torch.get_rng_state(), expected)
    restore(engine, path, about, "another")
    restored = torch.get_rng_state()
    torch.manual_seed(0)
    first = torch.equal(restored, torch.get_rng_state())
    engine.stream = dist.get_rank()
    restore(engine, path, about, "another")
    return same, first, torch.rand(3).tolist()


def on_one_rank(folder: str) -> list[dict[str, Any]]:
    """To the end, and once more: a run that was killed when all its steps were done."""
    here = Path(folder)
    return [train(job(here, "one", STEPS, every=2), here / work) for work in ("journey", "again")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("snapshots")
    write_programs(folder, (*STOPS, "one"))
    found = run_ranks(2, on_two_ranks, str(folder))
    assert found[0]["plain"] == found[1]["plain"]
    found[0] |= run_ranks(4, travel, str(folder), "ddp_tp")[0] | run_ranks(2, travel, str(folder), *ON_TWO[1])[0]
    found[0]["one"], found[0]["again"] = run_ranks(1, on_one_rank, str(folder))[0]
    return folder, {**found[0], "streams": [rank["streams"] for rank in found]}


def apart(found: list[float], wanted: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(found, wanted[: len(found)], strict=True))


def test_a_run_goes_on_under_other_plans(runs) -> None:
    folder, found = runs
    assert [len(found[name]) for name in STOPS] == list(STOPS.values())
    assert len(found["one"]["losses"]) == STEPS and apart(found["one"]["losses"], found["plain"]) < NEAR
    assert len(found["one"]["seconds"]) == 2 and len(found["one"]["peak_bytes"]) == 1  # of this plan alone
    told = notes(folder / "journey")
    assert [note["resumed"] for note in told if "resumed" in note] == list(STOPS.values())
    assert [note["snapshot"] for note in told if "snapshot" in note] == [2, 4, 6, 8, 10, 12, 14]
    kept = snapshots_in(folder / "runs/train/snapshots/run")
    assert [path.name for path in kept] == ["step-000014", "step-000012"]


def test_a_run_with_no_step_left_reports_what_was_measured(runs) -> None:
    folder, found = runs
    assert found["again"] == found["one"]
    assert [note["resumed"] for note in notes(folder / "again")] == [STEPS]


def test_the_same_plan_repeats_every_loss(runs) -> None:
    """The damaged snapshot of step 5 is passed over for that of step 3, and written anew."""
    folder, found = runs
    assert len(found["same"]) == STEPS and apart(found["same"], found["plain"]) <= SAME
    told = notes(folder / "b")
    assert told[0] == {"damaged": "step-000005: manifest.json cannot be read (JSONDecodeError)"}
    assert told[1]["resumed"] == 3 and [note["snapshot"] for note in told[2:]] == [6, 9, 12, 14]


def test_a_full_disk_costs_the_snapshot_alone(runs) -> None:
    folder, found = runs
    assert len(found["full"]) == 4 and apart(found["full"], found["plain"]) < NEAR
    failed = [note for note in notes(folder / "full_work") if "problem" in note]
    assert failed == [{"snapshot": step, "problem": "File too large"} for step in (3, 4)]
    assert sorted(path.name for path in (folder / "full").iterdir()) == ["step-000001", "step-000002"]


def test_a_loss_that_is_no_number_names_the_last_good_snapshot(runs) -> None:
    folder, found = runs
    last = snapshots_in(folder / "runs/train/snapshots/wild")[0]
    assert "the loss became nan at step" in found["wild"]
    assert f"the last good snapshot is runs/train/snapshots/wild/{last.name}" in found["wild"]


def test_replicas_that_differ_are_named(runs) -> None:
    _, found = runs
    assert found["equal"] == ""
    assert found["differs"].startswith("weights/") and found["differs"].endswith("between rank 0 and rank 1")


def test_streams_of_random_numbers(runs) -> None:
    told = runs[1]["streams"]
    assert [found[:2] for found in told] == [(True, True), (True, True)]
    torch.manual_seed(0)
    assert told[0][2] == torch.rand(3).tolist() != told[1][2]


def test_ranks_are_started_again_after_a_kill_and_a_hang(runs, tmp_path: Path) -> None:
    """Rank 1 dies while it reads a sample, later one rank never ends reading another; each once."""
    folder, found = runs
    given = job(folder, "zero1", STEPS, every=1, hang_s=6, folder=str(tmp_path / "snapshots"))
    given["data"]["dataset"] |= {"_target_": f"{Faulty.__module__}.Faulty", "marks": str(tmp_path)}
    seen: list[Path] = []
    told: dict[str, Any] = {}

    def poll(work: Path) -> None:
        seen.append(work)
        with contextlib.suppress(OSError):
            told["notes"] = notes(work)

    result = launch("stages.train.worker", given, 2, 280, poll, restarts=6)
    assert apart(result["losses"], found["plain"]) <= SAME and len(result["losses"]) == STEPS
    restarts = [note["restart"] for note in told["notes"] if "resumed" in note]
    assert restarts[:2] == [1, 2]  # on a slow machine a step may count as hanging
    assert {path.name for path in tmp_path.glob("*.mark")} == {"kill.mark", "hang.mark"}
    assert len(set(seen)) == 1
