"""The plans that people know by name, priced as ours are: the fastest of each kind on this mesh."""

from __future__ import annotations

import math
from collections.abc import Callable

from shardwright.pipeline.ir.graph import OpGraph
from shardwright.pipeline.ir.plan import Baseline, FrontierPoint, Sharding
from shardwright.stages.solve.problem.build import Choices, to_sharding
from shardwright.stages.solve.problem.data import Problem
from shardwright.stages.solve.problem.families import Families, named
from shardwright.stages.solve.search.decomposition import fastest
from shardwright.stages.solve.search.restricted import restrict

SECONDS = 5.0  # for a kind that only the search for large problems can plan


def baselines(
    graph: OpGraph, choices: Choices, problem: Problem, price: Callable[[Sharding], FrontierPoint]
) -> tuple[Baseline, ...]:
    """Kinds that the model's shapes do not allow on this mesh are left out; so are all on one device."""
    axes = len(next(iter(choices.ops.values()))[0].outputs[0].states)
    families = Families(graph, choices)
    found = []
    for name, roles in named(axes).items() if any(len(own) > 1 for own in choices.ops.values()) else ():
        kept = families.kept(roles)
        if kept is None:
            continue
        left = restrict(problem, kept)
        picked = left.expand(fastest(left.problem, SECONDS))
        if math.isfinite(problem.cost(picked)):
            point = price(to_sharding(graph, choices, picked))
            found.append(Baseline(name, point.seconds, point.peak_bytes, mesh=0))
    return tuple(found)
