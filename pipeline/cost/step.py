"""The price of a whole sharded step: every link forward and backward, gradient sums, optimizer, resident memory.

Once a step, in buckets, for a parameter that has m bytes on a rank, a gradient that is summed over the axes A, and an
optimizer state that is split over axes Z on which the parameter is not (ZeRO-1):

    backward         the gradient is sliced over Z without A        m' = m / |Z without A|
                     reduce-scattered over the axes in both         m' bytes
                     all-reduced over A without Z                   m' / |both| bytes
    after optimizer  the new values are all-gathered over Z         m bytes

Without Z this is the all-reduce of DDP. Axes of one collective are taken as one (pipeline.rates.joined_axes). A
collective's latency belongs to a bucket; a parameter pays its share of it. That backward hides the sums is not priced.

The parameters that a link gathers (ZeRO-2, ZeRO-3) are one collective too, of which each pays its share.

A step of several micro-batches runs prologue and links for each; all else is once a step, as above.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from pipeline.cost.memory import LinkMemory, link_memory
from pipeline.ir.cluster import LATER, Axis, Cluster
from pipeline.ir.graph import OpGraph, Role
from pipeline.ir.layout import Layout
from pipeline.ir.plan import Sharding
from pipeline.ir.profile import Profile
from pipeline.ir.program import Call, Convert, Program, Step, Tensor
from pipeline.rates.allocator import spare
from pipeline.rates.compute import Seconds, local_bytes, op_seconds, optimizer_seconds
from pipeline.rates.inner_collectives import talk_seconds
from pipeline.rates.joined_axes import joined_link
from pipeline.sharding.conversions import (
    TABLE,
    conversion_of,
    gathered_beside,
    gathered_share,
    gathered_together,
    step_axis,
)
from pipeline.sharding.lowering import home_layouts, state_layouts
from pipeline.sharding.paths import Paths

BUCKET_BYTES = 25e6  # of the buckets of pipeline.runtime.step.gradients


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
    both = [axis for axis in split if axis in summed]
    left = nbytes / prod(axis.size for axis in split if axis not in summed)
    owned = left / prod(axis.size for axis in both)
    return (
        _bucketed(LATER, left, both, nbytes)
        + _bucketed("all_reduce", owned, [axis for axis in summed if axis not in split], nbytes)
        + _bucketed("all_gather", nbytes, split, nbytes)
    )


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


def parameter_prices(
    graph: OpGraph, cluster: Cluster, sharding: Sharding, program: Program, optimizer_copies: float
) -> dict[str, ParameterPrice]:
    home = home_layouts(graph, sharding)
    found = {}
    for name, layout in state_layouts(graph, sharding).items():
        stored, state = (local_bytes(graph, name, own, cluster.sizes) for own in (home[name], layout))
        axes = _axes(cluster, program.reduced.get(name, ()), home[name], layout)
        shards = layout.pieces(cluster.sizes) // home[name].pieces(cluster.sizes)
        found[name] = ParameterPrice(
            resident_bytes(stored, state, optimizer_copies, shards),
            update_seconds(stored, *axes),
            optimizer_seconds(state, optimizer_copies, cluster.compute),
        )
    return found


def price_step(
    graph: OpGraph, profile: Profile, cluster: Cluster, sharding: Sharding, program: Program, optimizer_copies: float
) -> StepPrice:
    home = home_layouts(graph, sharding)
    links = []
    for index, steps in enumerate(program.links):
        link = graph.chain[index]
        last = index == len(program.links) - 1
        exit_ = program.output if last else Tensor(link.output, home[link.output])
        compute, communication = steps_seconds(graph, profile, cluster, sharding, steps)
        memory = link_memory(graph, profile, sharding, link, steps, exit_, cluster.sizes)
        entry = local_bytes(graph, link.input, home[link.input], cluster.sizes) if link.input else 0
        links.append(LinkPrice(compute, communication, memory, entry))
    before = [(program.prologue, program.micro_batches), (program.shared, 1)]
    priced = [(*steps_seconds(graph, profile, cluster, sharding, steps), times) for steps, times in before]
    outside = Seconds(
        sum(times * (ops.forward + moves.forward) for ops, moves, times in priced),
        sum(times * (ops.backward + moves.backward) for ops, moves, times in priced),
    )
    owned = parameter_prices(graph, cluster, sharding, program, optimizer_copies).values()
    return StepPrice(
        links=tuple(links),
        outside=outside,
        gradient_sum=sum(one.gradient_sum for one in owned),
        optimizer=sum(one.optimizer for one in owned),
        resident_bytes=round(sum(one.resident for one in owned))
        + sum(v.type.nbytes for v in graph.of_role(Role.BUFFER))
        + _left_over(graph, cluster, sharding, optimizer_copies),
        shared_bytes=sum(copied_bytes(graph, cluster, step, program.micro_batches) for step in program.shared),
        micro_batches=program.micro_batches,
        ahead_bytes=max((ahead_bytes(graph, steps, cluster.sizes) for steps in program.links), default=0),
    )


def _left_over(graph: OpGraph, cluster: Cluster, sharding: Sharding, optimizer_copies: float) -> int:
    """What a GPU's memory may lose between parameters, their gradients and the optimizer's tensors."""
    if cluster.device != "cuda":
        return 0
    home, found = home_layouts(graph, sharding), 0.0
    for name, layout in state_layouts(graph, sharding).items():
        stored, state = (spare(local_bytes(graph, name, own, cluster.sizes)) for own in (home[name], layout))
        found += resident_bytes(stored, state, optimizer_copies)
    return round(found)


def ahead_bytes(graph: OpGraph, steps: Sequence[Step], sizes: tuple[int, ...]) -> int:
    """What a link's gather of parameters as they are stored receives and sends (pipeline.runtime.step.gradients)."""
    again = [step for step in steps if isinstance(step, Convert) and step.again]
    made = {step.target for step in again}
    joined = {step for run in gathered_together(graph, steps, sizes) for step in run}
    found: dict[int, int] = {}
    for step in again:
        ends = step.source.layout, step.target.layout
        if step.source not in made and (step in joined or conversion_of(*ends, sizes) is TABLE["SB"]):
            axis, whole = step_axis(*ends, sizes), local_bytes(graph, step.target.value, step.target.layout, sizes)
            sent, _ = gathered_beside(graph, step, sizes)
            found[axis] = found.get(axis, 0) + whole + sent
    return max(found.values(), default=0)


def _axes(cluster: Cluster, summed: tuple[int, ...], home: Layout, state: Layout) -> tuple[list[Axis], list[Axis]]:
    """Those over which the gradient is summed, and those on which the state alone is split."""
    split = [n for n, (a, b) in enumerate(zip(home.states, state.states, strict=True)) if a.kind != "S" == b.kind]
    return [cluster.axes[n] for n in summed], [cluster.axes[n] for n in split]


def copied_bytes(graph: OpGraph, cluster: Cluster, step: Convert, micro_batches: int) -> int:
    """Bytes of a copy that is there for the whole step, of its gradient, and of what micro-batches before added up."""
    moved = conversion_of(step.source.layout, step.target.layout, cluster.sizes).forward != ""
    return (1 + moved + (micro_batches > 1)) * local_bytes(graph, step.target.value, step.target.layout, cluster.sizes)


def steps_seconds(
    graph: OpGraph, profile: Profile, cluster: Cluster, sharding: Sharding, steps: tuple[Step, ...]
) -> tuple[Seconds, Seconds]:
    """Seconds of ops, and of conversions and the collectives inside ops."""
    calls = [s for s in steps if isinstance(s, Call)]
    kept = {profile.storage.get(name, name) for s in calls for name in profile.ops[s.op].saves}
    ops = [_call_seconds(graph, profile, cluster, sharding, s) for s in calls]
    moves = [convert_seconds(graph, cluster, s, s.source.value in kept) for s in steps if isinstance(s, Convert)]
    moves += [talk_seconds(graph, s.op, sharding.strategies[s.op], cluster.axes) for s in calls]
    return _total(ops), _total(moves)


def _total(parts: list[Seconds]) -> Seconds:
    return Seconds(sum(p.forward for p in parts), sum(p.backward for p in parts))


def _call_seconds(graph: OpGraph, profile: Profile, cluster: Cluster, sharding: Sharding, step: Call) -> Seconds:
    strategy = sharding.strategies[step.op]
    return op_seconds(graph, step.op, profile.ops[step.op], strategy, cluster.compute, cluster.sizes)


def convert_seconds(graph: OpGraph, cluster: Cluster, step: Convert, kept: bool = True) -> Seconds:
    """A conversion is made again only where backward keeps something of the value: of a bias or a table it does not."""
    value = graph.values[step.source.value]
    paths = Paths(cluster.axes, cluster.compute, gathered_share(graph, step.source.value))
    again = step.again and kept
    return paths.step(step.source.layout, step.target.layout, value.type.nbytes, value.grad, again)[0]
