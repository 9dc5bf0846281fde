"""The memory and the time of a whole training step, put together from its distinct links.

Every distinct link is run once on meta tensors (`link.py`), the optimizer once for each type of parameter; a deep model
costs no more than a shallow one. Then all of it is laid on one line of time (`timeline.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardwright.pipeline.ir.graph import OpGraph, Role
from shardwright.pipeline.ir.profile import Kernel
from shardwright.stages.profile.link import ActivationForm, LinkEnds, LinkRun, Runner, link_ends
from shardwright.stages.profile.optimizer import Build, OptimizerRun, run_optimizer
from shardwright.stages.profile.timeline import Composer, MemoryTimeline, StepMemory, summary


@dataclass(frozen=True)
class StepProfile:
    memory: StepMemory
    timeline: MemoryTimeline
    runs: tuple[LinkRun, ...]  # one per link of the chain; equal links share one
    ends: tuple[LinkEnds, ...]
    prologue: tuple[Kernel, ...]
    optimizer: OptimizerRun
    joined: tuple[tuple[int, int, LinkRun], ...]  # links between which nothing crosses that a backward needs, as one


def profile_step(
    graph: OpGraph, device: str, precision: str, optimizer: Build = torch.optim.AdamW, workspace: int = 0
) -> StepProfile:
    """`precision` is `native` (the graph's own types) or `amp`; `workspace` is what the device's libraries hold."""
    runner = Runner(graph, device, precision)
    prologue = runner.run_prologue()
    ends = link_ends(graph)
    distinct: dict[object, LinkRun] = {}
    forms: dict[str, ActivationForm] = {}

    def run(first: int, last: int) -> LinkRun:
        """Of links first..last as one; equal ones are run once."""
        links = graph.chain[first : last + 1]
        end = ends[first] if first == last else ends_of(ends, first, last)
        entering = tuple(forms[name] for name in end.reads)
        key = (tuple(link.block for link in links), entering)
        if key not in distinct:
            distinct[key] = runner.run_link(tuple(op for link in links for op in link.ops), end, entering)
        return distinct[key]

    runs: list[LinkRun] = []
    for number, end in enumerate(ends):
        runs.append(run(number, number))
        forms.update(zip(end.writes, runs[-1].forms, strict=True))
    parameters = {value.name: value.type for value in graph.of_role(Role.PARAMETER)}
    step = run_optimizer(optimizer, parameters, device)
    timeline = Composer(graph, runs, ends, step, workspace).timeline()
    joined = []
    first = 0
    for last in range(len(runs)):
        if last + 1 == len(runs) or _needed(graph, runs, ends, last):
            if last > first:
                joined.append((first, last, run(first, last)))
            first = last + 1
    return StepProfile(summary(timeline), timeline, tuple(runs), ends, prologue, step, tuple(joined))


def _needed(graph: OpGraph, runs: list[LinkRun], ends: tuple[LinkEnds, ...], number: int) -> bool:
    """Whether the backward of a link, or of the next, needs the activation between them."""
    name = graph.chain[number].output
    before, after = runs[number], runs[number + 1]
    places = before.writes[ends[number].writes.index(name)], after.reads[ends[number + 1].reads.index(name)]
    kept = [{place for places in run.saved.values() for place in places} for run in (before, after)]
    return any(place is None or place in saved for place, saved in zip(places, kept, strict=True))


def ends_of(ends: tuple[LinkEnds, ...], first: int, last: int) -> LinkEnds:
    """Of links first..last as one."""
    inside = {name for end in ends[first : last + 1] for name in end.writes}
    later = {name for end in ends[last + 1 :] for name in end.reads}
    final = set(ends[-1].writes)
    return LinkEnds(
        tuple(dict.fromkeys(name for end in ends[first : last + 1] for name in end.reads if name not in inside)),
        tuple(name for end in ends[first : last + 1] for name in end.writes if name in later or name in final),
        tuple(dict.fromkeys(name for end in ends[first : last + 1] for name in end.parameters)),
    )
