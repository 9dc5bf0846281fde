"""`python -m stages sweep`: points as DVC experiments, runs of one set in MLflow, and a table of what came out."""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.base.files import write_atomic
from pipeline.base.log import Log, say
from pipeline.base.stage import as_cached, up_to
from pipeline.config import Config, SweepSettings, find_sweep, try_settings
from pipeline.config.schema import Until
from pipeline.tracking.execution import SWEEP_TAG, SweepPoint
from pipeline.tracking.spool import StageRecord
from pipeline.tracking.tracker import Tracker
from stages.sweep.abandoned import forget_killed, held
from stages.sweep.experiments import check_repository, metrics_of, run_point
from stages.sweep.points import SweepError, points_of

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
    name = f"{title}-{time.strftime('%Y%m%d-%H%M%S')}"
    with held(root / SWEEPS / name) as lock:
        sweeping = Sweeping(root, name, asked.until.value, environ, log, lock)
        tracker = _own_run(sweeping, configs[0], asked.settings)
        rows = [_ran(sweeping, number, *pair) for number, pair in enumerate(zip(points, configs, strict=True), start=1)]
    _close(sweeping, tracker, rows)
    say(json.dumps(rows, indent=1) if arguments.json else told(sweeping, configs[0], rows))
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


# ---- one point


def _ran(sweeping: Sweeping, number: int, settings: tuple[str, ...], config: Config) -> Row:
    """Its row of the table. What DVC took from its cache is recorded here: no stage ran to tell of it."""
    name, what = f"{sweeping.name}-{number}", " ".join(settings)
    point = SweepPoint(sweeping.name, what, sweeping.root)
    environ = {**sweeping.environ, **point.environment(), "SHARDWRIGHT_EXECUTION": name}
    sweeping.log.info("%s", what)
    report = sweeping.folder / f"{number}.log"
    ran = run_point(sweeping.root, name, settings, config.code, sweeping.until, environ, report, sweeping.lock)
    row: Row = dict(setting.split("=", 1) for setting in settings)
    tracker = Tracker(sweeping.root, config.tracking, sweeping.log, execution=name, point=point)
    if ran.reason:
        tracker.complete([StageRecord("sweep", "failed", error=ran.reason)])
        sweeping.log.warning("%s: %s", what, ran.reason)
        return {**row, "reason": ran.reason}
    stages = up_to(sweeping.until)
    figures = metrics_of(sweeping.root, name, stages)
    tracker.complete(as_cached(stages, config, figures))
    found = {column: figures.get(stage, {}).get(figure) for column, (stage, figure) in COLUMNS.items()}
    return {**row, **{column: value for column, value in found.items() if value is not None}, "experiment": name}


# ---- the set


def _own_run(sweeping: Sweeping, config: Config, settings: Sequence[str]) -> Tracker:
    """Sent before the first point, so that points find the run below which they lie."""
    above = SweepPoint("", sweeping.name, sweeping.root)
    tracker = Tracker(sweeping.root, config.tracking, sweeping.log, execution=sweeping.name, point=above)
    params = dict(setting.split("=", 1) for setting in settings)
    tracker.stage(StageRecord("sweep", params={**params, "until": sweeping.until}))
    return tracker


def _close(sweeping: Sweeping, tracker: Tracker, rows: Sequence[Row]) -> None:
    steps = [row["step_ms"] for row in rows if "step_ms" in row]
    figures: dict[str, float | int | str] = {"points": len(rows), "failed": sum("reason" in row for row in rows)}
    if steps:
        figures["best_step_ms"] = min(steps)
    page = sweeping.folder / "points.json"
    write_atomic(page, (json.dumps(list(rows), indent=1) + "\n").encode())
    tracker.stage(StageRecord("sweep", figures=figures, artifacts=(page,)))


def told(sweeping: Sweeping, config: Config, rows: Sequence[Row]) -> str:
    place = f"MLflow: experiment {config.tracking.experiment}, tags.`{SWEEP_TAG}` = '{sweeping.name}'"
    return "\n".join([*table(rows), place if config.tracking.enabled else "tracking is off", f"DVC: {_apply(rows)}"])


def _apply(rows: Sequence[Row]) -> str:
    done = [row for row in rows if "step_ms" in row]
    if not done:
        return "no experiment was kept"
    fastest = min(done, key=lambda row: row["step_ms"])
    return f"`dvc exp apply {fastest['experiment']}` takes the fastest"


def table(rows: Sequence[Row]) -> list[str]:
    """Columns as wide as they must be; reasons come last and are not cut."""
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name != "reason"]
    cells = [[_shown(row.get(name)) for name in names] for row in rows]
    widths = [max(map(len, column)) for column in zip(names, *cells, strict=True)]
    lines = [names, *cells]
    reasons = ["", *(row.get("reason", "") for row in rows)]
    aligned = ["  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in lines]
    return [f"{line}  {reason}".rstrip() for line, reason in zip(aligned, reasons, strict=True)]


def _shown(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
