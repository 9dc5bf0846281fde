"""`shardwright sweep`: points as DVC experiments, runs of one set in MLflow, and a table of what came out."""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from shardwright.pipeline.base.files import write_atomic
from shardwright.pipeline.base.log import Log, say
from shardwright.pipeline.base.stage import as_cached, up_to
from shardwright.pipeline.config import Config, SweepSettings, find_sweep, try_settings
from shardwright.pipeline.config.schema import Until
from shardwright.pipeline.tracking.execution import SWEEP_TAG, SweepPoint
from shardwright.pipeline.tracking.spool import StageRecord
from shardwright.pipeline.tracking.tracker import Tracker
from shardwright.stages.sweep.experiments import (
    SweepError,
    check_repository,
    experiment_flags,
    forget_killed,
    metrics_of,
    run_point,
    sweep_lock,
)

COLUMNS = {  # of the table: stage and figure
    "step_ms": ("checkpoint", "step_ms"),
    "peak_mb": ("checkpoint", "peak_mb"),
    "budget_mb": ("checkpoint", "budget_mb"),
    "communication_ms": ("checkpoint", "communication_ms"),
    "regions": ("checkpoint", "recompute_regions"),
    "mesh": ("solve", "mesh"),
    "measured_ms": ("train", "median_step_ms"),
    "final_loss": ("train", "final_loss"),
}

SWEEPS = "runs/sweep"
MOST_POINTS = 500
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,59}")  # DVC makes a git reference of it
Row = dict[str, Any]


@dataclass(frozen=True)
class Sweeping:
    root: Path
    name: str
    until: str
    environ: Mapping[str, str]
    log: Log
    lock: int  # an open file

    @property
    def folder(self) -> Path:
        return self.root / SWEEPS / self.name


def run(root: Path, arguments: argparse.Namespace, environ: Mapping[str, str], log: Log) -> int:
    title, asked = read_sweep(root, arguments)
    points = points_of(asked.settings)
    configs = [try_settings(root, point) for point in points]  # a mistake is told before the first point runs
    check_repository(root)
    for killed in forget_killed(root, root / SWEEPS):
        log.info("%s was killed: DVC does not take it for running any more", killed)
    name, until = f"{title}-{time.strftime('%Y%m%d-%H%M%S')}", asked.until.value
    with sweep_lock(root / SWEEPS / name) as lock:
        sweeping = Sweeping(root, name, until, environ, log, lock)
        tracker = Tracker(root, configs[0].tracking, log, execution=name, point=SweepPoint("", name, root))
        params = dict(setting.split("=", 1) for setting in asked.settings) | {"until": until}
        tracker.stage(StageRecord("sweep", params=params))  # so that points find the run below which they lie
        rows = [_run(sweeping, number, *pair) for number, pair in enumerate(zip(points, configs, strict=True), start=1)]
    done = [row for row in rows if "step_ms" in row]
    best = min(done, key=lambda row: row["step_ms"], default=None)
    figures: dict[str, float | int | str] = {"points": len(rows), "failed": sum("reason" in row for row in rows)}
    figures |= {"best_step_ms": best["step_ms"]} if best else {}
    page, text = sweeping.folder / "points.json", json.dumps(rows, indent=1)
    write_atomic(page, f"{text}\n".encode())
    tracker.stage(StageRecord("sweep", figures=figures, artifacts=(page,)))
    place = f"MLflow: experiment {configs[0].tracking.experiment}, tags.`{SWEEP_TAG}` = '{name}'"
    dvc = f"`dvc exp apply {best['experiment']}` takes the fastest" if best else "no experiment was kept"
    told = [*table(rows), place if configs[0].tracking.enabled else "tracking is off", f"DVC: {dvc}"]
    say(text if arguments.json else "\n".join(told))
    return 0


def read_sweep(root: Path, arguments: argparse.Namespace) -> tuple[str, SweepSettings]:
    """Its name, and a file of conf/sweep with further settings, or settings alone."""
    names = [word for word in arguments.words if "=" not in word]
    if len(names) > 1:
        raise SweepError(f"'{names[1]}' is no setting", remedy="name one file of conf/sweep, and settings as key=value")
    given = [word for word in arguments.words if "=" in word]
    known = find_sweep(root, names[0]) if names else SweepSettings("", [])
    until = Until(arguments.until) if arguments.until else known.until
    title = arguments.name or (names[0] if names else "sweep")
    if not NAME.fullmatch(title):
        raise SweepError(f"'{title}' is no name", where="--name", remedy="use letters, digits, '_' and '-', 60 at most")
    return title, replace(known, settings=[*known.settings, *given], until=until)


def points_of(settings: Sequence[str]) -> list[tuple[str, ...]]:
    """Every combination of the values that the settings list; the last setting changes fastest.

    `a=1,2 b=x` -> (`a=1`, `b=x`), (`a=2`, `b=x`)
    """
    keys, listed = [], []
    for setting in settings:
        key, equals, text = (part.strip() for part in setting.partition("="))
        values = _split(text)
        if not equals or not key or "" in values:
            raise SweepError(f"'{setting}' is no setting", remedy="write key=value or key=value,value")
        keys.append(key)
        listed.append([f"{key}={value}" for value in values])
    twice = next((key for number, key in enumerate(keys) if key in keys[:number]), None)
    if twice is not None:
        raise SweepError(f"'{twice}' is given twice", remedy=f"combine its values: {twice}=1,2")
    found = list(product(*listed))
    if not listed or len(found) > MOST_POINTS:
        what = f"{len(found)} points are more than {MOST_POINTS}" if listed else "nothing is varied"
        raise SweepError(what, remedy="give settings such as cluster=a100_80,h100 solve.memory_budget_gb=8,16")
    return found


def _split(text: str) -> list[str]:
    """At commas outside of brackets and braces."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[{(") - (letter in "]})")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def _run(sweeping: Sweeping, number: int, settings: tuple[str, ...], config: Config) -> Row:
    """Its row of the table. What DVC took from its cache is recorded here: no stage ran to tell of it."""
    name, what = f"{sweeping.name}-{number}", " ".join(settings)
    point = SweepPoint(sweeping.name, what, sweeping.root)
    environ = {**sweeping.environ, **point.environment(), "SHARDWRIGHT_EXECUTION": name}
    sweeping.log.info("%s", what)
    flags, report = experiment_flags(sweeping.root, settings, config.code), sweeping.folder / f"{number}.log"
    reason = run_point(sweeping.root, name, flags, sweeping.until, environ, report, sweeping.lock)
    row: Row = dict(setting.split("=", 1) for setting in settings)
    tracker = Tracker(sweeping.root, config.tracking, sweeping.log, execution=name, point=point)
    if reason:
        tracker.complete([StageRecord("sweep", "failed", error=reason)])
        sweeping.log.warning("%s: %s", what, reason)
        return {**row, "reason": reason}
    stages = up_to(sweeping.until)
    figures = metrics_of(sweeping.root, name, stages)
    tracker.complete(as_cached(stages, config, figures))
    found = {column: figures.get(stage, {}).get(figure) for column, (stage, figure) in COLUMNS.items()}
    return {**row, **{column: value for column, value in found.items() if value is not None}, "experiment": name}


def table(rows: Sequence[Row]) -> list[str]:
    """Columns as wide as they must be; reasons come last and are not cut."""
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name != "reason"]
    columns = []
    for name in names:
        values = [row.get(name, "-") for row in rows]
        cells = [name, *(f"{value:.4g}" if isinstance(value, float) else str(value) for value in values)]
        columns.append([cell.rjust(max(map(len, cells))) for cell in cells])
    columns.append(["", *(row.get("reason", "") for row in rows)])
    return ["  ".join(line).rstrip() for line in zip(*columns, strict=True)]
