"""`shardwright calibrate FILE.csv`: what measured steps say that a card and its links reach, for conf/cluster.

FILE.csv has a line for each step of a GPT (pipeline/layouts/measured.py). The six shares of `preset.reached` that fit
the steps best are written into the cluster's file, where plans and prices find them; comments stay.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Sequence
from pathlib import Path

from shardwright.pipeline.base.log import Log, say
from shardwright.pipeline.config import listing, load_config, load_part, set_keys
from shardwright.pipeline.config.schema import OverlapMode
from shardwright.pipeline.layouts.calibrate import FITTED, MeasuredStep, WorksOf, calibrated, predicted
from shardwright.pipeline.layouts.machine import Machine, machine_of
from shardwright.pipeline.layouts.measured import StepsError, read_rows, step_of, works_known
from shardwright.pipeline.layouts.planner_stages import PlannerStages
from shardwright.pipeline.layouts.sizes import why_not
from shardwright.pipeline.layouts.work import RecomputeMode

MOST, SEED = 200, 0  # steps that are fitted, drawn where there are more


def run(root: Path, arguments: argparse.Namespace, stages: PlannerStages, log: Log) -> int:
    config = load_config(root)
    name, known = arguments.cluster or config.choices["cluster"], listing(root, "cluster")
    file = f"conf/cluster/{name}.yaml"
    if name not in known:
        raise StepsError(f"there is no cluster '{name}'", remedy=f"choose one of: {', '.join(known)}")
    if len(arguments.files) > 1:
        raise StepsError("a CSV of steps is fitted alone", where=str(arguments.files[1]), remedy="name one file")
    machine = machine_of(load_part(root, "cluster", name), stages, file)
    steps = read_steps(arguments, log)
    works = works_known(config, stages)
    fitted = random.Random(SEED).sample(steps, min(MOST, len(steps)))
    found = calibrated(fitted, machine, works)
    reached = {name: float(f"{getattr(found.settings.preset.reached, name):.3g}") for name in FITTED}
    for line in set_keys(root, "cluster", name, {f"preset.reached.{n}": v for n, v in reached.items()}):
        log.info(line)
    before, after = (mean_error(steps, own, works) for own in (machine, found))
    say(f"{len(steps)} steps, {len(fitted)} of them fitted: mean error {before:.1%} before, {after:.1%} now")
    say(f"plans and prices for {name} now reach what was measured: {file}, preset.reached")
    return 0


def read_steps(arguments: argparse.Namespace, log: Log) -> list[MeasuredStep]:
    """Those whose sizes divide; the others are named."""
    steps = []
    for number, row in enumerate(read_rows(arguments.files[0]), 1):
        step = step_of(row, RecomputeMode(arguments.recompute), arguments.vocabulary, OverlapMode(arguments.overlap))
        what = why_not(step.model, step.layout)
        if what is None:
            steps.append(step)
        else:
            log.info("row %d is left out: %s", number, what)
    if not steps:
        raise StepsError("has no step that can be priced", where=str(arguments.files[0]), remedy="add measured steps")
    return steps


def mean_error(steps: Sequence[MeasuredStep], machine: Machine, works: WorksOf) -> float:
    times = predicted(steps, machine, works)
    return statistics.mean(abs(time / step.seconds - 1) for time, step in zip(times, steps, strict=True))
