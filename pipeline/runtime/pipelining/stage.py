"""A partition as a stage of `torch.distributed.pipelining`: torch's schedules say what runs when, on which rank.

torch sends between one rank of each stage, tensors that lie alike on both. A partition may be on several ranks, and
what it sends may lie otherwise at its reader: so the stage here says what is sent
(pipeline/runtime/pipelining/transfer.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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

from pipeline.ir.layout import Layout
from pipeline.runtime.pipelining.partition import Partition
from pipeline.runtime.pipelining.transfer import Arriving, Site, Transfer, meeting_device, run
from pipeline.runtime.step.slices import Slices

DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
FORWARD, BACKWARD = 0, 1
MOST_VALUES = 1 << 12  # that cross a cut


@dataclass(frozen=True)
class Mesh:
    """Of a partition: the ranks that it is on."""

    first: int
    sizes: tuple[int, ...]

    def site(self, layout: str) -> Site:
        return Site(self.first, self.sizes, Layout.parse(layout))

    @property
    def ranks(self) -> range:
        return self.site("").ranks


class Cut:
    """What one partition sends to the next of a micro-batch, and the gradients that come back."""

    def __init__(
        self, number: int, rows: Mapping[str, Any], source: Mesh, target: Mesh, passes: int, slices: Slices
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
            source, target, shape = self.source.site(row["from"]), self.target.site(row["to"]), tuple(row[key])
            there[name] = Transfer(source, target, shape)
            if self.gradient[name]:
                back[name] = Transfer(target.of_gradient(), source.of_gradient(), shape)
        return there, back

    def transfers(self, way: int, chunk: int) -> dict[str, Transfer]:
        return self.ways[self.slices.is_smaller(chunk)][way]

    def tag(self, name: str, way: int, chunk: int) -> int:
        return self.first_tag + 1 + (2 * self.names.index(name) + way) * self.passes + chunk

    def tell_types(self, results: Sequence[Tensor]) -> None:
        """To the readers, before the first values: the types that autocast gives are not in the program."""
        if self.dtypes:
            return
        self.dtypes = {name: tensor.dtype for name, tensor in zip(self.names, results, strict=True)}
        device = meeting_device(results[0].device)
        codes = torch.tensor([DTYPES.index(dtype) for dtype in self.dtypes.values()], device=device)
        place, count = dist.get_rank() - self.source.first, len(self.source.ranks)
        for reader in self.target.ranks[place::count]:
            dist.send(codes, reader, tag=self.first_tag)

    def hear_types(self, device: torch.device) -> None:
        if not self.dtypes:
            codes = torch.empty(len(self.names), dtype=torch.int64, device=meeting_device(device))
            place, count = dist.get_rank() - self.target.first, len(self.source.ranks)
            dist.recv(codes, self.source.first + place % count, tag=self.first_tag)
            self.dtypes = {name: DTYPES[code] for name, code in zip(self.names, codes.tolist(), strict=True)}


class Stage(_PipelineStageBase):
    """What a schedule asks of a stage; `before` and `after` are the cuts around the partition."""

    def __init__(
        self,
        partition: Partition,
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
        self.entered[chunk] = self.entering(chunk)
        self.results[chunk] = self.partition.forward(chunk, self.entered[chunk])
        if self.after is None:
            self.losses.append(self.results[chunk][0].detach())
        return self.results[chunk][0]

    def backward_one_chunk(
        self, chunk: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """With the gradients of weights, unless these are put off."""
        results, gradients = self.results.pop(chunk), self.gradients(chunk)
        self.partition.backward((loss,) if loss is not None else results, gradients)
        if loss is not None and self.chunks > 1:
            loss.detach_()  # torch keeps it until the step ends, and with it what entered this micro-batch
        entered = self.entered.pop(chunk)
        self.returned[chunk] = {name: _gradient(t) for name, t in entered.items() if t.requires_grad}
        if full_backward and self.partition.puts_off:
            self.partition.backward_weights(chunk)

    def backward_weight_one_chunk(self, chunk: int, last_backward: bool = False) -> None:
        """Where they are not put off they are there already."""
        if self.partition.puts_off:
            self.partition.backward_weights(chunk)

    def perform_reduce_grad(self, scale: int) -> None:
        """Buckets are sent in the last backward pass, or when its gradients of weights are made."""

    # ---- what is sent

    def get_fwd_send_ops(self, chunk: int) -> list[dist.P2POp]:
        if self.after is None:
            return []
        return self._send(FORWARD, chunk, dict(zip(self.after.names, self.results[chunk], strict=True)))

    def get_bwd_send_ops(self, chunk: int) -> list[dist.P2POp]:
        return self._send(BACKWARD, chunk, self.returned.pop(chunk)) if self.before else []

    def get_fwd_recv_ops(self, chunk: int) -> list[dist.P2POp]:
        return self._receive(FORWARD, chunk, self.before)

    def get_bwd_recv_ops(self, chunk: int) -> list[dist.P2POp]:
        return self._receive(BACKWARD, chunk, self.after)

    def _send(self, way: int, chunk: int, tensors: Mapping[str, Tensor]) -> list[dist.P2POp]:
        cut = self.after if way == FORWARD else self.before
        assert cut is not None
        if way == FORWARD:
            cut.tell_types(list(tensors.values()))
        transfers = cut.transfers(way, chunk)
        return [op for name, t in tensors.items() for op in transfers[name].send(t, cut.tag(name, way, chunk))]

    def _receive(self, way: int, chunk: int, cut: Cut | None) -> list[dist.P2POp]:
        if cut is None:
            return []
        if way == FORWARD:
            cut.hear_types(self.device)
        self.arriving[way, chunk] = {
            name: transfer.receive(cut.dtypes[name], self.device, cut.tag(name, way, chunk))
            for name, transfer in cut.transfers(way, chunk).items()
        }
        return [op for each in self.arriving[way, chunk].values() for op in each.ops]

    def entering(self, chunk: int) -> dict[str, Tensor]:
        """What has arrived for a micro-batch: leaves, as far as a gradient goes back."""
        if self.before is None:
            return {}
        found = {name: each.tensor() for name, each in self.arriving.pop((FORWARD, chunk)).items()}
        return {name: t.requires_grad_(self.before.gradient[name]) for name, t in found.items()}

    def gradients(self, chunk: int) -> list[Tensor | None]:
        """That have arrived, of what was sent; the loss needs none."""
        if self.after is None:
            return [None]
        found = {name: each.tensor() for name, each in self.arriving.pop((BACKWARD, chunk)).items()}
        return [found.get(name) for name in self.after.names]

    # ---- outside a step

    def loss(self, chunk: int, batch: Mapping[str, Tensor], program: Any) -> Tensor | None:
        """Of a slice of a batch, by this program of the partition, without a gradient; the last partition has it."""
        run(self.get_fwd_recv_ops(chunk))
        with torch.no_grad():
            entering = {name: t.requires_grad_(False) for name, t in self.entering(chunk).items()}
        results = self.partition.without_gradient(batch, entering, program)
        if self.after is None:
            return results[0]
        run(self._send(FORWARD, chunk, dict(zip(self.after.names, results, strict=True))))
        return None

    # ---- what torch would find out about tensors is in the program

    def _prepare_forward_infra(self, count: int, *given: Any, **named: Any) -> Any:
        self.chunks = count

    def _prepare_backward_infra(self, count: int, *given: Any, **named: Any) -> Any:
        self.chunks = count

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

    def __init__(self, stage: Stage, passes: int, **named: Any) -> None:
        PipelineScheduleSingle.__init__(self, stage, passes, **named)


SCHEDULES = {
    "gpipe": ScheduleGPipe,
    "1f1b": _Short1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
}


def schedule_of(name: str, stages: list[Stage], passes: int) -> Any:
    """The gradients of a step are those of its mean loss; the target of a micro-batch is what divides its loss."""
    kind = SCHEDULES[name]
    own: Any = stages[0] if issubclass(kind, PipelineScheduleSingle) else stages
    return kind(own, passes, loss_fn=lambda loss, parts: loss / float(parts), scale_grads=False)


def puts_off(schedule: Any, number: int) -> bool:
    """Whether a schedule has something between the two parts of a stage's backward: else one pass makes both."""
    rows: dict[int, list[Any]] = getattr(schedule, "pipeline_order_with_comms", {})
    pairs = [pair for row in rows.values() for pair in pairwise(row) if pair[1].stage_index == number]
    return any(
        action.computation_type == _ComputationType.BACKWARD_WEIGHT
        and before != action._replace(computation_type=_ComputationType.BACKWARD_INPUT)
        for before, action in pairs
    )
