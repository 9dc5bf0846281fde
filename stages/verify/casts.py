"""Casts of a program that the model does not have: to a lower type and back, nothing but digits are lost.

In float64 and in float32 such casts are widened (stages/verify/float64.py), and in a large batch their rounding would
hide anyway. So the lines that ask for a lower type are noted, each beside the ops that it stands for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch

from pipeline.ir.graph import OpGraph
from pipeline.ir.program import Call
from stages.verify.float32 import Float32Step
from stages.verify.float64 import Asked, in_float32
from stages.verify.interpret import interpret
from stages.verify.locate import Case, Fault
from stages.verify.record import Names, targets_by_line


def foreign_cast(case: Case, names: Iterable[Names], step: Float32Step, asked: Iterable[Asked]) -> Fault | None:
    """The first line that asks for a cast that none of its ops has and that loses digits of the graph's widest type."""
    widest = _widest(case.graph)
    suspects = sorted((line, str(dtype), dtype) for dtype, line in asked if _is_lower(dtype, widest))
    if not suspects:
        return None
    known = interpret(case.graph, step.state, step.batches[0], 0, step.parts[0], draw=False, within=in_float32).asked
    ops = _ops_by_name(names)
    targets = targets_by_line(case.text)
    for line, told, dtype in suspects:
        own = {op for name in targets.get(line, ()) for op in ops.get(name, ())}
        if not any(dtype in known.get(op, ()) for op in own):
            return _fault(case, line, told.removeprefix("torch."), own)
    return None


def _fault(case: Case, line: int, dtype: str, ops: set[str]) -> Fault:
    text = case.text.splitlines()[line - 1].strip()
    op = next((op for op in case.graph.ops if op.name in ops), None)
    what = f"a cast to {dtype} that the model does not have: digits are lost"
    fault = Fault(what, line=line, text=text)
    return replace(fault, op=op.name, target=op.target, module=op.module, source=op.source) if op else fault


def _widest(graph: OpGraph) -> torch.dtype:
    found = {value.type.dtype for value in graph.values.values() if value.type.is_inexact}
    real = [dtype for dtype in (getattr(torch, name) for name in found) if dtype.is_floating_point]
    return min(real, key=lambda dtype: torch.finfo(dtype).eps)


def _is_lower(dtype: torch.dtype, widest: torch.dtype) -> bool:
    """Fewer bits, or as many that are shared out otherwise."""
    own, wide = torch.finfo(dtype), torch.finfo(widest)
    return bool(own.bits < wide.bits or (own.bits == wide.bits and own.eps != wide.eps))


def _ops_by_name(names: Iterable[Names]) -> Mapping[tuple[str, str], set[str]]:
    """Name in a function of a program -> the ops whose results it stands for: one of each link that calls it."""
    found: dict[tuple[str, str], set[str]] = {}
    for own in names:
        for (_, name), written in own.items():
            if isinstance(written.step, Call):
                found.setdefault((written.function, name), set()).add(written.step.op)
    return found
