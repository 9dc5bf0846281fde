"""The predicted step by op class and collective. The rows of a part sum to what the plan predicts for it.

Ops and conversions are priced one by one, as the solver did; the plan may price a whole link by its kernels, or as it
was measured, and a pipeline by its slices. Then the rows say how a part divides, and `scale` what they were
multiplied with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pipeline.ir.plan import Plan
from pipeline.ir.program import Call, Step
from pipeline.sharding.partitions import busiest
from stages.report.priced import PricedPartition, class_of

SUMS = "gradient sums, in buckets"
BEFORE = "conversions before the chain"


@dataclass(frozen=True)
class Row:
    part: str  # compute, communication, recompute, optimizer, waiting
    name: str
    seconds: float


@dataclass(frozen=True)
class StepSeconds:
    rows: tuple[Row, ...]
    total: float
    scale: dict[str, float]  # of the parts whose rows did not sum to the prediction by themselves


def seconds_of(plan: Plan, parts: tuple[PricedPartition, ...]) -> StepSeconds:
    predicted = plan.prediction
    own = [parts[number] for number in busiest(plan)] if parts else []
    compute: Counter[str] = Counter()
    communication: Counter[str] = Counter()
    for part in own:
        if part.price is not None:
            _add(part, compute, communication)
    rows, scale = [], {}
    for name, found, known in (
        ("compute", compute, predicted.compute_seconds),
        ("communication", communication, predicted.communication_seconds),
    ):
        divided, factor = _divided(found, known)
        rows += [Row(name, what, seconds) for what, seconds in divided]
        if abs(factor - 1) > 1e-6:
            scale[name] = factor
    rest = (
        ("recompute", "computed again", predicted.recompute_seconds),
        ("optimizer", "optimizer", predicted.optimizer_seconds),
        ("waiting", "pipeline bubble", predicted.bubble_seconds),
        ("waiting", "the GPU for its host", predicted.host_seconds),
    )
    rows += [Row(part, name, seconds) for part, name, seconds in rest if seconds > 1e-12]
    return StepSeconds(tuple(rows), predicted.step_seconds, scale)


def _divided(found: Mapping[str, float], known: float) -> tuple[list[tuple[str, float]], float]:
    """Rows that sum to what is known, largest first, and the factor; one row where nothing says how it divides."""
    total = sum(found.values())
    if not total:
        return ([("all", known)] if known else []), 1.0
    factor = known / total
    rows = [(name, seconds * factor) for name, seconds in found.items() if seconds]
    return sorted(rows, key=lambda row: -row[1]), factor


def _add(part: PricedPartition, compute: Counter[str], communication: Counter[str]) -> None:
    program, times = part.program, part.program.micro_batches
    assert part.price is not None
    for steps in program.links:
        _add_steps(part, steps, times, compute, communication)
    before: Counter[str] = Counter()  # the plan counts what runs before the chain as compute
    _add_steps(part, program.prologue, times, compute, before)
    _add_steps(part, program.shared, 1, compute, before)
    compute[BEFORE] += sum(before.values())
    communication[SUMS] += part.price.gradient_sum  # type: ignore[assignment]


def _add_steps(
    part: PricedPartition, steps: Iterable[Step], times: int, compute: Counter[str], communication: Counter[str]
) -> None:
    steps = tuple(steps)
    kept = part.kept(steps)
    for step in steps:
        if isinstance(step, Call):
            seconds = part.seconds(step, kept)
            assert seconds is not None and part.priced is not None
            kind = class_of(part.graph.op(step.op).target, part.priced.profile.ops[step.op].free)
            compute[kind] += times * seconds.total  # type: ignore[assignment]
        for name, each in part.collectives(step, kept):
            communication[name] += times * each  # type: ignore[assignment]
