"""The plans of a frontier without a pipeline, each with its best recompute and in as many micro-batches as may be.

A pass that is cut into slices takes longer, as there are more kernels and weights are read more often, and needs less
memory: of each plan more slices are looked at until one of them fits with nothing recomputed. Here slices are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

from shardwright.pipeline.base.errors import SolveError
from shardwright.pipeline.config import Checkpoint, Pipeline, Recompute
from shardwright.pipeline.cost.step import Workload
from shardwright.pipeline.ir.cluster import Cluster
from shardwright.pipeline.ir.graph import OpGraph
from shardwright.pipeline.ir.plan import Frontier
from shardwright.pipeline.ir.profile import Profile
from shardwright.pipeline.sharding.slices import fits, sliced, slices_of
from shardwright.stages.checkpoint.choose import Candidate, evaluate_on
from shardwright.stages.checkpoint.pipelines.pipelined import may_stand_alone, slice_counts


def find_alone(
    graph: OpGraph, profile: Profile, cluster: Cluster, frontier: Frontier, settings: Checkpoint, where: str
) -> list[Candidate]:
    """`where` is the file of the settings. Nothing where a pipeline is asked for, or a recompute that needs one."""
    if not may_stand_alone(settings, frontier):
        return []
    cuts = _cuts(graph.batch, cluster.devices, frontier.micro_batches, settings, where)

    @cache  # prices of ops are those of all points on a mesh
    def load(cut: tuple[int, ...], mesh: int) -> Workload:
        own, costs = part(cut)
        passes = frontier.micro_batches * len(cut)
        return Workload(own, costs, cluster.on(frontier.meshes[mesh]), frontier.optimizer_copies, passes)

    @cache
    def part(cut: tuple[int, ...]) -> tuple[OpGraph, Profile]:
        return sliced(graph, profile, cut)

    found = [
        one
        for number in range(len(frontier.points))
        for one in _in_slices(graph, frontier, number, settings, cuts, load)
    ]
    if frontier.points and not found and settings.pipeline is Pipeline("off"):
        raise SolveError(
            f"no plan of the frontier can split {cuts[0][0]} of the {graph.batch} samples of a pass over its devices",
            where=f"{where}: micro_batches",
            remedy="ask for fewer micro-batches, or `solve`",
        )
    return found


def _cuts(batch: int, devices: int, passes: int, settings: Checkpoint, where: str) -> tuple[tuple[int, ...], ...]:
    """The ways to cut a pass, into few slices first."""
    counts = slice_counts(batch, settings, passes, devices, where)
    if settings.recompute is Recompute.except_last:
        counts = tuple(count for count in counts if count == 1)  # of several the last is another one in pipelines alone
    equal = tuple(count for count in counts if batch % count == 0)
    if not equal and settings.pipeline is Pipeline("off"):
        raise SolveError(
            f"got {settings.micro_batches}, and without a pipeline the {batch} samples of a pass are cut equally",
            where=f"{where}: micro_batches",
            remedy=f"use {passes} times a number that divides {batch}, or set `pipeline`",
        )
    return tuple(cut for count in equal if (cut := slices_of(batch, count)) is not None)


def _in_slices(
    graph: OpGraph,
    frontier: Frontier,
    number: int,
    settings: Checkpoint,
    cuts: tuple[tuple[int, ...], ...],
    load: Callable[[tuple[int, ...], int], Workload],
) -> Iterator[Candidate]:
    """`load` is of a cut, on a mesh of the frontier."""
    point = frontier.points[number]
    for cut in cuts:
        if not fits(graph, point.sharding, frontier.meshes[point.mesh].sizes, cut):
            continue
        passes = replace(frontier, micro_batches=frontier.micro_batches * len(cut))
        found = evaluate_on(load(cut, point.mesh), passes, number, settings)
        yield replace(found, slices=cut if len(cut) > 1 else ())
        twice = found.device_seconds > found.linear.once * (1 + 1e-9)
        if found.regions is not None and not twice:
            return
