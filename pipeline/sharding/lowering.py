"""From a graph and a sharding to the sharded program: the same for what is priced and for what is printed.

A tensor that several ops read in one layout is converted once, just before the first of them, through the layouts that
the sharding names; what lies on the way to another layout is not made a second time. Every link makes its own copies,
so that a recompute region repeats what belongs to it and nothing crosses a cut but the activation and the common
values; these cross it in the layout they are written in, and are converted by each link that reads them. An activation
that is written as partial sums, and read in one layout, is brought to that by the link that writes it: a link ends just
after a collective, which a region that begins with the next one does not repeat.

On an axis where a parameter is stored `R` and an op reads it as `B`, the step sums its gradient once, in buckets (this
is DDP), and the parameter counts as `B`: what ops that read it otherwise need there is local (`B -> R` masks the
gradient, `B -> S` takes a shard). What is left of the way to its readers is converted. A parameter that several links
read in a layout it is not stored in is converted once, before the chain; one that is regathered (ZeRO-3) by each link,
which lets go of the copy. A link begins with the parameters that it gathers, so that those of one axis are one
collective.

A step may run the chain on several micro-batches. What is converted before it is then made once for all of them, also
for a layout that one of the links alone reads; a parameter that belongs to one link is converted with it each time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

from shardwright.pipeline.ir.cluster import Cluster
from shardwright.pipeline.ir.graph import Link, OpGraph, Role, Value
from shardwright.pipeline.ir.layout import B, Layout, P, R, replicated
from shardwright.pipeline.ir.plan import Sharding, path_name
from shardwright.pipeline.ir.program import Call, Convert, Program, Step, Tensor
from shardwright.pipeline.sharding.conversions import gathered_share
from shardwright.pipeline.sharding.paths import Paths


def lower(graph: OpGraph, sharding: Sharding, micro_batches: int = 1, *, to_loss: bool = True) -> Program:
    """`to_loss` is false for a partition of a pipeline but the last: its output leaves as the next one reads it."""
    home, written = home_layouts(graph, sharding), written_layouts(graph, sharding)
    shared = _shared(graph, sharding, home, by_value=micro_batches > 1)
    leaves = home[graph.output]
    output = Tensor(graph.output, replicated(len(leaves.states)) if to_loss else leaves)
    prologue = _steps(graph, sharding, graph.prologue, home, {})
    links = []
    for index, link in enumerate(graph.chain):
        copies = {c.target: c.target for c in shared}
        made = Tensor(link.output, written.get(link.output, home[link.output]))
        end = output if index == len(graph.chain) - 1 else Tensor(link.output, home[link.output])
        steps = _steps(graph, sharding, link.ops, {**home, link.output: made.layout}, copies)
        if end not in copies:
            steps += _convert(graph, sharding, made, end, copies)
        links.append(tuple(_gathers_first(graph, steps)))
    reduced = _reduced(graph, sharding)
    return Program(tuple(prologue), tuple(shared), tuple(links), reduced, output, micro_batches)


def home_layouts(graph: OpGraph, sharding: Sharding) -> dict[str, Layout]:
    """The layout in which each value is born: fed, written by its op, or stored; `B` where the step sums a gradient.

    Of an activation between links: in which it crosses from one to the other.
    """
    axes = len(next(iter(sharding.strategies.values())).outputs[0].states)
    reduced = _reduced(graph, sharding)
    home = {}
    for value in graph.values.values():
        if value.role is Role.PARAMETER:
            stored, summed = sharding.storage[value.origin].states, reduced.get(value.name, ())
            home[value.name] = Layout(tuple(B if axis in summed else state for axis, state in enumerate(stored)))
        elif value.role in (Role.INPUT, Role.ENTERS):
            home[value.name] = sharding.inputs[value.name]
        elif value.role is Role.BUFFER:
            home[value.name] = replicated(axes)
    home |= written_layouts(graph, sharding)
    for link, reader in pairwise(graph.chain):
        home[link.output] = _crossing(graph, sharding, home[link.output], link.output, reader)
    if graph.output in sharding.inputs:  # of a partition: as the next one reads it
        home[graph.output] = sharding.inputs[graph.output]
    return home


def written_layouts(graph: OpGraph, sharding: Sharding) -> dict[str, Layout]:
    """The layouts in which ops write."""
    return {n: s for op in graph.ops for n, s in zip(op.outputs, sharding.strategies[op.name].outputs, strict=True)}


def _crossing(graph: OpGraph, sharding: Sharding, written: Layout, name: str, reader: Link) -> Layout:
    """Of an activation between two links: partial sums are summed before they cross, where they are read in one way."""
    ops = [graph.op(op) for op in reader.ops]
    pairs = (pair for op in ops for pair in zip(op.inputs, sharding.strategies[op.name].inputs, strict=True))
    wanted = {layout for value, layout in pairs if value == name}
    if P not in written.states or len(wanted) != 1 or P in next(iter(wanted)).states:
        return written
    return wanted.pop()


def uses(graph: OpGraph, sharding: Sharding) -> dict[str, set[Layout]]:
    """The layouts in which each value is read."""
    found: dict[str, set[Layout]] = defaultdict(set)
    for op in graph.ops:
        for name, layout in zip(op.inputs, sharding.strategies[op.name].inputs, strict=True):
            found[name].add(layout)
    return found


def state_layouts(graph: OpGraph, sharding: Sharding) -> dict[str, Layout]:
    """How the optimizer's state of each parameter lies; one that no op reads has no gradient and is never updated."""
    read = uses(graph, sharding)
    return {
        value.name: sharding.state.get(value.origin, stored) if read[value.name] else stored
        for value in graph.of_role(Role.PARAMETER)
        for stored in (sharding.storage[value.origin],)
    }


def _reduced(graph: OpGraph, sharding: Sharding) -> dict[str, tuple[int, ...]]:
    read = uses(graph, sharding)
    found = {}
    for value in graph.of_role(Role.PARAMETER):
        wanted, stored = read[value.name], sharding.storage[value.origin].states
        summed = [a for a, state in enumerate(stored) if state == R and any(layout.states[a] == B for layout in wanted)]
        if summed:
            found[value.name] = tuple(summed)
    return found


def _shared(graph: OpGraph, sharding: Sharding, home: dict[str, Layout], by_value: bool) -> list[Convert]:
    """A parameter that more than one link reads in another layout is converted once, before the chain.

    By value: one that more than one link reads in whatever layouts.
    """
    readers: dict[Tensor, set[int]] = defaultdict(set)
    links_of: dict[str, set[int]] = defaultdict(set)
    for index, link in enumerate(graph.chain):
        for op in (graph.op(name) for name in link.ops):
            for name, layout in zip(op.inputs, sharding.strategies[op.name].inputs, strict=True):
                links_of[name].add(index)
                if graph.values[name].role is Role.PARAMETER and layout != home[name]:
                    readers[Tensor(name, layout)].add(index)
    copies: dict[Tensor, Tensor] = {}
    several = [
        tensor
        for tensor, links in readers.items()
        if len(links_of[tensor.value] if by_value else links) > 1
        and graph.values[tensor.value].origin not in sharding.regathered
    ]
    return [s for t in several for s in _convert(graph, sharding, Tensor(t.value, home[t.value]), t, copies)]


def _steps(
    graph: OpGraph, sharding: Sharding, ops: Iterable[str], home: dict[str, Layout], copies: dict[Tensor, Tensor]
) -> list[Step]:
    steps: list[Step] = []
    for op in (graph.op(name) for name in ops):
        strategy = sharding.strategies[op.name]
        inputs = []
        for name, layout in zip(op.inputs, strategy.inputs, strict=True):
            wanted = Tensor(name, layout)
            if wanted not in copies:
                own = Tensor(name, home[name])
                same = _same(graph.values[name], own.layout, layout)
                steps += [] if same else _convert(graph, sharding, own, wanted, copies)
                copies[wanted] = own if same else wanted
            inputs.append(copies[wanted])
        outputs = tuple(Tensor(n, s) for n, s in zip(op.outputs, strategy.outputs, strict=True))
        steps.append(Call(op.name, tuple(inputs), outputs))
    return steps


def _gathers_first(graph: OpGraph, steps: list[Step]) -> list[Step]:
    """Parameters that are gathered before all else: of these the first step of every way before the second."""
    converts = [step for step in steps if isinstance(step, Convert)]
    parameters = [step for step in converts if graph.values[step.source.value].role is Role.PARAMETER]
    gathered = {step.source.value for step in parameters if step.again or _gathered_axes(step)}
    first = [step for step in parameters if step.source.value in gathered]
    depth: dict[Tensor, int] = {}
    for step in first:
        depth[step.target] = depth.get(step.source, -1) + 1

    def place(step: Convert) -> tuple[bool, int, tuple[int, ...], str, str]:
        """Those of one axis next to each other."""
        return step.again, depth[step.target], _gathered_axes(step), str(step.source.layout), str(step.target.layout)

    first.sort(key=place)
    return [*first, *(step for step in steps if step not in first)]


def _gathered_axes(step: Convert) -> tuple[int, ...]:
    """Where it is S -> B or S -> R."""
    pairs = enumerate(zip(step.source.layout.states, step.target.layout.states, strict=True))
    return tuple(axis for axis, (before, after) in pairs if before.kind == "S" and after in (B, R))


def _same(value: Value, have: Layout, want: Layout) -> bool:
    """Whether nothing has to be done: equal, or different only in the gradient that the value does not have."""
    if have == want:
        return True
    return not value.grad and all(h == w or {h, w} == {R, B} for h, w in zip(have.states, want.states, strict=True))


def _convert(
    graph: OpGraph, sharding: Sharding, source: Tensor, target: Tensor, copies: dict[Tensor, Tensor]
) -> list[Convert]:
    """The steps from one layout to another, after the last of its layouts that is there already."""
    if source == target:
        return []
    between = sharding.between(source.value, source.layout, target.layout)
    way = [source, *(Tensor(source.value, layout) for layout in between), target]
    there = max(i for i, tensor in enumerate(way) if i == 0 or copies.get(tensor) == tensor)
    copies |= {tensor: tensor for tensor in way[there + 1 :]}
    value = graph.values[source.value]
    again = value.role is Role.PARAMETER and value.origin in sharding.regathered
    return [Convert(before, after, again) for before, after in pairwise(way[there:])]


def with_paths(graph: OpGraph, sharding: Sharding, cluster: Cluster) -> Sharding:
    """The sharding with the cheapest path for each of its conversions that takes more than one step."""
    paths: dict[float, Paths] = {}
    found = {}
    for step in lower(graph, replace(sharding, paths={})).conversions():
        value, ends = graph.values[step.source.value], (step.source.layout, step.target.layout)
        share = gathered_share(graph, value.name)
        own = paths.setdefault(share, Paths(cluster.axes, cluster.compute, share))
        path = own.cheapest(*ends, value.type.shape, value.type.nbytes, value.grad)
        if len(path.layouts) > 2:
            found[path_name(value.name, *ends)] = path.layouts[1:-1]
    return replace(sharding, paths=found)
