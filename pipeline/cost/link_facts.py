"""What is known of a link of the sharded program, step by step: seconds, memory written and kept, peaks.

Seconds are those of pipeline.cost.step; for a GPU whose kernels are known (`Profile.kernels`), those of its kernels, in
the proportion in which the roofline has the local op to the whole one. Bytes are those of the link as it was run by
itself where no conversion moves memory in it; else as pipeline.cost.memory has them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from shardwright.pipeline.cost.groups import LinkGroup
from shardwright.pipeline.cost.memory import link_parts
from shardwright.pipeline.cost.op_prices import is_cast
from shardwright.pipeline.cost.step import Priced, total
from shardwright.pipeline.ir.graph import Link, Role
from shardwright.pipeline.ir.plan import path_name
from shardwright.pipeline.ir.profile import Held, LinkKernels
from shardwright.pipeline.ir.program import Call, Convert, Step
from shardwright.pipeline.ops.table import rule_of
from shardwright.pipeline.rates.compute import Seconds
from shardwright.pipeline.sharding.conversions import conversion_of

CAST = "_to_copy"
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


NO_SECONDS = Seconds(0.0, 0.0)
Life = tuple[Any, int, int, int]  # what it is, its bytes, and from which kernel until before which it is there


@dataclass(frozen=True, eq=False)
class StepFacts:
    """A step of a link; memory is by identity, so that what two steps keep counts once."""

    name: str
    seconds: float
    spared: float  # seconds that are left of it where its result is kept
    costly: bool  # a product or a collective: its result may be kept
    results: Mapping[Any, int]
    private: Mapping[Any, int]  # what it keeps for backward that is neither given to it nor its result
    keeps: bool  # anything at all
    keeps_result: bool
    collective: bool = False

    @property
    def attends(self) -> bool:
        """A product whose backward needs its result."""
        return self.costly and self.keeps_result and not self.collective


@dataclass(frozen=True)
class LinkHost:
    """Seconds of a GPU's host: to issue the link, and in a recompute region."""

    forward: float = 0.0
    backward: float = 0.0
    saved: float = 0.0  # for all tensors that the link keeps, on each run
    region: float = 0.0
    kept: float = 0.0  # for each result that is kept


@dataclass(frozen=True)
class LinkFacts:
    steps: tuple[StepFacts, ...]
    output: Mapping[Any, int]
    kept: Mapping[Any, int]  # for its own backward
    input_bytes: int
    forward_peak: int
    dropped_peak: int
    backward_peak: int  # with the gradients at both ends
    peak_again: int  # the same where the link ends a region, which holds the gradient that arrives
    lives: tuple[Life, ...] = ()  # of what its forward pass holds, where it was run
    seconds: Seconds = NO_SECONDS  # of the device
    host: LinkHost = LinkHost()

    def second_peak(self, present: Container[Any]) -> int:
        """The most that its second run holds, where results that it kept are present from its beginning."""
        if not self.lives:
            return self.forward_peak
        lives = [(size, 0 if owner in present else born, died) for owner, size, born, died in self.lives]
        return max(self.forward_peak, _peak(lives, 0, max(died for *_, died in lives)))


class ChainFacts:
    """Of the links of a priced program; `growing` are the parameters whose gradients appear in backward."""

    def __init__(self, priced: Priced, growing: Container[str] = ()) -> None:
        self.priced, self.sharded, self.growing = priced, priced.sharded, growing
        self.graph, self.sizes = priced.graph, priced.sharded.sizes
        kernels = priced.profile.kernels
        self.slices = kernels.slices if kernels else 1
        self.card = priced.ops.card

    def link(self, group: LinkGroup) -> LinkFacts:
        steps = self.steps(group)
        times = [(self._forward(step), self._casts(step)) for step in steps]
        moved = any(isinstance(s, Convert) and self._forward_of(s) for s in steps)
        if group.run is not None and group.run.held and not moved and self.slices == 1:
            found = _AsRun(self, group, group.run).facts(steps, times)
        else:
            found = self._as_priced(group, steps, times)
        return replace(found, seconds=self.device(group), host=self.host(group))

    def steps(self, group: LinkGroup) -> tuple[Step, ...]:
        links = self.priced.program.links[group.first : group.last + 1]
        return tuple(step for link in links for step in link)

    def input_bytes(self, group: LinkGroup) -> int:
        return self.priced.step.links[group.first].input_bytes

    def unread_bytes(self) -> int:
        """Of what is made before the chain and no link reads."""
        storage, op = self.priced.profile.storage, self.graph.op
        read = {storage[name] for link in self.graph.chain for own in link.ops for name in op(own).inputs}
        made = {name for own in self.graph.prologue for name in op(own).outputs if storage[name] == name}
        return sum(map(self.sharded.local_bytes, made - read))

    def _forward_of(self, step: Convert) -> str:
        """What a conversion does in the forward pass."""
        return conversion_of(step.source.layout, step.target.layout, self.sizes).forward

    # ---- seconds

    def device(self, group: LinkGroup) -> Seconds:
        own = self.priced.step.links[group.first : group.last + 1]
        return Seconds(sum(price.forward for price in own), sum(price.backward for price in own))

    def host(self, group: LinkGroup) -> LinkHost:
        run, card, steps = group.run, self.card, self.steps(group)
        if run is None or card is None:
            return LinkHost()
        pace, calls = card.host, sum(isinstance(step, Call) for step in steps)
        return LinkHost(
            forward=pace.kernel * len(run.forward) + pace.op * calls,
            backward=pace.backward_kernel * len(run.backward),
            saved=pace.saved * sum(map(len, run.saved.values())),
            region=pace.region,
            kept=pace.kept,
        )

    def share(self, group: LinkGroup) -> tuple[Seconds, float]:
        """Of the whole block's seconds and bytes, what one rank has; its collectives are not in it."""
        ops = group.link.ops
        own, whole = total(map(self.priced.op, ops)), total(map(self._unsplit, ops))
        local = unsplit = 0
        for name in group.link.ops:
            for output, layout in zip(self.graph.op(name).outputs, self.sharded.strategy(name).outputs, strict=True):
                nbytes = self.graph.values[output].type.nbytes
                local += nbytes // layout.shards(self.sizes)
                unsplit += self.slices * nbytes
        return _ratio(own, whole), local / unsplit if unsplit else 1.0

    def _unsplit(self, op: str) -> Seconds:
        return self.priced.ops.unsplit(op, self.sharded.strategy(op))

    def moved(self, group: LinkGroup) -> Seconds:
        """Seconds of its conversions."""
        return total(self.priced.conversion(step) for step in self.steps(group) if isinstance(step, Convert))

    def _forward(self, step: Step) -> float:
        if isinstance(step, Convert):
            return self.priced.conversion(step).forward
        return self.priced.op(step.op).forward + self.priced.collectives_inside(step.op).forward

    def _casts(self, step: Step) -> float:
        return self.priced.ops(step.op, self.sharded.strategy(step.op)).casts if isinstance(step, Call) else 0.0

    # ---- steps

    def name(self, step: Step) -> str:
        if isinstance(step, Convert):
            return path_name(step.source.value, step.source.layout, step.target.layout)
        return step.op

    def may_be_kept(self, step: Step) -> bool:
        if isinstance(step, Convert):
            trained = self.graph.values[step.source.value].role is Role.PARAMETER
            return self._forward_of(step) in COLLECTIVES and not trained
        rule = rule_of(self.graph.op(step.op))
        return rule is not None and rule.is_product and not self.sharded.strategy(step.op).body.strip(",")

    def parameters(self, link: Link) -> list[str]:
        read = dict.fromkeys(name for op in link.ops for name in self.graph.op(op).inputs)
        return [name for name in read if self.graph.values[name].role is Role.PARAMETER]

    # ---- bytes, as they are priced

    def _as_priced(self, group: LinkGroup, steps: tuple[Step, ...], times: list[tuple[float, float]]) -> LinkFacts:
        link, exit_ = group.link, self.sharded.leaving(group.last)
        beside = {name for name in self.parameters(link) if name not in self.growing}
        parts = link_parts(self.sharded, self.priced.profile, link, steps, exit_, beside)
        whole, input_bytes = parts.whole, self.input_bytes(group)
        found = [
            StepFacts(
                self.name(step),
                forward,
                casts,
                self.may_be_kept(step),
                own.results,
                own.private,
                keeps=bool(own.kept),
                keeps_result=bool(own.kept.keys() & own.results.keys()),
                collective=isinstance(step, Convert),
            )
            for step, (forward, casts), own in zip(steps, times, parts.steps, strict=True)
        ]
        backward_peak = whole.kept + whole.backward_extra + input_bytes + whole.output
        return LinkFacts(
            steps=tuple(found),
            output={parts.output: whole.output},
            kept=dict(parts.kept),
            input_bytes=input_bytes,
            forward_peak=max(whole.forward_peak, whole.kept),
            dropped_peak=whole.dropped_peak,
            backward_peak=backward_peak,
            peak_again=backward_peak,
        )


class _AsRun:
    """The bytes of a link as it was run by itself: each memory by its number in that run, with what a rank has of it.

    The run may be that of another, equal link: `ops` leads from the ops of this link to those that were run.
    """

    def __init__(self, chain: ChainFacts, group: LinkGroup, run: LinkKernels) -> None:
        self.chain, self.sharded, self.group, self.link, self.run = chain, chain.sharded, group, group.link, run
        self.count, self.end = len(run.forward), len(run.forward) + len(run.backward)
        op = chain.graph.op
        pairs = [(op(there), op(here)) for here, there in group.ops.items()]
        self.values = {old: new for there, here in pairs for old, new in zip(there.outputs, here.outputs, strict=True)}
        read = {old: new for there, here in pairs for old, new in zip(there.inputs, here.inputs, strict=True)}
        self.named = read | self.values
        here_of = {there: here for here, there in group.ops.items()}
        self.size = [self._local(held, here_of.get(held.op, "")) for held in run.held]
        written = {self.values.get(run.held[n].value) for n in run.writes if n is not None}
        common = written & set(self.link.common)
        self.outside = {n for n, held in enumerate(run.held) if self.values.get(held.value) in common}

    def _local(self, held: Held, op: str) -> int:
        if value := self.values.get(held.value) or self.named.get(held.gradient, ""):
            return held.nbytes // self.sharded.home[value].shards(self.sharded.sizes)
        return held.nbytes // self.sharded.shards_of(op) if op else held.nbytes

    def facts(self, steps: tuple[Step, ...], times: list[tuple[float, float]]) -> LinkFacts:
        run, size, count = self.run, self.size, self.count
        inside = [(n, held) for n, held in enumerate(run.held) if n not in self.outside]
        kept = {n: size[n] for n, h in inside if h.born < count and (h.died is None or h.died > count)}
        output = self._output()
        beside = self._added()
        added = [self.named.get(h.gradient, "") in beside for _, h in inside]
        again = [(size[n], h.born, self._died(h, own)) for (n, h), own in zip(inside, added, strict=True)]
        lives = [
            (nbytes, born, self._died(h, True) if self._is_used_up(h) else died)
            for (_, h), (nbytes, born, died) in zip(inside, again, strict=True)
        ]
        ratio = sum(size) / max(1, sum(held.nbytes for held in run.held))
        return LinkFacts(
            steps=tuple(self._step(step, *seconds) for step, seconds in zip(steps, times, strict=True)),
            output=output,
            kept=kept,
            input_bytes=self.chain.input_bytes(self.group),
            forward_peak=max(_peak(lives, 0, count), sum({**kept, **output}.values())),
            dropped_peak=round(run.dropped_peak * ratio),
            backward_peak=_peak(lives, count, self.end),
            peak_again=_peak(again, count, self.end),
            lives=tuple(
                (n, size[n], held.born, count if held.died is None else min(held.died, count))
                for n, held in inside
                if held.born < count
            ),
        )

    def _output(self) -> dict[Any, int]:
        storage, name = self.chain.priced.profile.storage, self.link.output
        for n in self.run.writes:
            if n is not None and storage.get(self.values.get(self.run.held[n].value, ""), "") == storage[name]:
                return {n: self.size[n]}
        nbytes = self.chain.graph.values[name].type.nbytes  # a view of what entered
        return {"output": nbytes // self.sharded.home[name].shards(self.sharded.sizes)}

    def _step(self, step: Step, forward: float, casts: float) -> StepFacts:
        run, size, chain = self.run, self.size, self.chain
        there = self.group.ops[step.op] if isinstance(step, Call) else ""
        saved = set(run.saved.get(there, ())) - self.outside
        results = {n: size[n] for n in run.results.get(there, ()) if n is not None and n not in self.outside}
        given = {n for n in saved if run.held[n].value and n not in results}
        forwards = {n for n in saved if run.held[n].born < self.count}
        cast = {n for n in forwards if is_cast(chain.graph, run.forward[run.held[n].born])}
        private = {n: size[n] for n in saved - given - cast - set(results) if run.held[n].op == there}
        keeps, keeps_result = bool(run.saved.get(there)), bool(saved & set(results))
        costly = chain.may_be_kept(step)
        return StepFacts(chain.name(step), forward, casts, costly, results, private, keeps, keeps_result)

    def _added(self) -> set[str]:
        """Parameters whose gradients have a place already, and one op that makes them."""
        readers = Counter(name for op in self.link.ops for name in self.chain.graph.op(op).inputs)
        parameters = self.chain.parameters(self.link)
        return {name for name in parameters if name not in self.chain.growing and readers[name] == 1}

    def _is_used_up(self, held: Held) -> bool:
        """Whether it is the gradient that arrives, which the run had to hold, and the first kernel takes it: that of an
        op with one input, as others may hand it on."""
        graph, name = self.chain.graph, self.link.output
        arrives = held.born == self.count and self.values.get(held.gradient) == name
        inputs = [read for read in graph.op(graph.values[name].origin).inputs if graph.values[read].grad]
        return arrives and len(inputs) == 1 and bool(self.run.backward) and self.run.backward[0].op == held.op

    def _died(self, held: Held, goes: bool) -> int:
        """The kernel before which it goes: what is added to a place of its own, or used up, when its op is undone."""
        end = self.end if held.died is None else held.died
        if not goes:
            return end
        after = (n for n in range(held.born + 1, self.end) if self.run.backward[n - self.count].op != held.op)
        return min(next(after, self.end), end)


def _ratio(own: Seconds, whole: Seconds) -> Seconds:
    return Seconds(
        own.forward / whole.forward if whole.forward else 1.0,
        own.backward / whole.backward if whole.backward else 1.0,
    )


def _peak(lives: list[tuple[int, int, int]], start: int, end: int) -> int:
    """The most that is alive at one of the kernels from `start` on."""
    change = [0] * (max((died for _, _, died in lives), default=0) + 2)
    for size, born, died in lives:
        change[born] += size
        change[died] -= size
    return max(list(accumulate(change))[start:end], default=0)
