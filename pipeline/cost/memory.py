"""Bytes that a link of the sharded program holds: for backward, at its forward peak and at its backward peak.

Two tensors share memory where one is a view of the other, or where a conversion does nothing in the forward pass.
Parameters, inputs and other common values are resident and not counted here; a gathered copy of a parameter is.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.cost.compute import local_bytes
from pipeline.cost.conversions import conversion_of
from pipeline.ir.graph import OpGraph
from pipeline.ir.layout import Layout
from pipeline.ir.plan import Sharding
from pipeline.ir.profile import Profile
from pipeline.ir.program import Call, Convert, Step, Tensor


@dataclass(frozen=True)
class LinkMemory:
    """`kept` includes the output, not the input. Peaks count neither the link's input nor its output's gradient."""

    output: int
    kept: int
    forward_peak: int  # when everything backward needs is kept
    dropped_peak: int  # when nothing is kept but the output
    backward_extra: int  # gradients alive inside the link beyond `kept` and the gradients at its two ends


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
    steps: tuple[Step, ...],
    output: Tensor,
    sizes: tuple[int, ...],
) -> LinkMemory:
    storage = _Storage(graph, profile, sizes)
    for step in steps:
        storage.add(step)
    kept_by = [_kept(graph, profile, sharding, step, storage, sizes) for step in steps]
    exit_ = storage.find(output)
    kept = {exit_: storage.size(exit_)}
    for held in kept_by:
        kept |= held
    return LinkMemory(
        output=storage.size(exit_),
        kept=sum(kept.values()),
        forward_peak=_forward_peak(steps, storage, kept),
        dropped_peak=_forward_peak(steps, storage, {exit_: storage.size(exit_)}),
        backward_extra=_backward_extra(graph, steps, storage, kept_by, kept, output),
    )


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
        layouts = (*sharding.strategies[step.op].inputs, *sharding.strategies[step.op].outputs)
        private = Tensor(f"{step.op}:extra", Layout(()))
        kept[private] = cost.extra_saved // max(layout.pieces(sizes) for layout in layouts)
    return kept


def _forward_peak(steps: tuple[Step, ...], storage: _Storage, kept: dict[Tensor, int]) -> int:
    """The most that is alive while the link runs forward. A block's local names hold all it wrote until it returns."""
    written = {storage.find(tensor) for step in steps for tensor in _written(step)}
    private = sum(size for tensor, size in kept.items() if tensor not in storage.bytes)
    return private + sum(storage.bytes.get(owner, 0) for owner in written)


def _backward_extra(
    graph: OpGraph,
    steps: tuple[Step, ...],
    storage: _Storage,
    kept_by: list[dict[Tensor, int]],
    kept: dict[Tensor, int],
    output: Tensor,
) -> int:
    """Walks the link backwards: gradients appear as ops are undone, what was kept goes when no earlier op needs it."""
    needed_until: dict[Tensor, int] = {}
    for index in reversed(range(len(steps))):
        for owner in kept_by[index]:
            needed_until[owner] = index
    held = dict(kept)
    gradients: dict[Tensor, int] = {output: storage.size(output)}
    start = sum(held.values())
    peak = 0
    for index in reversed(range(len(steps))):
        step = steps[index]
        for tensor in _read(step):
            if graph.values[tensor.value].grad:
                gradients.setdefault(tensor, local_bytes(graph, tensor.value, tensor.layout, storage.sizes))
        peak = max(peak, sum(held.values()) + sum(gradients.values()))
        for tensor in _written(step):
            gradients.pop(tensor, None)
        held = {t: n for t, n in held.items() if needed_until.get(t, len(steps)) < index}
    ends = sum(gradients.values()) + storage.size(output)
    return max(0, peak - start - ends)


def _read(step: Step) -> tuple[Tensor, ...]:
    return step.inputs if isinstance(step, Call) else (step.source,)


def _written(step: Step) -> tuple[Tensor, ...]:
    return step.outputs if isinstance(step, Call) else (step.target,)
