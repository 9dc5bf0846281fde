"""From graph, profile, op strategies and mesh to plain numbers.

Nodes: one per parameter (the ways to store it), per input of the step (its layouts) and per op (its strategies). Edges:
from whoever makes a tensor to its only reader, priced by the conversion between the layout it is made in and the one it
is read in; a share where several read it, so that a conversion which three ops want is made and paid once. As in the
lowered program, a parameter is converted once for all its readers, another tensor once per link.

Memory, over the moments of the step: what a parameter keeps (value, gradient, optimizer state), what backward needs
until it is undone, what a link writes until it returns, gradients between the ops that make them and the op that takes
them, temporaries while their op runs, gathered copies, and the buffers that conversions fill.

Ops of equal layers have equal numbers: every array is made once and shared, which is what makes a deep model cost no
more than its distinct layers further on.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from pipeline.cost.step import Workload, update_seconds
from pipeline.ir.cluster import Axis
from pipeline.ir.graph import Op, OpGraph, Role, TensorType, Value
from pipeline.ir.layout import B, Layout, Place, R, replicated, without_gradient
from pipeline.ir.plan import Sharding, Strategy
from pipeline.ir.verify import gathered
from pipeline.ops.mesh import op_strategies, view_op
from pipeline.rates.allocator import spare
from pipeline.rates.compute import piece_bytes
from pipeline.rates.inner_collectives import talk_seconds
from pipeline.sharding.conversions import gathered_share
from pipeline.sharding.path_tables import conversion_table
from pipeline.sharding.paths import Paths
from stages.solve.problem.data import FORBIDDEN, Array, Edge, Holding, Node, Problem, Reader, Share
from stages.solve.problem.moments import Moments
from stages.solve.problem.storage import Stored, Way, storage_choices


@dataclass(frozen=True)
class Choices:
    """What the choices of each node stand for."""

    storage: dict[str, tuple[Stored, ...]]  # parameter's value -> ways to store it
    inputs: dict[str, tuple[Layout, ...]]
    ops: dict[str, tuple[Strategy, ...]]
    index: dict[str, int]  # name of a value or an op -> its node
    sizes: tuple[int, ...]  # of the mesh's axes


T = TypeVar("T")


class _Once:
    """Makes each thing once: by a key, and by the objects that it is made of, which are told by identity and kept."""

    def __init__(self) -> None:
        self.made: dict[Hashable, tuple[Any, tuple[object, ...]]] = {}

    def __call__(self, key: Hashable, make: Callable[[], T], *of: object) -> T:
        whole = (key, *map(id, of))
        if whole not in self.made:
            self.made[whole] = make(), of
        found: T = self.made[whole][0]
        return found


class _Builder:
    def __init__(self, workload: Workload, shards: bool) -> None:
        graph, profile, cluster = workload.graph, workload.profile, workload.cluster
        self.graph, self.profile, self.workload, self.shards = graph, profile, workload, shards
        self.axes, self.compute, self.sizes = cluster.axes, cluster.compute, cluster.sizes
        self.paths = Paths(self.axes, self.compute)
        self.moments = Moments(graph, profile)
        self.once = _Once()
        self.nodes: list[Node] = []
        self.edges: list[Edge] = []
        self.shares: list[Share] = []
        self.index: dict[str, int] = {}
        self.layouts: dict[str, tuple[Layout, ...]] = {}  # value -> the layout it is made in, per choice of its maker
        self.maker: dict[str, int] = {}
        self.stored: dict[str, tuple[Stored, ...]] = {}
        self.options = {op.name: self._options(op) for op in graph.ops}
        self.saved = {
            (self.moments.link.get(op.name), profile.storage.get(name, name))
            for op in graph.ops
            for name in profile.ops[op.name].saves
        }

    def _options(self, op: Op) -> tuple[Strategy, ...]:
        return op_strategies(view_op(self.graph, op), self.sizes)

    def add(self, name: str, costs: Array, holdings: list[Holding]) -> int:
        self.index[name] = len(self.nodes)
        if not self.nodes:  # what libraries keep is there whatever is chosen
            holdings = [*holdings, Holding(0, self.moments.end, np.full(len(costs), float(self.compute.workspace)))]
        self.nodes.append(Node(name, costs, tuple(h for h in holdings if h.end > h.first)))
        return self.index[name]

    # ---- arrays that equal layers share

    def split_bytes(self, layouts: tuple[Layout, ...], kind: TensorType) -> Array:
        """Bytes on one rank, per layout."""
        made = lambda: np.array([piece_bytes(kind, x, self.sizes) for x in layouts], dtype=float)  # noqa: E731
        return self.once(("bytes", kind), made, layouts)

    def same(self, layouts: tuple[Layout, ...]) -> tuple[Layout, ...]:
        """One object for equal tuples, so that they can be told by identity."""
        return self.once(("layouts", layouts), lambda: layouts)

    def outputs(self, options: tuple[Strategy, ...], position: int) -> tuple[Layout, ...]:
        made = lambda: self.same(tuple(s.outputs[position] for s in options))  # noqa: E731
        return self.once(("outputs", position), made, options)

    def inputs(self, options: tuple[Strategy, ...], position: int) -> tuple[Layout, ...]:
        made = lambda: self.same(tuple(s.inputs[position] for s in options))  # noqa: E731
        return self.once(("inputs", position), made, options)

    # ---- nodes, in the order of the step: a parameter stands before the first op that reads it

    def leaf(self, value: Value) -> None:
        readers = self.moments.readers[value.name]
        found = [self.inputs(self.options[op.name], i) for op in readers for i in _places(op, value.name)]
        each = {id(layouts): layouts for layouts in found}.values()
        wanted = self.once("wanted", lambda: frozenset(layout for layouts in each for layout in layouts), *each)
        if value.role is Role.BUFFER:
            self.source(value, (replicated(len(self.sizes)),))
            return
        shards = value.role is Role.PARAMETER and self.shards
        ways = self.once(
            ("ways", value.type.shape, shards),
            lambda: storage_choices(value.type.shape, wanted, self.sizes, shards=shards),
            wanted,
        )
        if value.role is Role.PARAMETER:
            self.parameter(value, self._not_regathered(ways) if self._shared(readers) else ways)
        else:
            self.source(value, tuple(way.layout for way in ways))

    def _not_regathered(self, ways: tuple[Stored, ...]) -> tuple[Stored, ...]:
        """What several links read is gathered once for all of them, or each of them would gather it twice."""
        kept = tuple(way for way in ways if way.way is not Way.regathered)
        return self.once("not regathered", lambda: kept, ways)

    def _shared(self, readers: list[Op]) -> bool:
        """Whether several links read a parameter: it is then converted before the chain, once a step."""
        return len({self.moments.link.get(op.name) for op in readers}) > 1

    def source(self, value: Value, layouts: tuple[Layout, ...]) -> None:
        """An input or a buffer: there for the whole step."""
        layouts = self.same(layouts)
        held = Holding(0, self.moments.end, self.split_bytes(layouts, value.type))
        zero = self.once(("zeros", len(layouts)), lambda: np.zeros(len(layouts)))
        self.maker[value.name] = self.add(value.name, zero, [held])
        self.layouts[value.name] = layouts

    def parameter(self, value: Value, ways: tuple[Stored, ...]) -> None:
        layouts = self.once("layouts of", lambda: self.same(tuple(way.layout for way in ways)), ways)
        states = self.once("states of", lambda: self.same(tuple(way.state for way in ways)), ways)
        copies, axes = self.workload.optimizer_copies, self.axes
        stored, state = self.split_bytes(layouts, value.type), self.split_bytes(states, value.type)
        seconds = self.once(
            ("optimizer", value.type),
            lambda: np.array(
                [
                    self.workload.ops.optimizer(owned, copies) + update_seconds(n, [], _sharded(way, axes))
                    for way, n, owned in zip(ways, stored, state, strict=True)
                ]
            ),
            ways,
        )
        usages = self.once(
            ("resident", value.type),
            lambda: self._allocated(stored) + copies * self._allocated(state),
            layouts,
            states,
        )
        self.maker[value.name] = self.add(value.name, seconds, [Holding(0, self.moments.end, usages)])
        self.layouts[value.name], self.stored[value.name] = layouts, ways

    def _allocated(self, nbytes: Array) -> Array:
        """With what the allocator of a GPU may lose."""
        on_gpu = self.workload.cluster.device == "cuda"
        return nbytes + np.array([spare(int(size)) for size in nbytes]) if on_gpu else nbytes

    def _gradients(self, value: Value, forms: tuple[Layout, ...]) -> tuple[Array, Array]:
        """Bytes of the gradient of a parameter that is read in these forms: where it is there all the time, in buckets
        or to be added up, and where it is made in backward, as it is complete then."""
        ways = self.stored[value.name]
        shards = np.array([way.state.pieces(self.sizes) // way.layout.pieces(self.sizes) for way in ways])
        stored, state = (
            np.array([piece_bytes(value.type, layout, self.sizes) for layout in layouts], dtype=float)
            for layouts in ([way.layout for way in ways], [way.state for way in ways])
        )
        nbytes = self._allocated(np.maximum(stored, shards * state))[:, None]
        apart = np.array([way.state != way.layout for way in ways])[:, None]
        there = apart | (_summed_axes(ways, forms) > 0) | (self.workload.micro_batches > 1)
        return nbytes * there, nbytes * ~there

    def op(self, op: Op) -> None:
        cost, options = self.profile.ops[op.name], self.options[op.name]
        grads = tuple(self.graph.values[o].grad for o in op.outputs)
        types = self.graph.types((*op.inputs, *op.outputs))
        alike = self.workload.ops.alike(op.name)
        key = ("op", op.target, replace(cost, saves=()), grads, types, alike)
        seconds = self.once(key, lambda: self._op_seconds(op, options), options)
        if op.name == self._loss_maker:
            seconds = seconds + self._to_whole_loss(op, options)
        node = self.add(op.name, seconds, self._op_holdings(op, options))
        for position, output in enumerate(op.outputs):
            self.maker[output] = node
            self.layouts[output] = self.outputs(options, position)

    @property
    def _loss_maker(self) -> str:
        return self.graph.values[self.graph.output].origin

    def _op_seconds(self, op: Op, options: tuple[Strategy, ...]) -> Array:
        times = [
            self.workload.ops(op.name, s).seconds.total + talk_seconds(self.graph, op.name, s, self.axes).total
            for s in options
        ]
        return np.array(times) * self.workload.micro_batches

    def _to_whole_loss(self, op: Op, options: tuple[Strategy, ...]) -> Array:
        """The step ends with the loss on every rank."""
        loss = self.graph.values[self.graph.output]
        have = self.outputs(options, op.outputs.index(loss.name))
        return self.conversions(loss, have, self.same((replicated(len(self.sizes)),)))[:, 0]

    def _op_holdings(self, op: Op, options: tuple[Strategy, ...]) -> list[Holding]:
        cost, moments = self.profile.ops[op.name], self.moments
        before, after = moments.forward(op.name), moments.backward(op.name)
        count = lambda: np.array([_most_pieces(s, self.sizes) for s in options], dtype=float)  # noqa: E731
        pieces = self.once("shares", count, options)
        found = []
        for first, end, nbytes in (
            (before, before + 1, cost.temporary_forward),
            (before, after + 1, cost.extra_saved),
            (after, after + 1, cost.temporary_backward),
        ):
            if nbytes:
                part = self.once(("part", nbytes), partial(np.divide, nbytes, pieces), pieces)
                found.append(Holding(first, end, part))
        for position, name in enumerate(op.outputs):
            found += self._output_holdings(op, name, self.outputs(options, position))
        return found + self._kept_holdings(op, options)

    def _output_holdings(self, op: Op, name: str, layouts: tuple[Layout, ...]) -> list[Holding]:
        """What the op writes while the forward pass has it, or its backward pass where it is common; its gradient."""
        value, moments = self.graph.values[name], self.moments
        held = self.split_bytes(layouts, value.type)
        own = self.profile.storage[name] == name
        common = name in self.graph.common
        last = moments.backward(op.name) + 1
        found = []
        if own:
            found.append(Holding(moments.forward(op.name), last if common else moments.forgotten(op, name), held))
        if value.grad and (own or common):
            found.append(Holding(moments.undone(name), last, held))
        return found

    def _kept_holdings(self, op: Op, options: tuple[Strategy, ...]) -> list[Holding]:
        """What backward needs, in the layout of the first op that keeps it, once the forward pass has let go of it."""
        found = []
        readings = [*((n, self.inputs(options, i)) for i, n in enumerate(op.inputs))]
        readings += [(n, self.outputs(options, i)) for i, n in enumerate(op.outputs)]
        seen = set()
        for name, layouts in readings:
            root = self.profile.storage[name]
            if (
                name in self.profile.ops[op.name].saves
                and self.moments.keepers.get(root) == op.name
                and root not in seen
            ):
                seen.add(root)
                maker = self.graph.op(self.graph.values[root].origin)
                first = self.moments.forgotten(maker, root)
                held = self.split_bytes(layouts, self.graph.values[name].type)
                found.append(Holding(first, self.moments.backward(op.name) + 1, held))
        return found

    # ---- what lies between a maker and its readers

    def connect(self, value: Value, readers: list[Op]) -> None:
        wants = [
            (op, self.inputs(self.options[op.name], i))
            for op in readers
            for i, n in enumerate(op.inputs)
            if n == value.name
        ]
        if len(wants) == 1:
            op, layouts = wants[0]
            costs, holdings = self.reading(value, layouts, readers)
            self.edges.append(Edge(self.maker[value.name], self.index[op.name], costs, holdings))
            return
        sort = lambda: self.same(tuple(sorted({x for _, layouts in wants for x in layouts})))  # noqa: E731
        forms = self.once("forms", sort, *(layouts for _, layouts in wants))
        number = {layout: n for n, layout in enumerate(forms)}
        costs, holdings = self.reading(value, forms, readers)
        rows = [
            Reader(
                self.index[op.name],
                self.once("wants", partial(_numbers, number, layouts), layouts, forms),
            )
            for op, layouts in wants
        ]
        self.shares.append(Share(self.maker[value.name], tuple(rows), costs, holdings))

    def reading(self, value: Value, forms: tuple[Layout, ...], readers: list[Op]) -> tuple[Array, tuple[Holding, ...]]:
        """Seconds and bytes to read a value in each form, by the choice of its maker."""
        if value.role is Role.PARAMETER:
            return self._reading_parameter(value, forms, readers)
        have = self.layouts[value.name]
        first = min(self.moments.forward(op.name) for op in readers)
        end = max(self.moments.forgotten(op, value.name) for op in readers)
        costs = self.conversions(value, have, forms)
        copied = self.once(("copied", value.type), lambda: self._copied(value, have, forms), have, forms)
        if not copied.any():
            return costs, ()
        until = max((self.moments.backward(op.name) + 1 for op in readers if self._keeps_copy(op, value)), default=end)
        return costs, (Holding(first, max(end, until), copied),)

    def _keeps_copy(self, op: Op, value: Value) -> bool:
        """Whether backward needs what the op reads in the layout in which it reads it, beside what another op keeps."""
        first = self.moments.keepers.get(self.profile.storage[value.name])
        return value.name in self.profile.ops[op.name].saves and first not in (None, op.name)

    def conversions(self, value: Value, have: tuple[Layout, ...], forms: tuple[Layout, ...]) -> Array:
        def make() -> Array:
            kind = value.type
            table = conversion_table(self.paths, have, forms, kind.shape, kind.nbytes, value.grad)
            return table * self.workload.micro_batches

        return self.once(("conversions", value.type, value.grad), make, have, forms)

    def _copied(self, value: Value, have: tuple[Layout, ...], forms: tuple[Layout, ...]) -> Array:
        """Bytes of the copy that a conversion makes; none where it does nothing in the forward pass."""
        held = self.split_bytes(forms, value.type)
        number: dict[Layout, int] = {}
        made, read = (
            np.array([number.setdefault(without_gradient(x), len(number)) for x in found]) for found in (have, forms)
        )
        return np.where(made[:, None] == read[None, :], 0.0, held[None, :])

    def _reading_parameter(
        self, value: Value, forms: tuple[Layout, ...], readers: list[Op]
    ) -> tuple[Array, tuple[Holding, ...]]:
        ways, have = self.stored[value.name], self.layouts[value.name]
        saved = any((self.moments.link.get(r.name), value.name) in self.saved for r in readers)
        times = 1 if self._shared(readers) else self.workload.micro_batches
        key = value.type, value.grad, saved, times, gathered_share(self.graph, value.name)

        def once(what: str, make: Callable[[], T]) -> T:
            return self.once((what, *key), make, ways, forms)

        costs = once("reading", lambda: _parameter_seconds(self, value, ways, forms, saved, times))
        whole = once("gathered", lambda: self._copied(value, have, forms))
        gradients: tuple[Holding, ...] = ()
        if value.grad:
            there, made = once("gradients", lambda: self._gradients(value, forms))
            firsts = (0, self.moments.undone(value.name))
            pairs = zip(firsts, (there, made), strict=True)
            gradients = tuple(Holding(first, self.moments.end, own) for first, own in pairs if own.any())
        if not whole.any():
            return costs, gradients
        op = min(readers, key=lambda r: self.moments.forward(r.name))
        first, undone = self.moments.forward(op.name), self.moments.backward(op.name) + 1
        end = max(self.moments.forgotten(r, value.name) for r in readers)
        if self._shared(readers):  # it, its gradient and, between passes, what was added up before
            copies = once("shared copies", lambda: (2 + (self.workload.micro_batches > 1)) * whole)
            return costs, (Holding(0, self.moments.end, copies), *gradients)
        stays = np.array([way.way is not Way.regathered and saved for way in ways])[:, None]
        kept, dropped = once("copies", lambda: (whole * stays, whole * ~stays))
        found = [Holding(first, undone, kept), Holding(first, end, dropped)]
        found.append(Holding(undone - 1, undone, dropped))
        return costs, (*gradients, *(h for h in found if h.usages.any()))


def _places(op: Op, value: str) -> list[int]:
    """Where among its inputs an op reads a value."""
    return [i for i, name in enumerate(op.inputs) if name == value]


def _most_pieces(strategy: Strategy, sizes: tuple[int, ...]) -> int:
    return max((layout.pieces(sizes) for layout in (*strategy.inputs, *strategy.outputs)), default=1)


def _parameter_seconds(
    builder: _Builder, value: Value, ways: tuple[Stored, ...], forms: tuple[Layout, ...], saved: bool, times: int
) -> Array:
    """Seconds of a step to have a stored parameter in each form so many times, and its gradient as it is stored.

    It is gathered again only where backward reads it (`saved`): a bias or an embedding's table it does not.
    """
    goes = _goes(ways, forms, builder.sizes)
    if not goes.any():
        return np.full(goes.shape, FORBIDDEN)
    summed = _summed_axes(ways, forms)
    source, step = np.zeros(goes.shape, dtype=np.int64), np.zeros(goes.shape)
    rows: dict[Layout, int] = {}
    for i, way in enumerate(ways):
        for code in np.unique(summed[i, goes[i]]):
            axes = [a for a in range(len(builder.sizes)) if code >> a & 1]
            at = goes[i] & (summed[i] == code)
            source[i, at] = rows.setdefault(_summed(way.layout, axes), len(rows))
            step[i, at] = _step_seconds(builder, value, way, axes)
    share = gathered_share(builder.graph, value.name)
    paths = builder.once(("paths", share), lambda: Paths(builder.axes, builder.compute, share))
    there, again = (
        conversion_table(paths, tuple(rows), forms, value.type.shape, value.type.nbytes, grad)
        for grad in (value.grad, False)  # without a gradient it is the forward pass alone
    )
    columns = np.arange(len(forms))
    once = there[source, columns]
    twice = once + again[source, columns] if saved else once
    regathered = np.array([way.way is Way.regathered for way in ways])[:, None]
    return np.where(goes, times * np.where(regathered, twice, once) + step, FORBIDDEN)


def _summed_axes(ways: tuple[Stored, ...], forms: tuple[Layout, ...]) -> NDArray[np.int64]:
    """Of each way to store and each form to read: the axes over which gradients are summed, as bits."""
    whole = np.array([[state == R for state in way.layout.states] for way in ways])
    partial = np.array([[state == B for state in form.states] for form in forms])
    return np.asarray((whole[:, None] & partial[None]) @ (1 << np.arange(whole.shape[1])))


def _goes(ways: tuple[Stored, ...], forms: tuple[Layout, ...], sizes: tuple[int, ...]) -> np.ndarray:
    """A parameter that is to be read as it lies is not gathered on any axis, one to be regathered by nothing else."""
    number: dict[Place, int] = {}

    def placed(layouts: list[Layout]) -> np.ndarray:
        found = np.full((len(layouts), len(sizes)), -1)
        for row, layout in enumerate(layouts):
            for axis, place in layout.places(sizes).items():
                found[row, axis] = number.setdefault(place, len(number))
        return found

    have, wanted = placed([way.layout for way in ways]), placed(list(forms))
    free = np.array([way.way is Way.regathered for way in ways])[:, None, None]
    partial = np.array([[state == B for state in form.states] for form in forms])
    stays = (have[:, None] < 0) | (have[:, None] == wanted[None]) | (free & partial[None])
    gathered = np.array([way.way is Way.gathered for way in ways])
    return np.asarray(gathered[:, None] | stays.all(axis=2))


def _summed(have: Layout, axes: list[int]) -> Layout:
    """The stored layout once the step has seen to the gradients of these replicated axes."""
    return Layout(tuple(B if a in axes else state for a, state in enumerate(have.states)))


def _step_seconds(builder: _Builder, value: Value, way: Stored, summed: list[int]) -> float:
    """Once a step: gradients summed over these axes, on which the parameter is replicated."""
    nbytes = value.type.nbytes // way.layout.pieces(builder.sizes)
    axes = builder.axes
    split = _sharded(way, axes)
    over = [axes[a] for a in summed] if value.grad else []
    return update_seconds(nbytes, over, split) - update_seconds(nbytes, [], split)


def _sharded(way: Stored, axes: tuple[Axis, ...]) -> list[Axis]:
    """The axes over which new values are gathered: whatever reads the parameter, once a step."""
    pairs = zip(axes, way.layout.states, way.state.states, strict=True)
    return [axis for axis, have, state in pairs if have.kind != "S" == state.kind]


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


def _numbers(number: Mapping[Layout, int], layouts: tuple[Layout, ...]) -> NDArray[np.int64]:
    return np.array([number[layout] for layout in layouts])
