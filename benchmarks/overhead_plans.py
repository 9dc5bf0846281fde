"""The programs that benchmarks.overhead measures: one rank unsplit, two ranks in ways that have a name."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from torch.optim import AdamW

from benchmarks.overhead_models import batch_two, build_two
from benchmarks.profile_accuracy import trace_row
from shardwright.pipeline.cost.step import Workload
from shardwright.pipeline.ir.cluster import COLLECTIVES, Axis, Cluster, Compute, Curve, LinkCost
from shardwright.pipeline.ir.graph import OpGraph
from shardwright.pipeline.ir.plan import Prediction, Region, Sharding
from shardwright.pipeline.ir.profile import as_run
from shardwright.pipeline.sharding.lowering import with_paths
from shardwright.pipeline.tracing.chain import find_chain
from shardwright.pipeline.tracing.export import export_loss
from shardwright.pipeline.tracing.lower import lower as to_ops
from shardwright.pipeline.tracing.simplify import simplify
from shardwright.stages.checkpoint.recompute.released import released
from shardwright.stages.codegen.module import write_module
from shardwright.stages.profile.run import make_profile
from shardwright.stages.solve.problem.build import build, to_sharding
from shardwright.stages.solve.problem.families import Families, named
from shardwright.stages.solve.search.decomposition import fastest
from shardwright.stages.solve.search.restricted import restrict
from tests.unpipelined import replicated, whole_plan

SEARCH_S = 20.0
FAMILIES = {"ddp": "DDP", "zero3": "ZeRO-3", "tensor": "tensor"}


def one_rank(model: dict[str, Any]) -> str:
    """Unsplit."""
    graph = trace_row({**model, "mode": "fp32"})
    return _text(graph, replicated(graph), 1)


def two_ranks(sizes: dict[str, int], name: str) -> str:
    """The fastest plan of that family on two CPU processes."""
    model, batch = build_two(sizes), batch_two(sizes)
    graph = find_chain(simplify(to_ops(export_loss(model, batch), model, tuple(batch))))
    return _text(graph, _forced(graph, FAMILIES[name]), 2)


def _forced(graph: OpGraph, family: str) -> Sharding:
    cluster = two_processes()
    profile, _ = make_profile(graph, "cpu", "fp32", AdamW, logging.getLogger())
    priced = as_run(graph, profile.types)
    problem, choices = build(Workload(priced, profile, cluster, 2.0))
    kept = Families(priced, choices).kept(named(1)[family])
    assert kept is not None, f"{family} does not fit this model"
    left = restrict(problem, kept)
    picked = left.expand(fastest(left.problem, SEARCH_S))
    return with_paths(priced, to_sharding(priced, choices, picked), cluster)


def two_processes() -> Cluster:
    """Figures of a laptop; they decide between plans of one family, not between families."""
    links = {kind: LinkCost(5e-5, 2e9) for kind in COLLECTIVES}
    compute = Compute(Curve((1e6,), (5e10,)), 1e10, 5e-6, 5e-6)
    return Cluster("preset", "cpu", 2, 4 * 10**9, compute, (Axis("d0", 2, links),))


def _text(graph: OpGraph, sharding: Sharding, ranks: int) -> str:
    profile, _ = make_profile(graph, "cpu", "fp32", AdamW, logging.getLogger())
    regions = tuple(Region(number, number, False, ()) for number in range(len(graph.chain)))
    plan = whole_plan((("d0", ranks),), "cpu", 0, sharding, regions, Prediction(0.0, 0, 0, 0.0, 0.0, 0.0, 0.0))
    plan = replace(plan, released=released(as_run(graph, profile.types), profile))
    return write_module(graph, plan)
