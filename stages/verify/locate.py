"""The first op that differs, where a program does: run on all ranks at once, after the verdict.

One step is run again from the module's own state before it, so that nothing of an earlier fault is left:

1. The traced graph, run op by op, differs from the module: the trace is at fault.
2. The step is equal now: it was the optimizer's step before it, on shards, that went wrong.
3. The values that the program writes beside those of the graph, in the order of the program: forward first.
4. Then gradients of what ops write, in the order of backward; then those of the parameters.

What is wrong in float32 alone is looked for by 3 and 4 in float32, with the rounding of the graph's own run as measure.
Each rank looks at all that its partitions write in one pass; of what the ranks find, the first counts: forward that of
the first partition, backward that of the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor as Data

from shardwright.pipeline.ir.graph import Op, OpGraph, Role
from shardwright.pipeline.ir.layout import of_gradient
from shardwright.pipeline.ir.plan import Plan
from shardwright.pipeline.ir.program import Call, Convert
from shardwright.pipeline.ops.samples import NormParts, norm_parts_of_plan
from shardwright.pipeline.sharding.partitions import sharded_parts
from shardwright.stages.verify.compare import (
    IN_FLOAT32,
    LOSS,
    SHARE,
    TOLERANCE,
    Difference,
    Gap,
    compare_passes,
    largest,
    own_gap,
    whole_gap,
)
from shardwright.stages.verify.float32 import LEAST, MARGIN, Float32Step
from shardwright.stages.verify.float64 import Asked, in_float32, in_float64
from shardwright.stages.verify.ranks import Rank, rank_of
from shardwright.stages.verify.record import Names, Noted, Recorder, names_of, recorded, targets_by_line
from shardwright.stages.verify.truth import (
    Batch,
    MakeOptimizer,
    ModuleState,
    Truth,
    TruthStep,
    Values,
    doubled,
    interpret,
)

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
    plan: Plan
    written: str  # as codegen writes it
    text: str  # as it is run
    path: str
    smaller: OpGraph | None = None  # of micro-batches that have fewer samples

    def graph_of(self, batch: Batch) -> OpGraph:
        """By the sizes of what is given."""
        if self.smaller is None:
            return self.graph
        fewer = all(batch[v.name].shape == v.type.shape for v in self.smaller.of_role(Role.INPUT))
        return self.smaller if fewer else self.graph

    def names(self, graph: OpGraph) -> dict[int, Names]:
        """By partition, in micro-batches of that graph."""
        found = {}
        for number, own in enumerate(sharded_parts(self.plan, graph)):
            apart = graph is self.smaller and f"class Smaller{number}(" in self.written
            name = f"{'Smaller' if apart else 'Partition'}{number}" if self.plan.pipelined else "Program"
            found[number] = names_of(self.written, own.program, name, self.plan.partitions[number].first)
        return found

    @cached_property
    def norms(self) -> dict[str, NormParts]:
        """Batch norms of each rank's own samples."""
        return norm_parts_of_plan(self.graph, self.plan)

    def line(self, number: int) -> str:
        return self.text.splitlines()[number - 1].strip()


def locate(case: Case, truth: Truth, make: MakeOptimizer, first: Difference) -> Fault:
    """`first` is what differed first; the truth's steps have not been taken yet."""
    if first.tolerance == IN_FLOAT32:
        return Fault("in float64 throughout all is equal: the difference is the rounding of the model's own casts")
    before, step = _step(truth, first.step)
    if first.kind == "parameter":
        return _of_update(first)
    fault = _of_trace(case, before, step, draw=truth.draw)
    if fault is not None:
        return fault
    for at in [first.at] if first.kind == LOSS else range(len(step.batches)):
        with in_float64(widen=True, draws=truth.draw):
            rank, recorder, losses = _recorded_step(case, before, step.batches, make, truth.batch_norm, at)
        again = compare_passes(rank, losses, step.passes, first.step, TOLERANCE)
        if first.kind != "buffer" and not any(d.over > 1.0 for d in again):
            return _of_update(first)
        values = interpret(case.graph_of(step.batches[at]), before, step.batches, at, draw=truth.draw, norms=case.norms)
        search = _FaultSearch(case, rank, recorder, values)
        if fault := search.forward() or search.backward() or search.buffers(first):
            return fault
    return _of_parameter(case, first)


def locate_in_float32(case: Case, step: Float32Step, make: MakeOptimizer, batch_norm: str, first: Difference) -> Fault:
    wide = ModuleState(doubled(step.state.parameters), doubled(step.state.constants))
    batches = [doubled(batch) for batch in step.batches]
    fault = None
    for at, batch in enumerate(step.batches):
        with in_float32(draws=False):
            rank, recorder, _ = _recorded_step(case, step.state, step.batches, make, batch_norm, at)
        exact = interpret(case.graph_of(batch), wide, batches, at, norms=case.norms)
        own = interpret(case.graph_of(batch), step.state, step.batches, at, within=in_float32, norms=case.norms)
        search = _FaultSearch(case, rank, recorder, exact, own)
        if fault := search.forward() or search.backward():
            break
    fault = fault or _of_parameter(case, first)
    return replace(fault, what=f"{IN_FLOAT32_ALONE} {fault.what}")


def _recorded_step(
    case: Case, before: ModuleState, batches: list[Batch], make: MakeOptimizer, batch_norm: str, at: int
) -> tuple[Rank, Recorder, list[Data]]:
    """One pass of the step is noted."""
    recorder = Recorder(case.names(case.graph_of(batches[at])))
    rank = rank_of(recorded(case.text, case.path, recorder), before, make, batch_norm)
    rank.inside(lambda partition, number: recorder.inside(partition, number == at))
    return rank, recorder, rank.run(batches)


def _step(truth: Truth, number: int) -> tuple[ModuleState, TruthStep]:
    """The state before a step, and the step."""
    before = deepcopy(truth.first)
    for place, step in enumerate(truth.steps):
        if place == number:
            return before, step
        before = deepcopy(step.after)
    raise AssertionError(f"there are fewer than {number + 1} steps")


def _of_update(first: Difference) -> Fault:
    return Fault(
        f"up to it all is equal, but the optimizer's step {first.step + (first.kind == 'parameter')} on shards of the "
        "parameters is not its step on the whole: it must work element by element"
    )


def _of_trace(case: Case, before: ModuleState, step: TruthStep, *, draw: bool) -> Fault | None:
    """Whether the graph, op by op, is the module."""
    wrong = "the traced graph itself is not the module: run op by op, it has another"
    summed: dict[str, Data] = {}
    for at, (batch, loss) in enumerate(zip(step.batches, step.passes.losses, strict=True)):
        values = interpret(case.graph_of(batch), before, step.batches, at, draw=draw, norms=case.norms)
        far = whole_gap(values.loss, loss)
        if far.relative() > TOLERANCE:
            return Fault(f"{wrong} loss", difference=far.difference, size=far.size)
        for value in case.graph.of_role(Role.PARAMETER):
            if value.name in values.gradients:
                summed[value.origin] = summed.get(value.origin, 0) + values.gradients[value.name]
    floor = SHARE * largest(summed.values())
    for name, gradient in summed.items():
        far = whole_gap(gradient, step.passes.gradients.get(name, torch.zeros_like(gradient)))
        if far.relative(floor) > NEAR:
            return Fault(f"{wrong} gradient of {name}", difference=far.difference, size=far.size)
    return None


@dataclass(frozen=True)
class _FaultSearch:
    """What this rank's partitions have written beside what the graph computes.

    The ranks of a mesh meet where a value is partial, so all of them look at everything.
    """

    case: Case
    rank: Rank
    recorder: Recorder
    exact: Values  # in float64
    own: Values | None = None  # where float32 is looked at: in float32, with the graph's own rounding

    def forward(self) -> Fault | None:
        found = []
        for noted in self.recorder.noted.values():
            tensor, own = noted.written.tensor, self.own.values if self.own else None
            wanted = self.exact.values[tensor.value]
            far = own_gap(noted.value, wanted, tensor.layout, self.rank.axes, padding=False)
            if far.relative(SMALL) > _near(own, tensor.value, wanted, SMALL):
                found.append((noted, _fault_of(self.case, noted, far)))
        return self._first(found, min)

    def backward(self) -> Fault | None:
        """The first in the order of backward; it is what reads the value that is at fault."""
        parameters = (value.name for value in self.case.graph.of_role(Role.PARAMETER))
        gradients, own = self.exact.gradients, self.own.gradients if self.own else None
        floor = SHARE * largest(gradients[name] for name in parameters if name in gradients)
        found = []
        for noted in self.recorder.noted.values():
            tensor = noted.written.tensor
            wanted = gradients.get(tensor.value)
            if wanted is None or not isinstance(noted.written.step, Call):
                continue
            far = own_gap(noted.gradient, wanted, of_gradient(tensor.layout), self.rank.axes, padding=False)
            if far.relative(floor) > _near(own, tensor.value, wanted, floor):
                found.append((noted, self._of_readers(noted, far)))
        return self._first(found, max)

    def buffers(self, first: Difference) -> Fault | None:
        """The line that changes it."""
        names, graph, found = _names(self.case, first.name), self.case.graph, []
        for noted in self.recorder.noted.values() if first.kind == "buffer" else ():
            step = noted.written.step
            if isinstance(step, Call) and names & set(graph.op(step.op).mutates):
                what = f"results are equal, but {step.op} leaves another {first.name} behind"
                found.append((noted, replace(_fault_of(self.case, noted, Gap(0.0, 0.0)), what=what)))
        return self._first(found, min)

    def _of_readers(self, noted: Noted, far: Gap) -> Fault:
        value, others = noted.written.tensor.value, self.recorder.noted.values()
        beside = [other for other in others if other.place[0] == noted.place[0]]
        reading = sorted({other.line for other in beside if _reads(self.case, other.written.step, value)})
        where = f"{'line' if len(reading) == 1 else 'lines'} {', '.join(map(str, reading))}"
        fault = _fault_of(self.case, noted, far)
        what = f"forward is equal, but the gradient of the result of {fault.op} is not: see what reads it, {where}"
        return replace(fault, what=what)

    def _first(self, found: Iterable[tuple[Noted, Fault]], pick: Callable[..., Any]) -> Fault | None:
        """Of all ranks, by the order in which the program writes; of what several find, with the largest difference."""
        sign = -1 if pick is min else 1
        own = [((noted.place, sign * fault.difference), fault) for noted, fault in found]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
        first: Fault | None = pick((f for rank in everyone for f in rank), key=lambda f: f[0], default=(None, None))[1]
        return first


def _near(own: dict[str, Data] | None, name: str, exact: Data, floor: float) -> float:
    if own is None:
        return NEAR
    return MARGIN * max(whole_gap(own[name], exact).relative(floor) if name in own else 0.0, LEAST)


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
    return _at(op, Fault(what))


def _names(case: Case, origin: str) -> set[str]:
    return {value.name for value in case.graph.values.values() if value.origin == origin}


def _fault_of(case: Case, noted: Noted, far: Gap) -> Fault:
    """What a line writes differs; of a conversion the op is that of the value, or one that reads it."""
    step = noted.written.step
    if isinstance(step, Call):
        op, what = case.graph.op(step.op), f"the result of {step.op} differs"
    else:
        value = case.graph.values[step.source.value]
        made = value.role is Role.RESULT
        op = next(op for op in case.graph.ops if value.name in (op.outputs if made else op.inputs))
        named = f"result of {op.name}" if made else f"{value.role.value} {value.origin}"
        what = f"the {named} differs after its conversion {step.source.layout} -> {step.target.layout}"
    fault = Fault(what, line=noted.line, text=case.line(noted.line), difference=far.difference, size=far.size)
    return _at(op, fault)


def _at(op: Op | None, fault: Fault) -> Fault:
    return replace(fault, op=op.name, target=op.target, module=op.module, source=op.source) if op else fault


# ---- casts to lower types and back, which lose nothing but digits: a mode widens them, and rounding would hide them


def foreign_cast(case: Case, step: Float32Step, asked: Iterable[Asked]) -> Fault | None:
    """The first line that asks for a cast that none of its ops has and that loses digits of the graph's widest type."""
    types = {getattr(torch, v.type.dtype) for v in case.graph.values.values() if v.type.is_inexact}
    widest = min((t for t in types if t.is_floating_point), key=lambda dtype: torch.finfo(dtype).eps)
    suspects = sorted((line, str(dtype), dtype) for dtype, line in asked if _is_lower(dtype, widest))
    if not suspects:
        return None
    known = interpret(case.graph, step.state, step.batches, 0, within=in_float32, norms=case.norms).asked
    graphs = [graph for graph in (case.graph, case.smaller) if graph is not None]
    ops: dict[tuple[str, str], set[str]] = {}  # function, name in it -> ops whose results it stands for
    for (_, name), written in (item for g in graphs for own in case.names(g).values() for item in own.items()):
        if isinstance(written.step, Call):
            ops.setdefault((written.function, name), set()).add(written.step.op)
    targets = targets_by_line(case.text)
    for line, named, dtype in suspects:
        own = {op for name in targets.get(line, ()) for op in ops.get(name, ())}
        if not any(dtype in known.get(op, ()) for op in own):
            what = f"a cast to {named.removeprefix('torch.')} that the model does not have: digits are lost"
            op = next((op for op in case.graph.ops if op.name in own), None)
            return _at(op, Fault(what, line=line, text=case.line(line)))
    return None


def _is_lower(dtype: torch.dtype, widest: torch.dtype) -> bool:
    """Fewer bits, or as many that are shared out otherwise."""
    own, wide = torch.finfo(dtype), torch.finfo(widest)
    return bool(own.bits < wide.bits or (own.bits == wide.bits and own.eps != wide.eps))
