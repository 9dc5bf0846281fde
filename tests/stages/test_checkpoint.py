"""From a frontier and a budget to one plan: keep everything, then recompute, then a refusal that names what fits."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import nn

from shardwright.pipeline.base.errors import SolveError
from shardwright.pipeline.config import Checkpoint, Recompute
from shardwright.pipeline.cost import chain_memory
from shardwright.pipeline.cost.step import Workload
from shardwright.pipeline.ir.cluster import Cluster, Mesh
from shardwright.pipeline.ir.graph import OpGraph, Role
from shardwright.pipeline.ir.layout import Layout, R
from shardwright.pipeline.ir.plan import Frontier, FrontierPoint, Plan, Proof, Region, Sharding
from shardwright.pipeline.ops.dims import strategies
from shardwright.pipeline.ops.mesh import view_op
from shardwright.pipeline.ops.table import rule_of
from shardwright.pipeline.runtime.step.memory import measure_peak, storage_bytes
from shardwright.stages.checkpoint.choose import choose, evaluate
from shardwright.stages.checkpoint.describe import describe
from shardwright.stages.checkpoint.recompute import rotor
from shardwright.stages.checkpoint.recompute.linearize import linearize
from shardwright.stages.checkpoint.recompute.schedule import no_recompute
from shardwright.stages.checkpoint.recompute.simulate import simulate
from shardwright.stages.checkpoint.run import figures
from shardwright.stages.codegen.module import write_module
from shardwright.stages.profile.by_table import profile_graph
from tests.graphs import GRAPHS, frontier_of, plan_of, preset, profile_of, trace
from tests.skips import Ladder, sequences

WHERE = "conf/solve/test.yaml: memory_budget_gb"
NAMES = tuple(GRAPHS)


def candidate(name: str, point: int, budget: int, recompute: str = "optimal"):
    frontier = replace(frontier_of(name), budget_bytes=budget)
    settings = Checkpoint(recompute=Recompute(recompute))
    return evaluate(GRAPHS[name](), profile_of(name), preset(), frontier, point, settings)


def leaves(regions: tuple[Region, ...]) -> list[int]:
    found = []
    for region in regions:
        assert region.first <= region.last
        inner = leaves(region.inner) if region.recompute else [region.first]
        if region.recompute:
            assert inner == list(range(region.first, region.last + 1))
        else:
            assert region.first == region.last and not region.inner
        found += inner
    return found


def covers(name: str, plan: Plan) -> None:
    assert leaves(plan.regions) == list(range(len(GRAPHS[name]().chain)))
    last = plan.regions[-1]
    assert not last.recompute and last.first == len(GRAPHS[name]().chain) - 1  # the loss is never recomputed


def recomputes(regions: tuple[Region, ...]) -> bool:
    return any(region.recompute for region in regions)


def named_budget(line: str) -> int:
    return round(float(re.search(r"tightest feasible budget is (\S+) GB", line)[1]) * 1e9)


@pytest.mark.parametrize("name", ["mlp", "gpt_tied", "ladder"])
def test_shrinking_budgets(name):
    """No recompute, then recompute, then a refusal; time never falls as the budget does."""
    loose = plan_of(name)
    covers(name, loose)
    assert not recomputes(loose.regions)
    assert loose.prediction.recompute_seconds == pytest.approx(0, abs=1e-15)
    seen, seconds, budget = [], loose.prediction.step_seconds, loose.prediction.peak_bytes
    step = max(1, (loose.prediction.peak_bytes - loose.prediction.resident_bytes) // 6)
    while True:
        try:
            plan = plan_of(name, budget=budget)
        except SolveError as refusal:
            assert "tightest feasible budget" in refusal.line() and WHERE in refusal.line()
            break
        covers(name, plan)
        assert plan.prediction.peak_bytes <= budget == plan.budget_bytes
        assert plan.prediction.step_seconds >= seconds * 0.97  # slots are rounded: nearly monotone
        seconds = plan.prediction.step_seconds
        seen.append(recomputes(plan.regions))
        budget -= step
    assert seen[0] is False and seen[-1] is True
    assert budget > min(point.resident_bytes for point in frontier_of(name).points)


@pytest.mark.parametrize("name", NAMES)
def test_the_tightest_budget_that_is_named_is_accepted(name):
    """To the byte, for every plan of the frontier; one byte less is refused with the same number."""
    for point in range(len(frontier_of(name).points)):
        refused = candidate(name, point, 1)
        assert refused.regions is None
        accepted = candidate(name, point, refused.peak_bytes)
        assert accepted.regions is not None and accepted.peak_bytes <= refused.peak_bytes
        less = candidate(name, point, refused.peak_bytes - 1)
        assert less.regions is None and less.peak_bytes == refused.peak_bytes


@pytest.mark.parametrize("recompute", ["optimal", "full", "off"])
@pytest.mark.parametrize("name", NAMES)
def test_the_budget_in_the_message_is_accepted(name, recompute):
    with pytest.raises(SolveError) as refusal:
        plan_of(name, budget=1000, recompute=recompute)
    line = refusal.value.line()
    assert "no plan fits 1e-06 GB" in line and "\n" not in line and "gradients and optimizer state" in line
    plan = plan_of(name, budget=named_budget(line), recompute=recompute)
    assert plan.prediction.peak_bytes <= plan.budget_bytes


@pytest.mark.parametrize("name", NAMES)
def test_off_recomputes_nothing_and_full_everything(name):
    off, full, optimal = (plan_of(name, recompute=how) for how in ("off", "full", "optimal"))
    links = len(GRAPHS[name]().chain)
    covers(name, off)
    covers(name, full)
    assert off.regions == tuple(Region(i, i, False, ()) for i in range(links))
    assert off.prediction == optimal.prediction  # everything fits: the best is to keep it
    recomputed = {i for region in full.regions if region.recompute for i in leaves((region,))}
    assert recomputed == set(range(links - 1))
    assert full.prediction.recompute_seconds > 0
    assert full.prediction.step_seconds > off.prediction.step_seconds
    assert full.prediction.peak_bytes <= off.prediction.peak_bytes  # of so few links the last gradients may be the most


def test_off_is_refused_where_recompute_would_fit():
    budget = candidate("gpt", 0, 1).peak_bytes
    assert plan_of("gpt", budget=budget, points=slice(1)).regions
    with pytest.raises(SolveError, match="tightest feasible budget"):
        plan_of("gpt", budget=budget, points=slice(1), recompute="off")


@pytest.mark.parametrize("name", NAMES)
def test_the_prediction_adds_up(name):
    for budget in (None, candidate(name, 0, 1).peak_bytes):
        predicted = plan_of(name, budget=budget).prediction
        parts = (
            predicted.compute_seconds
            + predicted.communication_seconds
            + predicted.recompute_seconds
            + predicted.optimizer_seconds
        )
        assert predicted.step_seconds == pytest.approx(parts, rel=1e-9)
        assert predicted.resident_bytes < predicted.peak_bytes


def test_without_recompute_the_plan_is_as_fast_as_the_frontier_says():
    for name in NAMES:
        fastest = frontier_of(name).points[0]
        assert plan_of(name).prediction.step_seconds == pytest.approx(fastest.seconds, rel=1e-9)


def test_the_best_of_all_plans_is_chosen_and_the_others_are_told():
    frontier = frontier_of("gpt")
    budget = candidate("gpt", 0, 1).peak_bytes - 200
    plan = plan_of("gpt", budget=budget)
    points = range(len(frontier.points))
    (chosen,) = set(points) - {a.point for a in plan.alternatives}
    every = {point: candidate("gpt", point, budget) for point in points}
    assert plan.prediction.step_seconds == min(c.step_seconds for c in every.values() if c.regions is not None)
    assert plan.sharding == every[chosen].priced.sharding
    fitting = [a for a in plan.alternatives if a.seconds is not None]
    assert list(plan.alternatives) == sorted(plan.alternatives, key=lambda a: (a.seconds is None, a.seconds))
    assert all(a.peak_bytes <= budget and a.seconds == every[a.point].step_seconds for a in fitting)
    first = next(a for a in plan.alternatives if a.point == 0)
    assert first.seconds is None and first.peak_bytes == every[0].peak_bytes > budget
    assert first.lost.startswith("needs ") and " more than the budget of " in first.lost
    assert all(re.match(r"\S+ (us|ms|s) slower: [+-]", a.lost) for a in fitting)


def test_a_budget_below_what_stays_resident():
    frontier = frontier_of("mlp")
    least = min(point.resident_bytes for point in frontier.points)
    found = candidate("mlp", 0, least // 2)
    assert found.regions is None and found.peak_bytes > least


def test_a_model_of_one_link():
    """Nothing to choose: it fits or it does not."""
    from shardwright.stages.solve.answer.frontier import FrontierSearch
    from shardwright.stages.solve.on_mesh import price_point
    from shardwright.stages.solve.problem.build import build, to_sharding
    from tests.graphs import SILENT, solve_settings

    class One(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))

        def forward(self, x):
            return torch.sum(self.weight)

    graph = trace(One(), {"x": torch.zeros(4, 4)})
    assert len(graph.chain) == 1
    profile, cluster = profile_graph(graph), preset(1)
    problem, choices = build(Workload(graph, profile, cluster, 0.0))
    (solution,) = FrontierSearch(problem, solve_settings(), WHERE, SILENT).frontier(
        math.inf, lambda done, note="": None
    )
    sharding = to_sharding(graph, choices, solution.picked)
    workload = Workload(graph, profile, cluster, 0.0)
    point = price_point(workload, sharding, solution.proof)
    assert linearize(workload.priced(point.sharding)).chain is None
    settings = Checkpoint(recompute=Recompute.optimal)
    for budget, fits in ((10**6, True), (100, False)):
        frontier = Frontier(budget, 0.0, (Mesh(cluster.axes),), (point,))
        found = evaluate(graph, profile, cluster, frontier, 0, settings)
        if fits:
            assert choose([found], cluster, frontier, WHERE).regions == (Region(0, 0, False, ()),)
        else:
            with pytest.raises(SolveError, match="no plan fits"):
                choose([found], cluster, frontier, WHERE)


def test_what_cublas_keeps_for_products_with_a_bias():
    """Once for forward, and again only where backward repeats one."""
    graph, profile, cluster, biased = GRAPHS["mlp"](), profile_of("mlp"), preset(), 4096
    more = replace(cluster, compute=replace(cluster.compute, workspace_biased=biased))
    frontier = replace(frontier_of("mlp"), budget_bytes=10**9)

    def peak(cluster: Cluster, recompute: Recompute, budget: int = 10**9) -> int:
        found = evaluate(
            graph, profile, cluster, replace(frontier, budget_bytes=budget), 0, Checkpoint(recompute=recompute)
        )
        assert found.regions is None or found.peak_bytes <= budget
        assert found.regions is None or recompute is not Recompute.full or recomputes(found.regions)
        return found.peak_bytes

    kept, dropped = peak(cluster, Recompute.optimal), peak(cluster, Recompute.full)
    assert peak(more, Recompute.optimal) == kept + biased
    assert peak(more, Recompute.full) == dropped + 2 * biased
    assert peak(more, Recompute.optimal, budget=kept + biased) == kept + biased  # it fits with nothing repeated
    least = peak(cluster, Recompute.optimal, budget=1)  # of any schedule
    assert peak(more, Recompute.optimal, budget=1) == min(least + 2 * biased, kept + biased)
    with patch.object(chain_memory, "PRODUCTS_WITH_BIAS", ()):
        assert peak(more, Recompute.full) == dropped


def test_the_chain_in_numbers():
    frontier = frontier_of("gpt")
    graph, sharding = GRAPHS["gpt"](), frontier.points[0].sharding
    priced = Workload(graph, profile_of("gpt"), preset(), 2.0).priced(sharding)
    price, chain = priced.step, linearize(priced).chain
    assert chain.length == len(graph.chain) - 1
    assert chain.a[0] == 0  # the first link reads inputs, which stay where they are
    assert sum(chain.f) + sum(chain.b) == pytest.approx(sum(link.forward + link.backward for link in price.links))
    assert all(kept >= out for kept, out in zip(chain.saved, chain.a[1:], strict=True))


@pytest.mark.parametrize("recompute", ["off", "full"])
def test_the_step_is_that_of_all_micro_batches(recompute):
    """What is recomputed, is so in each of them; the optimizer runs once."""
    settings, found = Checkpoint(recompute=Recompute(recompute)), {}
    for count in (1, 3):
        frontier = replace(frontier_of("gpt"), micro_batches=count, points=frontier_of("gpt").points[:1])
        cases = [evaluate(GRAPHS["gpt"](), profile_of("gpt"), preset(), frontier, 0, settings)]
        plan = choose(cases, preset(), frontier, WHERE)
        assert plan.micro_batches == count
        assert ("3 micro-batches a step; " in describe(GRAPHS["gpt"](), plan)) is (count == 3)
        found[count] = plan.prediction, cases[0].price
    (one, price), (three, _) = found[1], found[3]
    once = price.gradient_sum + price.optimizer
    assert three.step_seconds - once == pytest.approx(3 * (one.step_seconds - once))
    assert three.recompute_seconds == pytest.approx(3 * one.recompute_seconds)
    assert (one.recompute_seconds > 0) is (recompute == "full")
    assert three.optimizer_seconds == one.optimizer_seconds
    assert three.resident_bytes == one.resident_bytes
    gradients = sum(value.type.nbytes for value in GRAPHS["gpt"]().of_role(Role.PARAMETER))
    assert one.peak_bytes <= three.peak_bytes <= one.peak_bytes + gradients  # they stay from pass to pass


def test_common_values_are_beside_every_schedule():
    """A budget that ends between what any schedule needs with and without them is refused."""
    frontier = frontier_of("ladder")
    graph, sharding = GRAPHS["ladder"](), frontier.points[0].sharding
    price = Workload(graph, profile_of("ladder"), preset(), 2.0).priced(sharding).step
    least = candidate("ladder", 0, 1).peak_bytes
    assert price.common_bytes > 0
    assert candidate("ladder", 0, least).regions is not None
    assert candidate("ladder", 0, least - price.common_bytes // 2).regions is None
    full = candidate("ladder", 0, frontier.budget_bytes, "full")
    assert full.peak_bytes > price.resident_bytes + price.common_bytes


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 1.0])
def test_a_ladder_holds_no_more_than_predicted(share):
    """The generated step, measured, under the schedule that Rotor finds for a budget."""
    torch.manual_seed(0)
    model, batch = Ladder(rungs=12), sequences()
    graph = trace(model, batch)
    sharding, profile, cluster = replicated(graph), profile_graph(graph), preset(1)
    priced = Workload(graph, profile, cluster, 0.0).priced(sharding)
    price, linear = priced.step, linearize(priced)
    chain = linear.chain
    least, most = rotor.tightest(chain, 500).memory, simulate(chain, no_recompute(chain).sequence).peak
    budget = linear.fixed_bytes + math.ceil(least + share * (most - least))
    point = FrontierPoint(sharding, 0.0, 0, 0, Proof("none", "none", 0.0, 0.0, 0.0, 0, 0))
    frontier = Frontier(budget, 0.0, (Mesh(cluster.axes),), (point,))
    found = evaluate(graph, profile, cluster, frontier, 0, Checkpoint())
    plan = choose([found], cluster, frontier, WHERE)
    assert recomputes(plan.regions) is (share < 1)
    held = measured(graph, plan, model, batch)
    beside = price.resident_bytes // 2 + storage_bytes([*batch.values()])  # parameters without their gradients
    assert 0.4 * (plan.prediction.peak_bytes - beside) < held <= plan.prediction.peak_bytes - beside


def replicated(graph: OpGraph) -> Sharding:
    chosen = {op.name: strategies(rule_of(op), view_op(graph, op), 1)[0] for op in graph.ops}
    whole = Layout((R,))
    return Sharding(
        chosen,
        {v.origin: whole for v in graph.of_role(Role.PARAMETER)},
        {v.name: whole for v in graph.of_role(Role.INPUT)},
    )


def measured(graph: OpGraph, plan: Plan, model: nn.Module, batch: dict[str, torch.Tensor]) -> int:
    """Bytes that a step holds at its worst, beyond parameters and the batch."""
    namespace: dict = {}
    exec(write_module(graph, plan), namespace)
    program = namespace["Program"](dict(model.named_parameters()))
    there = [*model.parameters(), *batch.values()]
    work = measure_peak(lambda: program.forward(**batch).backward(), lambda: there, torch.device("cpu"))
    return work - storage_bytes(there)


def test_a_plan_in_one_line():
    plan = plan_of("gpt")
    line = describe(GRAPHS["gpt"](), plan)
    assert "\n" not in line and "2 ranks" in line and "no recompute" in line and "ms a step" in line
    tight = plan_of("gpt", budget=candidate("gpt", 0, 1).peak_bytes)
    assert re.search(r"\d+ recompute regions", describe(GRAPHS["gpt"](), tight))
    assert figures(tight)["recompute_regions"] >= 1 and figures(plan)["recompute_regions"] == 0
