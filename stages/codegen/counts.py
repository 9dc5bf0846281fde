"""Counters that a model keeps in buffers, such as how many batches each norm has seen: one call for a run of them.

A kernel for every counter takes longer to launch than all of them take to run.
"""

from __future__ import annotations

from itertools import groupby

from pipeline.ir.graph import Op, OpGraph, Role
from pipeline.ir.program import Call, Step


def counted_together(graph: OpGraph, steps: tuple[Step, ...]) -> list[tuple[Call, ...]]:
    """Runs of two or more steps that each add the same number to a buffer, with nothing between them."""
    read = graph.consumers()

    def counts_by(step: Step) -> object:
        return _added(graph, graph.op(step.op)) if isinstance(step, Call) and not read[step.outputs[0].value] else None

    runs = (tuple(run) for number, run in groupby(steps, counts_by) if number is not None)
    return [run for run in runs if len(run) > 1]  # type: ignore[misc]


def _added(graph: OpGraph, op: Op) -> object:
    """The number that an op adds to a buffer of integers; None for any other op."""
    if op.target != "aten.add_.Tensor" or op.args.named or len(op.inputs) != 1:
        return None
    buffer, number = graph.values[op.inputs[0]], op.args.positional[-1]
    counts = buffer.role is Role.BUFFER and buffer.type.dtype == "int64" and isinstance(number, int)
    return number if counts else None
