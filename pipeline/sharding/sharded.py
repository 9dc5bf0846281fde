"""A sharded model as one value: the graph, how each of its tensors lies on a mesh, and the program that follows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from shardwright.pipeline.ir.graph import OpGraph
from shardwright.pipeline.ir.layout import Layout
from shardwright.pipeline.ir.plan import Sharding, Strategy
from shardwright.pipeline.ir.program import Program, Tensor
from shardwright.pipeline.rates.compute import local_bytes
from shardwright.pipeline.sharding.lowering import home_layouts, lower, state_layouts


@dataclass(frozen=True)
class Sharded:
    """A whole model, or a partition of a pipeline; what follows from the fields is made once."""

    graph: OpGraph
    sharding: Sharding
    sizes: tuple[int, ...]  # of the mesh's axes
    micro_batches: int = 1
    to_loss: bool = True  # false for a partition but the last: its output leaves as the next one reads it

    @cached_property
    def program(self) -> Program:
        return lower(self.graph, self.sharding, self.micro_batches, to_loss=self.to_loss)

    @cached_property
    def home(self) -> dict[str, Layout]:
        """The layout in which each value is born."""
        return home_layouts(self.graph, self.sharding)

    @cached_property
    def states(self) -> dict[str, Layout]:
        """How the optimizer's state of each parameter lies."""
        return state_layouts(self.graph, self.sharding)

    def strategy(self, op: str) -> Strategy:
        return self.sharding.strategies[op]

    def local_bytes(self, value: str, layout: Layout | None = None) -> int:
        """Of one rank's shard, as the value is born or in another layout."""
        return local_bytes(self.graph, value, layout or self.home[value], self.sizes)

    def shards_of(self, op: str) -> int:
        """Into how many an op's tensors are cut at most."""
        strategy = self.strategy(op)
        return max((layout.shards(self.sizes) for layout in (*strategy.inputs, *strategy.outputs)), default=1)

    def leaving(self, link: int) -> Tensor:
        """The activation with which a link ends, as the next one finds it; of the last one the program's output."""
        if link == len(self.program.links) - 1:
            return self.program.output
        name = self.graph.chain[link].output
        return Tensor(name, self.home[name])
