"""The memory and the time of a whole training step, put together from its distinct links.

Every distinct link is run once on meta tensors (`link.py`), the optimizer once for each type of parameter; a deep model
costs no more than a shallow one. Then all of it is laid on one line of time (`timeline.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pipeline.ir.graph import OpGraph, Role
from pipeline.ir.profile import Kernel
from stages.profile.link import Ends, Form, LinkRun, Runner, link_ends
from stages.profile.optimizer import Build, OptimizerRun, run_optimizer
from stages.profile.timeline import StepMemory, Timeline, compose, summary


@dataclass(frozen=True)
class StepProfile:
    memory: StepMemory
    timeline: Timeline
    runs: tuple[LinkRun, ...]  # one per link of the chain; equal links share one
    ends: tuple[Ends, ...]
    prologue: tuple[Kernel, ...]
    optimizer: OptimizerRun

    @property
    def kernels(self) -> int:
        return len(self.prologue) + self.timeline.length


def adamw(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters)


def profile_step(
    graph: OpGraph, device: str, precision: str, optimizer: Build = adamw, workspace: int = 0
) -> StepProfile:
    """`precision` is `native` (the graph's own types) or `amp`; `workspace` is what the device's libraries hold."""
    runner = Runner(graph, device, precision)
    prologue = runner.run_prologue()
    ends = link_ends(graph)
    runs: list[LinkRun] = []
    distinct: dict[object, LinkRun] = {}
    forms: dict[str, Form] = {}
    for link, end in zip(graph.chain, ends, strict=True):
        entering = tuple(forms[name] for name in end.reads)
        key = (link.block, entering)
        if key not in distinct:
            distinct[key] = runner.run_link(link.ops, end, entering)
        runs.append(distinct[key])
        forms.update(zip(end.writes, runs[-1].forms, strict=True))
    parameters = {value.name: value.type for value in graph.of_role(Role.PARAMETER)}
    step = run_optimizer(optimizer, parameters, foreach=device == "cuda")
    timeline = compose(graph, runs, ends, step, workspace)
    return StepProfile(summary(timeline), timeline, tuple(runs), ends, prologue, step)
