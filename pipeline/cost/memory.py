"""Bytes that a link of the sharded program holds: for backward, at its forward peak and at its backward peak.

Two tensors share memory where one is a view of the other, or where a conversion does nothing in the forward pass.
Parameters, inputs and results of the prologue are resident and not counted here; a gathered copy of a parameter is. One
that is made again in backward is alive while the link runs forward, and in backward from the first op that needs it
until its gradient is there; in between nothing of it is kept. Copies that are gathered together are made again so,
when the first of them is needed, and each goes with the last op that needs it. What the collective receives lies beside
them while they are made, and what it sends beside their gradients when these are summed.

A common value (an activation that later links read) and its gradient are counted once, on their own, by the link that
writes it, and nowhere else: not in what any link keeps, nor in its peaks. They are alive from the forward of their
link to its backward; the value is counted as if it were there all the time, the gradient from the backward of the last
link that reads it (pipeline/cost/chain_memory.py): an upper bound. It holds under recompute too:
a region that writes the value again does so when every later reader is undone and the first copy gone.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass

from shardwright.pipeline.ir.graph import Link
from shardwright.pipeline.ir.layout import Layout
from shardwright.pipeline.ir.profile import Profile
from shardwright.pipeline.ir.program import GATHERED_ALONE, Call, Convert, Step, Tensor
from shardwright.pipeline.sharding.conversions import TABLE, conversion_of, gathered_beside, gathered_together
from shardwright.pipeline.sharding.sharded import Sharded


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
class StepStorage:
    """What one step of a link writes and keeps, each block of memory by its owner."""

    results: dict[Tensor, int]
    kept: dict[Tensor, int]
    private: dict[Tensor, int]  # of what it keeps: neither given to it nor its result


@dataclass(frozen=True)
class LinkParts:
    whole: LinkMemory
    steps: tuple[StepStorage, ...]
    output: Tensor  # the owner of its memory
    kept: dict[Tensor, int]  # for the link's own backward


def link_memory(sharded: Sharded, profile: Profile, number: int) -> LinkMemory:
    steps, output = sharded.program.links[number], sharded.leaving(number)
    return link_parts(sharded, profile, sharded.graph.chain[number], steps, output).whole


def link_parts(
    sharded: Sharded,
    profile: Profile,
    link: Link,
    steps: tuple[Step, ...],
    output: Tensor,
    beside: Container[str] = (),
) -> LinkParts:
    """`beside` are parameters whose gradients have a place already, to which what backward makes is added."""
    storage = _Storage(sharded, profile, steps)
    common = [t for step in steps if isinstance(step, Call) for t in step.outputs if t.value in link.common]
    common_bytes = _common_bytes(common, storage, link.input)
    exit_ = storage.find(output)
    for tensor in common:
        if (owner := storage.find(tensor)) != exit_:  # where the output is a view of it, Rotor counts that memory too
            storage.bytes.pop(owner, None)
    kept_by = tuple(_kept(step, storage) for step in steps)
    again = {s.target for s in steps if isinstance(s, Convert) and s.again}
    own = {owner: size for held in kept_by for owner, size in held.items() if owner not in again}
    kept = {exit_: storage.size(exit_), **own}
    together = _together(sharded, steps)
    entry = None if link.input in sharded.graph.reads_common(link) else link.input
    walk = _Backward(storage, steps, output, kept_by, kept, together, entry, beside)
    whole = LinkMemory(
        output=storage.size(exit_),
        kept=sum(kept.values()),
        forward_peak=_forward_peak(steps, storage, kept_by, together),
        dropped_peak=_forward_peak(steps, storage, ({},) * len(steps), together),
        backward_extra=walk.extra(),
        common=common_bytes,
    )
    by_step = (_step_memory(step, held, storage) for step, held in zip(steps, kept_by, strict=True))
    return LinkParts(whole, tuple(by_step), exit_, own)


class _Storage:
    """Which memory each tensor of a link lies in, and how large each block of memory is."""

    def __init__(self, sharded: Sharded, profile: Profile, steps: tuple[Step, ...]) -> None:
        self.sharded, self.profile, self.sizes = sharded, profile, sharded.sizes
        self.owner: dict[Tensor, Tensor] = {}
        self.bytes: dict[Tensor, int] = {}  # of the memory that this link allocates
        self.viewed: dict[Tensor, Tensor] = {}  # of a view as large as what it shows: that, which has its gradient too
        for step in steps:
            self._add(step)

    def _add(self, step: Step) -> None:
        if isinstance(step, Convert):
            if conversion_of(step.source.layout, step.target.layout, self.sizes).forward:
                self._allocate(step.target)
            else:
                self.owner[step.target] = self.find(step.source)
            return
        for output in step.outputs:
            shared = self.profile.ops[step.op].free or self.profile.storage[output.value] != output.value
            if shared and step.inputs:
                self.owner[output] = self.find(step.inputs[0])
                if self.local(output) == self.local(step.inputs[0]):
                    self.viewed[output] = self.viewed.get(step.inputs[0], step.inputs[0])
            else:
                self._allocate(output)

    def _allocate(self, tensor: Tensor) -> None:
        self.owner[tensor] = tensor
        self.bytes[tensor] = self.local(tensor)

    def local(self, tensor: Tensor) -> int:
        return self.sharded.local_bytes(tensor.value, tensor.layout)

    def find(self, tensor: Tensor) -> Tensor:
        return self.owner.get(tensor, tensor)

    def size(self, tensor: Tensor) -> int:
        return self.bytes.get(self.find(tensor), 0)

    def has_gradient(self, tensor: Tensor) -> bool:
        return self.sharded.graph.values[tensor.value].grad


def _step_memory(step: Step, kept: dict[Tensor, int], storage: _Storage) -> StepStorage:
    results = {storage.find(tensor): storage.size(tensor) for tensor in _written(step) if storage.size(tensor)}
    private = {owner: size for owner, size in kept.items() if owner not in storage.bytes}
    return StepStorage(results, kept, private)


def _common_bytes(common: list[Tensor], storage: _Storage, entry: str | None) -> int:
    """Each block of memory once; a view of a parameter, or of another link's common value, needs none."""
    total = sum(storage.size(owner) for owner in dict.fromkeys(storage.find(t) for t in common))
    for tensor in common:
        own = storage.local(tensor)
        of_entry = storage.find(tensor).value == entry and not storage.size(tensor)
        total += own if of_entry else 0  # the link before lets go of that memory, a view of it is still there
        total += own if storage.has_gradient(tensor) else 0
    return total


def _kept(step: Step, storage: _Storage) -> dict[Tensor, int]:
    """The memory that this step keeps for backward, by owner."""
    if isinstance(step, Convert):
        return {}
    cost = storage.profile.ops[step.op]
    kept = {}
    for tensor in (*step.inputs, *step.outputs):
        if tensor.value in cost.saves and storage.size(tensor):
            kept[storage.find(tensor)] = storage.size(tensor)
    if cost.extra_saved:
        private = Tensor(f"{step.op}:extra", Layout(()))
        kept[private] = cost.extra_saved // storage.sharded.shards_of(step.op)
    return kept


def _temporaries(step: Step, storage: _Storage) -> tuple[int, int]:
    """Bytes that an op takes while it runs, forward and backward."""
    if isinstance(step, Convert):
        return 0, 0
    cost, shards = storage.profile.ops[step.op], storage.sharded.shards_of(step.op)
    return cost.temporary_forward // shards, cost.temporary_backward // shards


Together = tuple[tuple[Tensor, int], ...]  # copies that are made at once, and what is received beside each


def _together(sharded: Sharded, steps: tuple[Step, ...]) -> tuple[Together, ...]:
    graph, sizes = sharded.graph, sharded.sizes
    runs = gathered_together(graph, steps, sizes)
    return tuple(tuple((step.target, gathered_beside(graph, step, sizes)[1]) for step in run) for run in runs)


def _forward_peak(
    steps: tuple[Step, ...],
    storage: _Storage,
    kept_by: tuple[Mapping[Tensor, int], ...],
    together: tuple[Together, ...],
) -> int:
    """The most that is alive while the link runs forward. A block's local names hold all it wrote until it returns;
    an op's temporaries, and what a collective receives beside its copies, are there while it runs."""
    last = {run[-1][0]: run for run in together}
    alive = peak = 0
    for step, own in zip(steps, kept_by, strict=True):
        alive += sum(storage.bytes.get(tensor, 0) for tensor in _written(step))
        alive += sum(size for tensor, size in own.items() if tensor not in storage.bytes)
        beside = _temporaries(step, storage)[0]
        if isinstance(step, Convert) and step.target in last:
            beside = sum(received for _, received in last[step.target])
        peak = max(peak, alive + beside)
    return peak


@dataclass(frozen=True)
class _Backward:
    """A link walked backwards: gradients appear as ops are undone, what was kept goes when no earlier op needs it.

    Gradients at the link's two ends are counted elsewhere. So are those of the common values that it reads, but the
    link's own share lies beside what has come together so far; and that of a parameter whose gradient has a place
    already lies beside it until it is added. Of other parameters they stay.
    """

    storage: _Storage
    steps: tuple[Step, ...]
    output: Tensor
    kept_by: tuple[Mapping[Tensor, int], ...]  # by each step
    kept: Mapping[Tensor, int]
    together: tuple[Together, ...]
    entry: str | None  # the link's input, unless it is a common value
    beside: Container[str]  # parameters whose gradients have a place already

    def extra(self) -> int:
        """The most that is alive beyond what is kept and the gradients at the two ends."""
        steps, storage, kept = self.steps, self.storage, self.kept
        made = {tensor: index for index, step in enumerate(steps) for tensor in _written(step)}
        run_of = {copy: run for run in self.together for copy, _ in run}
        needed_until = self._needed_until(made, run_of)
        held = {owner: size for owner, size in kept.items() if any(owner in own for own in self.kept_by)}
        gradients = {storage.viewed.get(self.output, self.output): storage.size(self.output)}
        start, peak = sum(kept.values()), 0
        asked: set[Together] = set()
        converts = [step for step in steps if isinstance(step, Convert)]
        last = [step for step in converts if any(step.target == run[-1][0] for run in self.together)]
        summed = {step.target for step in converts if self._sums_gradient(step)}
        source = {step.target: step.source for step in converts}
        for index in reversed(range(len(steps))):
            step, own = steps[index], self.kept_by[index]
            held |= {owner: size for owner, size in own.items() if owner not in kept}
            for run in {run_of[owner] for owner in own if owner in run_of and owner not in kept} - asked:
                asked.add(run)
                again = [(copy, received) for copy, received in run if copy in needed_until]
                held |= {copy: storage.size(copy) for copy, _ in again}
                received = sum(beside for _, beside in again)
                peak = max(peak, sum(held.values()) + sum(gradients.values()) + received)
            run = run_of[step.target] if isinstance(step, Convert) and step in last else ()
            sent = _most_sent([storage.size(copy) for copy, _ in run if copy in summed])
            for tensor in (*_read(step), *(source[copy] for copy, _ in run)):  # the shards of all come at once
                if storage.has_gradient(tensor):
                    gradients.setdefault(storage.viewed.get(tensor, tensor), storage.local(tensor))
            temporary = _temporaries(step, storage)[1]
            peak = max(peak, sum(held.values()) + sum(gradients.values()) + temporary + sent)
            added = [tensor for tensor in _read(step) if self._has_place(tensor) and tensor not in made]
            for tensor in (*_written(step), *added):
                gradients.pop(tensor, None)
            held = {t: n for t, n in held.items() if needed_until.get(t, len(steps)) < index}
        arrived = sum(n for tensor, n in gradients.items() if tensor.value == self.entry)
        return max(0, peak - start - arrived - storage.size(self.output))

    def _needed_until(self, made: Mapping[Tensor, int], run_of: Mapping[Tensor, Together]) -> dict[Tensor, int]:
        """The first step that needs each memory, with which it goes; a copy made again for one op goes right after."""
        found: dict[Tensor, int] = {}
        for index in reversed(range(len(self.steps))):
            found |= dict.fromkeys(self.kept_by[index], index)
        alone = [owner for owner in found if owner in made and owner not in self.kept and owner not in run_of]
        return found | {owner: made[owner] + 1 for owner in alone}

    def _has_place(self, tensor: Tensor) -> bool:
        """That of a copy that is made for several links has one where passes add it up."""
        sharded = self.storage.sharded
        as_stored = sharded.micro_batches > 1 or tensor.layout == sharded.home[tensor.value]
        return tensor.value in self.beside and as_stored

    def _sums_gradient(self, step: Convert) -> bool:
        """Of what is gathered: its gradient is sent. That of S -> R is there on every rank."""
        return conversion_of(step.source.layout, step.target.layout, self.storage.sizes) is TABLE["SB"]


def _most_sent(sizes: list[int]) -> int:
    """Gradients that are summed go one after the other where they are large, and the others together."""
    return max([sum(size for size in sizes if size < GATHERED_ALONE), *sizes], default=0)


def _read(step: Step) -> tuple[Tensor, ...]:
    return step.inputs if isinstance(step, Call) else (step.source,)


def _written(step: Step) -> tuple[Tensor, ...]:
    return step.outputs if isinstance(step, Call) else (step.target,)
