"""Everything that is solved for one mesh: its problem, what the user leaves of it, plans and baselines."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from functools import cached_property

from pipeline.config import Solve
from pipeline.cost.step import price_step
from pipeline.ir.cluster import Cluster
from pipeline.ir.graph import OpGraph
from pipeline.ir.plan import Baseline, FrontierPoint, Proof, Sharding
from pipeline.ir.profile import Profile
from pipeline.ir.verify import gathered
from pipeline.log import Advance, Log
from pipeline.lowering import lower, with_paths
from stages.solve.baselines import baselines
from stages.solve.constraints import Hand
from stages.solve.exact import as_it_is, restrict
from stages.solve.frontier import Solution, Sweep
from stages.solve.problem import Given, build, to_sharding


class OnMesh:
    def __init__(
        self,
        graph: OpGraph,
        profile: Profile,
        cluster: Cluster,
        copies: float,
        settings: Solve,
        where: str,
        log: Log,
        micro_batches: int = 1,
    ) -> None:
        """`cluster` is on the mesh; `copies` are tensors of a parameter's size that the optimizer keeps."""
        self.graph, self.profile, self.cluster, self.copies = graph, profile, cluster, copies
        self.micro_batches = micro_batches
        start = time.monotonic()
        self.problem, self.choices = build(graph, profile, Given(cluster.axes, cluster.compute, copies, micro_batches))
        hand = Hand(graph, tuple(axis.name for axis in cluster.axes), settings, where)
        self.left = restrict(self.problem, hand.kept(self.choices)) if hand.asks else as_it_is(self.problem)
        self.build_seconds = time.monotonic() - start
        self.sweep = Sweep(self.left.problem, settings, where, log)

    def promise(self, budget: float) -> float:
        """No plan within the budget is faster, before recompute; infinite where no plan keeps to the constraints."""
        fastest = self.sweep.bounder.fastest
        return fastest.cost if fastest.peak <= budget else max(fastest.cost, self.sweep.bounder.bound_at(budget))

    def points(self, budget: float, advance: Advance) -> list[FrontierPoint]:
        return [self._point(solution) for solution in self.sweep.frontier(budget, advance)]

    def _point(self, solution: Solution) -> FrontierPoint:
        sharding = to_sharding(self.graph, self.choices, self.left.expand(solution.picked))
        return price_point(
            self.graph, self.profile, self.cluster, self.copies, sharding, solution.proof, self.micro_batches
        )

    @cached_property
    def baselines(self) -> tuple[Baseline, ...]:
        return baselines(self.graph, self.choices, self.problem)


def price_point(
    graph: OpGraph,
    profile: Profile,
    cluster: Cluster,
    copies: float,
    sharding: Sharding,
    proof: Proof,
    micro_batches: int = 1,
) -> FrontierPoint:
    """The plan with its conversions' paths, and what its program is predicted to cost."""
    sharding = with_paths(graph, _regathering(graph, sharding, cluster), cluster)
    price = price_step(graph, profile, cluster, sharding, lower(graph, sharding, micro_batches), copies)
    peak = price.fixed_bytes + sum(link.memory.kept for link in price.links)
    return FrontierPoint(sharding, price.seconds, price.resident_bytes, peak, proof)


def _regathering(graph: OpGraph, sharding: Sharding, cluster: Cluster) -> Sharding:
    """A parameter that every op reads as it is stored costs the same where it is to be regathered: it is not."""
    there = gathered(graph, sharding, cluster.sizes)
    return replace(sharding, regathered=tuple(name for name in sharding.regathered if name in there))


def most_promising(meshes: list[OnMesh], budget: float, count: int) -> list[OnMesh]:
    """The meshes on which the fastest plan is fastest; of equal ones the first."""
    possible = [mesh for mesh in meshes if math.isfinite(mesh.promise(budget))]
    return sorted(possible or meshes[:1], key=lambda mesh: mesh.promise(budget))[:count]


def best_rows(meshes: list[OnMesh]) -> tuple[Baseline, ...]:
    """Of each kind the fastest on any of the meshes."""
    best: dict[str, Baseline] = {}
    for number, mesh in enumerate(meshes):
        for row in mesh.baselines:
            if row.name not in best or row.seconds < best[row.name].seconds:
                best[row.name] = replace(row, mesh=number)
    return tuple(best.values())
