"""The price of a whole sharded step: every link forward and backward, gradient sums, optimizer, resident memory.

Once a step, in buckets, for a parameter that has m bytes on a rank, a gradient that is summed over the axes A, and an
optimizer state that is split over axes Z on which the parameter is not (ZeRO-1):

    backward         the gradient is sliced over Z without A        m' = m / |Z without A|
                     reduce-scattered over the axes in both         m' bytes
                     all-reduced over A without Z                   m' / |both| bytes
    after optimizer  the new values are all-gathered over Z         m bytes

Without Z this is the all-reduce of DDP. Axes of one collective are taken as one (pipeline.rates.joined_axes). A
collective's latency belongs to a bucket; a parameter pays its share of it. Here all is added up; what runs beside
computation is played in pipeline.cost.traffic, which says by how much the step is shorter.

The parameters that a link gathers (ZeRO-2, ZeRO-3) are one collective too, of which each pays its share.

A step of several micro-batches runs prologue and links for each; all else is once a step, as above.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from shardwright.pipeline.cost.groups import likeness
from shardwright.pipeline.cost.memory import LinkMemory, link_memory
from shardwright.pipeline.cost.op_prices import OpPrices
from shardwright.pipeline.ir.buckets import BUCKET_BYTES
from shardwright.pipeline.ir.cluster import LATER, Axis, Cluster
from shardwright.pipeline.ir.graph import OpGraph, Role
from shardwright.pipeline.ir.plan import Sharding
from shardwright.pipeline.ir.profile import Profile
from shardwright.pipeline.ir.program import Call, Convert, Program, Step
from shardwright.pipeline.rates.compute import Seconds
from shardwright.pipeline.rates.inner_collectives import talk_seconds
from shardwright.pipeline.rates.joined_axes import joined_link
from shardwright.pipeline.sharding.conversions import (
    TABLE,
    conversion_of,
    gathered_beside,
    gathered_share,
    gathered_together,
    step_axis,
)
from shardwright.pipeline.sharding.paths import Paths
from shardwright.pipeline.sharding.sharded import Sharded


@dataclass(frozen=True)
class LinkPrice:
    compute: Seconds
    communication: Seconds
    memory: LinkMemory
    input_bytes: int

    @property
    def forward(self) -> float:
        return self.compute.forward + self.communication.forward

    @property
    def backward(self) -> float:
        return self.compute.backward + self.communication.backward


@dataclass(frozen=True)
class StepPrice:
    links: tuple[LinkPrice, ...]  # of one micro-batch
    outside: Seconds  # of the whole step: prologue of each micro-batch, and shared conversions
    gradient_sum: float  # once a step: sums of gradients, and new values gathered
    optimizer: float
    resident_bytes: int
    shared_bytes: int  # copies of parameters that several links read, and their gradients
    micro_batches: int = 1
    ahead_bytes: int = 0  # what is gathered before it is asked for: of one link at a time, at most of the largest

    @property
    def common_bytes(self) -> int:
        """Of the activations that many links read, with their gradients."""
        return sum(link.memory.common for link in self.links)

    @property
    def fixed_bytes(self) -> int:
        """What is there whatever is recomputed."""
        return self.resident_bytes + self.common_bytes + self.shared_bytes + self.ahead_bytes

    @property
    def seconds(self) -> float:
        return self.seconds_with(sum(link.forward + link.backward for link in self.links))

    def seconds_with(self, chain: float) -> float:
        """Of a step, where the links of one micro-batch take so many seconds, forward, backward and recomputed."""
        return self.micro_batches * chain + self.outside.total + self.gradient_sum + self.optimizer

    @property
    def compute(self) -> float:
        return self.micro_batches * sum(link.compute.total for link in self.links) + self.outside.total

    @property
    def communication(self) -> float:
        return self.micro_batches * sum(link.communication.total for link in self.links) + self.gradient_sum


def gradient_sum_seconds(nbytes: float, axes: Sequence[Axis]) -> float:
    """A gradient's share of the bucketed all-reduce over these axes: its bytes, and its part of a bucket's latency."""
    return _bucketed("all_reduce", nbytes, axes, nbytes)


def update_seconds(nbytes: float, summed: Sequence[Axis], split: Sequence[Axis]) -> float:
    """Seconds of a step for a parameter of so many bytes on a rank: `summed` is A and `split` is Z above."""
    sums = sum(seconds for _, seconds in sums_of(nbytes, summed, split))
    return sums + _bucketed("all_gather", nbytes, split, nbytes)


def sums_of(
    nbytes: float, summed: Sequence[Axis], split: Sequence[Axis]
) -> tuple[tuple[list[Axis], float], tuple[list[Axis], float]]:
    """Of these the sums, which may leave in backward: what is scattered, then what is all-reduced."""
    both, rest = [axis for axis in split if axis in summed], [axis for axis in summed if axis not in split]
    left = nbytes / prod(axis.size for axis in split if axis not in summed)
    owned = left / prod(axis.size for axis in both)
    return (both, _bucketed(LATER, left, both, nbytes)), (rest, _bucketed("all_reduce", owned, rest, nbytes))


def _bucketed(collective: str, nbytes: float, axes: Sequence[Axis], held: float) -> float:
    """Seconds for so many bytes of a parameter that fills `held` bytes of a bucket: its share of the bucket's."""
    link = joined_link(collective, axes)
    if link is None or not held:
        return 0.0
    share = min(1.0, held / BUCKET_BYTES)
    return link.seconds(nbytes / share) * share


def resident_bytes(stored: float, state: float, optimizer_copies: float, shards: int = 1) -> float:
    """A parameter with its gradient as they are stored, and the optimizer's tensors as its state is.

    Of a gradient that is cut into so many shards, the padding of the last ones is there too.
    """
    return stored + max(stored, shards * state) + optimizer_copies * state


@dataclass(frozen=True)
class ParameterPrice:
    """What one parameter takes on a rank: bytes for good, and seconds once a step."""

    resident: float  # with its gradient and the optimizer's state
    gradient_sum: float
    optimizer: float


@dataclass(frozen=True)
class Priced:
    """A sharded model with what its step takes. The cluster is on its mesh; prices are made once."""

    sharded: Sharded
    ops: OpPrices  # of the whole model, where this is a partition of it
    optimizer_copies: float  # tensors of a parameter's size that the optimizer keeps

    @property
    def profile(self) -> Profile:
        return self.ops.profile

    @property
    def cluster(self) -> Cluster:
        return self.ops.cluster

    @property
    def graph(self) -> OpGraph:
        return self.sharded.graph

    @property
    def sharding(self) -> Sharding:
        return self.sharded.sharding

    @property
    def program(self) -> Program:
        return self.sharded.program

    def with_sharding(self, sharding: Sharding) -> Priced:
        return replace(self, sharded=replace(self.sharded, sharding=sharding))

    # ---- seconds

    def op(self, name: str) -> Seconds:
        """Without the collectives inside it."""
        return self.ops(name, self.sharded.strategy(name)).seconds

    def collectives_inside(self, op: str) -> Seconds:
        return talk_seconds(self.graph, op, self.sharded.strategy(op), self.cluster.axes)

    def conversion(self, step: Convert, kept: bool = True) -> Seconds:
        """Made again only where backward keeps something of the value: of a bias or a table it does not."""
        value = self.graph.values[step.source.value]
        paths = Paths(self.cluster.axes, self.cluster.compute, gathered_share(self.graph, step.source.value))
        again = step.again and kept
        return paths.step(step.source.layout, step.target.layout, value.type.nbytes, value.grad, again)

    def kept_by(self, steps: Sequence[Step]) -> set[str]:
        """Values that the ops among these steps keep for backward."""
        saved = (name for step in steps if isinstance(step, Call) for name in self.profile.ops[step.op].saves)
        return {self.profile.storage.get(name, name) for name in saved}

    def seconds(self, steps: Sequence[Step]) -> tuple[Seconds, Seconds]:
        """Of ops, and of conversions and the collectives inside ops."""
        calls, kept = [step.op for step in steps if isinstance(step, Call)], self.kept_by(steps)
        moves = [self.conversion(s, s.source.value in kept) for s in steps if isinstance(s, Convert)]
        return total(map(self.op, calls)), total([*moves, *map(self.collectives_inside, calls)])

    @cached_property
    def parameters(self) -> dict[str, ParameterPrice]:
        found = {}
        for name, (stored, state, shards) in self._stored().items():
            found[name] = ParameterPrice(
                resident_bytes(stored, state, self.optimizer_copies, shards),
                update_seconds(stored, *self.update_axes(name)),
                self.ops.optimizer(state, self.optimizer_copies),
            )
        return found

    def _stored(self) -> dict[str, tuple[int, int, int]]:
        """Bytes of each parameter and of a tensor of its optimizer state, and how many of these one of those has."""
        own, sizes = self.sharded, self.sharded.sizes
        return {
            name: (own.local_bytes(name), own.local_bytes(name, state), state.shards(sizes) // home.shards(sizes))
            for name, state in own.states.items()
            for home in (own.home[name],)
        }

    def update_axes(self, parameter: str) -> tuple[list[Axis], list[Axis]]:
        """Those over which its gradient is summed, and those on which its state alone is split."""
        home, state = self.sharded.home[parameter], self.sharded.states[parameter]
        split = [n for n, (a, b) in enumerate(zip(home.states, state.states, strict=True)) if a.kind != "S" == b.kind]
        axes = self.cluster.axes
        return [axes[n] for n in self.program.reduced.get(parameter, ())], [axes[n] for n in split]

    # ---- the step

    @cached_property
    def step(self) -> StepPrice:
        program = self.program
        before = [(program.prologue, program.micro_batches), (program.shared, 1)]
        priced = [(*self.seconds(steps), times) for steps, times in before]
        outside = Seconds(
            sum(times * (ops.forward + moves.forward) for ops, moves, times in priced),
            sum(times * (ops.backward + moves.backward) for ops, moves, times in priced),
        )
        owned = self.parameters.values()
        return StepPrice(
            links=tuple(self._links()),
            outside=outside,
            gradient_sum=sum(one.gradient_sum for one in owned),
            optimizer=sum(one.optimizer for one in owned),
            resident_bytes=round(sum(one.resident for one in owned))
            + sum(value.type.nbytes for value in self.graph.of_role(Role.BUFFER)),
            shared_bytes=sum(map(self.copied_bytes, program.shared)),
            micro_batches=program.micro_batches,
            ahead_bytes=max(map(self._ahead_bytes, program.links), default=0),
        )

    def _links(self) -> Iterator[LinkPrice]:
        """Equal ones are priced once."""
        known: dict[Hashable, LinkPrice] = {}
        for number in range(len(self.program.links)):
            own = likeness(self.sharded, self.ops, number, number)
            if own not in known:
                known[own] = self._link(number)
            yield known[own]

    def _link(self, number: int) -> LinkPrice:
        entry = self.graph.chain[number].input
        compute, communication = self.seconds(self.program.links[number])
        memory = link_memory(self.sharded, self.profile, number)
        return LinkPrice(compute, communication, memory, self.sharded.local_bytes(entry) if entry else 0)

    def gathered_ahead(self, steps: Sequence[Step]) -> list[Convert]:
        """Those that begin before a link asks for them: of parameters as they are stored (runtime.step.gradients)."""
        sizes = self.sharded.sizes
        again = [step for step in steps if isinstance(step, Convert) and step.again]
        made = {step.target for step in again}
        joined = {step for run in gathered_together(self.graph, steps, sizes) for step in run}
        regathers = (conversion_of(s.source.layout, s.target.layout, sizes) is TABLE["SB"] for s in again)
        return [s for s, alone in zip(again, regathers, strict=True) if s.source not in made and (alone or s in joined)]

    def _ahead_bytes(self, steps: Sequence[Step]) -> int:
        """What a link's gather receives and sends."""
        sizes = self.sharded.sizes
        found: dict[int, int] = {}
        for step in self.gathered_ahead(steps):
            axis = step_axis(step.source.layout, step.target.layout, sizes)
            sent, _ = gathered_beside(self.graph, step, sizes)
            whole = self.sharded.local_bytes(step.target.value, step.target.layout)
            found[axis] = found.get(axis, 0) + whole + sent
        return max(found.values(), default=0)

    def copied_bytes(self, step: Convert) -> int:
        """Of a copy that is there for the whole step, of its gradient, and of what micro-batches before added up."""
        moved = conversion_of(step.source.layout, step.target.layout, self.sharded.sizes).forward != ""
        copies = 1 + moved + (self.program.micro_batches > 1)
        return copies * self.sharded.local_bytes(step.target.value, step.target.layout)


@dataclass(frozen=True)
class Workload:
    """A model with its batch, its optimizer and the mesh that it is planned for: all of a price but the sharding."""

    graph: OpGraph
    profile: Profile
    cluster: Cluster  # on the mesh
    optimizer_copies: float
    micro_batches: int = 1
    to_loss: bool = True

    @cached_property
    def ops(self) -> OpPrices:
        return OpPrices(self.graph, self.profile, self.cluster)

    def priced(self, sharding: Sharding) -> Priced:
        sharded = Sharded(self.graph, sharding, self.cluster.sizes, self.micro_batches, self.to_loss)
        return Priced(sharded, self.ops, self.optimizer_copies)


def total(parts: Iterable[Seconds]) -> Seconds:
    each = list(parts)
    return Seconds(sum(part.forward for part in each), sum(part.backward for part in each))
