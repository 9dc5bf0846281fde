"""A model laid out as it is told, on a mesh of one axis: tensor parallelism, with the sequence split between the
blocks or whole there."""

from __future__ import annotations

from shardwright.pipeline.base.errors import SolveError
from shardwright.pipeline.cost.step import Workload
from shardwright.pipeline.ir.plan import Sharding
from shardwright.stages.solve.problem.build import build, to_sharding
from shardwright.stages.solve.problem.families import Families, Parallel
from shardwright.stages.solve.search.decomposition import fastest
from shardwright.stages.solve.search.restricted import restrict

SECONDS = 5.0  # for a model of which only the search for large problems can plan


def tensor_parallel(workload: Workload, split_sequence: bool) -> Sharding:
    """The fastest of the plans that split every large weight that can be."""
    problem, choices = build(workload)
    families = Families(workload.graph, choices)
    kept = families.kept((Parallel.sequence if split_sequence else Parallel.tensor,))
    if kept is None:
        raise SolveError(
            "nothing between the blocks can be split along the sequence", remedy="leave sequence_parallel out"
        )
    left = restrict(problem, families.parameters_whole(kept, 0) if split_sequence else families.replicated(kept, 0))
    return to_sharding(workload.graph, choices, left.expand(fastest(left.problem, SECONDS)))
