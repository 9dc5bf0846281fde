"""The predicted step of a plan as events, for plan.json."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from shardwright.pipeline.cost.step import StepPrice
from shardwright.pipeline.cost.step_lines import StepLines
from shardwright.pipeline.ir.plan import Event, Timeline, Total
from shardwright.stages.checkpoint.pipelines.refine import PipelinePlan
from shardwright.stages.checkpoint.recompute.linearize import Linear
from shardwright.stages.checkpoint.recompute.schedule import OpKind
from shardwright.stages.checkpoint.recompute.simulate import Outcome

MOST_EVENTS = 2000
PHASES = {"F": "forward", "B": "backward", "W": "weight gradients"}
WAITING = "waiting"


def of_one(price: StepPrice, outcome: Outcome, linear: Linear, lines: StepLines) -> Timeline:
    """Without a pipeline: link by link in the order of execution, one micro-batch after another, each until the device
    is through with it; of gradient sums what is left then."""
    last, spans = len(linear.spans) - 1, linear.spans
    loss, now = len(price.links) - 1, 0.0
    events: list[Event] = []

    def add(what: str, first: int, last: int, micro: int | None, seconds: float, held: int | None = None) -> None:
        nonlocal now
        if seconds:
            events.append(Event(what, 0, first, last, micro, now, seconds, held))
            now += seconds

    add("prologue", 0, loss, None, price.outside.total)
    count, waited = price.micro_batches, 0.0
    kinds = {number: lines.durations(number) for number in {0, min(1, count - 1), count - 1}}
    for micro in range(count):
        seen: set[int] = set()
        *took, waited = kinds.get(micro) or kinds[1]
        for step, seconds in zip(outcome.steps, took, strict=True):
            link = step.op.link
            ran = "recompute" if link in seen else "forward"
            what = ran if step.op.kind is not OpKind.B else "loss" if link == last else "backward"
            seen.add(link)
            add(what, *spans[link], micro, seconds, linear.fixed_bytes + int(step.held))
    begun = sum(one.seconds for bucket in lines.buckets for one in bucket.sums)
    add("gradient sums", 0, loss, None, max(0.0, price.gradient_sum - begun) + waited)
    add("optimizer", 0, loss, None, price.optimizer)
    return _bounded(events)


def of_pipeline(plan: PipelinePlan, spans: Sequence[tuple[int, int]]) -> Timeline:
    """Of each partition, with its links, the micro-batches as they pass, and what is done once they are through."""
    events: list[Event] = []
    size = len(plan.timeline.events)
    for device, row in enumerate(plan.timeline.events):
        for event in row:
            task, seconds = event.task, event.end - event.start
            if seconds:
                what, links = PHASES[task.phase], spans[task.partition]
                events.append(Event(what, task.partition, *links, task.micro, event.start, seconds))
        now = plan.timeline.ends[device]
        for number in range(device, len(plan.partitions), size):
            part = plan.partitions[number]
            if part.load.once:
                what = "gradient sums, optimizer"
                events.append(Event(what, number, *spans[number], None, now, part.load.once))
                now += part.load.once
    return _bounded(events, waits(plan))


def waits(plan: PipelinePlan) -> list[Total]:
    """Seconds of a step in which the devices of the first partitions (each lies on its own) have nothing to do."""
    found = []
    for device, row in enumerate(plan.timeline.events):
        busy = sum(event.end - event.start for event in row)
        once = sum(part.load.once for part in plan.partitions[device :: len(plan.timeline.events)])
        found.append(Total(device, WAITING, plan.seconds - busy - once))
    return found


def _bounded(events: list[Event], more: list[Total] | None = None) -> Timeline:
    totals: Counter[tuple[int, str]] = Counter()
    for event in events:
        totals[event.partition, event.what] += event.seconds  # type: ignore[assignment]
    sums = tuple(Total(number, what, seconds) for (number, what), seconds in sorted(totals.items()))
    listed, note = _thinned(events) if len(events) > MOST_EVENTS else (events, "")
    return Timeline(tuple(sorted(listed, key=lambda e: (e.start, e.partition))), (*sums, *(more or ())), note)


def _thinned(events: list[Event]) -> tuple[list[Event], str]:
    """Without the micro-batches in the middle, which pass as their neighbours do; none, where two are too many."""
    by_micro = Counter(event.micro_batch for event in events)
    once, each = by_micro.pop(None, 0), max(by_micro.values(), default=1)
    kept, count = (MOST_EVENTS - once) // each, len(by_micro)
    if kept < 2:
        return [], f"{len(events)} events are too many to list: only the totals of each partition are kept"
    first, last = (kept + 1) // 2, count - kept // 2
    note = f"{len(events)} events are too many to list: micro-batches {first} to {last - 1} of {count} are left out"
    return [e for e in events if e.micro_batch is None or not first <= e.micro_batch < last], note
