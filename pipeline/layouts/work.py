"""What one rank does for a part of a model with one micro-batch: kernels, collectives, bytes. No seconds.

They are those of the planner: kernels at the shapes of a rank's shards (pipeline.cost.op_prices), conversions of the
lowered program, memory of its links (pipeline.cost.link_facts). Of ways to recompute, where backward begins:

    none       all that backward needs is there
    selective  of each link the results of products, attention and collectives are there, but not the scores of plain
               attention: the product of two activations that is larger than they are. The rest runs again
    full       the input of a block is there, and all of it runs again

Everything but the parameters grows in a straight line with the samples: two sizes tell all others (`Grown`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from shardwright.pipeline.cost.chain_memory import growing
from shardwright.pipeline.cost.groups import Join, LinkGroup, groups_of
from shardwright.pipeline.cost.link_facts import ChainFacts, LinkFacts
from shardwright.pipeline.cost.links import computed_again
from shardwright.pipeline.cost.step import Priced
from shardwright.pipeline.ir.cluster import COLLECTIVES
from shardwright.pipeline.ir.graph import OpGraph, Role
from shardwright.pipeline.ir.profile import Kernel
from shardwright.pipeline.ir.program import Call, Convert, Step
from shardwright.pipeline.ops.factors import once_per_graph
from shardwright.pipeline.ops.rule import plain_view
from shardwright.pipeline.ops.table import rule_of
from shardwright.pipeline.sharding.conversions import conversion_of, made_again

MOVE = "copy_"  # the kernel of a conversion that moves bytes on a rank


class RecomputeMode(StrEnum):
    none = "none"
    selective = "selective"
    full = "full"


@dataclass(frozen=True)
class Collective:
    kind: str
    nbytes: float  # of the unsplit tensor


@dataclass(frozen=True, eq=False)
class Pass:
    """Of a part, forward or backward, or what of it runs again; each its own, by which its seconds are kept."""

    kernels: tuple[Kernel, ...] = ()
    collectives: tuple[Collective, ...] = ()

    def __add__(self, other: Pass) -> Pass:
        return Pass(self.kernels + other.kernels, self.collectives + other.collectives)


@dataclass(frozen=True)
class HeldBytes:
    """Bytes under one way to recompute."""

    saved: float  # from forward to backward, what the part gives to the next one included
    peak: float  # beside what is saved, while it runs backward, with the gradients at its two ends


@dataclass(frozen=True)
class PartWork:
    """Of a block, or of what comes before or after all blocks."""

    forward: Pass
    backward: Pass
    again: Mapping[RecomputeMode, Pass]
    held: Mapping[RecomputeMode, HeldBytes]
    parameters: tuple[float, ...]  # bytes of each on the rank, in the precision of the products
    output: float  # bytes that it gives to the next part

    @property
    def ran(self) -> Hashable:
        """Kernels, by name and dims of their tensors, and collectives of each pass."""
        passes = (self.forward, self.backward, *self.again.values())
        kernels = tuple(tuple((one.name, *map(len, one.shapes)) for one in own.kernels) for own in passes)
        return kernels, tuple(tuple(one.kind for one in own.collectives) for own in passes)


@dataclass(frozen=True)
class Parts:
    """Of a model."""

    before: PartWork
    layer: PartWork
    after: PartWork


def part_work(priced: Priced, first: int, last: int) -> PartWork:
    """Of the links first..last of the chain, on a mesh of one axis; there may be none."""
    if first > last:
        nothing = dict.fromkeys(RecomputeMode, HeldBytes(0.0, 0.0))
        return PartWork(Pass(), Pass(), dict.fromkeys(RecomputeMode, Pass()), nothing, (), 0.0)
    facts = ChainFacts(priced, growing(priced.sharded))
    groups = [g for g in groups_of(priced.graph, priced.profile, Join.NONE) if first <= g.first <= last]
    links = [facts.link(group) for group in groups]
    passes = {step: _passes(priced, step) for group in groups for step in facts.steps(group)}
    ways = [list(_ways(facts, group, link)) for group, link in zip(groups, links, strict=True)]
    again = {way: _sum(passes[step][0] for own in ways for step in own[n][0]) for n, way in enumerate(RecomputeMode)}
    saved = [sum(own[n][1] for own in ways) for n in range(2)]
    peaks = [max(own[n][2] for own in ways) for n in range(2)]
    output = float(sum(links[-1].output.values()))
    held = {
        RecomputeMode.none: HeldBytes(saved[0], peaks[0]),
        RecomputeMode.selective: HeldBytes(saved[1], peaks[1]),
        RecomputeMode.full: HeldBytes(output, saved[0] - output + peaks[0]),
    }
    names = dict.fromkeys(name for group in groups for name in facts.parameters(group.link))
    return PartWork(
        forward=_sum(forward for forward, _ in passes.values()),
        backward=_sum(backward for _, backward in passes.values()),
        again=again,
        held=held,
        parameters=tuple(float(priced.sharded.local_bytes(name)) for name in names),
        output=output,
    )


def _sum(passes: Iterable[Pass]) -> Pass:
    found = Pass()
    for one in passes:
        found += one
    return found


Way = tuple[Sequence[Step], float, float]  # steps that run again, bytes saved and at the peak of backward


def _ways(facts: ChainFacts, group: LinkGroup, link: LinkFacts) -> Iterator[Way]:
    """Nothing runs again, the rest does, everything does."""
    steps = dict(zip(link.steps, facts.steps(group), strict=True))
    ends = link.input_bytes + sum(link.output.values())
    whole = sum({**link.kept, **link.output}.values())
    yield (), whole, max(0, link.backward_peak - whole)
    again = computed_again(link.steps)
    chosen = [own for own in again if own.costly and not _is_square(facts, steps[own])]
    kept = dict(link.output)
    for own in chosen:
        kept |= {**own.results, **own.private}
    saved = sum(kept.values())
    present = {owner for own in chosen for owner in (*own.results, *own.private)}
    peak = max(link.backward_peak, link.second_peak(present) + ends - link.input_bytes)
    if saved < whole and len(chosen) < len(again):
        yield [steps[own] for own in again if own not in chosen], saved, max(0, peak - saved)
    else:
        yield (), whole, max(0, link.backward_peak - whole)
    yield [steps[own] for own in again], 0.0, 0.0


def _is_square(facts: ChainFacts, step: Step) -> bool:
    if not isinstance(step, Call):
        return False
    graph, op = facts.graph, facts.graph.op(step.op)
    made, read = (sum(one.numel for one in graph.types(names)) for names in (op.outputs, op.inputs))
    return made > read and weights_of(graph).isdisjoint(op.inputs)


@once_per_graph
def weights_of(graph: OpGraph) -> frozenset[str]:
    """Parameters and buffers, and what is made of these alone: views, casts."""
    found = {value.name for role in (Role.PARAMETER, Role.BUFFER) for value in graph.of_role(role)}
    for op in graph.ops:
        if op.inputs and found.issuperset(op.inputs):
            found.update(op.outputs)
    return frozenset(found)


# ------------------------------------------------------------------------------------------------ passes of one step


def _passes(priced: Priced, step: Step) -> tuple[Pass, Pass]:
    if isinstance(step, Convert):
        return _conversion(priced, step)
    strategy = priced.sharded.strategy(step.op)
    own = priced.ops.local_kernels(step.op, strategy)
    there, back = _inside(priced, step.op)
    return Pass(own.forward, there), Pass(own.backward, back)


def _inside(priced: Priced, name: str) -> tuple[tuple[Collective, ...], tuple[Collective, ...]]:
    """The collectives inside an op."""
    op, strategy = priced.graph.op(name), priced.sharded.strategy(name)
    rule = rule_of(op)
    if rule is None or rule.talks is None or not strategy.body.strip(","):
        return (), ()
    (there, sent), (back, returned) = rule.talks(plain_view(priced.graph, op))
    grad = any(priced.graph.values[output].grad for output in op.outputs)
    return (
        (Collective(there, sent),) if sent else (),
        (Collective(back, returned),) if returned and grad else (),
    )


def _conversion(priced: Priced, step: Convert) -> tuple[Pass, Pass]:
    ends, sizes = (step.source.layout, step.target.layout), priced.sharded.sizes
    value, entry = priced.graph.values[step.source.value], conversion_of(*ends, sizes)
    if step.again:
        entry = made_again(entry)
    nbytes = value.type.nbytes

    def move(kind: str) -> Pass:
        if kind in COLLECTIVES:
            return Pass((), (Collective(kind, nbytes),))
        return Pass((Kernel(MOVE, 0.0, nbytes, nbytes, value.type.dtype, (value.type.shape,), step.source.value),))

    backward = [kind for kind in (entry.again, entry.backward) if kind] if value.grad else []
    return (move(entry.forward) if entry.forward else Pass()), _sum(map(move, backward))


# --------------------------------------------------------------------------------------------------- other sizes


@dataclass(frozen=True)
class Grown:
    """A part with one number of samples and with twice as many; with any other by the line through both."""

    samples: int
    one: PartWork
    two: PartWork

    def of(self, samples: int) -> PartWork:
        far = (samples - self.samples) / self.samples  # 0 at one, 1 at two

        def line(a: float, b: float) -> float:
            return a + (b - a) * far

        def kernel(a: Kernel, b: Kernel) -> Kernel:
            shapes = tuple(
                tuple(round(line(m, n)) for m, n in zip(s, t, strict=True))
                for s, t in zip(a.shapes, b.shapes, strict=True)
            )
            read, written = round(line(a.read, b.read)), round(line(a.written, b.written))
            return replace(a, flops=line(a.flops, b.flops), read=read, written=written, shapes=shapes)

        def done(a: Pass, b: Pass) -> Pass:
            pairs = zip(a.collectives, b.collectives, strict=True)
            moved = tuple(Collective(x.kind, line(x.nbytes, y.nbytes)) for x, y in pairs)
            return Pass(tuple(kernel(x, y) for x, y in zip(a.kernels, b.kernels, strict=True)), moved)

        one, two = self.one, self.two
        held = {
            way: HeldBytes(line(own.saved, two.held[way].saved), max(0.0, line(own.peak, two.held[way].peak)))
            for way, own in one.held.items()
        }
        return PartWork(
            forward=done(one.forward, two.forward),
            backward=done(one.backward, two.backward),
            again={way: done(own, two.again[way]) for way, own in one.again.items()},
            held=held,
            parameters=one.parameters,
            output=line(one.output, two.output),
        )
