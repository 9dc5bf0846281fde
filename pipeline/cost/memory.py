"""Bytes that a link of the sharded program holds: for backward, at its forward peak and at its backward peak.

Two tensors share memory where one is a view of the other, or where a conversion does nothing in the forward pass.
Parameters, inputs and results of the prologue are resident and not counted here; a gathered copy of a parameter is. One
that is made again in backward is alive while the link runs forward, and in backward from the first op that needs it
until its gradient is there; in between nothing of it is kept. Copies that are gathered together are made again so,
when the first of them is needed, and each goes with the last op that needs it. What the collective receives lies beside
them while they are made, and what it sends beside their gradients when these are summed.

A common value (an activation that later links read) and its gradient are counted once, on their own, by the link that
writes it, and nowhere else: not in what any link keeps, nor in its peaks. They are alive from the forward of their
link to its backward; counted as if they were there all the time, this is an upper bound. It holds under recompute too:
a region that writes the value again does so when every later reader is undone and the first copy gone.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from pipeline.ir.graph import Link, OpGraph
from pipeline.ir.layout import Layout
from pipeline.ir.plan import Sharding
from pipeline.ir.profile import Profile
from pipeline.ir.program import GATHERED_ALONE, Call, Convert, Step, Tensor
from pipeline.rates.compute import local_bytes
from pipeline.sharding.conversions import TABLE, conversion_of, gathered_beside, gathered_together


@dataclass(frozen=True)
class LinkMemory:
    """`kept` includes the output, not the input. Peaks count neither the link's input nor its output's gradient."""

    output: int
    kept: int
    forward_peak: int  # when everything backward needs is kept
    dropped_peak: int  # when nothing is kept but the output
    backward_extra: int  # gradients alive inside the link beyond `kept` and the gradients at its two ends
    common: int  # the common values that it writes, and their gradients


@dataclass(frozen=True)
class StepMemory:
    """What one step of a link writes and keeps, each piece of memory by its owner."""

    results: dict[Tensor, int]
    kept: dict[Tensor, int]
    private: dict[Tensor, int]  # of what it keeps: neither given to it nor its result


@dataclass(frozen=True)
class LinkParts:
    whole: LinkMemory
    steps: tuple[StepMemory, ...]
    output: Tensor  # the owner of its memory
    kept: dict[Tensor, int]  # for the link's own backward


class _Storage:
    """Which memory each tensor of a link lies in, and how large each piece of memory is."""

    def __init__(self, graph: OpGraph, profile: Profile, sizes: tuple[int, ...]) -> None:
        self.graph, self.profile, self.sizes = graph, profile, sizes
        self.owner: dict[Tensor, Tensor] = {}
        self.bytes: dict[Tensor, int] = {}  # of the memory that this link allocates

    def add(self, step: Step) -> None:
        if isinstance(step, Convert):
            if _moves_bytes(step, self.sizes):
                self._allocate(step.target)
            else:
                self.owner[step.target] = self.find(step.source)
            return
        for output in step.outputs:
            shared = self.profile.storage[output.value] != output.value
            if shared and step.inputs:
                self.owner[output] = self.find(step.inputs[0])
            else:
                self._allocate(output)

    def _allocate(self, tensor: Tensor) -> None:
        self.owner[tensor] = tensor
        self.bytes[tensor] = local_bytes(self.graph, tensor.value, tensor.layout, self.sizes)

    def find(self, tensor: Tensor) -> Tensor:
        return self.owner.get(tensor, tensor)

    def size(self, tensor: Tensor) -> int:
        return self.bytes.get(self.find(tensor), 0)


def _moves_bytes(step: Convert, sizes: tuple[int, ...]) -> bool:
    return conversion_of(step.source.layout, step.target.layout, sizes).forward != ""


def link_memory(
    graph: OpGraph,
    profile: Profile,
    sharding: Sharding,
    link: Link,
    steps: tuple[Step, ...],
    output: Tensor,
    sizes: tuple[int, ...],
) -> LinkMemory:
    return link_parts(graph, profile, sharding, link, steps, output, sizes).whole


def link_parts(
    graph: OpGraph,
    profile: Profile,
    sharding: Sharding,
    link: Link,
    steps: tuple[Step, ...],
    output: Tensor,
    sizes: tuple[int, ...],
    beside: Container[str] = (),
) -> LinkParts:
    """`beside` are parameters whose gradients have a place already, to which what backward makes is added."""
    storage = _Storage(graph, profile, sizes)
    for step in steps:
        storage.add(step)
    needs = [_temporaries(profile, sharding, step, sizes) for step in steps]
    common = [t for step in steps if isinstance(step, Call) for t in step.outputs if t.value in link.common]
    common_bytes = _common_bytes(graph, common, storage, link.input)
    exit_ = storage.find(output)
    for tensor in common:
        if (owner := storage.find(tensor)) != exit_:  # where the output is a view of it, Rotor counts that memory too
            storage.bytes.pop(owner, None)
    kept_by = [_kept(graph, profile, sharding, step, storage, sizes) for step in steps]
    again = {s.target for s in steps if isinstance(s, Convert) and s.again}
    own = {owner: size for held in kept_by for owner, size in held.items() if owner not in again}
    kept = {exit_: storage.size(exit_), **own}
    most = max((need.forward for need in needs), default=0)
    together = _together(graph, steps, sizes)
    gathered = _gather_peak(steps, storage, together)
    whole = LinkMemory(
        output=storage.size(exit_),
        kept=sum(kept.values()),
        forward_peak=max(_forward_peak(steps, storage, kept) + most, gathered),
        dropped_peak=max(_forward_peak(steps, storage, {exit_: storage.size(exit_)}) + most, gathered),
        backward_extra=_backward_extra(
            graph, steps, storage, kept_by, kept, output, needs, graph.reads_common(link), together, beside
        ),
        common=common_bytes,
    )
    by_step = (_step_memory(step, held, storage) for step, held in zip(steps, kept_by, strict=True))
    return LinkParts(whole, tuple(by_step), exit_, own)


def _step_memory(step: Step, kept: dict[Tensor, int], storage: _Storage) -> StepMemory:
    results = {storage.find(tensor): storage.size(tensor) for tensor in _written(step) if storage.size(tensor)}
    private = {owner: size for owner, size in kept.items() if owner not in storage.bytes}
    return StepMemory(results, kept, private)


def _common_bytes(graph: OpGraph, common: list[Tensor], storage: _Storage, entry: str | None) -> int:
    """Each piece of memory once; a view of a parameter, or of another link's common value, needs none."""
    total = sum(storage.size(owner) for owner in dict.fromkeys(storage.find(t) for t in common))
    for tensor in common:
        own = local_bytes(graph, tensor.value, tensor.layout, storage.sizes)
        of_entry = storage.find(tensor).value == entry and not storage.size(tensor)
        total += own if of_entry else 0  # the link before lets go of that memory, a view of it is still there
        total += own if graph.values[tensor.value].grad else 0
    return total


def _kept(
    graph: OpGraph, profile: Profile, sharding: Sharding, step: Step, storage: _Storage, sizes: tuple[int, ...]
) -> dict[Tensor, int]:
    """The memory that this step keeps for backward, by owner."""
    if isinstance(step, Convert):
        return {}
    cost = profile.ops[step.op]
    kept = {}
    for tensor in (*step.inputs, *step.outputs):
        if tensor.value in cost.saves and storage.size(tensor):
            kept[storage.find(tensor)] = storage.size(tensor)
    if cost.extra_saved:
        private = Tensor(f"{step.op}:extra", Layout(()))
        kept[private] = cost.extra_saved // _pieces(sharding, step.op, sizes)
    return kept


def _pieces(sharding: Sharding, op: str, sizes: tuple[int, ...]) -> int:
    strategy = sharding.strategies[op]
    return max((layout.pieces(sizes) for layout in (*strategy.inputs, *strategy.outputs)), default=1)


@dataclass(frozen=True)
class _Temporaries:
    forward: int = 0
    backward: int = 0


def _temporaries(profile: Profile, sharding: Sharding, step: Step, sizes: tuple[int, ...]) -> _Temporaries:
    if isinstance(step, Convert):
        return _Temporaries()
    cost, pieces = profile.ops[step.op], _pieces(sharding, step.op, sizes)
    return _Temporaries(cost.temporary_forward // pieces, cost.temporary_backward // pieces)


def _forward_peak(steps: tuple[Step, ...], storage: _Storage, kept: dict[Tensor, int]) -> int:
    """The most that is alive while the link runs forward. A block's local names hold all it wrote until it returns."""
    written = {storage.find(tensor) for step in steps for tensor in _written(step)}
    private = sum(size for tensor, size in kept.items() if tensor not in storage.bytes)
    return private + sum(storage.bytes.get(owner, 0) for owner in written)


Together = tuple[tuple[Tensor, int], ...]  # copies that are made at once, and what is received beside each


def _together(graph: OpGraph, steps: tuple[Step, ...], sizes: tuple[int, ...]) -> tuple[Together, ...]:
    runs = gathered_together(graph, steps, sizes)
    return tuple(tuple((step.target, gathered_beside(graph, step, sizes)[1]) for step in run) for run in runs)


def _gather_peak(steps: tuple[Step, ...], storage: _Storage, together: tuple[Together, ...]) -> int:
    """The most that is alive while a collective makes its copies: these come before all else in a link."""
    last = {run[-1][0]: run for run in together}
    alive = peak = 0
    for step in steps:
        alive += sum(storage.bytes.get(tensor, 0) for tensor in _written(step))
        if isinstance(step, Convert) and step.target in last:
            peak = max(peak, alive + sum(received for _, received in last[step.target]))
    return peak


def _backward_extra(
    graph: OpGraph,
    steps: tuple[Step, ...],
    storage: _Storage,
    kept_by: list[dict[Tensor, int]],
    kept: dict[Tensor, int],
    output: Tensor,
    needs: list[_Temporaries],
    carried: tuple[str, ...],
    together: tuple[Together, ...],
    beside: Container[str],
) -> int:
    """Walks the link backwards: gradients appear as ops are undone, what was kept goes when no earlier op needs it.

    Gradients at the link's input and of its parameters are counted elsewhere. So are those of the common values that it
    reads, but the link's own share lies beside what has come together so far; and that of a parameter whose gradient
    has a place already lies beside it until it is added.
    """
    needed_until: dict[Tensor, int] = {}
    for index in reversed(range(len(steps))):
        for owner in kept_by[index]:
            needed_until[owner] = index
    made = {tensor: index for index, step in enumerate(steps) for tensor in _written(step)}
    run_of = {copy: run for run in together for copy, _ in run}
    alone = [owner for owner in needed_until if owner in made and owner not in kept and owner not in run_of]
    needed_until |= {owner: made[owner] + 1 for owner in alone}
    held = dict(kept)
    gradients: dict[Tensor, int] = {output: storage.size(output)}
    start = sum(held.values())
    peak = 0
    asked: set[Together] = set()
    converts = [s for s in steps if isinstance(s, Convert)]
    last = [s for s in converts if any(s.target == run[-1][0] for run in together)]
    summed = {s.target for s in converts if _sums_gradient(s, storage.sizes)}
    source = {s.target: s.source for s in converts}
    for index in reversed(range(len(steps))):
        step = steps[index]
        held |= {owner: size for owner, size in kept_by[index].items() if owner not in kept}
        for run in {run_of[owner] for owner in kept_by[index] if owner in run_of and owner not in kept} - asked:
            asked.add(run)
            again = [(copy, received) for copy, received in run if copy in needed_until]
            held |= {copy: storage.size(copy) for copy, _ in again}
            peak = max(peak, sum(held.values()) + sum(gradients.values()) + sum(received for _, received in again))
        run = run_of[step.target] if step in last else ()
        sent = _most_sent([storage.size(copy) for copy, _ in run if copy in summed])
        for tensor in (*_read(step), *(source[copy] for copy, _ in run)):  # the pieces of all come at once
            if graph.values[tensor.value].grad:
                gradients.setdefault(tensor, local_bytes(graph, tensor.value, tensor.layout, storage.sizes))
        peak = max(peak, sum(held.values()) + sum(gradients.values()) + needs[index].backward + sent)
        added = [tensor for tensor in _read(step) if tensor.value in beside and tensor not in made]
        for tensor in (*_written(step), *added):
            gradients.pop(tensor, None)
        held = {t: n for t, n in held.items() if needed_until.get(t, len(steps)) < index}
    ends = sum(n for tensor, n in gradients.items() if tensor.value not in carried) + storage.size(output)
    return max(0, peak - start - ends)


def _most_sent(sizes: list[int]) -> int:
    """Gradients that are summed go one after the other where they are large, and the others together."""
    return max([sum(size for size in sizes if size < GATHERED_ALONE), *sizes], default=0)


def _sums_gradient(step: Convert, sizes: tuple[int, ...]) -> bool:
    """Of what is gathered: its gradient is sent. That of S -> R is there on every rank."""
    return conversion_of(step.source.layout, step.target.layout, sizes) is TABLE["SB"]


def _read(step: Step) -> tuple[Tensor, ...]:
    return step.inputs if isinstance(step, Call) else (step.source,)


def _written(step: Step) -> tuple[Tensor, ...]:
    return step.outputs if isinstance(step, Call) else (step.target,)
