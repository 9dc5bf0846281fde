"""The recompute benchmark without a GPU: how points are judged and told, and the programs that it plans."""

from __future__ import annotations

import ast
import json
import re
from itertools import pairwise
from typing import Any

import pytest

from benchmarks.measure_steps import text
from benchmarks.profile_accuracy import trace_row
from benchmarks.recompute import row
from benchmarks.recompute_plans import Planner
from benchmarks.recompute_report import EQUAL, judged, report
from shardwright.pipeline.ir.profile import Compiled, CompiledBlock, CompiledWay
from shardwright.pipeline.ops.blocks import blocks_of

GB = 10**9


def peer(peak: float, ms: float) -> dict[str, float]:
    return {"peak": peak * GB, "ms": ms, "loss": 1.0, "seconds": 1.0}


PEERS = {
    "none": peer(10.0, 100.0),
    "per block": peer(4.0, 130.0),
    "sequential 2": peer(7.0, 125.0),
    "sequential 4": peer(6.0, 128.0),
    "compile 1.0": peer(8.0, 90.0),
    "compile 0.5": peer(5.0, 96.0),
}


EAGER = {label: one for label, one in PEERS.items() if not label.startswith("compile")}


def ours(budget: float, peak: float, ms: float, predicted: float, recomputes: bool = True) -> dict[str, Any]:
    measured = {"peak": peak * GB, "ms": ms, "loss": 1.0}
    return {"budget": budget * GB, "measured": measured, "predicted_ms": predicted, "recomputes": recomputes}


# --------------------------------------------------------------------------------------------------------- judgement


def test_a_point_is_held_to_the_fastest_peer_that_fits_its_budget():
    found = judged(ours(8.0, 7.6, 110.0, 99.0), PEERS)
    assert found["used"] == pytest.approx(0.95) and found["error"] == pytest.approx(0.1)
    assert found["best"] == "compile 1.0" and found["gain"] == pytest.approx(90 / 110 - 1)
    assert found["between"] and found["gain_over_eager"] == pytest.approx(125 / 110 - 1)


def test_a_peer_of_the_same_peak_counts_and_a_larger_one_does_not():
    assert judged(ours(7.0, 6.9, 120.0, 120.0), EAGER)["best"] == "sequential 2"
    assert judged(ours(7.0 / EQUAL + 1e-6, 6.9, 120.0, 120.0), EAGER)["best"] == "sequential 2"
    assert judged(ours(6.9, 6.8, 120.0, 120.0), EAGER)["best"] == "sequential 4"
    assert judged(ours(4.9, 4.8, 120.0, 120.0), PEERS)["best"] == "per block"


def test_where_no_peer_fits_there_is_nothing_to_gain_on():
    found = judged(ours(3.0, 2.9, 150.0, 150.0), PEERS)
    assert found["best"] is None and found["gain"] is None is found["gain_over_eager"] and not found["between"]


@pytest.mark.parametrize(("budget", "between"), [(4.0, False), (4.1, True), (9.9, True), (10.0, False), (12.0, False)])
def test_between_every_block_and_none(budget, between):
    assert judged(ours(budget, budget, 110.0, 110.0), PEERS)["between"] is between


# ------------------------------------------------------------------------------------------------------------- report


def found() -> dict[str, Any]:
    points = [
        ours(4.0, 3.9, 126.0, 120.0),
        ours(10.0, 9.0, 100.0, 100.0, recomputes=False),
        ours(6.5, 6.4, 112.0, 112.0),
        ours(3.0, 3.03, 150.0, 150.0),
        {**ours(2.0, 2.0, 1.0, 1.0), "name": "small_4", "measured": {"error": "RuntimeError: no"}},
    ]
    broken = {**PEERS, "sequential 3": {"error": "OutOfMemoryError", "seconds": 1.0}}
    return {"peers": {"small": broken}, "ours": {"small": points}}


def test_the_last_line_is_the_result():
    lines = report(found()).splitlines()
    assert json.loads(lines[-1]) == {
        "points": 4,
        "over_budget": 1,
        "least_used": pytest.approx(3.9 / 4.0, abs=1e-4),  # what keeps everything need not use its budget
        "failed": 1,
        "worst_time_error": pytest.approx(6 / 126, abs=1e-4),
        "slower_than_peers": 2,
        "least_gain_between": pytest.approx(96 / 112 - 1, abs=1e-4),
        "least_gain_between_over_eager": pytest.approx(128 / 112 - 1, abs=1e-4),
    }


def test_the_table_has_every_peer_that_ran_and_every_point_from_large_to_small():
    told = report(found())
    rows = told.splitlines()
    assert sum(bool(re.match(r"  (none|per block|sequential \d|compile \S+) ", line)) for line in rows) == len(PEERS)
    assert "sequential 3" not in told
    budgets = [float(line.split()[0]) for line in rows if re.match(r" +\d+\.\d\d +\d", line)]
    assert budgets == [10.0, 6.5, 4.0, 3.0]
    assert "compile 0.5 (-14.3%)" in told and "none fits" in told and "per block (+3.2%)" in told


def test_a_point_that_is_slower_than_a_peer_is_counted():
    slow = found() | {"peers": {"small": EAGER}}
    assert json.loads(report(slow).splitlines()[-1])["slower_than_peers"] == 0
    slow["ours"]["small"][2]["measured"]["ms"] = 140.0
    told = json.loads(report(slow).splitlines()[-1])
    assert told["slower_than_peers"] == 1 and told["least_gain_between"] < 0


def test_a_model_that_waits_for_its_measurement_is_named_and_not_counted():
    waiting = {key: value for key, value in ours(6.0, 6.0, 1.0, 1.0).items() if key != "measured"}
    half = found() | {"peers": {"small": PEERS, "large": PEERS}}
    half["ours"]["large"] = [waiting]
    lines = report(half).splitlines()
    assert "large: planned and not measured" in lines
    assert lines[-1] == report(found()).splitlines()[-1]


# ------------------------------------------------------------------------------------------------------------ planning

CALIBRATION = {"matmul_tflops": {"large_bfloat16": 600.0, "large_float32": 50.0}, "copy_tb_per_s": 4.0}


@pytest.fixture(scope="module")
def planner() -> Planner:
    pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    sizes = {"n_layer": 4, "n_embd": 128, "n_head": 4, "vocab_size": 512, "n_positions": 128, "use_cache": False}
    graph = trace_row(row("GPT2", "LMHeadModel", sizes, text(16, 128, 512), "transformer.h.*"))
    return Planner(graph, CALIBRATION, None)


def test_smaller_budgets_recompute_more(planner):
    budgets = planner.budgets(7)
    assert budgets == sorted(budgets, reverse=True) and len(set(budgets)) == 7
    plans = [planner.schedule(budget) for budget in budgets]
    assert all(plan["predicted_peak"] <= budget for plan, budget in zip(plans, budgets, strict=True))
    assert [plan["recomputes"] for plan in plans] == [False] + [True] * 6
    times = [plan["predicted_ms"] for plan in plans]
    assert all(later >= sooner * 0.999 for sooner, later in pairwise(times))
    assert times[-1] > times[0] * 1.02
    again = [plan["regions"].count("(") + plan["regions"].count(".") for plan in plans]  # regions, and links in part
    assert again[0] == 0 and again[-1] > again[1] > 0
    for plan in plans:
        ast.parse(plan["text"])
        assert ("recompute(" in plan["text"]) is plan["recomputes"]
    assert any("kept(" in plan["text"] for plan in plans) and all("del " in plan["text"] for plan in plans)


def test_below_the_least_there_is_no_plan(planner):
    least = planner.budgets(2)[-1]
    assert planner.schedule(least) is not None
    assert planner.schedule(int(least * 0.97)) is None
    assert planner.schedule(planner.linear.fixed_bytes) is None
    assert planner.schedule(planner.linear.optimizer_peak - 1) is None


def test_more_than_everything_takes_is_no_better(planner):
    most = planner.budgets(2)[0]
    enough, plenty = planner.schedule(most), planner.schedule(10 * most)
    assert enough["text"] == plenty["text"] and not plenty["recomputes"]
    assert enough["predicted_peak"] == plenty["predicted_peak"] == most


def test_compiled_blocks_are_planned_by_what_they_were_measured_to_take(planner):
    """Four layers of two links: one block each, between the tables and the end."""
    spans = blocks_of(planner.graph)
    ways = [
        CompiledWay(k, 1e-3, 2e-3 - 1e-3 * k + 1e-3, int(9e6 * k) + GB // 1000, int(9e6 * k), 10**7, 2 * 10**7)
        for k in (1.0, 0.5, 0.0)
    ]
    blocks = tuple(CompiledBlock(first, last, 0) for first, last in spans)
    own = Planner(planner.graph, CALIBRATION, Compiled("a card", blocks, (tuple(ways),)))
    chain = own.linear.chain
    assert own.linear.spans == spans and chain.length == len(spans) - 1
    assert set(chain.f) == {1e-3} and all(len(options) == 2 for options in chain.more)
    most, *_, least = own.budgets(6)
    assert "keeps=1.0" in own.schedule(most)["text"] and "keeps=0.5" not in own.schedule(most)["text"]
    tight = own.schedule(most - 10**7)
    assert "keeps=0.5" in tight["text"] or "keeps=0.0" in tight["text"]
    assert tight["predicted_ms"] > own.schedule(most)["predicted_ms"] and "kept(" not in tight["text"]
    assert own.schedule(least) is not None
