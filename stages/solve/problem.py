"""The sharding problem as plain numbers: nodes with costs and memory, edges with cost matrices, one memory limit.

Nodes: one per parameter (its storage layouts), per input of the step (its layouts), per op (its strategies), and one
yes/no node per (tensor, layout) copy of a tensor that several ops read: so a conversion that three ops share is made
and paid once. As in the lowered program, a parameter is converted once for all its readers, another tensor once per
link. Edges: from whoever makes a tensor to whoever reads it, priced by the conversion between the layout it is made in
and the layout it is read in; a reader that wants a copy which is absent is forbidden.

Memory: what a parameter keeps (value, gradient, optimizer state) and what backward needs. All of it is alive when the
forward pass ends, so one row bounds it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pipeline.cost.compute import local_bytes, op_seconds, optimizer_seconds
from pipeline.cost.paths import Paths
from pipeline.cost.step import gradient_sum_seconds, resident_bytes
from pipeline.ir.cluster import Cluster
from pipeline.ir.graph import Op, OpGraph, Role, Value
from pipeline.ir.layout import B, Layout, R, S
from pipeline.ir.plan import Sharding, Strategy
from pipeline.ir.profile import Profile
from pipeline.ops.dims import strategies
from pipeline.ops.rule import view_op
from pipeline.ops.table import rule_of

FORBIDDEN = math.inf
ABSENT, PRESENT = 0, 1


@dataclass(frozen=True)
class Node:
    name: str
    costs: tuple[float, ...]  # seconds, one per choice
    usages: tuple[float, ...]  # bytes, one per choice


@dataclass(frozen=True)
class Edge:
    first: int
    second: int
    costs: tuple[tuple[float, ...], ...]  # costs[choice of first][choice of second]


@dataclass(frozen=True)
class Problem:
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]

    def cost(self, choices: tuple[int, ...]) -> float:
        own = sum(node.costs[k] for node, k in zip(self.nodes, choices, strict=True))
        return own + sum(e.costs[choices[e.first]][choices[e.second]] for e in self.edges)

    def usage(self, choices: tuple[int, ...]) -> float:
        return sum(node.usages[k] for node, k in zip(self.nodes, choices, strict=True))


@dataclass(frozen=True)
class Choices:
    """What the choices of each node stand for."""

    storage: dict[str, tuple[Layout, ...]]  # parameter's value -> layouts
    inputs: dict[str, tuple[Layout, ...]]
    ops: dict[str, tuple[Strategy, ...]]
    index: dict[str, int]  # name of a value or an op -> its node


class _Builder:
    def __init__(self, graph: OpGraph, profile: Profile, cluster: Cluster, optimizer_copies: float) -> None:
        self.graph, self.profile, self.cluster = graph, profile, cluster
        self.copies = optimizer_copies
        self.axis = cluster.axes[0]
        self.sizes = cluster.sizes
        self.paths = Paths(cluster.axes, cluster.compute)
        self.nodes: list[Node] = []
        self.edges: list[Edge] = []
        self.index: dict[str, int] = {}
        self.layouts: dict[str, tuple[Layout, ...]] = {}  # value -> the layout it is made in, per choice of its maker
        self.maker: dict[str, int] = {}
        self.as_it_lies: dict[str, range] = {}  # parameter -> choices in which it is never converted
        self.readers = graph.consumers()
        self.first_keeper = _first_keepers(graph, profile)

    def add(self, name: str, costs: list[float], usages: list[float]) -> int:
        self.index[name] = len(self.nodes)
        self.nodes.append(Node(name, tuple(costs), tuple(usages)))
        return self.index[name]

    def source(self, value: Value, layouts: tuple[Layout, ...]) -> None:
        """An input or a buffer."""
        stored = [float(local_bytes(self.graph, value.name, layout, self.sizes)) for layout in layouts]
        self.maker[value.name] = self.add(value.name, [0.0] * len(layouts), stored)
        self.layouts[value.name] = layouts

    def parameter(self, value: Value, layouts: tuple[Layout, ...]) -> None:
        """Each split layout is there twice: read only as it lies, and gathered, which keeps a whole copy as well."""
        kept = any(value.name in cost.saves for cost in self.profile.ops.values())
        costs, usages = [], []
        choices = (*layouts, *layouts[1:])
        for number, layout in enumerate(choices):
            stored = local_bytes(self.graph, value.name, layout, self.sizes)
            gathered = value.type.nbytes if number >= len(layouts) and kept else 0
            costs.append(optimizer_seconds(stored, self.copies, self.cluster.compute))
            usages.append(resident_bytes(stored, self.copies) + gathered)
        self.maker[value.name] = self.add(value.name, costs, usages)
        self.layouts[value.name] = choices
        self.as_it_lies[value.name] = range(1, len(layouts))

    def op(self, op: Op, options: tuple[Strategy, ...]) -> None:
        cost = self.profile.ops[op.name]
        compute = self.cluster.compute
        seconds = [op_seconds(self.graph, op.name, cost, s, compute, self.sizes).total for s in options]
        node = self.add(op.name, seconds, [self._kept(op, s) for s in options])
        for position, output in enumerate(op.outputs):
            self.maker[output] = node
            self.layouts[output] = tuple(s.outputs[position] for s in options)

    def _kept(self, op: Op, strategy: Strategy) -> float:
        """Bytes the op keeps of its own: private ones, its outputs, and inputs that no other op reads."""
        cost = self.profile.ops[op.name]
        layouts = (*strategy.inputs, *strategy.outputs)
        kept = cost.extra_saved / max((layout.pieces(self.sizes) for layout in layouts), default=1)
        kept += self._common_bytes(op, strategy)
        tensors = [*zip(op.outputs, strategy.outputs, strict=True), *zip(op.inputs, strategy.inputs, strict=True)]
        for name, layout in dict(tensors).items():
            if name in cost.saves and self._answers_for(op, name):
                kept += local_bytes(self.graph, name, layout, self.sizes)
        return kept

    def _common_bytes(self, op: Op, strategy: Strategy) -> float:
        """What many links read is there until its op is undone, with its gradient."""
        total = 0.0
        for name, layout in zip(op.outputs, strategy.outputs, strict=True):
            if name in self.graph.common:
                own = self.graph.values[self.profile.storage[name]].role is Role.RESULT
                total += local_bytes(self.graph, name, layout, self.sizes) * (own + self.graph.values[name].grad)
        return total

    def _answers_for(self, op: Op, name: str) -> bool:
        """One op answers for each piece of memory that backward needs: the first that keeps it."""
        return self.first_keeper.get(self.profile.storage[name]) == op.name

    def connect(self, value: Value, readers: list[tuple[Op, tuple[Strategy, ...]]]) -> None:
        """Edges from the maker of a value to its readers, through copies where there are several."""
        wanted = [[_wanted(op, s, value.name) for s in options] for op, options in readers]
        made = self.layouts[value.name]
        if len(readers) == 1 and all(len(w) == 1 for w in wanted[0]):
            costs = tuple(tuple(self.made(value, n, next(iter(w))) for w in wanted[0]) for n in range(len(made)))
            self.edges.append(Edge(self.maker[value.name], self.index[readers[0][0].name], costs))
            return
        layouts = sorted({layout for reader in wanted for w in reader for layout in w})
        for layout in layouts:
            copy = self.add(f"{value.name}@{layout} for {readers[0][0].name}", [0.0, 0.0], [0.0, 0.0])
            costs = tuple((0.0, self.made(value, n, layout)) for n in range(len(made)))
            self.edges.append(Edge(self.maker[value.name], copy, costs))
            for (op, _), reader in zip(readers, wanted, strict=True):
                forbidden = tuple(FORBIDDEN if layout in w else 0.0 for w in reader)
                if any(forbidden):
                    self.edges.append(Edge(copy, self.index[op.name], (forbidden, (0.0,) * len(reader))))

    def made(self, value: Value, choice: int, want: Layout) -> float:
        """Seconds to read a value in a layout, given its maker's choice."""
        have = self.layouts[value.name][choice]
        if value.role is Role.PARAMETER and have.states[0].kind == "S":
            gathered = choice not in self.as_it_lies[value.name]
            alone = len(self.readers[value.name]) == 1
            if (have != want and not gathered) or (gathered and alone and want.states[0].kind == "S"):
                return FORBIDDEN  # the other form of the same layout is for that
        return self.convert(value, have, want)

    def convert(self, value: Value, have: Layout, want: Layout) -> float:
        if have == want or (not value.grad and {have.states[0], want.states[0]} == {R, B}):
            return 0.0
        if value.role is Role.PARAMETER and (have.states[0], want.states[0]) == (R, B):
            return gradient_sum_seconds(value.type.nbytes, self.axis)
        return self.paths.cheapest(have, want, value.type.shape, value.type.nbytes, value.grad).seconds.total


def _first_keepers(graph: OpGraph, profile: Profile) -> dict[str, str]:
    """Each activation's memory that backward needs, beside the common values -> the first op that keeps it."""
    keepers: dict[str, str] = {}
    common = {profile.storage[name] for name in graph.common}
    for op in graph.ops:
        for name in profile.ops[op.name].saves:
            root = profile.storage[name]
            if graph.values[root].role is Role.RESULT and root not in common:
                keepers.setdefault(root, op.name)
    return keepers


def _sharing(readers: list[Op], links: dict[str, int]) -> list[list[Op]]:
    """The readers that share the copies of a value: those in the same link; all, where no links are given."""
    groups: dict[int | None, list[Op]] = {}
    for op in readers:
        groups.setdefault(links.get(op.name), []).append(op)
    return list(groups.values())


def _wanted(op: Op, strategy: Strategy, value: str) -> set[Layout]:
    return {layout for name, layout in zip(op.inputs, strategy.inputs, strict=True) if name == value}


def build(graph: OpGraph, profile: Profile, cluster: Cluster, optimizer_copies: float) -> tuple[Problem, Choices]:
    builder = _Builder(graph, profile, cluster, optimizer_copies)
    size = cluster.axes[0].size
    options = {op.name: strategies(rule_of(op), view_op(graph, op), size) for op in graph.ops}
    for value in graph.values.values():
        if value.role is Role.PARAMETER:
            read = [(op, options[op.name]) for op in builder.readers[value.name]]
            builder.parameter(value, (*_source_layouts(value, size), *_factored(value, read)))
        elif value.role is not Role.RESULT:
            builder.source(value, _source_layouts(value, size))
    for op in graph.ops:
        builder.op(op, options[op.name])
    links = {name: number for number, link in enumerate(graph.chain) for name in link.ops}
    for value in graph.values.values():
        shared = value.role is Role.PARAMETER
        for readers in _sharing(builder.readers[value.name], {} if shared else links):
            builder.connect(value, [(op, options[op.name]) for op in readers])
    _want_loss(builder, graph)
    problem = Problem(tuple(builder.nodes), tuple(builder.edges))
    storage = {v.name: builder.layouts[v.name] for v in graph.of_role(Role.PARAMETER)}
    inputs = {v.name: builder.layouts[v.name] for v in graph.of_role(Role.INPUT)}
    return problem, Choices(storage, inputs, options, builder.index)


def _source_layouts(value: Value, size: int) -> tuple[Layout, ...]:
    """Replicated, or split on a dim that divides; a buffer is always whole."""
    dims = range(len(value.type.shape)) if value.role is not Role.BUFFER and size > 1 else ()
    return (Layout((R,)), *(Layout((S(d),)) for d in dims if value.type.shape[d] and value.type.shape[d] % size == 0))


def _factored(value: Value, readers: list[tuple[Op, tuple[Strategy, ...]]]) -> list[Layout]:
    """Splits of a factor of a dim (a fused qkv weight, head by head) in which an op reads the parameter."""
    read = {layout for op, options in readers for s in options for layout in _wanted(op, s, value.name)}
    return sorted(layout for layout in read if layout.states[0].kind == "S" and layout.states[0].outer > 1)


def _want_loss(builder: _Builder, graph: OpGraph) -> None:
    """The step ends with the loss on every rank."""
    loss = graph.values[graph.output]
    end = builder.add("loss", [0.0], [0.0])
    costs = tuple((builder.convert(loss, have, Layout((R,))),) for have in builder.layouts[loss.name])
    builder.edges.append(Edge(builder.maker[loss.name], end, costs))


def to_sharding(graph: OpGraph, choices: Choices, picked: tuple[int, ...]) -> Sharding:
    return Sharding(
        strategies={name: options[picked[choices.index[name]]] for name, options in choices.ops.items()},
        storage={
            graph.values[name].origin: layouts[picked[choices.index[name]]] for name, layouts in choices.storage.items()
        },
        inputs={name: layouts[picked[choices.index[name]]] for name, layouts in choices.inputs.items()},
    )
