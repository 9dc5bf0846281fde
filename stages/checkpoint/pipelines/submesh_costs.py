"""Plans of the frontier as `SubmeshPlan`s: the sharded program of a submesh of the cluster, priced link by link.

A partition needs what its links read, and links are added up one by one, so that what several links share is put so:

    read by       bytes (an upper bound)              seconds once a step
    one link      that link                           that link
    two           both                                both (each updates its copy, and they sum their gradients)
    more          any partition (`SubmeshPlan.everywhere`)  the first and the last

Parameters count with gradient and optimizer state; copies of parameters that several links read, and buffers, are put
in the same way. A common value is held by the link that writes it and by its reader, or by any partition, for each
micro-batch in flight, and crosses every cut in between. The prologue runs in every partition, beside the others: it
counts once, in the first link.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod

from shardwright.pipeline.cost.groups import Join
from shardwright.pipeline.cost.step import Priced
from shardwright.pipeline.ir.graph import Op, OpGraph, Role
from shardwright.pipeline.ir.program import Call, Convert, Step
from shardwright.pipeline.ops.products import is_put_off, weights
from shardwright.stages.checkpoint.pipelines.submesh_plans import SubmeshPlan
from shardwright.stages.checkpoint.recompute.linearize import Linear, linearize_partitions

FEW = 2  # links that each get what they share


@dataclass(frozen=True)
class Once:
    """Seconds of a link once a step, by what they are for."""

    compute: float = 0.0  # the prologue, of all micro-batches
    communication: float = 0.0  # gradient sums, new values gathered, copies for several links
    optimizer: float = 0.0

    @property
    def total(self) -> float:
        return self.compute + self.communication + self.optimizer


@dataclass(frozen=True)
class SubmeshCosts:
    """A plan on a submesh of the cluster as numbers, with what they were made from."""

    submesh: SubmeshPlan
    priced: Priced  # the whole model on the submesh's mesh
    linear: Linear
    once: tuple[Once, ...]  # of each link of the graph
    slices: tuple[int, ...]  # samples of those into which a pass of the model is cut

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.priced.sharded.sizes


def fill(
    name: str, priced: Priced, slices: tuple[int, ...], link: Callable[[float], float], join: Join = Join.NONE
) -> SubmeshCosts | None:
    """`link` leads to the next submesh; a link of the chain may stand for several. None where the model is one link:
    it cannot be cut."""
    linear = linearize_partitions(priced, join)
    if linear.chain is None:
        return None
    shares, sizes, loss = _Shares(priced, link), priced.sharded.sizes, priced.step.links[-1]
    held, everywhere_held = shares.held()
    once, crosses = shares.once(), shares.crosses()

    def joined(values: Sequence[float]) -> tuple[float, ...]:
        return tuple(sum(values[first : last + 1]) for first, last in linear.spans)

    submesh = SubmeshPlan(
        name=name,
        devices=prod(sizes),
        chain=linear.chain,
        resident=joined(shares.resident),
        once=joined([part.total for part in once]),
        weight=joined(shares.weight()),
        put_off=joined(shares.put_off()),
        mesh=" x ".join(map(str, sizes)),
        loss_held=loss.memory.kept if join is Join.NONE else linear.costs[-1].ways[0].saved,
        held=joined(held),
        crosses=tuple(crosses[first] for first, _ in linear.spans),
        everywhere=shares.everywhere,
        everywhere_held=everywhere_held,
    )
    return SubmeshCosts(submesh, priced, linear, once, slices)


class _Shares:
    """What each link has of a program that is priced as a whole."""

    def __init__(self, priced: Priced, link: Callable[[float], float]) -> None:
        self.priced, self.sharded, self.graph, self.program = priced, priced.sharded, priced.graph, priced.program
        self.link = link
        self.readers, self.weights = readers(self.graph), weights(self.graph)
        self.resident, self.everywhere = self._resident()

    def _links(self, value: str) -> tuple[int, ...]:
        """Those that read a parameter; one that nobody reads lies with the first."""
        return self.readers.get(value) or (0,)

    def _resident(self) -> tuple[tuple[float, ...], float]:
        sizes: list[tuple[tuple[int, ...], float]] = []
        sizes += [(self._links(name), price.resident) for name, price in self.priced.parameters.items()]
        sizes += [(self._links(step.target.value), self.priced.copied_bytes(step)) for step in self.program.shared]
        of_prologue = {name for op in self.graph.prologue for name in self.graph.op(op).inputs}
        for buffer in self.graph.of_role(Role.BUFFER):
            sizes.append((() if buffer.name in of_prologue else self._links(buffer.name), buffer.type.nbytes))
        return self._spread(sizes)

    def _spread(self, sizes: Iterable[tuple[tuple[int, ...], float]]) -> tuple[tuple[float, ...], float]:
        """Bytes of each link, and of any partition; what has no link is of any."""
        own, everywhere = [0.0] * len(self.graph.chain), 0.0
        for links, nbytes in sizes:
            if 0 < len(links) <= FEW:
                for number in links:
                    own[number] += nbytes
            else:
                everywhere += nbytes
        return tuple(own), everywhere

    def held(self) -> tuple[tuple[float, ...], float]:
        """Of common values and their gradients, for one micro-batch."""
        sizes = []
        for writer, (link, priced) in enumerate(zip(self.graph.chain, self.priced.step.links, strict=True)):
            later = {number for name in link.common for number in self.readers.get(name, ())} - {writer}
            sizes.append(((writer, *sorted(later)), priced.memory.common))
        return self._spread(sizes)

    def crosses(self) -> tuple[float, ...]:
        """Before each link: the common values that are written before it, and read by it or later."""
        crossing = [0.0] * len(self.graph.chain)
        for name, writer in self.graph.common.items():
            nbytes = self.sharded.local_bytes(name)
            for number in range(writer + 1, max(self.readers.get(name, (0,))) + 1):
                crossing[number] += nbytes
        return tuple(crossing)

    def once(self) -> tuple[Once, ...]:
        found: dict[int, list[Once]] = defaultdict(list)
        for name, price in self.priced.parameters.items():
            ends = self._ends(name)
            tied = 0.0
            if len(ends) > 1 and self.graph.values[name].grad:  # the copies sum their gradients
                tied = self.link(self.sharded.local_bytes(name))
            for number in ends:
                found[number].append(Once(0.0, price.gradient_sum + tied, price.optimizer))
        for step in self.program.shared:
            _, moved = self._seconds((step,))
            for number in self._ends(step.target.value):
                found[number].append(Once(communication=moved))
        computed, moved = self._seconds(self.program.prologue)
        found[0].append(Once(self.program.micro_batches * (computed + moved)))
        return tuple(
            Once(
                sum(part.compute for part in found[number]),
                sum(part.communication for part in found[number]),
                sum(part.optimizer for part in found[number]),
            )
            for number in range(len(self.graph.chain))
        )

    def _ends(self, value: str) -> tuple[int, ...]:
        links = self._links(value)
        return tuple(sorted({links[0], links[-1]}))

    def _seconds(self, steps: tuple[Step, ...]) -> tuple[float, float]:
        ops, moves = self.priced.seconds(steps)
        return ops.total, moves.total

    def weight(self) -> tuple[float, ...]:
        """Seconds of backward that make weight gradients, as far as training puts them off.

        The backward of a product of an activation and a weight is two products of the same size; where the activation
        has no gradient it is one. Other ops (norms, tables, convolutions) and compiled blocks make all gradients at
        once, and so does a recompute region. The gradient of a converted weight goes back through its conversions when
        it is there.
        """
        found = []
        for link, steps in zip(self.graph.chain, self.program.links, strict=True):
            converts = [step for step in steps if isinstance(step, Convert) and step.source.value in self.weights]
            moved = sum(self.priced.conversion(step, kept=False).backward for step in converts)
            found.append(moved + sum(self._weight(self.graph.op(name)) for name in link.ops))
        return tuple(found)

    def put_off(self) -> tuple[float, ...]:
        """Bytes of what these gradients are made of, beside what backward keeps anyway: gradients of products."""
        found = []
        for steps in self.program.links:
            calls = (step for step in steps if isinstance(step, Call))
            own = [s for s in calls if self._is_put_off(self.graph.op(s.op))]
            made = (step.outputs[0] for step in own)
            found.append(float(sum(self.sharded.local_bytes(x.value, x.layout) for x in made)))
        return tuple(found)

    def _is_put_off(self, op: Op) -> bool:
        """A compiled block makes all gradients at once."""
        return self.priced.profile.compiled is None and is_put_off(self.graph, op, self.weights)

    def _weight(self, op: Op) -> float:
        if not self._is_put_off(op):
            return 0.0
        seconds = self.priced.op(op.name).backward
        others = any(self.graph.values[name].grad for name in op.inputs if name not in self.weights)
        return seconds / 2 if others else seconds


def readers(graph: OpGraph) -> dict[str, tuple[int, ...]]:
    """Each value -> the links whose ops read it, ascending."""
    found: dict[str, dict[int, None]] = defaultdict(dict)
    for number, link in enumerate(graph.chain):
        for op in link.ops:
            for name in graph.op(op).inputs:
                found[name][number] = None
    return {name: tuple(links) for name, links in found.items()}
