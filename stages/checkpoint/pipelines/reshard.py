"""An activation from the plan of one partition to that of the next: what its layout costs beside the transfer.

Between meshes of one shape and equal layouts every device sends what it has to its neighbour. Otherwise

    sender     summands are summed (`P -> R`)
    transfer   the larger of what a device of either side has (partition.one_way)
    receiver   on a mesh of the same shape: from the sender's layout to its own; on another: each device gets an equal
               part, which is gathered to its own layout

by the cheapest path (pipeline.sharding.paths), forward and its gradient backward; a transfer counts in both directions,
so that each has half.
"""

from __future__ import annotations

from math import prod

from shardwright.pipeline.ir.cluster import Axis, Cluster
from shardwright.pipeline.ir.graph import OpGraph, Value
from shardwright.pipeline.ir.layout import Layout, R, S
from shardwright.pipeline.sharding.paths import Paths
from shardwright.stages.checkpoint.pipelines.submesh_costs import SubmeshCosts
from shardwright.stages.checkpoint.pipelines.submesh_plans import SubmeshPlan


class Resharding:
    """Seconds of one direction by cut, for submeshes that are known by their names."""

    def __init__(self, graph: OpGraph, filled: dict[str, SubmeshCosts], cluster: Cluster) -> None:
        self.graph, self.filled, self.cluster = graph, filled, cluster
        self._paths: list[tuple[tuple[Axis, ...], Paths]] = []  # by mesh
        self._known: dict[object, float] = {}

    def __call__(self, cut: int, before: SubmeshPlan, after: SubmeshPlan) -> float:
        sender, receiver = self.filled[before.name], self.filled[after.name]
        name = self.graph.chain[sender.linear.spans[cut][0]].input
        if name is None:
            return 0.0
        home, wanted = (side.priced.sharded.home[name] for side in (sender, receiver))
        value, ends = self.graph.values[name], (home, wanted)
        key = value.type, value.grad, ends, self._mesh(sender), self._mesh(receiver), receiver.slices
        if key not in self._known:
            self._known[key] = self._seconds(value, *ends, sender, receiver) / 2
        return self._known[key]

    def _seconds(
        self, value: Value, source: Layout, target: Layout, sender: SubmeshCosts, receiver: SubmeshCosts
    ) -> float:
        alike = sender.sizes == receiver.sizes
        if alike and source == target:
            return 0.0
        if alike:
            return self._cheapest(value, source, target, receiver)
        whole = Layout(tuple(state if state.kind == "S" else R for state in source.states))
        summed = self._cheapest(value, source, whole, sender)
        return summed + self._cheapest(value, _parts(value, receiver.sizes), target, receiver)

    def _cheapest(self, value: Value, source: Layout, target: Layout, on: SubmeshCosts) -> float:
        """Of a micro-batch; its shape is the whole one, as which of its dims is cut does not matter."""
        _, paths = self._paths[self._mesh(on)]
        nbytes = value.type.nbytes * on.slices[0] // sum(on.slices)
        return paths.cheapest(source, target, value.type.shape, nbytes, value.grad).seconds.total

    def _mesh(self, on: SubmeshCosts) -> int:
        """Its number among the meshes that were seen."""
        own = on.priced.cluster.axes
        for number, (axes, _) in enumerate(self._paths):
            if axes == own:
                return number
        self._paths.append((own, Paths(own, self.cluster.compute)))
        return len(self._paths) - 1


def _parts(value: Value, sizes: tuple[int, ...]) -> Layout:
    """Split over all devices on the first dim that allows it; else all of it on each."""
    for dim, size in enumerate(value.type.shape):
        if size % prod(sizes) == 0:
            return Layout(tuple(S(dim) for _ in sizes))
    return Layout(tuple(R for _ in sizes))
