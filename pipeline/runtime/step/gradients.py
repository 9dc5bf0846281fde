"""Between backward and the next step: gradients brought together in buckets, clipped, new values given to all.

| a parameter whose               | during backward                              | optimizer updates | after it      |
|---------------------------------|----------------------------------------------|-------------------|---------------|
| gradient is complete as it is   | nothing                                      | it                | nothing       |
| gradient is summed (DDP)        | all-reduce                                   | it                | nothing       |
| state is split further (ZeRO-1) | slice or reduce-scatter, all-reduce the rest | this rank's shard | an all-gather |

A bucket is sent when its last gradient is there and every bucket before it has been sent: all ranks send in one order,
also where buckets go over different axes. Over the micro-batches of a step gradients add up where they lie, on this
rank alone: buckets are armed for the last backward pass, and sent in that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.pipeline.ir.layout import Layout, R
from shardwright.pipeline.runtime.context import step
from shardwright.pipeline.runtime.programs.collectives import Joining, Split, as_real, in_memory
from shardwright.pipeline.runtime.programs.mesh import MeshAxis, axis_of
from shardwright.pipeline.runtime.step.buckets import Row, ShardBucket, SumBucket, buckets_of, members_of

SPARE = 1e-6  # added to the norm before it divides, as torch.nn.utils.clip_grad_norm_ does


class Gradients:
    """A step is: start, forward, backward, wait, the optimizer on `updated`, publish.

    One of several micro-batches is: start unarmed, forward and backward of each, armed before the last; then as above.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        rows: Iterable[Row],
        axes: Iterable[str],
        first_mb: float = 1,
        bucket_mb: float = 25,
    ) -> None:
        members = members_of(parameters, rows, axes)
        self.complete = [m.parameter for m in members if not m.summed and not m.digits]
        self.buckets = buckets_of([m for m in members if m.summed or m.digits], first_mb, bucket_mb)
        self.split = [bucket for bucket in self.buckets if isinstance(bucket, ShardBucket)]
        summed = [bucket for bucket in self.buckets if isinstance(bucket, SumBucket)]
        self.slots = [bucket.slot for bucket in summed if bucket.axis.size > 1]
        shards = {m.parameter: s for bucket in self.split for m, s in zip(bucket.members, bucket.shards, strict=True)}
        self.updated: list[nn.Parameter] = [shards.get(m.parameter, m.parameter) for m in members]  # by the optimizer
        self.prefetch = GatherPrefetch()
        self.next = 0  # bucket to be sent: all before it have been
        self.armed = True
        self.places: dict[int, tuple[SumBucket | ShardBucket, int]] = {}  # `id` of a parameter -> bucket, number there
        for bucket in self.buckets:
            for number, member in enumerate(bucket.members):
                self.places[id(member.parameter)] = bucket, number
                member.parameter.register_post_accumulate_grad_hook(partial(self._ready, bucket, number))

    def _ready(self, bucket: SumBucket | ShardBucket, number: int, parameter: Tensor) -> None:
        bucket.take(number)
        if self.armed:
            bucket.missing.discard(number)
            if not bucket.missing:
                self._send_complete()

    def finish(self, parameters: Iterable[Tensor]) -> None:
        """No gradient of these comes any more in this step: for a last pass that is not armed, as it is in parts."""
        for parameter in parameters:
            if id(parameter) in self.places:
                bucket, number = self.places[id(parameter)]
                bucket.missing.discard(number)
        self._send_complete()

    def _send_complete(self) -> None:
        while self.next < len(self.buckets) and not self.buckets[self.next].missing:
            self._send()

    def _send(self) -> None:
        if self.next:
            self.buckets[self.next - 1].go_on()
        self.buckets[self.next].send()
        self.next += 1

    def start(self, armed: bool = True) -> None:
        """Before the first forward pass of a step; armed where it is the only one."""
        self.next = 0
        self.armed = armed
        self.prefetch.start()
        step.start(self.slots)
        for bucket in self.buckets:
            bucket.reset()
        for parameter in self.complete:
            if armed or parameter.grad is None:
                parameter.grad = None  # autograd puts the only gradient in its place without adding
            else:
                parameter.grad.zero_()

    def arm(self) -> None:
        """Before the last backward pass: what it finishes may be sent."""
        self.armed = True

    def wait(self) -> None:
        """After backward: sends what no gradient reached, and waits for all; then the optimizer may step."""
        self.prefetch.stop()
        while self.next < len(self.buckets):
            self._send()
        for bucket in self.buckets:
            bucket.go_on()
        for bucket in self.buckets:
            bucket.wait()
        for parameter in self.complete:
            if parameter.grad is not None and parameter.grad.is_conj():  # as autograd leaves it; Adam does not take it
                parameter.grad = in_memory(parameter.grad)
        step.finish(self.slots)

    def publish(self) -> None:
        """After the optimizer: every rank gets the values that others have updated."""
        for bucket in self.split:
            bucket.gather()
        for bucket in self.split:
            bucket.spread()

    def buffers(self) -> list[Tensor]:
        """The memory in which gradients lie that are not their parameters' own."""
        return [bucket.flat for bucket in self.buckets]


# ---------------------------------------------------------------------------------------------------------- prefetch


@dataclass(frozen=True, eq=False)
class _GatherRequest:
    """What is gathered: shards that lie where they are for the whole training."""

    shards: tuple[Tensor, ...]
    splits: tuple[Split, ...]
    axis: MeshAxis

    def is_for(self, other: _GatherRequest) -> bool:
        return self.axis == other.axis and self.splits == other.splits and self._places() == other._places()

    def _places(self) -> list[tuple[int, torch.Size]]:
        return [(shard.data_ptr(), shard.shape) for shard in self.shards]


class GatherPrefetch:
    """Gathers of parameters that begin before they are asked for.

    A program asks for its parameters in the same order in every step, forward, backward and in what it runs again. So
    the order of one step tells the next: when a gather has been handed out, the one that followed it begins, and is
    under way while the ops between the two are computed. One is under way at a time, and none from one step to the
    next, as the optimizer changes what is gathered. Every rank runs the same program, so all begin the same gathers at
    the same places.
    """

    def __init__(self) -> None:
        self.last: list[_GatherRequest] = []  # of the last step, in their order
        self.seen: list[_GatherRequest] = []  # of this one so far
        self.begun: tuple[_GatherRequest, Joining] | None = None
        self.used = 0  # gathers of this step that had begun when they were asked for

    def start(self) -> None:
        """A step begins."""
        self.stop()
        self.last, self.seen, self.used = self.seen, [], 0
        step.prefetch = self

    def stop(self) -> None:
        """Before the optimizer; what has begun and was not asked for is waited for, as the other ranks take part."""
        step.prefetch = None
        if self.begun is not None:
            self.begun[1].finish()
            self.begun = None

    def gather(self, shards: Sequence[Tensor], splits: Sequence[Split], axis: MeshAxis) -> list[Tensor]:
        request = _GatherRequest(tuple(shard.detach() for shard in shards), tuple(splits), axis)
        begun, self.begun = self.begun, None
        if begun is not None and not begun[0].is_for(request):
            begun[1].finish()
            begun = None
        self.used += begun is not None
        joining = Joining(request.shards, request.splits, request.axis) if begun is None else begun[1]
        wholes = joining.finish()
        place = len(self.seen)
        self.seen.append(request)
        if place + 1 < len(self.last) and self.last[place].is_for(request):
            following = self.last[place + 1]
            self.begun = following, Joining(following.shards, following.splits, following.axis, waits=False)
        return wholes


# ---------------------------------------------------------------------------------------------------------- clipping


class Clipping:
    """By the global norm, where each element of the unsplit gradients counts once.

    A gradient that the optimizer is given (`Gradients.updated`) is a shard as its state lies: split on some axes, equal
    on all ranks of the others. So of the ranks that hold the same shard the first alone counts it; the squares are
    summed over all ranks in one message.
    """

    def __init__(self, updated: Sequence[nn.Parameter], rows: Iterable[Row], axes: Sequence[str], limit: float) -> None:
        self.updated, self.limit = updated, limit
        self.counted = []
        for parameter, (_, _, state) in zip(updated, rows, strict=True):
            states = Layout.parse(state).states or [R] * len(axes)  # without a layout it is whole on all
            if all(s.kind == "S" or axis_of(name).rank == 0 for name, s in zip(axes, states, strict=True)):
                self.counted.append(parameter)

    def clip(self) -> Tensor:
        """After backward and before the optimizer: scales the gradients down to the limit, and returns their norm."""
        norms: list[Tensor] = []
        for dtype, gradients in _by_type(self.counted).items():
            norms += torch._foreach_norm(gradients, 2, _exact(dtype))
        total = torch.zeros((), dtype=torch.float64, device=self.updated[0].device)
        if norms:
            total = torch.stack(norms).double().square().sum()
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(total)
        total = total.sqrt()
        factor = torch.clamp(self.limit / (total + SPARE), max=1.0)
        for dtype, gradients in _by_type(self.updated).items():
            torch._foreach_mul_(gradients, factor.to(_exact(dtype)))
        return total


def _by_type(parameters: Iterable[nn.Parameter]) -> dict[torch.dtype, list[Tensor]]:
    """Complex ones as the real numbers that they are made of."""
    found: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            gradient = as_real(parameter.grad)
            found.setdefault(gradient.dtype, []).append(gradient)
    return found


def _exact(dtype: torch.dtype) -> torch.dtype:
    """A norm has more digits than bfloat16."""
    return dtype if dtype == torch.float64 else torch.float32
