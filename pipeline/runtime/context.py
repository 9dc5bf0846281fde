"""What the passes of a step share: functions that a generated program calls find it here, beside their arguments.

Most is seen by all threads, as autograd runs backward in threads of its own; what one thread runs is in `thread`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

if TYPE_CHECKING:
    from shardwright.pipeline.runtime.pipelining.deferred_weight_grads import DeferredGradients
    from shardwright.pipeline.runtime.programs.mesh import MeshAxis
    from shardwright.pipeline.runtime.recompute.random_draws import StepDraws
    from shardwright.pipeline.runtime.recompute.regather import GatherSource
    from shardwright.pipeline.runtime.recompute.regions import RecomputeRegion
    from shardwright.pipeline.runtime.step.gradients import GatherPrefetch
    from shardwright.pipeline.runtime.step.running_stats import DeferredStatistics


@dataclass(eq=False)
class PiggybackSlot:
    """Room for one number in a bucket of gradients that is summed over an axis anyway."""

    axis: MeshAxis
    place: Tensor
    value: Tensor | None = None

    def fits(self, total: Tensor, axis: MeshAxis) -> bool:
        here = total.dtype == self.place.dtype and total.device == self.place.device and total.numel() == 1
        return self.value is None and here and self.axis == axis

    def write(self) -> None:
        """Before the bucket is summed."""
        if self.value is None:
            self.place.zero_()
        else:
            self.place.copy_(self.value.detach().view(1))

    def read(self) -> None:
        """After it."""
        if self.value is not None:
            self.value.detach().copy_(self.place.view_as(self.value))
            self.value = None

    def sum_alone(self) -> None:
        """What came after the bucket was sent."""
        if self.value is not None:
            dist.all_reduce(self.value.detach(), group=self.axis.group)
            self.value = None


class _OfThread(threading.local):
    deferred: DeferredGradients | None = None  # takes gradients of weights of the pass that is recorded
    region: RecomputeRegion | None = None  # of recompute
    replaying = False  # a region runs for the second time
    last_pass = False  # of a step
    keeping_shards = 0  # how many `keep_shards` are around


class StepContext:
    """One for the process, `step`; outside of a step it is empty.

    A sum over ranks that nobody reads before the gradients are there, as that of the loss, rides in a bucket of
    gradients that is summed over the same ranks, or is under way on its own while backward runs.
    """

    def __init__(self) -> None:
        self.thread = _OfThread()
        self.as_written = False  # programs that are loaded are not compiled
        self.draws: StepDraws | None = None  # notes or captures the random numbers of a step
        self.statistics: DeferredStatistics | None = None  # collects those of batch norms
        self.prefetch: GatherPrefetch | None = None  # of the training whose step this is
        self.gathered: dict[int, GatherSource] = {}  # how gathered copies are made, by where they lie, while they live
        self.target_counts: Any = WeakTensorKeyDictionary()  # target -> axis, ignored index, the count under way
        self.sample: int | None = None  # that the data set is asked for now
        self.slots: dict[int, list[PiggybackSlot]] = {}  # of each partition of this rank whose step has begun
        self.sums: list[Any] = []  # under way on their own

    def start(self, slots: list[PiggybackSlot]) -> None:
        self.slots[id(slots)] = slots

    def add_up(self, total: Tensor, axis: MeshAxis) -> None:
        """The sum takes the tensor's place by the end of the step."""
        assert self.slots, "no step has begun"
        slot = next((slot for slots in self.slots.values() for slot in slots if slot.fits(total, axis)), None)
        if slot is None:
            self.sums.append(dist.all_reduce(total, group=axis.group, async_op=True))
        else:
            slot.value = total

    def settle(self) -> None:
        """All sums are there when it returns; the steps go on."""
        for slots in self.slots.values():
            for slot in slots:
                slot.sum_alone()
        while self.sums:
            self.sums.pop().wait()

    def finish(self, slots: list[PiggybackSlot]) -> None:
        """The step that began with these ends."""
        for slot in slots:
            slot.sum_alone()
        del self.slots[id(slots)]
        while self.sums and not self.slots:
            self.sums.pop().wait()


step = StepContext()


@contextmanager
def setting(target: object, **values: Any) -> Iterator[None]:
    """Attributes of the context, or of its `thread`; afterwards they are as before."""
    before = {name: getattr(target, name) for name in values}
    target.__dict__.update(values)
    try:
        yield
    finally:
        target.__dict__.update(before)
