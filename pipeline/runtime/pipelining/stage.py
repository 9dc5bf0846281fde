"""A partition of a pipeline on this rank, as a stage of `torch.distributed.pipelining`: torch's schedules say what runs
when, on which rank.

torch sends between one rank of each stage, tensors that lie alike on both. A partition may be on several ranks, and
what it sends may lie otherwise at its reader: so the stage here says what is sent
(pipeline/runtime/pipelining/transfer.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, _ComputationType
from torch.distributed.pipelining.stage import _PipelineStageBase

from shardwright.pipeline.ir.layout import Layout
from shardwright.pipeline.ir.names import look_up
from shardwright.pipeline.runtime.context import setting, step
from shardwright.pipeline.runtime.pipelining.deferred_weight_grads import DeferredGradients
from shardwright.pipeline.runtime.pipelining.transfer import Arriving, Submesh, Transfer, meeting_device, run
from shardwright.pipeline.runtime.step.buckets import Row
from shardwright.pipeline.runtime.step.gradients import Gradients
from shardwright.pipeline.runtime.step.passes import StepCopies, copies_of
from shardwright.pipeline.runtime.step.slices import Slices

Batch = Mapping[str, Tensor]
Around = Callable[[], AbstractContextManager[Any]]
DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
FORWARD, BACKWARD = 0, 1
MOST_VALUES = 1 << 12  # that cross a cut


class RankPartition:
    """A partition's parts of the model on this rank, and the passes of a step.

    `written` is its class of the program, `tensors` this rank's shards; those to be trained are `nn.Parameter`.
    `smaller` is the class for micro-batches of fewer samples, which may be the same.
    """

    def __init__(
        self, number: int, written: Any, smaller: Any, slices: Slices, tensors: Mapping[str, Tensor], around: Around
    ) -> None:
        self.number, self.tensors, self.around = number, tensors, around
        self.parameters = {name: t for name, t in tensors.items() if isinstance(t, nn.Parameter)}
        self.rows = {name: row_of(written, name) for name in self.parameters}
        self.slices, self.programs = slices, (written(tensors), smaller(tensors))  # may lay out weights otherwise
        self.gradients = Gradients(self.parameters.values(), self.rows.values(), list(written.MESH))
        self.updated = dict(zip(self.parameters, self.gradients.updated, strict=True))
        self.inputs: list[str] = list(written.INPUTS)
        self.batches: list[Callable[[], Batch]] = []
        self.defers = False  # whether the schedule asks for gradients of weights on their own
        self.deferred: dict[int, DeferredGradients] = {}  # of micro-batches
        self.undone = 0  # micro-batches of this step whose backward is done

    def start(self, batches: Sequence[Callable[[], Batch]]) -> None:
        """A step; each batch is asked for when its turn comes."""
        self.batches, self.undone = list(batches), 0
        self.gradients.start(armed=len(batches) == 1 and not self.defers)
        with self.around():
            self.copies = StepCopies(copies_of(self.programs[0]))

    def forward(self, number: int, entering: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Of a micro-batch; the last one is undone last, whatever the schedule."""
        program, last = self.programs[self.slices.is_smaller(number)], number == len(self.batches) - 1
        with setting(step.thread, last_pass=last):
            if self.defers:
                self.deferred[number] = DeferredGradients(self.copies.stand_ins.values())
                with self.deferred[number].recording():
                    return self._run(program, self.batches[number](), entering, self.copies.stand_ins)
            copies = self.copies.last() if last else self.copies.stand_ins
            return self._run(program, self.batches[number](), entering, copies)

    def backward(self, results: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """Of a micro-batch; where gradients of weights are deferred, `backward_weights` follows."""
        if not self.defers:
            self.undone += 1
            if self.undone == len(self.batches):
                self.gradients.arm()
        trained = [(r, g) for r, g in zip(results, gradients, strict=True) if r.requires_grad]
        if trained:
            torch.autograd.backward([r for r, _ in trained], [g for _, g in trained])

    def backward_weights(self, number: int) -> None:
        """What the backward of a micro-batch has deferred; what the last one finishes is sent."""
        own = self.deferred.pop(number)
        self.undone += 1
        if self.undone < len(self.batches):
            own.run()
            return
        own.entries.insert(0, self.copies)
        left = own.leaves()
        self.gradients.finish(p for p in self.parameters.values() if id(p) not in left)
        own.run(self.gradients.finish)

    def without_gradient(self, batch: Batch, entering: Mapping[str, Tensor], program: Any) -> tuple[Tensor, ...]:
        """Of any batch, by another program of the partition, without a change of buffers."""
        buffers = {name: t for name, t in self.tensors.items() if not isinstance(t, nn.Parameter)}
        kept = {name: t.clone() for name, t in buffers.items()}
        with torch.no_grad():
            with self.around():
                copies = copies_of(program)
            found = self._run(program, batch, entering, copies)
            for name, tensor in kept.items():
                buffers[name].copy_(tensor)
        return found

    def _run(
        self, program: Any, batch: Batch, entering: Mapping[str, Tensor], copies: Mapping[str, Tensor]
    ) -> tuple[Tensor, ...]:
        given = {name: batch[name] for name in self.inputs}
        common = {name: tensor for name, tensor in entering.items() if name != "x"}
        with self.around():
            found = program.forward(*([entering["x"]] if entering else []), **common, **given, **copies)
        return found if isinstance(found, tuple) else (found,)


def row_of(written: Any, name: str) -> Row:
    row: Row | None = look_up(written.PARAMETERS, name)
    assert row is not None, f"{name} is not trained in this partition"
    return row


class Cut:
    """What one partition sends to the next of a micro-batch, and the gradients that come back."""

    def __init__(
        self, number: int, rows: Mapping[str, Any], source: Submesh, target: Submesh, passes: int, slices: Slices
    ) -> None:
        self.names, self.source, self.target = list(rows), source, target
        self.gradient = {name: bool(row["gradient"]) for name, row in rows.items()}
        self.passes, self.slices = passes, slices
        self.ways = [self._both_ways(rows, key) for key in (["shape", "smaller"] if slices.uneven else ["shape"])]
        self.first_tag = 1 + number * (1 + 2 * MOST_VALUES * passes)
        self.dtypes: dict[str, torch.dtype] = {}

    def _both_ways(self, rows: Mapping[str, Any], key: str) -> tuple[dict[str, Transfer], dict[str, Transfer]]:
        """Forward and backward, by name, of micro-batches of the size whose shapes have this key."""
        there, back = {}, {}
        for name, row in rows.items():
            source, target = self.source.site(Layout.parse(row["from"])), self.target.site(Layout.parse(row["to"]))
            there[name] = Transfer(source, target, tuple(row[key]))
            if self.gradient[name]:
                back[name] = Transfer(target.of_gradient(), source.of_gradient(), tuple(row[key]))
        return there, back

    def transfers(self, way: int, chunk: int) -> dict[str, Transfer]:
        return self.ways[self.slices.is_smaller(chunk)][way]

    def tag(self, name: str, way: int, chunk: int) -> int:
        return self.first_tag + 1 + (2 * self.names.index(name) + way) * self.passes + chunk

    def send_dtypes(self, results: Sequence[Tensor]) -> None:
        """To the readers, before the first values: the types that autocast gives are not in the program."""
        if self.dtypes:
            return
        self.dtypes = {name: tensor.dtype for name, tensor in zip(self.names, results, strict=True)}
        device = meeting_device(results[0].device)
        codes = torch.tensor([DTYPES.index(dtype) for dtype in self.dtypes.values()], device=device)
        place, count = dist.get_rank() - self.source.first, len(self.source.ranks)
        for reader in self.target.ranks[place::count]:
            dist.send(codes, reader, tag=self.first_tag)

    def receive_dtypes(self, device: torch.device) -> None:
        if not self.dtypes:
            codes = torch.empty(len(self.names), dtype=torch.int64, device=meeting_device(device))
            place, count = dist.get_rank() - self.target.first, len(self.source.ranks)
            dist.recv(codes, self.source.first + place % count, tag=self.first_tag)
            self.dtypes = {name: DTYPES[code] for name, code in zip(self.names, codes.tolist(), strict=True)}


class ShardedStage(_PipelineStageBase):
    """What a schedule asks of a stage; `before` and `after` are the cuts around the partition."""

    def __init__(
        self,
        partition: RankPartition,
        count: int,
        device: torch.device,
        column: dist.ProcessGroup,
        before: Cut | None,
        after: Cut | None,
    ) -> None:
        super().__init__(nn.Module(), partition.number, count, device, column)
        self.partition, self.before, self.after = partition, before, after
        self.args_recv_info = {0: ()}  # with `act_send_info` looked at once: nothing is torch's to send
        self.clear_runtime_states()

    def clear_runtime_states(self) -> None:
        self.arriving: dict[tuple[int, int], dict[str, Arriving]] = {}  # way and micro-batch -> by name
        self.entered: dict[int, dict[str, Tensor]] = {}
        self.results: dict[int, tuple[Tensor, ...]] = {}
        self.returned: dict[int, dict[str, Tensor]] = {}  # gradients of what entered
        self.losses: list[Tensor] = []

    # ---- what runs

    def forward_one_chunk(self, chunk: int, *given: Any, **named: Any) -> Any:
        self.entered[chunk] = self._entering(chunk)
        self.results[chunk] = self.partition.forward(chunk, self.entered[chunk])
        if self.after is None:
            self.losses.append(self.results[chunk][0].detach())
        return self.results[chunk][0]

    def backward_one_chunk(
        self, chunk: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """With the gradients of weights, unless these are deferred."""
        results = self.results.pop(chunk)
        gradients: list[Tensor | None] = [None]  # the loss needs none
        if self.after is not None:
            found = {name: tensor() for name, tensor in self.arriving.pop((BACKWARD, chunk)).items()}
            gradients = [found.get(name) for name in self.after.names]
        self.partition.backward((loss,) if loss is not None else results, gradients)
        if loss is not None and self.chunks > 1:
            loss.detach_()  # torch keeps it until the step ends, and with it what entered this micro-batch
        entered = self.entered.pop(chunk)
        self.returned[chunk] = {name: _gradient(t) for name, t in entered.items() if t.requires_grad}
        if full_backward:
            self.backward_weight_one_chunk(chunk)

    def backward_weight_one_chunk(self, chunk: int, last_backward: bool = False) -> None:
        """Where they are not deferred they are there already."""
        if self.partition.defers:
            self.partition.backward_weights(chunk)

    def perform_reduce_grad(self, scale: int) -> None:
        """Buckets are sent in the last backward pass, or when its gradients of weights are made."""

    # ---- what is sent

    def get_fwd_send_ops(self, chunk: int) -> list[dist.P2POp]:
        if self.after is None:
            return []
        self.after.send_dtypes(self.results[chunk])
        return self._send(FORWARD, chunk, self.after, dict(zip(self.after.names, self.results[chunk], strict=True)))

    def get_bwd_send_ops(self, chunk: int) -> list[dist.P2POp]:
        return self._send(BACKWARD, chunk, self.before, self.returned.pop(chunk)) if self.before else []

    def get_fwd_recv_ops(self, chunk: int) -> list[dist.P2POp]:
        if self.before is None:
            return []
        self.before.receive_dtypes(self.device)
        return self._receive(FORWARD, chunk, self.before)

    def get_bwd_recv_ops(self, chunk: int) -> list[dist.P2POp]:
        return self._receive(BACKWARD, chunk, self.after) if self.after else []

    def _send(self, way: int, chunk: int, cut: Cut, tensors: Mapping[str, Tensor]) -> list[dist.P2POp]:
        transfers = cut.transfers(way, chunk)
        return [op for name, t in tensors.items() for op in transfers[name].send(t, cut.tag(name, way, chunk))]

    def _receive(self, way: int, chunk: int, cut: Cut) -> list[dist.P2POp]:
        ops, self.arriving[way, chunk] = [], {}
        for name, transfer in cut.transfers(way, chunk).items():
            own, tensor = transfer.receive(cut.dtypes[name], self.device, cut.tag(name, way, chunk))
            ops += own
            self.arriving[way, chunk][name] = tensor
        return ops

    def _entering(self, chunk: int) -> dict[str, Tensor]:
        """What has arrived for a micro-batch: leaves, as far as a gradient goes back."""
        if self.before is None:
            return {}
        found = {name: tensor() for name, tensor in self.arriving.pop((FORWARD, chunk)).items()}
        return {name: t.requires_grad_(self.before.gradient[name]) for name, t in found.items()}

    # ---- outside a step

    def loss(self, chunk: int, batch: Mapping[str, Tensor], program: Any) -> Tensor | None:
        """Of a slice of a batch, by this program of the partition, without a gradient; the last partition has it."""
        run(self.get_fwd_recv_ops(chunk))
        with torch.no_grad():
            entering = {name: t.requires_grad_(False) for name, t in self._entering(chunk).items()}
        self.results[chunk] = self.partition.without_gradient(batch, entering, program)
        run(self.get_fwd_send_ops(chunk))
        found = self.results.pop(chunk)
        return found[0] if self.after is None else None

    # ---- what torch would find out about tensors is in the program

    def _prepare_forward_infra(self, count: int, *given: Any, **named: Any) -> Any:
        self.chunks = count

    _prepare_backward_infra = _prepare_forward_infra

    def _create_grad_recv_info(self, act_send_info: Any) -> Any:
        return ()

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return []


def _gradient(tensor: Tensor) -> Tensor:
    """Of a leaf that nothing needs any more."""
    found, tensor.grad = tensor.grad, None
    return torch.zeros_like(tensor) if found is None else found


class _Short1F1B(Schedule1F1B):
    """Also for fewer micro-batches than stages, for which torch refuses what its own loop can do."""

    def __init__(self, stage: ShardedStage, passes: int, **named: Any) -> None:
        PipelineScheduleSingle.__init__(self, stage, passes, **named)


SCHEDULES = {
    "gpipe": ScheduleGPipe,
    "1f1b": _Short1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
}


def schedule_of(name: str, stages: list[ShardedStage], passes: int) -> Any:
    """The gradients of a step are those of its mean loss; the target of a micro-batch is what divides its loss."""
    kind = SCHEDULES[name]
    own: Any = stages[0] if issubclass(kind, PipelineScheduleSingle) else stages
    return kind(own, passes, loss_fn=lambda loss, parts: loss / float(parts), scale_grads=False)


def defers(schedule: Any, number: int) -> bool:
    """Whether a schedule has something between the two parts of a stage's backward: else one pass makes both."""
    rows: dict[int, list[Any]] = getattr(schedule, "pipeline_order_with_comms", {})
    pairs = [pair for row in rows.values() for pair in pairwise(row) if pair[1].stage_index == number]
    return any(
        action.computation_type == _ComputationType.BACKWARD_WEIGHT
        and before != action._replace(computation_type=_ComputationType.BACKWARD_INPUT)
        for before, action in pairs
    )
