"""Runs on real ranks that stop and go on, under the same plan and others: the losses of a run that never stopped."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.forged_snapshots import about
from shardwright.pipeline.base.errors import TrainError
from shardwright.pipeline.launch.launch import Supervision
from shardwright.pipeline.launch.launch import run_ranks as launch
from shardwright.stages.train.engines.planned import PlannedEngine
from shardwright.stages.train.ranks.safety import differing_replicas
from shardwright.stages.train.snapshots.manifest import snapshots_in
from shardwright.stages.train.snapshots.resume import find, restore
from shardwright.stages.train.snapshots.writer import SnapshotWriter
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


def full_disk(here: Path) -> tuple[str, list[float]]:
    """A limit on the size of files stands for a disk that is full; then on, when there is room again.

    A run that also exports its weights has its last state in them.
    """
    given = {"folder": str(here / "full"), "every": 1}
    train(job(here, "ddp", 2, **given), here / "full_work")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(TrainError) as error:
            train(job(here, "ddp", 4, **given), here / "full_work")
        exporting = job(here, "ddp", 3, **given)
        exporting["train"]["export"] = True
        assert len(train(exporting, here / "full_export")["losses"]) == 3
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return str(error.value), list(train(job(here, "ddp", 4, **given), here / "room_work")["losses"])


def faults(here: Path) -> dict[str, Any]:
    found = {"wild": wild(here), "engines": engines(here), "unshared": unshared(here), "refused": refused(here)}
    engine = PlannedEngine(job(here, "ddp", 1))
    equal = differing_replicas(engine)
    if dist.get_rank() == 1:
        with torch.no_grad():
            next(iter(engine.parameters.values())).view(-1)[0] += 1e-6
    return found | {"equal": equal, "differs": differing_replicas(engine), "streams": streams(here)}


def wild(here: Path) -> dict[str, Any]:
    """Two steps, then ones so large that the loss is no number; twice, and on from what the message names."""
    given = {"folder": str(here / "runs/train/snapshots/wild"), "every": 1, "keep": 1}
    train(job(here, "ddp", 2, **given), here / "wild")
    too_fast = job(here, "ddp", 6, **given)
    too_fast["train"]["optimizer"]["lr"] = 1e30
    told = []
    for _ in range(2):
        with pytest.raises(TrainError) as error:
            train(too_fast, here / "wild")
        told.append(str(error.value))
    beside = {"folder": str(here / "runs/train/snapshots/sane"), "every": 0}
    named = [str(here / path) for path in re.findall(r"last good snapshot is (\S+),", told[0])]
    sane = train(job(here, "ddp", 6, **beside, origin=named[0]), here / "sane")["losses"]
    from_start = job(here, "ddp", 6, **{**given, "folder": str(here / "runs/train/snapshots/at_once")})
    from_start["train"]["optimizer"]["lr"] = 1e30
    with pytest.raises(TrainError) as error:
        train(from_start, here / "at_once")
    return {"told": told, "sane": sane, "at_once": str(error.value)}


def engines(here: Path) -> list[tuple[str, int, int]]:
    """Who took the steps that the times are of, how many there are, and of how many losses."""
    found = []
    for engine, steps in (("planned", 2), ("ddp", 4), ("ddp", 5), ("planned", 5)):
        given = job(here, "zero1", steps, every=2, folder=str(here / "engines"))
        given["train"]["engine"] = engine
        result = train(given, here / "engines_work")
        found.append((result["engine"], len(result["seconds"]), len(result["losses"])))
    return found


def unshared(here: Path) -> tuple[str, list[str]]:
    """Each rank has a folder of its own, as hosts have that share none."""
    engine, folder = PlannedEngine(job(here, "zero1", 1)), here / f"host{dist.get_rank()}"
    snapshots = SnapshotWriter(folder, 2, True, 60)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardwright.stages.train.snapshots.writer.SEEN_S", 0.2)
        snapshots.take(engine, 1, about(1))
        outcome = snapshots.done(wait=True)
    dist.barrier()
    return outcome[1], [path.name for path in folder.iterdir()]


def streams(here: Path) -> tuple[bool, bool, list[float]]:
    """Random numbers after a snapshot: of this rank under the same program, and of rank 0 under another.

    And the next ones under another whose ranks draw apart, as submeshes of a pipeline do.
    """
    engine, folder = PlannedEngine(job(here, "ddp", 1)), here / "streams"
    torch.manual_seed(dist.get_rank())
    expected = torch.get_rng_state()
    snapshots = SnapshotWriter(folder, 1, True, 60)
    snapshots.take(engine, 1, about(1, program="this"))
    torch.rand(3)
    assert snapshots.done(wait=True)[1] == ""
    found = find(folder, None, "")
    restore(engine, found, "this")
    same = torch.equal(torch.get_rng_state(), expected)
    restore(engine, found, "another")
    restored = torch.get_rng_state()
    torch.manual_seed(0)
    first = torch.equal(restored, torch.get_rng_state())
    engine.stream = dist.get_rank()
    restore(engine, found, "another")
    return same, first, torch.rand(3).tolist()


def refused(here: Path) -> list[str]:
    """Snapshots that one rank does not see, that another version wrote, and that are all damaged: they stay there."""
    folder, own = here / "engines", here / f"engines{dist.get_rank()}"
    name = snapshots_in(folder)[0].name
    if dist.get_rank() == 0:
        shutil.copytree(folder, own)
        manifest = here / "later" / name / "manifest.json"
        shutil.copytree(folder / name, manifest.parent)
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "version": 1}))
        for snapshot in snapshots_in(folder):
            damaged = shutil.copytree(snapshot, here / "damaged" / snapshot.name)
            (damaged / "tensors.json").write_text("{}")
    dist.barrier()
    told = []
    for where in (own, here / "later", here / "damaged"):
        with pytest.raises(TrainError) as error:
            find(where, None, "train.yaml: resume")
        told.append(str(error.value).replace(str(here), ""))
    return [*told, *(path.name for path in (here / "later").iterdir()), *sorted(os.listdir(here / "damaged"))]


def on_one_rank(folder: str) -> list[dict[str, Any]]:
    """To the end, and once more: a run that was killed when all its steps were done."""
    here = Path(folder)
    found = [train(job(here, "one", STEPS, every=2), here / work) for work in ("journey", "again")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardwright.stages.train.snapshots.writer.write_boxes", _break)
        with pytest.raises(TrainError, match=r"RuntimeError: a surprise; mend that, .* goes on from the start"):
            train(job(here, "one", 1, every=1, folder=str(here / "broken")), here / "broken_work")
    return found


def _break(*_: Any, **__: Any) -> None:
    raise RuntimeError("a\nsurprise")


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
    assert told[0] == {"damaged": "step-000005: manifest.json is not whole (JSONDecodeError)"}
    assert told[1]["resumed"] == 3 and [note["snapshot"] for note in told[2:]] == [6, 9, 12, 14]


def test_a_run_whose_last_state_is_not_on_the_disk_has_not_ended(runs) -> None:
    """Other snapshots cost a warning; there is room again, and it goes on from the last that is there."""
    folder, found = runs
    told, losses = found["full"]
    assert len(losses) == 4 and apart(losses, found["plain"]) < NEAR
    assert "full: the state after the last step could not be saved: File too large; mend that, and run again" in told
    assert told.endswith("full/step-000002")
    assert [note.get("resumed") for note in notes(folder / "room_work")][:1] == [2]
    failed = [note for note in notes(folder / "full_work") if "problem" in note]
    assert failed == [{"snapshot": step, "problem": "File too large"} for step in (3, 4)]
    assert sorted(path.name for path in (folder / "full").iterdir()) == ["step-000003", "step-000004"]


def test_a_loss_that_is_no_number_names_the_last_good_snapshot(runs) -> None:
    folder, found = runs
    first, second = found["wild"]["told"]
    assert first.startswith("the loss became nan at step 3; lower the learning rate; the last good snapshot is")
    assert first == second  # begun from the last one, which is not good
    assert "the last good snapshot is runs/train/snapshots/wild/step-000002, name it as `resume`" in first
    kept = snapshots_in(folder / "runs/train/snapshots/wild")  # one is to be kept, and the last is not proven
    assert [path.name for path in kept] == ["step-000003", "step-000002"]
    assert apart(found["wild"]["sane"], found["plain"]) < NEAR and len(found["wild"]["sane"]) == 6
    assert found["wild"]["at_once"].endswith("; no snapshot is known to be good, begin anew")


def test_times_are_those_of_one_engine(runs) -> None:
    """The last start had no step left to take, and says whose the times are."""
    assert runs[1]["engines"] == [("planned", 2, 2), ("ddp", 2, 4), ("ddp", 3, 5), ("ddp", 3, 5)]


def test_hosts_that_share_no_folder_have_no_snapshot(runs) -> None:
    problem, left = runs[1]["unshared"]
    assert problem.startswith(
        "the first host does not see rank-00001.safetensors, which another one wrote; put runs/ on a file"
    )
    assert left == []


def test_what_may_be_whole_is_refused_and_left_alone(runs) -> None:
    unseen, later, damaged, left, *still = runs[1]["refused"]
    assert unseen.startswith(
        "train.yaml: resume: /engines0/step-000005 cannot be used: rank 1 does not see manifest.json"
    )
    assert later.startswith("train.yaml: resume: /later/step-000005 cannot be used: manifest.json has version 1, this")
    assert left == "step-000005"
    assert damaged.startswith(
        "train.yaml: resume: no snapshot of this run in /damaged is whole: step-000005 (tensors.js"
    )
    assert "step-000004 (tensors.json has 2 bytes instead of" in damaged and "`resume: never`, which keeps" in damaged
    assert still == ["step-000004", "step-000005"]


def test_an_error_of_the_thread_is_told(runs) -> None:
    told = notes(runs[0] / "broken_work")
    assert told == [{"snapshot": 1, "problem": "RuntimeError: a surprise"}]


def test_replicas_that_differ_are_named(runs) -> None:
    _, found = runs
    assert found["equal"] == ""
    assert found["differs"].startswith("weights/") and found["differs"].endswith("between rank 0 and rank 1")


def test_streams_of_random_numbers(runs) -> None:
    told = runs[1]["streams"]
    assert [found[:2] for found in told] == [(True, True), (True, True)]
    torch.manual_seed(0)
    assert told[0][2] == torch.rand(3).tolist() != told[1][2]


def test_ranks_are_started_again_after_a_kill_and_a_hang(warm_python: None, runs, tmp_path: Path) -> None:
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

    result = launch("shardwright.stages.train.worker", given, 2, 280, poll, watch=Supervision(restarts=6))
    assert apart(result["losses"], found["plain"]) <= SAME and len(result["losses"]) == STEPS
    restarts = [note["restart"] for note in told["notes"] if "resumed" in note]
    assert restarts[:2] == [1, 2]  # on a slow machine a step may count as hanging
    assert {path.name for path in tmp_path.glob("*.mark")} == {"kill.mark", "hang.mark"}
    assert len(set(seen)) == 1
