"""The step-time benchmark: how steps take turns, how they are judged, and that all sides train the same model."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import step_time_plans as plans
from benchmarks.overhead_steps import Step
from benchmarks.step_time import Outcome, Predicted, judge, spearman, verdict
from benchmarks.step_time_models import SCENARIOS, Scenario, batch, build
from benchmarks.step_time_ranks import CHOSEN, RANKS, WARM_UP, measure, peak_bytes, turn
from shardwright.pipeline.config import load_config
from tests.flow.project import TINY
from tests.ranks import run_ranks

SMALL = {"small": Scenario("gpt", {"vocab_size": 16, "context": 4, "width": 8, "layers": 2, "heads": 2}, 4)}
ROUNDS = 2


@given(st.integers(1, 6))
def test_all_take_turns_to_be_first(count: int) -> None:
    names = [str(n) for n in range(count)]
    orders = [turn(names, number) for number in range(2 * count)]
    assert all(sorted(order) == names for order in orders)
    assert set(Counter(order[0] for order in orders).values()) == {2}


@given(st.lists(st.integers(1, 1000), min_size=2, max_size=20, unique=True))
def test_ranks_correlate_as_the_order_is(numbers: list[int]) -> None:
    assert spearman([(x, 3 * x) for x in numbers]) == pytest.approx(1)
    assert spearman([(x, -x) for x in numbers]) == pytest.approx(-1)


def test_equal_ones_share_their_rank() -> None:
    assert spearman([(1, 1), (1, 2), (2, 3)]) == pytest.approx(3**0.5 / 2)


def found() -> dict[str, Any]:
    seconds = {CHOSEN: [2.0, 1.0, 3.0], "ddp": [1.0, 1.0, 1.0], "fsdp2": [4.0, 4.0, 4.0]}
    losses = {CHOSEN: [1.0, 2.0], "ddp": [1.0, 2.0], "fsdp2": [1.0, 4.0]}
    peaks = {CHOSEN: 90e6, "ddp": 200e6, "fsdp2": 80e6}
    return {"compared": {who: {"seconds": seconds[who], "losses": losses[who]} for who in seconds}, "peaks": peaks}


def test_the_best_of_the_others_that_fit_is_the_measure() -> None:
    free, tight = judge(found(), None), judge(found(), 100)
    assert (free.best, free.ratio, free.too_large) == ("ddp", 2.0, ())
    assert (tight.best, tight.ratio, tight.too_large) == ("fsdp2", 0.5, ("ddp",))
    assert tight.losses_differ == 0.5 and tight.milliseconds[CHOSEN] == 2000
    alone = judge(found(), 50)
    assert alone.ratio is None and CHOSEN in alone.too_large


def outcomes(*ratios: float) -> dict[str, Outcome]:
    return {name: Outcome(r, "ddp", {}, {}, (), 0.0) for name, r in zip(SCENARIOS, ratios, strict=False)}


def predictions(count: int, off: float) -> list[Predicted]:
    return [Predicted("x", str(n), n * (1 + off), n) for n in range(1, count + 1)]


@pytest.mark.parametrize(
    ("ratios", "count", "off", "met"),
    [
        ([0.8] * 6 + [1.1], 20, 0.1, True),
        ([0.8] * 6, 20, 0.1, False),  # a scenario is missing
        ([0.8] * 7, 19, 0.1, False),
        ([0.8] * 7, 20, 0.2, False),
        ([0.9] * 7, 20, 0.1, False),
        ([0.5] * 5 + [1.1, 1.0], 20, 0.1, False),
        ([0.8] * 6 + [1.2], 20, 0.1, False),  # with norms of the whole batch
    ],
)
def test_bars(ratios: list[float], count: int, off: float, met: bool) -> None:
    told, held = verdict(outcomes(*ratios), predictions(count, off))
    assert held is met
    assert list(told) == ["geomean", "worst", "whole_norms", "spearman", "median_error", "plans", "scenarios"]
    alike, rest = ratios[:6], ratios[6:]
    assert told["whole_norms"] == max(rest, default=None)
    assert told["worst"] == max(alike) and told["median_error"] == pytest.approx(off)
    assert told["geomean"] == pytest.approx(torch.tensor(alike).log().mean().exp().item(), abs=1e-4)


def test_a_choice_over_its_budget_does_not_pass() -> None:
    over = Outcome(0.5, "fsdp2", {}, {}, (CHOSEN,), 0.0)
    assert not verdict(outcomes(*[0.5] * 7) | {"memory_bound": over}, predictions(20, 0.0))[1]


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenarios_can_be_trained(name: str, tmp_path: Path) -> None:
    scenario = SCENARIOS[name]
    with torch.no_grad():
        assert build(name)(**batch(scenario)).isfinite()
    assert scenario.batch % RANKS == 0
    load_config(plans.project(tmp_path, name, plans.apart() if scenario.megabits else plans.alone()))


def steps_of(programs: dict[str, str]) -> dict[str, Any]:
    """On a rank."""
    with mock.patch.dict(SCENARIOS, SMALL):
        return measure("small", programs, ROUNDS) | {"copied": copied()}


def copied() -> tuple[int, int]:
    """What is measured of a step that keeps a copy of a model; and the bytes of the copy."""
    model = torch.nn.Linear(64, 64)

    def make() -> Step:
        kept = copy.deepcopy(model)
        return lambda: next(kept.parameters()).detach().sum()

    return peak_bytes(make, list(model.parameters())), 4 * (64 * 64 + 64)


@pytest.mark.long
def test_all_sides_train_the_same_model(tmp_path: Path) -> None:
    with mock.patch.dict(SCENARIOS, SMALL):
        root = plans.project(tmp_path, "small", TINY["cluster"])
        plans.run(root, "cluster")
        written = [plans.chosen(root), *plans.forced(root)]
    names = {each.name for each in written}
    assert {CHOSEN, "DDP", "ZeRO-1", "ZeRO-3", "tensor", "DDP + recompute"} <= names
    assert all(each.predicted == pytest.approx(sum(each.parts.values())) and each.predicted > 0 for each in written)
    programs = {each.name: each.path for each in written if each.name in (CHOSEN, "tensor", "ZeRO-3 + recompute")}
    for result in run_ranks(RANKS, steps_of, programs):
        assert (
            set(result["compared"]) == {CHOSEN, "ddp", "fsdp2", "dtensor"} and result["plans"].keys() == programs.keys()
        )
        for row in (*result["compared"].values(), *result["plans"].values()):
            assert len(row["seconds"]) == ROUNDS and len(row["losses"]) == WARM_UP + ROUNDS
            assert row["losses"] == pytest.approx(result["compared"]["ddp"]["losses"], rel=1e-4)
        assert result["peaks"]["fsdp2"] < result["peaks"]["ddp"]
        found, own = result["copied"]
        assert own <= found < 1.1 * own, "the model that it is made from is not counted"
