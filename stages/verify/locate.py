"""The first op that differs, where a program does: run on all ranks at once, after the verdict.

One step is run again from the module's own state before it, so that nothing of an earlier fault is left:

1. The traced graph, run op by op, differs from the module: the trace is at fault.
2. The step is equal now: it was the optimizer's step before it, on pieces, that went wrong.
3. The values that the program writes beside those of the graph, in the order of the program: forward first.
4. Then gradients of what ops write, in the order of backward; then those of the parameters.

What is wrong in float32 alone is looked for by 3 and 4 in float32, with the rounding of the graph's own run as measure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor as Data

from pipeline.ir.graph import OpGraph, Role
from pipeline.ir.layout import of_gradient
from pipeline.ir.program import Call, Convert, Program
from stages.verify.compare import IN_FLOAT32, SHARE, TOLERANCE, Gap, gap, largest, whole_gap
from stages.verify.float32 import LEAST, MARGIN, Float32Step
from stages.verify.float64 import in_float32, in_float64
from stages.verify.interpret import Values, interpret
from stages.verify.record import Noted, Recorder, names_of, recorded
from stages.verify.steps import LOSS, Difference, Rank, compare_passes
from stages.verify.truth import Batch, MakeOptimizer, State, Step, Truth, copied, doubled, parts_of

NEAR = 10 * TOLERANCE  # for values inside a step
SMALL = 1e-6  # a value below is held against this: zeros may come with rounding
IN_FLOAT32_ALONE = "in float64 all is equal, but in float32"


@dataclass(frozen=True)
class Fault:
    """Where a program leaves the module's way."""

    what: str  # a sentence
    op: str = ""
    target: str = ""
    module: str = ""
    source: str = ""
    line: int = 0  # of module.py
    text: str = ""  # of that line
    difference: float = 0.0
    size: float = 0.0


@dataclass(frozen=True)
class Case:
    """A program's texts, and what they were written from."""

    graph: OpGraph
    program: Program | None  # of a pipeline every partition has one
    written: str  # as codegen writes it
    text: str  # as it is run
    path: str
    smaller: OpGraph | None = None  # of micro-batches that have fewer samples

    def graph_of(self, batch: Batch) -> OpGraph:
        """By the sizes of what is given."""
        inputs = [] if self.smaller is None else self.smaller.of_role(Role.INPUT)
        fewer = self.smaller is not None and all(batch[v.name].shape == v.type.shape for v in inputs)
        return self.smaller if fewer and self.smaller is not None else self.graph


class InPass(Protocol):
    """Looks for the fault in one pass of the step that differs first, given the state before it."""

    def __call__(
        self, case: Case, truth: Truth, make: MakeOptimizer, first: Difference, before: State, step: Step, at: int
    ) -> Fault | None: ...


class InPassOfFloat32(Protocol):
    """The same of the step that is run in float32."""

    def __call__(
        self, case: Case, step: Float32Step, make: MakeOptimizer, batch_norm: str, at: int
    ) -> Fault | None: ...


def locate_in_float32(
    case: Case, step: Float32Step, make: MakeOptimizer, batch_norm: str, first: Difference, look: InPassOfFloat32
) -> Fault:
    for at in range(len(step.batches)):
        fault = look(case, step, make, batch_norm, at)
        if fault is not None:
            return replace(fault, what=f"{IN_FLOAT32_ALONE} {fault.what}")
    fault = _of_parameter(case, first)
    return replace(fault, what=f"{IN_FLOAT32_ALONE} {fault.what}")


def locate(case: Case, truth: Truth, make: MakeOptimizer, first: Difference, in_pass: InPass | None = None) -> Fault:
    """`first` is what differed first; the truth's steps have not been taken yet."""
    if first.tolerance == IN_FLOAT32:
        return Fault("in float64 throughout all is equal: the difference is the rounding of the model's own casts")
    before, step = _step(truth.first, truth.steps, first.step)
    if first.kind == "parameter":
        return of_update(first)
    fault = _of_trace(case, before, step, draw=truth.draw)
    if fault is not None:
        return fault
    for at in [first.at] if first.kind == LOSS else range(len(step.batches)):
        fault = (in_pass or _in_pass)(case, truth, make, first, before, step, at)
        if fault is not None:
            return fault
    return _of_parameter(case, first)


def _in_pass(
    case: Case, truth: Truth, make: MakeOptimizer, first: Difference, before: State, step: Step, at: int
) -> Fault | None:
    with in_float64(widen=True, draws=truth.draw):
        rank, recorder, losses = _recorded_step(case, before, step.batches, make, truth.batch_norm, at)
    again = compare_passes(rank, losses, step.passes, first.step, TOLERANCE)
    if first.kind != "buffer" and not any(d.over > 1.0 for d in again):
        return of_update(first)
    expected = Expected(interpret(case.graph, before, step.batches[at], at, len(step.batches), draw=truth.draw))
    return (
        _forward(case, rank, recorder, expected)
        or _backward(case, rank, recorder, expected)
        or of_buffer(case, recorder, first)
    )


def in_pass_of_float32(case: Case, step: Float32Step, make: MakeOptimizer, batch_norm: str, at: int) -> Fault | None:
    with in_float32(draws=False):
        rank, recorder, _ = _recorded_step(case, step.state, step.batches, make, batch_norm, at)
    expected = expected_of_float32(case.graph, step, at)
    return _forward(case, rank, recorder, expected) or _backward(case, rank, recorder, expected)


def _recorded_step(
    case: Case, before: State, batches: list[Batch], make: MakeOptimizer, batch_norm: str, at: int
) -> tuple[Rank, Recorder, list[Data]]:
    """One pass of the step is noted."""
    assert case.program is not None
    recorder = Recorder(names_of(case.written, case.program))
    rank = Rank(recorded(case.text, case.path, recorder), before, make, batch_norm)
    return rank, recorder, rank.run(batches, on_pass=lambda number: _switch(recorder, number == at))


def _switch(recorder: Recorder, on: bool) -> None:
    recorder.on = on


def _step(before: State, steps: Iterable[Step], number: int) -> tuple[State, Step]:
    """The state before a step, and the step."""
    before = copied(before)
    for place, step in enumerate(steps):
        if place == number:
            return before, step
        before = copied(step.after)
    raise AssertionError(f"there are fewer than {number + 1} steps")


def of_update(first: Difference) -> Fault:
    return Fault(
        f"up to it all is equal, but the optimizer's step {first.step + (first.kind == 'parameter')} on pieces of the "
        "parameters is not its step on the whole: it must work element by element"
    )


def _of_trace(case: Case, before: State, step: Step, *, draw: bool) -> Fault | None:
    """Whether the graph, op by op, is the module."""
    parts, wrong = parts_of(step.batches), "the traced graph itself is not the module: run op by op, it has another"
    summed: dict[str, Data] = {}
    for at, (batch, loss) in enumerate(zip(step.batches, step.passes.losses, strict=True)):
        values = interpret(case.graph_of(batch), before, batch, at, parts[at], draw=draw)
        far = Gap(float((values.loss - loss).abs()), float(loss.abs()))
        if far.relative() > TOLERANCE:
            return Fault(f"{wrong} loss", difference=far.difference, size=far.size)
        for value in case.graph.of_role(Role.PARAMETER):
            if value.name in values.gradients:
                summed[value.origin] = summed.get(value.origin, 0) + values.gradients[value.name]
    floor = SHARE * largest(summed.values())
    for name, gradient in summed.items():
        expected = step.passes.gradients.get(name, torch.zeros_like(gradient))
        far = Gap(float((gradient - expected).abs().max()), largest([expected]))
        if far.relative(floor) > NEAR:
            return Fault(f"{wrong} gradient of {name}", difference=far.difference, size=far.size)
    return None


@dataclass(frozen=True)
class Expected:
    """What the graph computes in float64; in float32, where that is what is looked at, its own rounding."""

    exact: Values
    own: Values | None = None

    def is_far(self, name: str, far: Gap) -> bool:
        return far.relative(SMALL) > self._near(self.exact.values, self.own.values if self.own else None, name, SMALL)

    def is_gradient_far(self, name: str, far: Gap, floor: float) -> bool:
        own = self.own.gradients if self.own else None
        return far.relative(floor) > self._near(self.exact.gradients, own, name, floor)

    def _near(self, exact: dict[str, Data], own: dict[str, Data] | None, name: str, floor: float) -> float:
        if own is None:
            return NEAR
        return MARGIN * max(whole_gap(own[name], exact[name]).relative(floor) if name in own else 0.0, LEAST)


def expected_of_float32(graph: OpGraph, step: Float32Step, at: int) -> Expected:
    """Both of the same pass."""
    wide, batch = State(*map(_doubled, (step.state.parameters, step.state.constants))), _doubled(step.batches[at])
    exact = interpret(graph, wide, batch, at, step.parts[at], draw=False)
    own = interpret(graph, step.state, step.batches[at], at, step.parts[at], draw=False, within=in_float32)
    return Expected(exact, own)


def _doubled(tensors: dict[str, Data]) -> dict[str, Data]:
    return {name: doubled(tensor) for name, tensor in tensors.items()}


def _forward(case: Case, rank: Rank, recorder: Recorder, expected: Expected) -> Fault | None:
    for noted in recorder.noted.values():
        tensor = noted.written.tensor
        far = gap(noted.value, expected.exact.values[tensor.value], tensor.layout, rank.axes)
        if expected.is_far(tensor.value, far):
            return fault_of(case, noted, far)
    return None


def _backward(case: Case, rank: Rank, recorder: Recorder, expected: Expected) -> Fault | None:
    """The first in the order of backward; it is what reads the value that is at fault."""
    floor = floor_of_gradients(case, expected.exact)
    for noted in reversed(recorder.noted.values()):
        tensor, wanted = noted.written.tensor, expected.exact.gradients.get(noted.written.tensor.value)
        if wanted is None or not noted.written.by_op:
            continue
        far = gap(noted.gradient, wanted, of_gradient(tensor.layout), rank.axes)
        if expected.is_gradient_far(tensor.value, far, floor):
            return of_readers(case, recorder, noted, far)
    return None


def floor_of_gradients(case: Case, values: Values) -> float:
    """A gradient below it is held against it."""
    parameters = (value.name for value in case.graph.of_role(Role.PARAMETER))
    return SHARE * largest(values.gradients[name] for name in parameters if name in values.gradients)


def of_readers(case: Case, recorder: Recorder, noted: Noted, far: Gap) -> Fault:
    value = noted.written.tensor.value
    reading = sorted({n.line for n in recorder.noted.values() if _reads(case, n.written.step, value)})
    where = f"{'line' if len(reading) == 1 else 'lines'} {', '.join(map(str, reading))}"
    fault = fault_of(case, noted, far)
    what = f"forward is equal, but the gradient of the result of {fault.op} is not: see what reads it, {where}"
    return replace(fault, what=what)


def _reads(case: Case, step: Call | Convert, value: str) -> bool:
    return step.source.value == value if isinstance(step, Convert) else value in case.graph.op(step.op).inputs


def _of_parameter(case: Case, first: Difference) -> Fault:
    """All that the passes compute is equal: what is left is how a parameter's own gradient is brought together."""
    op = next((op for op in case.graph.ops if _names(case, first.name) & set(op.inputs)), None)
    lines = [n for n, text in enumerate(case.text.splitlines(), 1) if text.lstrip().startswith("PARAMETERS")]
    tied = [n for n, text in enumerate(case.text.splitlines(), 1) if text.startswith("TIED")]
    rows = f"its row of PARAMETERS, line {' or '.join(map(str, lines))} and after"
    what = (
        f"all results and their gradients are equal, but the {first.kind} of {first.name} is not: see its conversions, "
        + (f"{rows}, and TIED, line {tied[0]}" if tied else f"and {rows}")
    )
    return Fault(what) if op is None else Fault(what, op.name, op.target, op.module, op.source)


def of_buffer(case: Case, recorder: Recorder, first: Difference) -> Fault | None:
    """The line that changes it."""
    names = _names(case, first.name)
    for noted in recorder.noted.values() if first.kind == "buffer" else ():
        step = noted.written.step
        if isinstance(step, Call) and names & set(case.graph.op(step.op).mutates):
            what = f"results are equal, but {step.op} leaves another {first.name} behind"
            return replace(fault_of(case, noted, Gap(0.0, 0.0)), what=what)
    return None


def _names(case: Case, origin: str) -> set[str]:
    return {value.name for value in case.graph.values.values() if value.origin == origin}


def fault_of(case: Case, noted: Noted, far: Gap) -> Fault:
    """What a line writes differs; of a conversion the op is that of the value, or one that reads it."""
    step, line = noted.written.step, noted.line
    if isinstance(step, Call):
        op, what = case.graph.op(step.op), f"the result of {step.op} differs"
    else:
        value = case.graph.values[step.source.value]
        made = value.role is Role.RESULT
        op = next(op for op in case.graph.ops if value.name in (op.outputs if made else op.inputs))
        named = f"result of {op.name}" if made else f"{value.role.value} {value.origin}"
        what = f"the {named} differs after its conversion {step.source.layout} -> {step.target.layout}"
    text = case.text.splitlines()[line - 1].strip()
    return Fault(what, op.name, op.target, op.module, op.source, line, text, far.difference, far.size)
