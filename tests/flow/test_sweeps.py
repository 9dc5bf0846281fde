"""`shardwright sweep` with real DVC experiments and a real MLflow store, on a very small model."""

from __future__ import annotations

import argparse
import json
import subprocess

import pytest

from shardwright.pipeline.base.log import get_log
from shardwright.stages.sweep.run import run
from tests.flow.tracked import Tracked

pytestmark = pytest.mark.flow
BUDGETS = ("0.5", "0.00001", "0.5")  # GB: ample; less than the parameters; and the first again, from DVC's cache


def sweep(project, capsys, *words, **options):
    """What the command prints, as JSON."""
    asked = {"name": None, "until": None, "json": True, **options, "words": words}
    environ = project.environment(warm=True)
    assert run(project.root, argparse.Namespace(**asked), environ, get_log("sweep", 0)) == 0
    return json.loads(capsys.readouterr().out)


def test_points_are_experiments_and_one_set_of_runs(make_project, capsys, warm_python):
    project = make_project(finished=True)  # points find the stages above solve in its cache
    project.edit("conf/config.yaml", "enabled: false", "enabled: true")
    project.commit()
    before = project.snapshot()
    rows = sweep(project, capsys, f"solve.memory_budget_gb={','.join(BUDGETS)}", name="memory")

    assert [row["solve.memory_budget_gb"] for row in rows] == list(BUDGETS)
    assert [row.get("budget_mb") for row in rows] == [500.0, None, 500.0], rows
    assert rows[0]["step_ms"] == rows[2]["step_ms"] > 0
    assert rows[1]["reason"].startswith("conf/solve/tiny.yaml: memory_budget_gb: no plan fits 1e-05 GB")

    listed = project.git("for-each-ref", "--format=%(refname:lstrip=-1)", "refs/exps").split()  # as DVC keeps them
    assert {rows[0]["experiment"], rows[2]["experiment"]} <= set(listed)
    assert not [name for name in listed if name == rows[0]["experiment"].removesuffix("1") + "2"]
    kept = {name: digest for name, digest in project.snapshot().items() if name in before}
    assert kept == before  # the project itself is as it was
    assert subprocess.run(["git", "diff", "--quiet"], cwd=project.root).returncode == 0

    above, *points = reversed(Tracked(project).runs)
    assert above.info.run_name == rows[0]["experiment"].removesuffix("-1")
    assert above.data.metrics["sweep/points"] == 3 and above.data.metrics["sweep/failed"] == 1
    assert [run.info.run_name for run in points] == [f"solve.memory_budget_gb={budget}" for budget in BUDGETS]
    assert {run.data.tags["mlflow.parentRunId"] for run in points} == {above.info.run_id}
    assert {run.data.tags["shardwright.sweep"] for run in points} == {above.info.run_name}
    assert [run.info.status for run in points] == ["FINISHED", "FAILED", "FINISHED"]
    assert [run.data.tags["stage.solve"] for run in points] == ["executed", "failed", "cached"]
    assert {run.data.tags["model"] for run in points} == {"tiny"}  # also of what came from the cache as a whole
    for point, row in zip(points, rows, strict=True):
        assert point.data.metrics.get("checkpoint/step_ms") == row.get("step_ms")
