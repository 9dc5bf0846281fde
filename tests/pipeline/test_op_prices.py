"""The one price of an op: its kernels at the shapes of a rank, the same for the solver, the step and Rotor's chain."""

from __future__ import annotations

import logging
import random
from dataclasses import replace
from functools import cache

import pytest
import torch

from shardwright.pipeline.config import Checkpoint, Recompute
from shardwright.pipeline.cost.groups import Join
from shardwright.pipeline.cost.links import link_costs
from shardwright.pipeline.cost.step import Priced, Workload
from shardwright.pipeline.cost.two_lines import ends_of, unrecomputed_runs
from shardwright.pipeline.cost.unsplit import card_of
from shardwright.pipeline.ir.cluster import NO_HOST, Cluster, Mesh
from shardwright.pipeline.ir.graph import OpGraph
from shardwright.pipeline.ir.plan import Frontier, Proof
from shardwright.pipeline.ir.profile import Compiled, CompiledBlock, CompiledWay, Profile, as_run
from shardwright.pipeline.ops.blocks import blocks_of
from shardwright.pipeline.ops.mesh import op_strategies, view_op
from shardwright.pipeline.rates.compute import op_seconds
from shardwright.pipeline.rates.kernels import kernel_seconds
from shardwright.pipeline.sharding.lowering import with_paths
from shardwright.pipeline.sharding.slices import sliced
from shardwright.stages.checkpoint.choose import evaluate
from shardwright.stages.profile.run import make_profile
from shardwright.stages.solve.on_mesh import price_point
from shardwright.stages.solve.problem.build import build, to_sharding
from shardwright.stages.solve.problem.storage import Way
from tests.graphs import preset
from tests.plans import graph_of

MODELS = ("gpt", "mlp")


@cache
def profiled(name: str, device: str = "cuda") -> tuple[OpGraph, Profile]:
    graph = graph_of(name)
    profile, why = make_profile(graph, device, "fp32", torch.optim.AdamW, logging.getLogger())
    assert not why and profile.kernels
    return as_run(graph, profile.types), profile


def gpus(devices: int) -> Cluster:
    return replace(preset(devices), device="cuda")


def any_sharding(workload: Workload, seed: int):
    """With the choices of the problem; parameters are stored so that any op may read them."""
    draw, (problem, choices) = random.Random(seed), build(workload)
    picked = [draw.randrange(len(node.costs)) for node in problem.nodes]
    for value, ways in choices.storage.items():
        free = [n for n, way in enumerate(ways) if way.way is Way.gathered]
        picked[choices.index[value]] = draw.choice(free or [0])
    sharding = to_sharding(workload.graph, choices, tuple(picked))
    return problem.cost(tuple(picked)), with_paths(workload.graph, sharding, workload.cluster)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("seed", range(3))
def test_the_solver_and_the_step_have_the_same_seconds_on_gpus(name: str, seed: int) -> None:
    workload = Workload(*profiled(name), gpus(2), 2.0)
    cost, sharding = any_sharding(workload, seed)
    priced = workload.priced(sharding)
    assert priced.step.seconds == pytest.approx(cost, rel=1e-9)
    chain = sum(own.ways[0].device.total for own in link_costs(priced))
    assert priced.step.seconds == pytest.approx(priced.step.seconds_with(chain), rel=1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_on_one_device_they_are_those_of_all_kernels(name: str) -> None:
    graph, profile = profiled(name)
    workload = Workload(graph, profile, gpus(1), 2.0)
    _, sharding = any_sharding(workload, 0)
    card = card_of(workload.cluster.compute)
    links = [profile.kernels.links[place] for place in profile.kernels.chain]
    kernels = [*profile.kernels.prologue, *(k for link in links for k in (*link.forward, *link.backward))]
    step = workload.priced(sharding).step
    assert step.seconds == pytest.approx(sum(kernel_seconds(k, card) for k in (*kernels, *profile.kernels.optimizer)))


def test_without_kernels_it_is_the_roofline() -> None:
    graph, profile = profiled("gpt", "cpu")
    workload = Workload(graph, profile, preset(2), 2.0)
    for op in graph.ops:
        strategy = op_strategies(view_op(graph, op), (2,))[0]
        own = op_seconds(graph, op.name, profile.ops[op.name], strategy, workload.cluster.compute, (2,))
        assert workload.ops(op.name, strategy).seconds == own


def test_a_split_op_has_smaller_kernels() -> None:
    """Each way to split a product halves its arithmetic; what is not split costs what it does on one device."""
    graph, profile = profiled("gpt")
    alone, split = (Workload(graph, profile, gpus(n), 2.0).ops for n in (1, 2))
    product = next(op for op in graph.ops if profile.ops[op.name].flops_forward and op.target.startswith("aten.linear"))
    whole = alone.unsplit(product.name, op_strategies(view_op(graph, product), (1,))[0])
    for strategy in op_strategies(view_op(graph, product), (2,)):
        found = split(product.name, strategy).seconds
        is_split = any(layout.splits((2,)) for layout in (*strategy.inputs, *strategy.outputs))
        assert found.total < whole.total if is_split else found == whole


def test_slices_have_their_part_of_the_kernels() -> None:
    graph, profile = profiled("gpt")
    cut, costs = sliced(graph, profile, (1,) * graph.batch)
    whole, part = (Workload(*pair, gpus(1), 2.0) for pair in ((graph, profile), (cut, costs)))
    for op in graph.ops:
        (strategy, *_) = op_strategies(view_op(graph, op), (1,))
        assert part.ops(op.name, strategy).seconds.total <= whole.ops(op.name, strategy).seconds.total
        assert part.ops.unsplit(op.name, strategy) == whole.ops.unsplit(op.name, strategy)


def test_a_block_whose_compiled_form_was_measured_takes_what_was_measured() -> None:
    graph, profile = profiled("gpt")
    run = CompiledWay(1.0, 2e-3, 5e-3, 1000, 900, 1200, 1500)
    blocks = tuple(CompiledBlock(first, last, 0) for first, last in blocks_of(graph))
    compiled = replace(profile, compiled=Compiled("cuda", blocks, ((run,),)))
    workload = Workload(graph, compiled, gpus(2), 2.0)
    cost, sharding = any_sharding(workload, 1)
    priced = workload.priced(sharding)
    assert priced.step.seconds == pytest.approx(cost, rel=1e-9)
    chain = sum(own.ways[0].device.total for own in link_costs(priced, join=Join.COMPILED))
    assert priced.step.seconds == pytest.approx(priced.step.seconds_with(chain), rel=1e-9)
    alone = Workload(graph, compiled, gpus(1), 2.0)
    step = alone.priced(any_sharding(alone, 1)[1]).step
    for first, last in blocks_of(graph):
        took = step.links[first : last + 1]
        assert sum(link.compute.forward for link in took) == pytest.approx(2e-3)
        assert sum(link.compute.backward for link in took) == pytest.approx(5e-3)


def waiting_seconds(priced: Priced) -> float:
    """That a device waits for its host in a pass."""
    passes = sum(link.forward + link.backward for link in priced.step.links)
    return sum(run.seconds for run in unrecomputed_runs(priced)) - passes


def test_a_device_waits_for_a_host_that_is_slower() -> None:
    graph, profile = profiled("gpt")
    small = Workload(graph, profile, gpus(1), 2.0)
    _, sharding = any_sharding(small, 0)
    assert waiting_seconds(small.priced(sharding)) > 0  # kernels of a tiny model
    compute = replace(small.cluster.compute, host=NO_HOST)
    idle = replace(small, cluster=replace(small.cluster, compute=compute))
    assert waiting_seconds(idle.priced(sharding)) == pytest.approx(0, abs=1e-12)
    on_cpu = Workload(*profiled("gpt", "cpu"), preset(1), 2.0).priced(sharding)
    assert waiting_seconds(on_cpu) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("name", MODELS)
def test_the_peak_of_a_plan_is_that_which_is_predicted_for_it_without_recompute(name: str, device: str) -> None:
    graph, profile = profiled(name, device)
    cluster = replace(preset(2), device=device)
    workload = Workload(graph, profile, cluster, 2.0)
    _, sharding = any_sharding(workload, 2)
    point = price_point(workload, sharding, Proof("", "", 0.0, 0.0, 0.0, 0, 0))
    frontier = Frontier(1 << 60, 2.0, (Mesh(cluster.axes),), (point,))
    planned = evaluate(graph, profile, cluster, frontier, 0, Checkpoint(recompute=Recompute.off))
    assert planned.regions is not None
    assert (point.seconds, point.peak_bytes) == (pytest.approx(planned.step_seconds), planned.peak_bytes)


def test_lines() -> None:
    """host    |--1--|--1--|-----5-----|
    device        |--2--|--2--|     wait    |1|
    """
    assert list(ends_of([(1, 2), (1, 2), (5, 1)])) == [2, 4, 7]
    assert list(ends_of([(3, 1), (0, 1)])) == [3, 4]


def test_the_plan_of_the_least_device_is_later_than_the_best_by_no_more_than_it_waits() -> None:
    """Of plans under one host: a step ends with the longest of the ways from host to device."""
    draw = random.Random(0)
    for _ in range(200):
        count = draw.randint(1, 6)
        host = [draw.random() for _ in range(count)]
        plans = [[draw.random() for _ in host] for _ in range(5)]
        found = [list(ends_of(zip(host, plan, strict=True)))[-1] for plan in plans]
        for plan, end in zip(plans, found, strict=True):
            assert end == pytest.approx(max(sum(host[:k]) + sum(plan[k:]) for k in range(count + 1)))
        least = min(range(5), key=lambda n: sum(plans[n]))
        assert found[least] - min(found) <= found[least] - sum(plans[least]) + 1e-9
