"""The price of a whole sharded step: every link forward and backward, gradient sums, optimizer, resident memory."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.cost.compute import Seconds, op_seconds, optimizer_seconds
from pipeline.cost.memory import LinkMemory, link_memory
from pipeline.cost.paths import Paths
from pipeline.ir.cluster import Axis, Cluster
from pipeline.ir.graph import OpGraph, Role
from pipeline.ir.plan import Sharding
from pipeline.ir.profile import Profile
from pipeline.ir.program import Call, Convert, Program, Step, Tensor
from pipeline.lowering import home_layouts

BUCKET_BYTES = 25e6  # of the gradient sums of pipeline.runtime.parameters


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
    links: tuple[LinkPrice, ...]
    outside: Seconds  # prologue and shared conversions
    gradient_sum: float
    optimizer: float
    resident_bytes: int

    @property
    def common_bytes(self) -> int:
        """Of the activations that many links read, with their gradients."""
        return sum(link.memory.common for link in self.links)

    @property
    def fixed_bytes(self) -> int:
        """What is there whatever is recomputed."""
        return self.resident_bytes + self.common_bytes

    @property
    def seconds(self) -> float:
        chain = sum(link.forward + link.backward for link in self.links)
        return chain + self.outside.total + self.gradient_sum + self.optimizer

    @property
    def communication(self) -> float:
        return sum(link.communication.total for link in self.links) + self.gradient_sum


def gradient_sum_seconds(nbytes: float, axis: Axis) -> float:
    """A gradient's share of the all-reduce of a full bucket, or one of its own where it is larger."""
    if axis.size == 1:
        return 0.0
    whole = max(nbytes, BUCKET_BYTES)
    return axis.links["all_reduce"].seconds(whole) * nbytes / whole


def resident_bytes(nbytes: float, optimizer_copies: float) -> float:
    """A stored parameter with its gradient and its optimizer state."""
    return nbytes * (2 + optimizer_copies)


def price_step(
    graph: OpGraph, profile: Profile, cluster: Cluster, sharding: Sharding, program: Program, optimizer_copies: float
) -> StepPrice:
    home = home_layouts(graph, sharding)
    links = []
    for index, steps in enumerate(program.links):
        link = graph.chain[index]
        last = index == len(program.links) - 1
        exit_ = program.loss if last else Tensor(link.output, home[link.output])
        compute, communication = _seconds(graph, profile, cluster, sharding, steps)
        memory = link_memory(graph, profile, sharding, link, steps, exit_, cluster.sizes)
        entry = graph.values[link.input].type.nbytes // home[link.input].pieces(cluster.sizes) if link.input else 0
        links.append(LinkPrice(compute, communication, memory, entry))
    before = [_seconds(graph, profile, cluster, sharding, steps) for steps in (program.prologue, program.shared)]
    outside = Seconds(
        sum(c.forward + m.forward for c, m in before),
        sum(c.backward + m.backward for c, m in before),
    )
    stored = {v.name: v.type.nbytes // home[v.name].pieces(cluster.sizes) for v in graph.of_role(Role.PARAMETER)}
    return StepPrice(
        links=tuple(links),
        outside=outside,
        gradient_sum=sum(gradient_sum_seconds(stored[n], axis) for n in program.reduced for axis in cluster.axes),
        optimizer=sum(optimizer_seconds(n, optimizer_copies, cluster.compute) for n in stored.values()),
        resident_bytes=round(sum(resident_bytes(n, optimizer_copies) for n in stored.values()))
        + sum(v.type.nbytes for v in graph.of_role(Role.BUFFER)),
    )


def _seconds(
    graph: OpGraph, profile: Profile, cluster: Cluster, sharding: Sharding, steps: tuple[Step, ...]
) -> tuple[Seconds, Seconds]:
    """Seconds of ops and of conversions."""
    ops = [_call_seconds(graph, profile, cluster, sharding, s) for s in steps if isinstance(s, Call)]
    moves = [convert_seconds(graph, cluster, s) for s in steps if isinstance(s, Convert)]
    return _total(ops), _total(moves)


def _total(parts: list[Seconds]) -> Seconds:
    return Seconds(sum(p.forward for p in parts), sum(p.backward for p in parts))


def _call_seconds(graph: OpGraph, profile: Profile, cluster: Cluster, sharding: Sharding, step: Call) -> Seconds:
    strategy = sharding.strategies[step.op]
    return op_seconds(graph, step.op, profile.ops[step.op], strategy, cluster.compute, cluster.sizes)


def convert_seconds(graph: OpGraph, cluster: Cluster, step: Convert) -> Seconds:
    value = graph.values[step.source.value]
    paths = Paths(cluster.axes, cluster.compute)
    return paths.step(step.source.layout, step.target.layout, value.type.nbytes, value.grad)[0]
