"""What a sharded program sends beside what it computes: the collectives of its links and buckets, as lines to play."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from shardwright.pipeline.cost.step import Priced, sums_of
from shardwright.pipeline.cost.step_lines import Bucket, Collective, LinkPass, StepLines, Traffic
from shardwright.pipeline.ir.buckets import bucket_members
from shardwright.pipeline.ir.cluster import COLLECTIVES, Axis
from shardwright.pipeline.ir.graph import Role
from shardwright.pipeline.ir.program import Call, Convert, Step
from shardwright.pipeline.ops.products import is_put_off, weights
from shardwright.pipeline.sharding.conversions import conversion_of, step_axis

MEGATRON = "megatron"


class RunKind(Enum):
    """Which pass of a link runs."""

    FORWARD = "forward"
    BACKWARD = "backward"
    AGAIN = "backward, with a part of the forward pass inside"
    BOTH = "forward and backward at once"  # the loss


@dataclass(frozen=True)
class Ran:
    """Links of the graph as they ran, for so long with all collectives one after the other."""

    first: int
    last: int
    kind: RunKind
    seconds: float


def lines_of(priced: Priced, ran: Iterable[Ran], span: tuple[int, int] | None = None) -> StepLines:
    """A step whose micro-batches run these: the links of a partition, or of the whole model."""
    overlap, found = priced.cluster.overlap, _Found(priced)
    silent = overlap.silent
    runs = [LinkPass(r.first, r.last, r.kind is not RunKind.FORWARD, r.seconds, found.of(r, silent)) for r in ran]
    buckets = () if silent else tuple(found.buckets(span))
    return StepLines(tuple(runs), buckets, priced.program.micro_batches, overlap.hidden)


def _gathered_at_once(traffic: Traffic) -> Traffic:
    """What a link gathers over the same ranks is one request."""
    found: dict[str, Collective] = {}
    for one in traffic.gathers:
        before = found[one.over].seconds if one.over in found else 0.0
        found[one.over] = replace(one, seconds=before + one.seconds)
    return replace(traffic, gathers=tuple(found.values()))


class _Found:
    def __init__(self, priced: Priced) -> None:
        self.priced, self.graph, self.program = priced, priced.graph, priced.program
        self.cluster, self.sizes = priced.cluster, priced.cluster.sizes
        self.megatron = self.cluster.overlap.mode == MEGATRON
        self.weights = weights(self.graph) if self.megatron else set[str]()
        self.links: dict[int, tuple[Traffic, Traffic]] = {}

    def of(self, ran: Ran, silent: bool) -> Traffic:
        found = Traffic()
        for number in range(ran.first, ran.last + 1) if not silent else ():
            if number not in self.links:
                self.links[number] = self._link(self.program.links[number])
            forward, backward = self.links[number]
            if ran.kind is RunKind.FORWARD:
                found += forward
            elif ran.kind is RunKind.BACKWARD:
                found += backward
            elif ran.kind is RunKind.BOTH:
                found += forward + backward
            else:
                found += Traffic(gathers=forward.gathers) + backward
        return found

    def _link(self, steps: Sequence[Step]) -> tuple[Traffic, Traffic]:
        forward, backward = Traffic(), Traffic()
        kept, ahead = self.priced.kept_by(steps), set(self.priced.gathered_ahead(steps))
        for step in steps:
            if isinstance(step, Call):
                there, back = self._inside(step.op)
            else:
                there, back = self._conversion(step, step.source.value in kept, step in ahead)
            forward, backward = forward + there, backward + back
        return _gathered_at_once(forward), _gathered_at_once(backward)

    def _inside(self, name: str) -> tuple[Traffic, Traffic]:
        seconds, bodies = self.priced.collectives_inside(name), self.priced.sharded.strategy(name).body.split(",")
        late = 0.0
        if self.megatron and is_put_off(self.graph, self.graph.op(name), self.weights):
            late = self.priced.op(name).backward / 2  # the other product makes the gradient of the activation
        axes = [number for number, body in enumerate(bodies) if body]
        there, back = ((self._collective(axes, part),) if part else () for part in (seconds.forward, seconds.backward))
        return Traffic(blocking=there), Traffic(blocking=back, late=late)

    def _conversion(self, step: Convert, kept: bool, ahead: bool) -> tuple[Traffic, Traffic]:
        ends = step.source.layout, step.target.layout
        entry, axis = conversion_of(*ends, self.sizes), step_axis(*ends, self.sizes)
        whole, once = self.priced.conversion(step, kept), self.priced.conversion(step, kept=False)
        trained = self.graph.values[step.source.value].role is Role.PARAMETER

        def some(move: str, seconds: float) -> tuple[Collective, ...]:
            return (self._collective([axis], seconds),) if move in COLLECTIVES and seconds else ()

        there = some(entry.forward, whole.forward)
        again, back = some(entry.forward, whole.backward - once.backward), some(entry.backward, once.backward)
        early = ahead or (self.megatron and trained)
        forward = Traffic(gathers=there) if early else Traffic(blocking=there)
        backward = Traffic(gathers=again) if early else Traffic(blocking=again)
        if not self.megatron:
            return forward, backward + Traffic(blocking=back)
        return forward, backward + (Traffic(trailing=back) if trained else Traffic(beside=back))

    def _collective(self, axes: Sequence[int], seconds: float) -> Collective:
        over = "+".join(self.cluster.axes[axis].name for axis in axes)
        return Collective(over, self.cluster.links_of(axes), seconds)

    # ---- gradients

    def buckets(self, span: tuple[int, int] | None) -> Iterator[Bucket]:
        """In the order in which they leave: each when its own gradients and those of all before it are there."""
        priced, first = self.priced, self._first_readers(span)
        axes = {name: priced.update_axes(name) for name in first}
        sent = [name for name, (summed, split) in axes.items() if summed or split]
        alike = []
        for name in sent:
            kind = self.graph.values[name].type.dtype
            common = (kind, *(tuple(axis.name for axis in own) for own in axes[name]))
            alike.append((common, priced.sharded.local_bytes(name)))
        least = len(self.graph.chain)
        for numbers in bucket_members(alike):
            names = [sent[number] for number in numbers]
            least = min(least, *(first[name] for name in names))
            parts = [sums_of(priced.sharded.local_bytes(name), *axes[name]) for name in names]
            sums = (
                (own[0][0], sum(seconds for _, seconds in own)) for own in zip(*parts, strict=True)
            )  # what is scattered, what is all-reduced
            yield Bucket(least, tuple(self._over(over, seconds) for over, seconds in sums if seconds))

    def _over(self, axes: Sequence[Axis], seconds: float) -> Collective:
        names = [axis.name for axis in self.cluster.axes]
        return self._collective([names.index(axis.name) for axis in axes], seconds)

    def _first_readers(self, span: tuple[int, int] | None) -> dict[str, int]:
        """Of each parameter the link whose backward pass completes its gradient; -1 is after all of them."""
        first, last = span or (0, len(self.graph.chain) - 1)
        found = {} if span else dict.fromkeys(self.priced.parameters, -1)
        for number in reversed(range(first, last + 1)):
            for op in self.graph.chain[number].ops:
                read = (name for name in self.graph.op(op).inputs if name in self.priced.parameters)
                found |= dict.fromkeys(read, number)
        shared = {step.source.value for step in self.program.shared}
        before = {name for op in self.graph.prologue for name in self.graph.op(op).inputs}
        inside = [name for name in self.priced.parameters if name in found]  # in the order of parameters
        return {name: -1 if name in shared | before else found[name] for name in inside}
