"""A pipeline's partition on this rank: its pieces of the model, and the passes of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.ir.names import look_up
from pipeline.runtime.pipelining.deferred_weight_grads import PutOff
from pipeline.runtime.recompute.regions import in_last_pass
from pipeline.runtime.step.gradients import Gradients, Row
from pipeline.runtime.step.passes import Copies
from pipeline.runtime.step.slices import Slices

Batch = Mapping[str, Tensor]
Around = Callable[[], AbstractContextManager[Any]]


class Partition:
    """`written` is its class of the program, `tensors` this rank's pieces; those to be trained are `nn.Parameter`.

    `smaller` is the class for micro-batches of fewer samples, which may be the same.
    """

    def __init__(
        self, number: int, written: Any, smaller: Any, slices: Slices, tensors: Mapping[str, Tensor], around: Around
    ) -> None:
        self.number, self.tensors, self.around = number, tensors, around
        self.axes = list(written.MESH)
        self.parameters = {name: t for name, t in tensors.items() if isinstance(t, nn.Parameter)}
        self.rows: dict[str, Row] = {name: _row(written, name) for name in self.parameters}
        self.slices, self.programs = slices, (written(tensors), smaller(tensors))  # may lay out weights otherwise
        self.gradients = Gradients(self.parameters.values(), self.rows.values(), self.axes)
        self.updated = dict(zip(self.parameters, self.gradients.updated, strict=True))
        self.inputs: list[str] = list(written.INPUTS)
        self.batches: list[Callable[[], Batch]] = []
        self.puts_off = False  # whether the schedule asks for gradients of weights on their own
        self.put_off: dict[int, PutOff] = {}  # of micro-batches whose gradients of weights are not yet made
        self.undone = 0  # micro-batches of this step whose backward is done

    def start(self, batches: Sequence[Callable[[], Batch]]) -> None:
        """A step; each batch is asked for when its turn comes."""
        self.batches, self.undone = list(batches), 0
        self.gradients.start(armed=len(batches) == 1 and not self.puts_off)
        program = self.programs[0]
        with self.around():
            self.copies = Copies(program.copies() if hasattr(program, "copies") else {})

    def forward(self, number: int, entering: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Of a micro-batch; the last one is undone last, whatever the schedule."""
        program, last = self.programs[self.slices.is_smaller(number)], number == len(self.batches) - 1
        with in_last_pass(last):
            if self.puts_off:
                self.put_off[number] = PutOff(self.copies.stand_ins.values())
                with self.put_off[number].recording():
                    return self._run(program, self.batches[number](), entering, self.copies.stand_ins)
            copies = self.copies.last() if last else self.copies.stand_ins
            return self._run(program, self.batches[number](), entering, copies)

    def backward(self, results: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """Of a micro-batch; where gradients of weights are put off, `backward_weights` follows."""
        if not self.puts_off:
            self.undone += 1
            if self.undone == len(self.batches):
                self.gradients.arm()
        trained = [(r, g) for r, g in zip(results, gradients, strict=True) if r.requires_grad]
        if trained:
            torch.autograd.backward([r for r, _ in trained], [g for _, g in trained])

    def backward_weights(self, number: int) -> None:
        """What the backward of a micro-batch has put off; what the last one finishes is sent."""
        own = self.put_off.pop(number)
        self.undone += 1
        if self.undone < len(self.batches):
            own.run()
            return
        own.entries.insert(0, self.copies)
        left = own.leaves()
        self.gradients.finish(p for p in self.parameters.values() if id(p) not in left)
        own.run_last(self.gradients.finish)

    def without_gradient(self, batch: Batch, entering: Mapping[str, Tensor], program: Any) -> tuple[Tensor, ...]:
        """Of any batch, by another program of the partition, without a change of buffers."""
        buffers = {name: t for name, t in self.tensors.items() if not isinstance(t, nn.Parameter)}
        kept = {name: t.clone() for name, t in buffers.items()}
        with torch.no_grad():
            with self.around():
                copies = program.copies() if hasattr(program, "copies") else {}
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


def _row(written: Any, name: str) -> Row:
    row: Row | None = look_up(written.PARAMETERS, name)
    assert row is not None, f"{name} is not trained in this partition"
    return row
