"""From graph, profile, op strategies and mesh to plain numbers.

Nodes: one per parameter (the ways to store it), per input of the step (its layouts) and per op (its strategies). Edges:
from whoever makes a tensor to its only reader, priced by the conversion between the layout it is made in and the one it
is read in; a share where several read it, so that a conversion which three ops want is made and paid once. As in the
lowered program, a parameter is converted once for all its readers, another tensor once per link.

Memory, over the moments of the step: what backward needs until it is undone, what a link writes until it returns,
gradients between the ops that make them and the op that takes them, temporaries while their op runs, and the copies of
activations with what is made on the way to them; of a parameter, what stages/solve/problem/parameters.py says. It is
the step's price of memory (pipeline/cost/memory.py) op by op.

Ops of equal layers have equal numbers: every array is made once and shared, which is what makes a deep model cost no
more than its distinct layers further on.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shardwright.pipeline.cost.step import Workload
from shardwright.pipeline.ir.graph import Op, OpGraph, Role, Value
from shardwright.pipeline.ir.layout import Layout, P, replicated
from shardwright.pipeline.ir.plan import Sharding, Strategy
from shardwright.pipeline.ir.verify import gathered
from shardwright.pipeline.ops.samples import strategies_in
from shardwright.pipeline.rates.inner_collectives import talk_seconds
from shardwright.stages.solve.problem.arrays import Arrays, Layouts
from shardwright.stages.solve.problem.data import Array, Edge, Holding, Node, Problem, Reader, Share
from shardwright.stages.solve.problem.made_once import Listed
from shardwright.stages.solve.problem.moments import Moments
from shardwright.stages.solve.problem.parameters import Parameters, Ways
from shardwright.stages.solve.problem.storage import Stored, Way, storage_choices


@dataclass(frozen=True)
class Choices:
    """What the choices of each node stand for."""

    storage: Mapping[str, tuple[Stored, ...]]  # parameter's value -> ways to store it
    inputs: Mapping[str, tuple[Layout, ...]]
    ops: Mapping[str, tuple[Strategy, ...]]
    index: dict[str, int]  # name of a value or an op -> its node
    sizes: tuple[int, ...]  # of the mesh's axes


class _Builder:
    def __init__(self, workload: Workload, shards: bool) -> None:
        self.graph, self.profile, self.workload = workload.graph, workload.profile, workload
        self.arrays, self.moments = Arrays(workload), Moments(workload.graph, workload.profile)
        self.parameters = Parameters(workload, self.moments, self.arrays, shards)
        self.once, self.sizes = self.arrays.once, self.arrays.sizes
        self.nodes: list[Node] = []
        self.edges: list[Edge] = []
        self.shares: list[Share] = []
        self.index: dict[str, int] = {}
        self.layouts: dict[str, Layouts] = {}  # value -> the layout it is made in, per choice of its maker
        self.maker: dict[str, int] = {}
        self.stored: dict[str, Ways] = {}
        self._seconds: dict[Hashable, Array] = {}  # of ops that are alike
        options = {op.name: strategies_in(self.graph, op, self.sizes) for op in self.graph.ops}
        listed = {id(own): Listed(own) for own in options.values()}
        self.options = {name: listed[id(own)] for name, own in options.items()}

    def add(self, name: str, costs: Array, holdings: Iterable[Holding]) -> int:
        self.index[name] = len(self.nodes)
        if not self.nodes:  # what libraries keep is there whatever is chosen
            kept = np.full(len(costs), float(self.workload.cluster.compute.workspace))
            holdings = [*holdings, Holding(0, self.moments.end, kept)]
        self.nodes.append(Node(name, costs, tuple(h for h in holdings if h.end > h.first)))
        return self.index[name]

    # ---- nodes, in the order of the step: a parameter stands before the first op that reads it

    def leaf(self, value: Value) -> None:
        if value.role is Role.BUFFER:
            self.source(value, self.arrays.listed((replicated(len(self.sizes)),)))
            return
        found = [self.arrays.inputs(self.options[op.name], at) for op, at in self.moments.places(value.name)]
        wanted = self.once(_all_of, tuple(dict.fromkeys(found)))
        if value.role is Role.PARAMETER:
            ways = self.stored[value.name] = self.parameters.ways(value, wanted)
            self.maker[value.name] = self.add(value.name, *self.parameters.node(value, ways))
            self.layouts[value.name] = self.parameters.layouts(ways)
        else:
            layouts = self.once(_input_layouts, value.type.shape, wanted, self.sizes)
            self.source(value, self.arrays.listed(layouts))

    def source(self, value: Value, layouts: Layouts) -> None:
        """An input or a buffer: there for the whole step."""
        held = Holding(0, self.moments.end, self.arrays.split_bytes(layouts, value.type))
        self.maker[value.name] = self.add(value.name, self.once(np.zeros, len(layouts)), [held])
        self.layouts[value.name] = layouts

    def op(self, op: Op) -> None:
        options = self.options[op.name]
        seconds = self._op_seconds(op, options)
        if op.name == self.graph.values[self.graph.output].origin:
            seconds = seconds + self._to_whole_loss(op, options)
        node = self.add(op.name, seconds, self._op_holdings(op, options))
        for position, output in enumerate(op.outputs):
            self.maker[output] = node
            self.layouts[output] = self.arrays.outputs(options, position)

    def _op_seconds(self, op: Op, options: Listed[Strategy]) -> Array:
        ops, axes = self.workload.ops, self.workload.cluster.axes
        grads = tuple(self.graph.values[o].grad for o in op.outputs)
        types = self.graph.types((*op.inputs, *op.outputs))
        cost = replace(self.profile.ops[op.name], saves=())
        key = options, op.target, cost, grads, types, ops.alike(op.name)
        if key not in self._seconds:
            talks = (talk_seconds(self.graph, op.name, s, axes).total for s in options)
            times = [ops(op.name, s).seconds.total + talk for s, talk in zip(options, talks, strict=True)]
            self._seconds[key] = np.array(times) * self.workload.micro_batches
        return self._seconds[key]

    def _to_whole_loss(self, op: Op, options: Listed[Strategy]) -> Array:
        """The step ends with the loss on every rank."""
        loss = self.graph.values[self.graph.output]
        have = self.arrays.outputs(options, op.outputs.index(loss.name))
        whole = self.arrays.listed((replicated(len(self.sizes)),))
        return self.arrays.conversions(have, whole, loss.type, loss.grad)[0][:, 0]

    def _op_holdings(self, op: Op, options: Listed[Strategy]) -> Iterator[Holding]:
        cost, moments = self.profile.ops[op.name], self.moments
        before, after = moments.forward(op.name), moments.backward(op.name)
        shards = self.once(_most_shards, options, self.sizes)
        for first, end, nbytes in (
            (before, before + 1, cost.temporary_forward),
            (before, after + 1, cost.extra_saved),
            (after, after + 1, cost.temporary_backward),
        ):
            if nbytes:
                yield Holding(first, end, self.once(np.divide, nbytes, shards))
        for position, name in enumerate(op.outputs):
            yield from self._output_holdings(op, name, self.arrays.outputs(options, position))
        yield from self._kept_holdings(op, options)

    def _output_holdings(self, op: Op, name: str, layouts: Layouts) -> Iterator[Holding]:
        """What the op writes while the forward pass has it, or its backward pass where it, or a view of it, is common;
        its gradient, in which those of its views lie."""
        value, moments = self.graph.values[name], self.moments
        held, root = self.arrays.split_bytes(layouts, value.type), self.graph.values[self.profile.storage[name]]
        own = root is value and not self.profile.ops[op.name].free
        first, last = moments.forward(op.name), moments.backward(op.name) + 1
        if own and name in moments.crossing:
            partial = self.once(_partial, layouts)
            yield Holding(first, moments.ends(op.name), self.once(np.where, partial, held, 0.0))
            yield Holding(first, moments.crossing[name], self.once(np.where, partial, 0.0, held))
        elif own:
            yield Holding(first, last if name in moments.common else moments.forgotten(op, name), held)
        if value.grad and (own or (name in self.graph.common and root.role is not Role.RESULT)):
            yield Holding(moments.undone(name), last, held)

    def _kept_holdings(self, op: Op, options: Listed[Strategy]) -> Iterator[Holding]:
        """What backward needs, in the layout of the first op that keeps it, once the forward pass has let go of it."""
        readings = [(n, self.arrays.inputs(options, i)) for i, n in enumerate(op.inputs)]
        readings += [(n, self.arrays.outputs(options, i)) for i, n in enumerate(op.outputs)]
        seen = set()
        for name, layouts in readings:
            root = self.profile.storage[name]
            kept = name in self.profile.ops[op.name].saves and self.moments.keepers.get(root) == op.name
            if kept and root not in seen:
                seen.add(root)
                first = self.moments.forgotten(self.graph.op(self.graph.values[root].origin), root)
                held = self.arrays.split_bytes(layouts, self.graph.values[name].type)
                yield Holding(first, self.moments.backward(op.name) + 1, held)

    # ---- what lies between a maker and its readers

    def connect(self, value: Value, readers: list[Op]) -> None:
        wants = [
            (op, self.arrays.inputs(self.options[op.name], i))
            for op in readers
            for i, n in enumerate(op.inputs)
            if n == value.name
        ]
        maker = self.maker[value.name]
        if len(wants) == 1:
            op, layouts = wants[0]
            self.edges.append(Edge(maker, self.index[op.name], *self.reading(value, layouts, wants)))
            return
        forms = self.arrays.listed(self.once(_sorted, tuple(layouts for _, layouts in wants)))
        rows = tuple(Reader(self.index[op.name], self.once(_numbers, forms, layouts)) for op, layouts in wants)
        self.shares.append(Share(maker, rows, *self.reading(value, forms, wants)))

    def reading(
        self, value: Value, forms: Layouts, wants: list[tuple[Op, Layouts]]
    ) -> tuple[Array, tuple[Holding, ...], Array | None]:
        """Seconds and bytes to read a value in each form, by the choice of its maker; of the seconds those of
        collectives that the runtime begins and does not wait for.
        """
        if value.role is Role.PARAMETER:
            return self.parameters.reading(value, self.stored[value.name], forms, wants)
        readers = [op for op, _ in wants]
        have, moments = self.layouts[value.name], self.moments
        costs, between = self.arrays.conversions(have, forms, value.type, value.grad)
        copied = self.arrays.copied_bytes(have, forms, value.type)
        first = min(moments.forward(op.name) for op in readers)
        end = max(moments.forgotten(op, value.name) for op in readers)
        kept = [moments.backward(name) + 1 for name in self._copy_keepers(readers, value)]
        holdings = [Holding(first, max([end, *kept]), copied), Holding(first, end, between)]
        if value.name in moments.crossing:
            holdings = [*self._summed(value, have, forms, holdings)]
        return costs, tuple(h for h in holdings if h.usages.any()), None

    def _summed(self, value: Value, have: Layouts, forms: Layouts, holdings: list[Holding]) -> Iterator[Holding]:
        """An activation that is written as partial sums is brought by the link that writes it to the layout in which it
        is read, and that copy crosses to the next link."""
        moments, op = self.moments, value.origin
        made, crossed, ends = moments.forward(op), moments.crossing[value.name], moments.ends(op)
        partial, summed = self.once(_partial, have), self.once(_summed, have, forms)
        for held, end in zip(holdings, (max(crossed, holdings[0].end), ends), strict=True):
            yield Holding(held.first, held.end, self.once(np.where, summed, 0.0, held.usages))
            yield Holding(made, end, self.once(np.where, summed, held.usages, 0.0))
        written = self.arrays.split_bytes(have, value.type)
        yield Holding(ends, crossed, self.once(_as_written, partial, summed, written))

    def _copy_keepers(self, readers: list[Op], value: Value) -> list[str]:
        """Who keeps a copy of a link for backward, beside what another op keeps: what the first of all keeps is counted
        with that op (`_kept_holdings`), and those that read the same copy keep nothing more."""
        first = self.moments.keepers.get(self.profile.storage[value.name])
        keepers = [name for op in readers for name in self.moments.keeping(op, value.name)]
        return [] if first in keepers else keepers


def _all_of(found: tuple[Layouts, ...]) -> frozenset[Layout]:
    return frozenset(layout for layouts in found for layout in layouts)


def _sorted(found: tuple[Layouts, ...]) -> tuple[Layout, ...]:
    return tuple(sorted(_all_of(found)))


def _numbers(forms: Layouts, layouts: Layouts) -> NDArray[np.int64]:
    number = {layout: n for n, layout in enumerate(forms)}
    return np.array([number[layout] for layout in layouts])


def _partial(layouts: Layouts) -> NDArray[np.bool_]:
    return np.array([P in layout.states for layout in layouts])


def _summed(have: Layouts, forms: Layouts) -> NDArray[np.bool_]:
    return _partial(have)[:, None] & ~_partial(forms)[None, :]


def _as_written(partial: NDArray[np.bool_], summed: NDArray[np.bool_], written: Array) -> Array:
    """Bytes of partial sums that nobody sums before they are read."""
    return np.where(partial[:, None] & ~summed, written[:, None], 0.0)


def _most_shards(options: Listed[Strategy], sizes: tuple[int, ...]) -> Array:
    most = (max((x.shards(sizes) for x in (*s.inputs, *s.outputs)), default=1) for s in options)
    return np.array(list(most), dtype=float)


def _input_layouts(shape: tuple[int, ...], wanted: frozenset[Layout], sizes: tuple[int, ...]) -> tuple[Layout, ...]:
    return tuple(way.layout for way in storage_choices(shape, wanted, sizes, shards=False))


def build(workload: Workload, *, shards: bool = True) -> tuple[Problem, Choices]:
    """`shards`: whether ZeRO may be chosen."""
    builder, graph = _Builder(workload, shards), workload.graph
    readers = builder.moments.readers
    for name in builder.moments.position:
        op = graph.op(name)
        for source in op.inputs:
            if source not in builder.index and graph.values[source].role is not Role.RESULT:
                builder.leaf(graph.values[source])
        builder.op(op)
    for value in graph.values.values():
        if value.role is not Role.RESULT and value.name not in builder.index:
            builder.leaf(value)  # that no op reads
    for value in graph.values.values():
        for group in _sharing(readers[value.name], {} if value.role is Role.PARAMETER else builder.moments.link):
            builder.connect(value, group)
    problem = Problem(tuple(builder.nodes), tuple(builder.edges), tuple(builder.shares))
    inputs = {v.name: builder.layouts[v.name] for v in graph.of_role(Role.INPUT)}
    return problem, Choices(builder.stored, inputs, builder.options, builder.index, builder.sizes)


def _sharing(readers: list[Op], links: dict[str, int]) -> list[list[Op]]:
    """The readers that share the copies of a value: those in the same link; all, where no links are given."""
    groups: dict[int | None, list[Op]] = {}
    for op in readers:
        groups.setdefault(links.get(op.name), []).append(op)
    return list(groups.values())


def to_sharding(graph: OpGraph, choices: Choices, picked: tuple[int, ...]) -> Sharding:
    stored = {graph.values[name].origin: ways[picked[choices.index[name]]] for name, ways in choices.storage.items()}
    found = Sharding(
        strategies={name: options[picked[choices.index[name]]] for name, options in choices.ops.items()},
        storage={origin: way.layout for origin, way in stored.items()},
        inputs={name: layouts[picked[choices.index[name]]] for name, layouts in choices.inputs.items()},
        state={origin: way.state for origin, way in stored.items() if way.state != way.layout},
    )
    apart = gathered(graph, found, choices.sizes)  # where nobody gathers, both ways of reading are the same
    again = (origin for origin, way in stored.items() if way.way is Way.regathered and origin in apart)
    return replace(found, regathered=tuple(again))
