"""`shardwright explain`: the plan in words, one choice of it with its alternatives, or two plans side by side."""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from shardwright.pipeline.base import artifacts
from shardwright.pipeline.base.errors import ArtifactError, ShardwrightError
from shardwright.pipeline.base.log import Log, say
from shardwright.pipeline.base.measured_runs import with_correction
from shardwright.pipeline.base.stage import read
from shardwright.pipeline.config import Config, load_config
from shardwright.pipeline.ir.codec import encode
from shardwright.pipeline.ops.discovery.remembered import remember_in
from shardwright.stages.solve.explain.diff import Changed, Diff, Facts, changes, explain_diff
from shardwright.stages.solve.explain.one import SubjectKind, SubjectSummary, explain_one, find_subject, home_of
from shardwright.stages.solve.explain.options import Evaluate, Options
from shardwright.stages.solve.explain.priced_run import KINDS, ExplainError, PlannedRun, planned
from shardwright.stages.solve.explain.revision import lay_out
from shardwright.stages.solve.explain.text import diff_text, module_text, one_text, whole_text
from shardwright.stages.solve.explain.whole import Module, PlanSummary, explain_module, explain_whole

Explained = PlanSummary | Module | SubjectSummary | Diff


def explain(root: Path, asked: argparse.Namespace, evaluate: Evaluate, log: Log) -> int:
    """`evaluate` is the checkpoint stage's: the best recompute of a plan."""
    found = _of_two(root, asked.diff) if asked.diff else _of_one(root, asked, evaluate, log)
    try:
        say(json.dumps(encode(found), indent=1) if asked.json else text_of(found))
    except BrokenPipeError:  # a reader that has seen enough (`| head`) is no error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left would be told at exit
    return 0


def text_of(found: Explained) -> str:
    if isinstance(found, PlanSummary):
        return whole_text(found)
    if isinstance(found, Module):
        return module_text(found)
    return one_text(found) if isinstance(found, SubjectSummary) else diff_text(found)


def _of_one(root: Path, asked: argparse.Namespace, evaluate: Evaluate, log: Log) -> Explained:
    config, found = read(KINDS, root)
    remember_in(root / "runs" / "ops")
    return explained(planned(found), config, asked, evaluate, log)


def explained(
    plan: PlannedRun, config: Config, asked: argparse.Namespace, evaluate: Evaluate, log: Log
) -> PlanSummary | Module | SubjectSummary:
    """What the command tells of a run that is planned, by its arguments."""
    if asked.name is None:
        return explain_whole(plan)
    subject = find_subject(plan.graph, asked.name)
    if subject.what is SubjectKind.module:
        return explain_module(plan, subject.name)
    if asked.solve and plan.plan.pipelined:
        log.warning("a pipeline is not solved again: options are priced with all else as it is")
    where = f"conf/solve/{config.choices['solve']}.yaml"
    options = Options(plan, home_of(plan, subject), config.solve, config.checkpoint, evaluate, where, log)
    return explain_one(plan, options, subject, asked.most, asked.seconds if asked.solve else None)


def _of_two(root: Path, names: list[str]) -> Diff:
    """Each a folder, a git revision or a DVC experiment."""
    with ExitStack() as places:
        folders = [name if (root / name).is_dir() else _laid_out(root, name, places) for name in names]
        before, after = (_read_named(root, *one) for one in zip(names, folders, strict=True))
        settings = _settings(before, after, *(_configuration(root, folder) for folder in folders))
    return explain_diff(before, after, (names[0], names[1]), settings)


def _laid_out(root: Path, revision: str, places: ExitStack) -> str:
    folder = places.enter_context(TemporaryDirectory(prefix="shardwright-"))
    own = [artifacts.KINDS[kind] for kind in KINDS]
    lay_out(root, revision, [f"runs/{kind.stage}/{kind.file}" for kind in own], Path(folder))
    return folder


def _read_named(root: Path, name: str, folder: str) -> PlannedRun:
    try:
        return _read_run(root, folder)
    except ArtifactError as error:
        if name == folder:
            raise
        what = f"its run is of another version: {Path(error.where or '').name}: {error.what}"
        remedy = f"`git checkout {name}` and `dvc repro checkpoint` with this version, or name another revision"
        raise ExplainError(what, where=name, remedy=remedy) from error


def _read_run(root: Path, folder: str) -> PlannedRun:
    """Of a folder of artifacts, such as runs/ or a copy of it; or of a project that has one."""
    place = Path(folder) / "runs" if (root / folder / "runs").is_dir() else Path(folder)
    known = artifacts.KINDS
    found = {
        kind: artifacts.load_saved(str(place / known[kind].stage / known[kind].file), root, (kind,)) for kind in KINDS
    }
    artifacts.check_together(found.values(), {})
    found["cluster"] = with_correction(found["cluster"], found["frontier"].body.correction)
    return planned(found)


def _configuration(root: Path, folder: str) -> Config | None:
    """That of the project a run lies in, where there is one; whether it made the run is for digests to say."""
    for place in (root / folder, *(root / folder).resolve().parents):
        if (place / "conf" / "config.yaml").is_file():
            try:
                return load_config(place)
            except ShardwrightError:
                return None
    return None


def _settings(before: PlannedRun, after: PlannedRun, old: Config | None, new: Config | None) -> tuple[Changed, ...]:
    """Values where both configurations are still those that made the runs; else which part of them is another."""
    found: list[Changed] = []
    for key in dict.fromkeys([*before.config, *after.config]):
        digests = before.config.get(key), after.config.get(key)
        if digests[0] == digests[1]:
            continue
        known = [
            config.plain(key) if config is not None and config.digest(key) == digest else None
            for config, digest in zip((old, new), digests, strict=True)
        ]
        if None not in known:
            found += changes(*(_flat(one, key) for one in known))
        else:
            before_it, after_it = ((digest or "-")[:8] for digest in digests)
            found.append(Changed(key, before_it, after_it))
    return tuple(found)


def _flat(value: Any, key: str) -> Facts:
    """Every setting, by its key."""
    if not isinstance(value, dict):
        return {key: (key, str(value))}
    return {name: one for part, inner in value.items() for name, one in _flat(inner, f"{key}.{part}").items()}
