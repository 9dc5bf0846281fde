"""What `dvc plots` draws; tests/flow/test_docs_runs.py has DVC draw it."""

from dataclasses import replace

import pytest

from shardwright.pipeline.ir.plan import Timeline
from shardwright.stages.checkpoint.curves import KINDS, memory_curve, plan_points
from shardwright.stages.train.measured import MOST_DRAWN, make_report, step_curve
from tests.graphs import frontier_of, plan_of


def report_of(losses, seconds):
    measured = {"losses": losses, "seconds": seconds, "profiled_at": -1, "breakdown": None, "peak_bytes": [1, 1]}
    more = {"ranks": 2, "samples": 8, "evaluated": [], "engine": "planned"}
    return make_report(measured | more, plan_of("mlp"), edited=False)


def test_of_a_long_run_every_so_many_th_step_is_drawn():
    steps = 2 * MOST_DRAWN + 1
    rows = step_curve(report_of([1.0] * steps, [0.5] * steps))
    assert [row["step"] for row in rows] == list(range(0, steps, 3)) and rows[0]["step_ms"] == 500


def test_steps_whose_seconds_nobody_kept_have_none():
    rows = step_curve(report_of([3.0, 2.0, 1.0], [0.1, 0.2]))
    assert [row["loss"] for row in rows] == [3, 2, 1]
    assert [row["step_ms"] for row in rows] == [None, 100, 200]


def test_memory_reaches_the_peak_and_is_the_peak_where_no_more_is_known():
    plan = plan_of("mlp")
    peak, rows = plan.prediction.peak_bytes / 1e6, memory_curve(plan)
    assert len(rows) > 4 and max(row["held_mb"] for row in rows) == pytest.approx(peak)
    assert [row["ms"] for row in rows] == sorted(row["ms"] for row in rows)
    flat = memory_curve(replace(plan, timeline=Timeline()))
    assert [row["held_mb"] for row in flat] == [peak, peak] and flat[1]["ms"] == plan.prediction.step_seconds * 1e3


def test_every_plan_is_a_point_of_its_kind():
    plan, frontier = plan_of("mlp"), frontier_of("mlp")
    rows = plan_points(plan, frontier)
    assert all(set(row) == {"peak_mb", *KINDS} for row in rows), "DVC reads no rows with other keys"
    found = {kind: [row for row in rows if row[kind] is not None] for kind in KINDS}
    assert sum(map(len, found.values())) == len(rows)
    assert len(found["frontier"]) == len(frontier.points) and len(found["baseline"]) == len(frontier.baselines)
    assert found["plan"][0]["plan"] == plan.prediction.step_seconds * 1e3
