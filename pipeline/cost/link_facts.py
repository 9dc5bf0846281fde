"""What is known of a link of the sharded program, step by step: seconds, memory written and kept, peaks.

Seconds are those of pipeline.cost.step; for a GPU whose kernels are known (`Profile.kernels`), those of its kernels, in
the proportion in which the roofline has the local op to the whole one. Bytes are those of the link as it was run by
itself where no conversion moves memory in it; else as pipeline.cost.memory has them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from pipeline.cost.groups import Group
from pipeline.cost.memory import LinkParts, link_parts
from pipeline.cost.step import LinkPrice, convert_seconds
from pipeline.cost.unsplit import card_of
from pipeline.ir.cluster import Cluster
from pipeline.ir.graph import Link, OpGraph, Role
from pipeline.ir.plan import Sharding, path_name
from pipeline.ir.profile import Held, Kernel, LinkKernels, OpCost, Profile
from pipeline.ir.program import Call, Convert, Program, Step, Tensor
from pipeline.ops.autocast import LOW
from pipeline.ops.table import rule_of
from pipeline.rates.compute import Seconds, local_bytes, op_seconds
from pipeline.rates.inner_collectives import talk_seconds
from pipeline.rates.kernels import Card, kernel_seconds
from pipeline.sharding.conversions import conversion_of
from pipeline.sharding.lowering import home_layouts

CAST = "_to_copy"
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


Life = tuple[Any, int, int, int]  # what it is, its bytes, and from which kernel until before which it is there


@dataclass(frozen=True, eq=False)
class StepFacts:
    """A step of a link; memory is by identity, so that what two steps keep counts once."""

    name: str
    seconds: float
    spared: float  # seconds that are left of it where its result is kept
    dear: bool  # a product or a collective: its result may be kept
    results: Mapping[Any, int]
    private: Mapping[Any, int]  # what it keeps for backward that is neither given to it nor its result
    keeps: bool  # anything at all
    keeps_result: bool
    collective: bool = False

    @property
    def attends(self) -> bool:
        """A product whose backward needs its result."""
        return self.dear and self.keeps_result and not self.collective


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
    seconds: Seconds  # of the device
    output: Mapping[Any, int]
    kept: Mapping[Any, int]  # for its own backward
    input_bytes: int
    forward_peak: int
    dropped_peak: int
    backward_peak: int  # with the gradients at both ends
    lives: tuple[Life, ...] = ()  # of what its forward pass holds, where it was run
    host: LinkHost = LinkHost()

    def second_peak(self, present: Container[Any]) -> int:
        """The most that its second run holds, where results that it kept are present from its beginning."""
        if not self.lives:
            return self.forward_peak
        lives = [(size, 0 if owner in present else born, died) for owner, size, born, died in self.lives]
        return max(self.forward_peak, _peak(lives, 0, max(died for *_, died in lives)))


class Facts:
    def __init__(
        self,
        graph: OpGraph,
        profile: Profile,
        cluster: Cluster,
        sharding: Sharding,
        program: Program,
        growing: Container[str] = (),
    ) -> None:
        """`growing` are the parameters whose gradients appear in backward."""
        self.graph, self.profile, self.cluster, self.sharding, self.program = graph, profile, cluster, sharding, program
        self.growing = growing
        self.home = home_layouts(graph, sharding)
        self.sizes = cluster.sizes
        self.slices = profile.kernels.slices if profile.kernels else 1
        self.card = card_of(cluster.compute) if profile.kernels and profile.device == "cuda" else None

    def link(self, group: Group, prices: Sequence[LinkPrice]) -> LinkFacts:
        link = group.link
        steps = tuple(step for number in range(group.first, group.last + 1) for step in self.program.links[number])
        last = group.last == len(self.program.links) - 1
        exit_ = self.program.output if last else Tensor(link.output, self.home[link.output])
        moved = any(isinstance(s, Convert) and self._moves(s) for s in steps)
        own = prices[group.first : group.last + 1]
        priced = Seconds(sum(price.forward for price in own), sum(price.backward for price in own))
        times, seconds = self._seconds(group, steps, priced)
        host = self._host(group, steps)
        if group.run is not None and group.run.held and not moved and self.slices == 1:
            return replace(self._as_run(group, group.run, steps, times, seconds, own[0].input_bytes), host=host)
        beside = {name for name in self._parameters(link) if name not in self.growing}
        parts = link_parts(self.graph, self.profile, self.sharding, link, steps, exit_, self.sizes, beside)
        return replace(self._as_priced(link, steps, parts, times, seconds, own[0].input_bytes), host=host)

    def _moves(self, step: Convert) -> bool:
        return conversion_of(step.source.layout, step.target.layout, self.sizes).forward != ""

    # ---- seconds

    def _seconds(
        self, group: Group, steps: tuple[Step, ...], priced: Seconds
    ) -> tuple[list[tuple[float, float]], Seconds]:
        """Of each step its forward seconds and those of its casts alone; and of the whole link."""
        run, card, ops = group.run, self.card, group.ops
        if run is None or card is None:
            return [(self._forward(step), 0.0) for step in steps], priced
        forward, casts = _by_op(run.forward, card), _by_op((k for k in run.forward if self._is_cast(k)), card)
        backward = _by_op(run.backward, card)
        times = []
        whole = Seconds(0.0, 0.0)
        for step in steps:
            if isinstance(step, Convert):
                moved = convert_seconds(self.graph, self.cluster, step)
                times.append((moved.forward, 0.0))
                whole = Seconds(whole.forward + moved.forward, whole.backward + moved.backward)
            else:
                there, part = ops[step.op], self._part(step.op)
                times.append((part.forward * forward.get(there, 0.0), part.forward * casts.get(there, 0.0)))
                undone = part.backward * backward.get(there, 0.0)
                whole = Seconds(whole.forward + times[-1][0], whole.backward + undone)
        beside = sum(seconds for op, seconds in backward.items() if op not in ops.values())
        return times, Seconds(whole.forward, whole.backward + beside)

    def _host(self, group: Group, steps: tuple[Step, ...]) -> LinkHost:
        run, card = group.run, self.card
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

    def share(self, group: Group) -> tuple[Seconds, float]:
        """Of the whole block's seconds and bytes, what one rank has; its collectives are not in it."""
        own, whole = Seconds(0.0, 0.0), Seconds(0.0, 0.0)
        held = [0, 0]
        for name in group.link.ops:
            cost, strategy = self.profile.ops[name], self.sharding.strategies[name]
            mine = op_seconds(self.graph, name, cost, strategy, self.cluster.compute, self.sizes)
            unsplit = _unsliced(cost, self.slices)
            all_ = op_seconds(self.graph, name, unsplit, strategy, self.cluster.compute, (1,) * len(self.sizes))
            own = Seconds(own.forward + mine.forward, own.backward + mine.backward)
            whole = Seconds(whole.forward + all_.forward, whole.backward + all_.backward)
            for output, layout in zip(self.graph.op(name).outputs, strategy.outputs, strict=True):
                nbytes = self.graph.values[output].type.nbytes
                held[0] += nbytes // layout.pieces(self.sizes)
                held[1] += self.slices * nbytes
        seconds = Seconds(
            own.forward / whole.forward if whole.forward else 1.0,
            own.backward / whole.backward if whole.backward else 1.0,
        )
        return seconds, held[0] / held[1] if held[1] else 1.0

    def moved(self, group: Group) -> Seconds:
        """Seconds of its conversions."""
        steps = (step for number in range(group.first, group.last + 1) for step in self.program.links[number])
        each = [convert_seconds(self.graph, self.cluster, step) for step in steps if isinstance(step, Convert)]
        return Seconds(sum(one.forward for one in each), sum(one.backward for one in each))

    def output_bytes(self, group: Group) -> int:
        name = group.link.output
        return local_bytes(self.graph, name, self.home[name], self.sizes)

    def _is_cast(self, kernel: Kernel) -> bool:
        """Of an argument, as `kept` makes it apart from the product itself."""
        return kernel.name == CAST and bool(kernel.op) and self.graph.op(kernel.op).target.split(".")[1] in LOW

    def _part(self, op: str) -> Seconds:
        """Of the whole op's seconds, what one rank's part takes by the roofline."""
        strategy, cost, compute = self.sharding.strategies[op], self.profile.ops[op], self.cluster.compute
        own = op_seconds(self.graph, op, cost, strategy, compute, self.sizes)
        whole = op_seconds(self.graph, op, _unsliced(cost, self.slices), strategy, compute, (1,) * len(self.sizes))
        return Seconds(
            own.forward / whole.forward if whole.forward else 1.0,
            own.backward / whole.backward if whole.backward else 1.0,
        )

    def _forward(self, step: Step) -> float:
        if isinstance(step, Convert):
            return convert_seconds(self.graph, self.cluster, step).forward
        strategy, cost = self.sharding.strategies[step.op], self.profile.ops[step.op]
        own = op_seconds(self.graph, step.op, cost, strategy, self.cluster.compute, self.sizes)
        return own.forward + talk_seconds(self.graph, step.op, strategy, self.cluster.axes).forward

    def _name(self, step: Step) -> str:
        if isinstance(step, Convert):
            return path_name(step.source.value, step.source.layout, step.target.layout)
        return step.op

    def _dear(self, step: Step) -> bool:
        if isinstance(step, Convert):
            moved = conversion_of(step.source.layout, step.target.layout, self.sizes).forward
            trained = self.graph.values[step.source.value].role is Role.PARAMETER
            return moved in COLLECTIVES and not trained
        rule = rule_of(self.graph.op(step.op))
        return rule is not None and rule.is_product and not self.sharding.strategies[step.op].body.strip(",")

    # ---- bytes, as the link was run by itself

    def _as_run(
        self,
        group: Group,
        run: LinkKernels,
        steps: tuple[Step, ...],
        times: list[tuple[float, float]],
        seconds: Seconds,
        input_bytes: int,
    ) -> LinkFacts:
        link, ops = group.link, group.ops
        here = {there: op for op, there in ops.items()}
        values = self._values(ops)
        named = self._read(ops) | values
        size = [
            self._local(held.nbytes, values.get(held.value) or named.get(held.gradient, ""), here.get(held.op, ""))
            for held in run.held
        ]
        count, end = len(run.forward), len(run.forward) + len(run.backward)
        beside = self._beside(link)
        common = {values.get(run.held[n].value) for n in run.writes if n is not None} & set(link.common)
        outside = {n for n, held in enumerate(run.held) if values.get(held.value) in common}
        kept = {
            n: size[n]
            for n, held in enumerate(run.held)
            if held.born < count and (held.died is None or held.died > count) and n not in outside
        }
        result = next((n for n in run.writes if n is not None and self._is_output(run, n, link, values)), None)
        output: dict[Any, int] = {} if result is None else {result: size[result]}
        if not output:  # a view of what entered
            output = {"output": self.graph.values[link.output].type.nbytes // self.home[link.output].pieces(self.sizes)}
        found = []
        for step, (forward, casts) in zip(steps, times, strict=True):
            there = ops[step.op] if isinstance(step, Call) else ""
            saved = set(run.saved.get(there, ())) - outside
            results = {n: size[n] for n in run.results.get(there, ()) if n is not None and n not in outside}
            given = {n for n in saved if run.held[n].value and n not in results}
            cast = {n for n in saved if run.held[n].born < count and self._is_cast(run.forward[run.held[n].born])}
            private = {n: size[n] for n in saved - given - cast - set(results) if run.held[n].op == there}
            keeps = bool(run.saved.get(there))
            found.append(
                StepFacts(
                    self._name(step),
                    forward,
                    casts,
                    self._dear(step),
                    results,
                    private,
                    keeps,
                    bool(saved & set(results)),
                )
            )
        lives = [
            (size[n], held.born, self._died(run, held, named.get(held.gradient, "") in beside))
            for n, held in enumerate(run.held)
            if n not in outside
        ]
        ratio = sum(size) / max(1, sum(held.nbytes for held in run.held))
        return LinkFacts(
            steps=tuple(found),
            seconds=seconds,
            output=output,
            kept=kept,
            input_bytes=input_bytes,
            forward_peak=max(_peak(lives, 0, count), sum({**kept, **output}.values())),
            dropped_peak=round(run.dropped_peak * ratio),
            backward_peak=_peak(lives, count, end),
            lives=tuple(
                (n, size[n], held.born, count if held.died is None else min(held.died, count))
                for n, held in enumerate(run.held)
                if n not in outside and held.born < count
            ),
        )

    def _is_output(self, run: LinkKernels, number: int, link: Link, values: Mapping[str, str]) -> bool:
        storage = self.profile.storage
        return storage.get(values.get(run.held[number].value, ""), "") == storage[link.output]

    def _values(self, ops: Mapping[str, str]) -> dict[str, str]:
        """A value of the link that was run -> this link's."""
        found: dict[str, str] = {}
        for here, there in ops.items():
            found |= dict(zip(self.graph.op(there).outputs, self.graph.op(here).outputs, strict=True))
        return found

    def _read(self, ops: Mapping[str, str]) -> dict[str, str]:
        """A value that the link that was run reads -> what this one reads in its place."""
        found: dict[str, str] = {}
        for here, there in ops.items():
            found |= dict(zip(self.graph.op(there).inputs, self.graph.op(here).inputs, strict=True))
        return found

    def _beside(self, link: Link) -> set[str]:
        """Parameters whose gradients have a place already, and one op that makes them."""
        readers = Counter(name for op in link.ops for name in self.graph.op(op).inputs)
        return {name for name in self._parameters(link) if name not in self.growing and readers[name] == 1}

    @staticmethod
    def _died(run: LinkKernels, held: Held, is_added: bool) -> int:
        """The kernel before which it goes: what is added to a place of its own, when the op that made it is undone."""
        count, end = len(run.forward), len(run.forward) + len(run.backward)
        if not is_added:
            return end if held.died is None else held.died
        after = (n for n in range(held.born + 1, end) if run.backward[n - count].op != held.op)
        return min(next(after, end), end if held.died is None else held.died)

    def _parameters(self, link: Link) -> list[str]:
        read = dict.fromkeys(name for op in link.ops for name in self.graph.op(op).inputs)
        return [name for name in read if self.graph.values[name].role is Role.PARAMETER]

    def _local(self, nbytes: int, value: str, op: str) -> int:
        if value:
            return nbytes // self.home[value].pieces(self.sizes)
        if not op:
            return nbytes
        strategy = self.sharding.strategies[op]
        return nbytes // max(x.pieces(self.sizes) for x in (*strategy.inputs, *strategy.outputs))

    # ---- bytes, as they are priced

    def _as_priced(
        self,
        link: Link,
        steps: tuple[Step, ...],
        parts: LinkParts,
        times: list[tuple[float, float]],
        seconds: Seconds,
        input_bytes: int,
    ) -> LinkFacts:
        whole = parts.whole
        grown = (name for name in self._parameters(link) if name in self.growing)
        appear = sum(local_bytes(self.graph, name, self.home[name], self.sizes) for name in grown)
        found = []
        for step, (forward, casts), own in zip(steps, times, parts.steps, strict=True):
            found.append(
                StepFacts(
                    self._name(step),
                    forward,
                    casts,
                    self._dear(step),
                    own.results,
                    own.private,
                    keeps=bool(own.kept),
                    keeps_result=bool(own.kept.keys() & own.results.keys()),
                    collective=isinstance(step, Convert),
                )
            )
        return LinkFacts(
            steps=tuple(found),
            seconds=seconds,
            output={parts.output: whole.output},
            kept=dict(parts.kept),
            input_bytes=input_bytes,
            forward_peak=max(whole.forward_peak, whole.kept),
            dropped_peak=whole.dropped_peak,
            backward_peak=whole.kept + whole.backward_extra + input_bytes + whole.output + appear,
        )


def _unsliced(cost: OpCost, slices: int) -> OpCost:
    return replace(
        cost,
        flops_forward=slices * cost.flops_forward,
        flops_backward=slices * cost.flops_backward,
        bytes_forward=slices * cost.bytes_forward,
        bytes_backward=slices * cost.bytes_backward,
    )


def _by_op(kernels: Iterable[Kernel], card: Card) -> dict[str, float]:
    found: dict[str, float] = {}
    for kernel in kernels:
        found[kernel.op] = found.get(kernel.op, 0.0) + kernel_seconds(kernel, card)
    return found


def _peak(lives: list[tuple[int, int, int]], start: int, end: int) -> int:
    """The most that is alive at one of the kernels from `start` on."""
    change = [0] * (max((died for _, _, died in lives), default=0) + 2)
    for size, born, died in lives:
        change[born] += size
        change[died] -= size
    return max(list(accumulate(change))[start:end], default=0)
