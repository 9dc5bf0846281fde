"""What each op costs, read from the links that were run: equal links cost the same, op by op."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from shardwright.pipeline.ir.graph import OpGraph
from shardwright.pipeline.ir.profile import Held, Joined, Kernel, Kernels, LinkKernels, OpCost
from shardwright.stages.profile.link import LinkRun, ops_by_run
from shardwright.stages.profile.step import StepProfile
from shardwright.stages.profile.symbolic import Storage


def op_costs(graph: OpGraph, step: StepProfile) -> dict[str, OpCost]:
    costs = {name: _cost([k for k in step.prologue if k.op == name], []) for name in graph.prologue}
    for link, run, known in zip(graph.chain, step.runs, ops_by_run(graph, step.runs), strict=True):
        if link.ops[0] in known:  # this is the link that was run
            costs |= _link_costs(graph, link.ops, run)
        for there, here in known.items():
            one, other = graph.op(there), graph.op(here)
            names = dict(zip((*one.inputs, *one.outputs), (*other.inputs, *other.outputs), strict=True))
            costs[here] = replace(costs[there], saves=tuple(names[name] for name in costs[there].saves))
    return costs


def _cost(
    forward: list[Kernel], backward: list[Kernel], saves: tuple[str, ...] = (), extra_saved: int = 0, **temporary: int
) -> OpCost:
    return OpCost(
        flops_forward=sum(k.flops for k in forward),
        flops_backward=sum(k.flops for k in backward),
        bytes_forward=sum(k.read + k.written for k in forward),
        bytes_backward=sum(k.read + k.written for k in backward),
        saves=saves,
        extra_saved=extra_saved,
        free=not forward,
        kernels_forward=len(forward),
        kernels_backward=len(backward),
        **temporary,
    )


def _link_costs(graph: OpGraph, ops: tuple[str, ...], run: LinkRun) -> dict[str, OpCost]:
    counted: set[int] = set()  # private memory that an op before has answered for
    costs = {}
    for name in ops:
        op, places, saved = graph.op(name), run.places[name], set(run.saved.get(name, ()))
        tensors = zip((*op.inputs, *op.outputs), places, strict=True)
        private = {s for s in saved if isinstance(s, int) and s not in places and not run.storages[s].value} - counted
        counted |= private
        costs[name] = _cost(
            [k for k in run.forward if k.op == name],
            [k for k in run.backward if k.op == name],
            saves=tuple(dict.fromkeys(tensor for tensor, place in tensors if place is not None and place in saved)),
            extra_saved=sum(run.storages[s].size for s in private),
            temporary_forward=_temporary(run.forward, 0, run.storages, name, ()),
            temporary_backward=_temporary(run.backward, len(run.forward), run.storages, name, private),
        )
    return costs


def _temporary(
    kernels: Sequence[Kernel], start: int, storages: Sequence[Storage], op: str, kept: Collection[int]
) -> int:
    """The most of its own making that is alive during an op's kernels, less what is left after the last of them, and
    less what has gone by then of what it `kept` for backward.

    A value of the graph is no temporary: the last one of a link is let go only because the link is run alone.
    """
    moments = [start + number for number, kernel in enumerate(kernels) if kernel.op == op]
    own = [s for s in storages if s.op == op and not s.value and start <= s.born < start + len(kernels)]
    if not moments or not own:
        return 0

    def ends(storage: Storage) -> float:
        return math.inf if storage.died is None else storage.died

    def held_at(moment: int) -> int:
        gone = sum(storages[n].size for n in kept if ends(storages[n]) <= moment)
        return sum(s.size for s in own if s.born <= moment < ends(s)) - gone

    left = sum(s.size for s in own if ends(s) > moments[-1] + 1)
    return max(0, max(map(held_at, moments)) - left)


def all_kernels(graph: OpGraph, step: StepProfile) -> Kernels:
    links, chain = _distinct(graph, [(number, number, run) for number, run in enumerate(step.runs)])
    runs, places = _distinct(graph, step.joined)
    joined = tuple(Joined(first, last, place) for (first, last, _), place in zip(step.joined, places, strict=True))
    return Kernels(step.prologue, links, chain, step.optimizer.kernels, joined, runs)


def _distinct(
    graph: OpGraph, spans: Sequence[tuple[int, int, LinkRun]]
) -> tuple[tuple[LinkKernels, ...], tuple[int, ...]]:
    """The kernels of each run once, and where among them each span of links has its own."""
    found: dict[int, LinkKernels] = {}
    for first, last, run in spans:
        if id(run) not in found:
            ops = [graph.op(name) for link in graph.chain[first : last + 1] for name in link.ops]
            found[id(run)] = _link_kernels({op.name: len(op.outputs) for op in ops}, run)
    places = {key: place for place, key in enumerate(found)}
    return tuple(found.values()), tuple(places[id(run)] for _, _, run in spans)


def _link_kernels(outputs: dict[str, int], run: LinkRun) -> LinkKernels:
    """`outputs` has the number of each op's; what enters the link is not its own and has no number here."""
    own = [place for place in range(len(run.storages)) if place not in run.reads]
    number = {place: n for n, place in enumerate(own)}

    def numbers(places: Iterable[int | str | None]) -> tuple[int | None, ...]:
        return tuple(number.get(place) if isinstance(place, int) else None for place in places)

    kept = {op: numbers(places) for op, places in run.saved.items()}
    return LinkKernels(
        forward=run.forward,
        backward=run.backward,
        held=tuple(Held(s.size, s.born, s.died, s.op, s.value, s.gradient) for s in (run.storages[i] for i in own)),
        writes=numbers(run.writes),
        saved={op: tuple(n for n in found if n is not None) for op, found in kept.items()},
        results={op: numbers(run.places[op][-count:]) for op, count in outputs.items()},
        dropped_peak=run.dropped_peak,
    )


def value_types(graph: OpGraph, step: StepProfile) -> dict[str, str]:
    """The dtypes of values that autocast makes others than the graph says."""
    found: dict[str, str] = {}
    for run, known in zip(step.runs, ops_by_run(graph, step.runs), strict=True):
        for there, here in known.items():
            found |= zip(graph.op(here).outputs, run.types[there], strict=True)
    return {name: dtype for name, dtype in found.items() if dtype != graph.values[name].type.dtype}
