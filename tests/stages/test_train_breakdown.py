"""Where the time of a step goes: from made-up events, and from real steps on two ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright.pipeline.ir.plan import Prediction
from shardwright.pipeline.ir.report import Breakdown
from shardwright.pipeline.runtime.pipelining.transfer import ACROSS
from shardwright.pipeline.runtime.programs.collectives import AROUND
from shardwright.stages.train.breakdown import (
    HOLE_NS,
    STEP,
    ProfiledEvent,
    break_down,
    joined,
    length,
    mean_breakdown,
    profiled,
    within,
    without,
)
from shardwright.stages.train.engines.pipelined import PipelinedEngine
from shardwright.stages.train.engines.planned import PlannedEngine
from shardwright.stages.train.loop import Loop, looked_at
from shardwright.stages.train.measured import compare, figures, make_report, median_seconds
from tests import plans
from tests.piped_training import Case, job_of, write_case
from tests.programs import plan_for, uniform
from tests.ranks import run_ranks
from tests.stages.test_train_tensors import job, write_files
from tests.storage_plans import plan_named

MS = 1_000_000
MAIN, GLOO = 1, 2

Spans = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)).map(lambda s: (s[0], s[0] + s[1])), max_size=8)


def moments(spans: list[tuple[int, int]]) -> set[int]:
    return {moment for begin, end in spans for moment in range(begin, end)}


@given(Spans, Spans)
def test_spans_are_sets_of_moments(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> None:
    a, b = joined(left), joined(right)
    assert moments(a) == moments(left) and length(a) == len(moments(left))
    assert moments(within(a, b)) == moments(left) & moments(right)
    assert length(within(a, b)) == len(moments(left) & moments(right))
    assert moments(without(a, b)) == moments(left) - moments(right)
    assert length(without(a, b)) == len(moments(left) - moments(right))


def test_holes_between_ops_are_filled_if_they_are_short() -> None:
    assert joined([(0, 2), (4, 5), (9, 10)], hole=2) == [(0, 5), (9, 10)]


def event(name: str, begin: float, end: float, thread: int = MAIN, on_gpu: bool = False) -> ProfiledEvent:
    return ProfiledEvent(name, thread, (int(begin * MS), int(end * MS)), on_gpu)


def test_the_parts_of_a_step() -> None:
    """Wrappers that wait are no ops, nor is what a thread of collectives does; both ends of the step cut."""
    events = [
        event(STEP, 10, 30),
        event("aten::mm", 8, 14),
        event("aten::add", 14 + HOLE_NS / MS, 16),
        event("autograd::engine::evaluate_function: _PairBackward", 16, 28),
        event("c10d::allreduce_", 16, 17),
        event("gloo:all_reduce", 15, 24, GLOO),
        event("aten::add_", 16, 24, GLOO),
        event("## Call CompiledFxGraph f1 ##", 26, 28),
    ]
    found = break_down(events, on_gpu=False)
    assert found == Breakdown(0.020, 0.008, 0.008, 0.001, 0.004)


def test_the_parts_of_a_step_on_a_gpu_are_those_of_its_kernels() -> None:
    events = [
        event(STEP, 0, 10),
        event("aten::mm", 0, 9),
        event("sgemm_128x64", 1, 4, 7, on_gpu=True),
        event("ncclDevKernel_AllReduce_Sum_f32", 3, 6, 8, on_gpu=True),
        replace(event(STEP, 0, 10, 7, on_gpu=True), is_label=True),
        replace(event("nccl:all_reduce", 0, 9, 8, on_gpu=True), is_label=True),
        event("Optimizer.step#AdamW.step", 0, 1),
        replace(event("Optimizer.step#AdamW.step", 2, 8, 7, on_gpu=True), is_label=True),
    ]
    found = Breakdown(0.010, 0.003, 0.002, 0.001, 0.005, optimizer_seconds=0.002)
    assert break_down(events, on_gpu=True) == found
    late = [events[0], *(event("add", begin, begin + 1, 7, on_gpu=True) for begin in (1.0, 2.003, 3.05))]
    assert break_down(late, on_gpu=True).compute_seconds == pytest.approx(0.003003)  # the last was issued too late


def test_the_bubble_is_what_a_partition_waits_for_others() -> None:
    """Not what ops or a collective of its own ranks cover; a message that is under way meanwhile is none."""
    events = [
        event(STEP, 0, 40),
        event("gloo:recv", 1, 10),
        event("aten::mm", 4, 6),
        event("gloo:send", 10, 30),
        event("aten::mm", 10, 20),
        event("gloo:all_reduce", 18, 24, GLOO),
        event(ACROSS, 33, 38),
        event("gloo:broadcast", 34, 38, GLOO),
    ]
    found = break_down(events, on_gpu=False)
    assert found == Breakdown(0.040, 0.012, 0.004, 0.012, 0.007, 0.017)
    parts = found.compute_seconds + found.communication_seconds + found.bubble_seconds + found.other_seconds
    assert parts == pytest.approx(found.step_seconds)


def test_messages_that_are_one_collective_are_no_bubble() -> None:
    events = [
        event(STEP, 0, 20),
        event("aten::mm", 0, 4),
        event(AROUND, 6, 12),
        event("gloo:send", 6, 9),
        event("gloo:recv", 7, 11),
        event("gloo:recv", 14, 17),
    ]
    assert break_down(events, on_gpu=False) == Breakdown(0.020, 0.004, 0.005, 0.0, 0.008, 0.003)


def test_the_bubble_on_a_gpu_is_in_kernels_of_messages() -> None:
    """All-to-all runs the same kernels; the label around them tells."""
    kernel = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
    events = [
        event(STEP, 0, 20),
        event("sgemm_128x64", 0, 4, 7, on_gpu=True),
        event(kernel, 3, 8, 8, on_gpu=True),
        event(kernel, 10, 13, 8, on_gpu=True),
        replace(event("nccl:all_to_all", 10, 13, 8, on_gpu=True), is_label=True),
        event("ncclDevKernel_Broadcast_RING_LL", 15, 16, 8, on_gpu=True),
        replace(event(ACROSS, 15, 16, 8, on_gpu=True), is_label=True),
    ]
    assert break_down(events, on_gpu=True) == Breakdown(0.020, 0.004, 0.003, 0.001, 0.008, 0.005)


def test_of_a_pipeline_the_busiest_rank_is_told() -> None:
    one, other = Breakdown(0.020, 0.008, 0.006, 0.0, 0.006), Breakdown(0.020, 0.012, 0.002, 0.002, 0.006)
    assert mean_breakdown([one, other]) == Breakdown(0.020, 0.010, 0.004, 0.001, 0.006)
    waits = replace(one, communication_seconds=0.0, bubble_seconds=0.006)
    assert mean_breakdown([waits, other]) == other


def test_parts_are_compared_on_the_scale_of_the_median_step() -> None:
    prediction = Prediction(0.010, 2_000_000, 0, 0.004, 0.002, 0.001, 0.001)
    breakdown = Breakdown(0.040, 0.024, 0.012, 0.001, 0.004, optimizer_seconds=0.004)
    peaks = [(1_000_000, 2_000_000), (3_000_000, 1_000_000)]  # of a pipeline ranks have peaks of their own
    rows = {row.what: row for row in compare(prediction, 0.020, 8, peaks, breakdown)}
    parts = [rows[name].measured for name in ("compute_ms", "communication_ms", "other_ms")]
    assert parts == pytest.approx([12.0, 6.0, 2.0]) and sum(parts) == pytest.approx(rows["step_ms"].measured)
    assert rows["compute_ms"].ratio == pytest.approx(2.0) and rows["communication_ms"].ratio == pytest.approx(3.0)
    assert rows["optimizer_ms"].ratio == pytest.approx(2.0)
    assert rows["samples_per_second"].ratio == pytest.approx(0.5) and rows["other_ms"].ratio is None
    assert [rows[f"peak_mb{rank}"].ratio for rank in ("", "_rank_0", "_rank_1")] == pytest.approx([1.5, 0.5, 3.0])
    assert [row.what for row in compare(prediction, 0.020, 8, [(1, 1)], None)] == [
        "step_ms", "samples_per_second", "peak_mb", "peak_mb_rank_0",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("median", "parts"),
    [(0.030, [24.0, 1.0, 5.0]), (0.020, [15.0, 0.625, 4.375])],  # a shorter one than the GPU worked is scaled
)
def test_on_a_gpu_the_profiler_adds_waiting_alone(median: float, parts: list[float]) -> None:
    prediction = Prediction(0.010, 2_000_000, 0, 0.004, 0.002, 0.001, 0.001)
    breakdown = Breakdown(0.032, 0.024, 0.001, 0.0, 0.007)
    rows = {row.what: row.measured for row in compare(prediction, median, 8, [(1, 1)], breakdown, on_gpu=True)}
    assert [rows[name] for name in ("compute_ms", "communication_ms", "other_ms")] == pytest.approx(parts)
    assert sum(parts) == pytest.approx(1e3 * median)


def test_a_bubble_is_compared_where_there_is_a_pipeline() -> None:
    piped = Prediction(0.010, 1, 0, 0.004, 0.002, 0.0, 0.001, bubble_seconds=0.003)
    found = compare(piped, 0.020, 8, [(1, 1)], Breakdown(0.040, 0.020, 0.004, 0.0, 0.004, 0.012))
    rows = {row.what: row for row in found}
    assert rows["bubble_ms"].measured == pytest.approx(6.0) and rows["bubble_ms"].ratio == pytest.approx(2.0)
    assert rows["communication_ms"].ratio == pytest.approx(1.0)
    parts = [rows[f"{name}_ms"].measured for name in ("compute", "communication", "bubble", "other")]
    assert sum(parts) == pytest.approx(rows["step_ms"].measured)


def test_a_profiled_step_is_not_in_the_median() -> None:
    assert median_seconds((9.0, 9.0, 9.0, 1.0, 8.0, 2.0, 3.0), profiled=4) == 2.0
    assert median_seconds((9.0, 8.0), profiled=2) == 8.0
    assert median_seconds((9.0, 9.0, 7.0, 8.0), profiled=3) == 7.0 and median_seconds((7.0,), profiled=0) == 7.0


@pytest.mark.parametrize(
    ("asked", "start", "steps", "found"),
    [
        (None, 0, 10, (1, 9)),
        (None, 0, 2, (1, 2)),  # none follows
        (5, 0, 10, (1, 5)),
        (5, 4, 10, (5, 6)),  # memory is measured there, as the run went on after four steps
        (5, 5, 10, (6, 5)),
        (9, 8, 10, (9, 10)),  # none follows
        (9, 9, 10, (9, 10)),
        (3, 5, 10, (6, 3)),  # taken before
    ],
)
def test_the_traced_step_is_not_the_one_whose_memory_is_measured(
    asked: int | None, start: int, steps: int, found: tuple[int, int]
) -> None:
    assert looked_at(asked, start, steps) == found


def train(folder: str) -> dict[str, Any]:
    given = job(Path(folder) / "ddp.py", Path(folder) / "model.pt")
    given["train"] |= {"steps": 4, "trace_step": 3, "evaluate": {"every": 0, "batches": 1}}
    given["trace_path"] = str(Path(folder) / "trace-rank0.json")
    return Loop(PlannedEngine(given), given, Path(folder)).run()


SLEEP = 0.5  # long beside what a busy machine adds


def train_piped(folder: str) -> Breakdown:
    (path,) = Path(folder).glob("*.py")
    case, _ = torch.load(path.with_suffix(".truth"), weights_only=False)
    engine = PipelinedEngine(job_of(case, path))

    def step() -> None:
        first, *later = engine.batches(0)
        engine.step(engine.on_device(first), later)

    step()
    return profiled(step, engine.device, None)


def test_a_partition_waits_for_one_that_sleeps(tmp_path: Path) -> None:
    write_case(Case("gpt", "1f1b", (1, 1), micro_batches=2), tmp_path)
    (path,) = tmp_path.glob("*.py")
    before, after = path.read_text().split("class Partition1")
    head, body = after.split("def forward", 1)
    lines = body.splitlines(keepends=True)
    asleep = f"        import time; time.sleep({SLEEP})\n"
    path.write_text("".join([before, "class Partition1", head, "def forward", lines[0], asleep, *lines[1:]]))
    waits, sleeps = run_ranks(2, train_piped, str(tmp_path))
    assert waits.bubble_seconds > waits.communication_seconds  # it waits for one that sleeps twice
    for found in (waits, sleeps):
        parts = (found.compute_seconds, found.communication_seconds, found.bubble_seconds, found.other_seconds)
        assert sum(parts) == pytest.approx(found.step_seconds)


def test_a_real_step_in_its_parts(tmp_path: Path) -> None:
    write_files(tmp_path)
    (tmp_path / "ddp.py").write_text(plans.lowered("tied8", plan_named("tied8", "ddp"))[1])
    measured, other = run_ranks(2, train, str(tmp_path))
    assert measured["breakdown"] == other["breakdown"]
    found = Breakdown(**measured["breakdown"])
    assert found.compute_seconds > 0 and found.communication_seconds + found.hidden_seconds > 0
    assert found.compute_seconds + found.communication_seconds + found.other_seconds == pytest.approx(
        found.step_seconds
    )
    assert found.bubble_seconds == 0.0 and 0 < found.optimizer_seconds < found.compute_seconds
    trace = json.loads((tmp_path / "trace-rank0.json").read_text())
    names = {entry.get("name") for entry in trace["traceEvents"]}
    assert {STEP, "aten::addmm", "gloo:all_reduce"} <= names
    assert not list(tmp_path.glob("*.part"))

    graph = plans.graph_of("mlp")
    plan = plan_for(graph, uniform(graph, 2), 2)
    report = make_report(measured, plan, edited=False)
    assert report.breakdown == mean_breakdown([found]) and report.median_step_seconds == measured["seconds"][2]
    told = figures(report)
    assert told["compute_ms"] > 0 and "peak_mb_rank_1" in told and "step_ms" not in told
