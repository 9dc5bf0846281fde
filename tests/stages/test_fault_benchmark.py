"""What the benchmark of faults counts as lost, and as a difference; and that faults to plant are of today's source."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.faults import Disturbed, Kill, difference, table
from benchmarks.house import copy_project
from benchmarks.planted_source_faults import FAULTS, ROOT


def test_an_acknowledged_snapshot_must_be_there(tmp_path: Path) -> None:
    work = tmp_path / "tmp" / "shardwright-x"
    work.mkdir(parents=True)
    run = Disturbed(tmp_path, 3, 100, random.Random(0))
    lines = [{"step": 7}, {"snapshot": 8}, {"snapshot": 12, "problem": "full"}, {"resumed": 8}]
    (work / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step"')
    run.kills = [Kill("rank", 7)]
    run._look()
    assert (run.step, run.acknowledged) == (7, 8)
    assert run.kills == [Kill("rank", 7, went_on=8)]
    run.kills.append(Kill("stage", 8))
    with open(work / "steps.jsonl", "a") as file:
        file.write(': 8}\n{"resumed": 4}\n')
    run._look()
    assert run.step == 8
    assert run.kills == [Kill("rank", 7, went_on=8), Kill("stage", 8, went_on=4, lost=1)]
    run.kills.append(Kill("launcher", 8))
    with open(work / "steps.jsonl", "a") as file:
        file.write('{"step": 0}\n')  # a start that found none of them
    run._look()
    assert run.kills[-1] == Kill("launcher", 8, went_on=0, lost=1)
    assert len(run.due) == 3 and run.due == sorted(run.due)


def test_the_table_has_a_row_for_each_kind() -> None:
    kills = [Kill("rank", 3, 0), Kill("rank", 9), Kill("launcher", 9, 8), Kill("rank", 14, 8, lost=1)]
    assert table(kills).splitlines() == [
        "killed     kills  brought back by  restarts  lost   after step",
        "rank           3  torchrun                2     1   3, 9, 14",
        "snapshot       0  torchrun                0     0   -",
        "launcher       1  the next start          1     0   9",
        "stage          0  the next start          0     0   -",
    ]


def test_the_largest_difference_of_losses_and_parameters(tmp_path: Path) -> None:
    roots = tmp_path / "a", tmp_path / "b"
    for root, loss, weight in zip(roots, (1.0, 1.25), (0.0, 0.5), strict=True):
        (root / "runs/train/weights").mkdir(parents=True)
        (root / "runs/train/report.json").write_text(json.dumps({"body": {"losses": [2.0, loss]}}))
        save_file({"w": torch.full((2,), weight)}, root / "runs/train/weights/model.safetensors")
    assert difference(*roots) == 0.5
    assert difference(roots[0], roots[0]) == 0
    (roots[1] / "runs/train/report.json").write_text(json.dumps({"body": {"losses": [2.0]}}))
    assert difference(*roots) == float("inf")


def test_a_fault_to_plant_has_one_place_in_the_source_and_tests_that_are_there() -> None:
    assert len({fault.what for fault in FAULTS}) == len(FAULTS)
    for fault in FAULTS:
        assert (ROOT / fault.file).read_text().count(fault.right) == 1 and fault.wrong != fault.right, fault.what
        assert all((ROOT / "tests" / name.partition("::")[0]).is_file() for name in fault.tests.split()), fault.what


def test_a_copy_of_the_project_has_its_own_source(tmp_path: Path) -> None:
    """The links of shardwright/ lead to the copied rooms."""
    copy = copy_project(tmp_path / "project")
    assert (copy / "shardwright/pipeline").resolve() == copy / "pipeline" and (copy / "shardwright/conf").is_dir()
