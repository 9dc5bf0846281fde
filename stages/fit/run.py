"""`shardwright fit`: whether a model trains on a cluster, with which plan, on how few devices, how fast, and what fills
the memory. No weights, no device, nothing on disk.

The model is traced. Its sharding is the solver's for a graph with few of the equal blocks
(`pipeline.tracing.shortened`), repeated for all; recompute, memory and time are worked out for the whole model, by what
the stage `checkpoint` does with such plans.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from shardwright.pipeline.base.files import write_atomic
from shardwright.pipeline.base.garbage import no_collection
from shardwright.pipeline.base.log import QUIET, Log, get_log, say
from shardwright.pipeline.config import (
    listing,
    load_config,
)
from shardwright.stages.fit.answer import FitAnswer, FitRow
from shardwright.stages.fit.model import FitStages, FittedModel
from shardwright.stages.fit.question import FitError, FitQuestion, home_of, is_described, machine_of, model_of

EACH = 2  # samples for each device, where no batch is given


def fit(question: FitQuestion, root: Path, stages: FitStages, log: Log | None = None) -> FitAnswer:
    """`root` is a project, or any folder: clusters are then those that come with Shardwright."""
    log = log or get_log("fit", QUIET)
    home = home_of(root)
    base, machines = load_config(home), {name: machine_of(home, name, question) for name in question.clusters}
    if not machines:
        raise FitError("no cluster is named", where="--clusters", remedy="add them: a100_80,h100")
    batch = question.batch or EACH * max(sum(own.host_sizes) for own in machines.values())
    config = replace(base, model=model_of(question, home, base, batch))
    rows: list[FitRow] = []
    models: dict[str, FittedModel] = {}
    for name, machine in machines.items():
        device = machine.device.value
        if device not in models:
            log.info("tracing %s, without weights", question.model)
            models[device] = FittedModel.of(replace(config, cluster=machine), stages, log)
        log.info("planning for %d devices of %s", sum(machine.host_sizes), name)
        rows.append(models[device].row(name, machine, alone=len(machines) == 1))
    return models[device].answer(question, batch, rows)


@contextmanager
def without(packages: Sequence[str]) -> Iterator[None]:
    """As if they were not installed, for what is imported meanwhile: `transformers` imports scikit-learn, for seconds,
    for a way to generate text. This process ends with its answer, so nobody misses them."""
    hidden = [name for name in packages if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in hidden:
            sys.modules.pop(name, None)


def run(root: Path, arguments: argparse.Namespace, stages: FitStages, log: Log) -> int:
    home = home_of(root)
    names: tuple[str, ...] = (arguments.cluster,)
    if arguments.clusters == "all":
        names = tuple(name for name in listing(home, "cluster") if is_described(home, name))
    elif arguments.clusters is not None:
        names = tuple(name for name in arguments.clusters.split(",") if name)
    unread = ("sklearn",) if arguments.model.endswith(".json") else ()
    words = ("model", "batch", "sequence", "precision", "lora", "devices", "nodes", "memory_gb")
    with no_collection(), without(unread):  # of the time a tenth, and a tenth
        answer = fit(
            FitQuestion(clusters=names, **{word: getattr(arguments, word) for word in words}), root, stages, log
        )
    if arguments.page is not None:
        try:
            write_atomic(arguments.page, answer.page().encode())
        except OSError as error:
            what = f"cannot be written: {error.strerror or error}"
            raise FitError(what, where=str(arguments.page)) from error
        log.info("wrote %s", arguments.page)
    say(answer.json() if arguments.json else answer.text())
    return 0
