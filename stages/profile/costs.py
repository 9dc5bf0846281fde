"""What each op costs, read from the links that were run: equal links cost the same, op by op."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from pipeline.ir.graph import Op, OpGraph
from pipeline.ir.profile import Held, Joined, Kernel, Kernels, LinkKernels, OpCost
from stages.profile.link import LinkRun
from stages.profile.step import StepProfile
from stages.profile.symbolic import Storage


@dataclass(frozen=True)
class _Cost:
    """An op's cost, with the values it keeps as places among its inputs and outputs."""

    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    keeps: tuple[int, ...]
    extra_saved: int
    temporary_forward: int
    temporary_backward: int

    def of(self, op: Op) -> OpCost:
        tensors = (*op.inputs, *op.outputs)
        return OpCost(
            flops_forward=sum(k.flops for k in self.forward),
            flops_backward=sum(k.flops for k in self.backward),
            bytes_forward=sum(k.read + k.written for k in self.forward),
            bytes_backward=sum(k.read + k.written for k in self.backward),
            saves=tuple(dict.fromkeys(tensors[i] for i in self.keeps)),
            extra_saved=self.extra_saved,
            free=not self.forward,
            kernels_forward=len(self.forward),
            kernels_backward=len(self.backward),
            temporary_forward=self.temporary_forward,
            temporary_backward=self.temporary_backward,
        )


def op_costs(graph: OpGraph, step: StepProfile) -> dict[str, OpCost]:
    costs: dict[str, OpCost] = {}
    for name in graph.prologue:
        kernels = tuple(k for k in step.prologue if k.op == name)
        costs[name] = _Cost(kernels, (), (), 0, 0, 0).of(graph.op(name))
    known: dict[int, list[_Cost]] = {}
    for link, run in zip(graph.chain, step.runs, strict=True):
        if id(run) not in known:  # this is the link that was run
            known[id(run)] = _link_costs(link.ops, run)
        costs |= {name: cost.of(graph.op(name)) for name, cost in zip(link.ops, known[id(run)], strict=True)}
    return costs


def _link_costs(ops: tuple[str, ...], run: LinkRun) -> list[_Cost]:
    counted: set[int] = set()  # private memory that an op before has answered for
    costs = []
    for name in ops:
        places, saved = run.places[name], set(run.saved.get(name, ()))
        keeps = tuple(i for i, place in enumerate(places) if place is not None and place in saved)
        private = {s for s in saved if isinstance(s, int) and s not in places and not run.storages[s].value} - counted
        counted |= private
        costs.append(
            _Cost(
                forward=tuple(k for k in run.forward if k.op == name),
                backward=tuple(k for k in run.backward if k.op == name),
                keeps=keeps,
                extra_saved=sum(run.storages[s].size for s in private),
                temporary_forward=_temporary(run.forward, 0, run.storages, name, ()),
                temporary_backward=_temporary(run.backward, len(run.forward), run.storages, name, private),
            )
        )
    return costs


def _temporary(
    kernels: tuple[Kernel, ...], start: int, storages: tuple[Storage, ...], op: str, kept: Collection[int]
) -> int:
    """The most of its own making that is alive during an op's kernels, less what is left after the last of them, and
    less what has gone by then of what it `kept` for backward.

    A value of the graph is no temporary: the last one of a link is let go only because the link is run alone.
    """
    moments = [start + number for number, kernel in enumerate(kernels) if kernel.op == op]
    own = [s for s in storages if s.op == op and not s.value and start <= s.born < start + len(kernels)]
    if not moments or not own:
        return 0
    left = _alive(own, lambda s: s.died is None or s.died > moments[-1] + 1)

    def held_at(moment: int) -> int:
        gone = _alive((storages[n] for n in kept), lambda s: s.died is not None and s.died <= moment)
        return _alive(own, lambda s: s.born <= moment and (s.died is None or s.died > moment)) - gone

    return max(0, max(map(held_at, moments)) - left)


def _alive(storages: Iterable[Storage], is_alive: Callable[[Storage], bool]) -> int:
    return sum(s.size for s in storages if is_alive(s))


def all_kernels(graph: OpGraph, step: StepProfile) -> Kernels:
    places: dict[int, int] = {}
    links: list[LinkKernels] = []
    for link, run in zip(graph.chain, step.runs, strict=True):
        if id(run) not in places:
            places[id(run)] = len(links)
            links.append(_link_kernels({name: len(graph.op(name).outputs) for name in link.ops}, run))
    chain = tuple(places[id(run)] for run in step.runs)
    return Kernels(step.prologue, tuple(links), chain, step.optimizer.kernels, *_joined(graph, step))


def _joined(graph: OpGraph, step: StepProfile) -> tuple[tuple[Joined, ...], tuple[LinkKernels, ...]]:
    places: dict[int, int] = {}
    runs: list[LinkKernels] = []
    for group in step.joined:
        if id(group.run) not in places:
            places[id(group.run)] = len(runs)
            runs.append(_link_kernels({name: len(graph.op(name).outputs) for name in group.ops}, group.run))
    return tuple(Joined(group.first, group.last, places[id(group.run)]) for group in step.joined), tuple(runs)


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
        held=tuple(
            Held(s.size, s.born, s.died, s.op, s.value, s.gradient) for s in (run.storages[place] for place in own)
        ),
        writes=numbers(run.writes),
        saved={op: tuple(n for n in found if n is not None) for op, found in kept.items()},
        results={op: numbers(run.places[op][-count:]) for op, count in outputs.items()},
        dropped_peak=run.dropped_peak,
    )


def value_types(graph: OpGraph, step: StepProfile) -> dict[str, str]:
    """The dtypes of values that autocast makes others than the graph says."""
    found: dict[str, str] = {}
    first: dict[int, tuple[str, ...]] = {}
    for link, run in zip(graph.chain, step.runs, strict=True):
        for there, here in zip(first.setdefault(id(run), link.ops), link.ops, strict=True):
            found |= zip(graph.op(here).outputs, run.types[there], strict=True)
    return {name: dtype for name, dtype in found.items() if dtype != graph.values[name].type.dtype}
