"""How a stage runs: check the configuration, read what it needs, do its work, write its artifact, record the run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shardwright.pipeline.base import artifacts
from shardwright.pipeline.base.artifacts import KINDS, Artifact
from shardwright.pipeline.base.errors import ShardwrightError
from shardwright.pipeline.base.files import told, write_atomic
from shardwright.pipeline.base.instantiate import add_code_path
from shardwright.pipeline.base.lock import locked
from shardwright.pipeline.base.log import Log
from shardwright.pipeline.base.measured_runs import as_measured_here, with_correction
from shardwright.pipeline.base.secrets import without_secrets
from shardwright.pipeline.base.soundness import check_sound
from shardwright.pipeline.config import Config, load_config
from shardwright.pipeline.tracking.execution import current_point
from shardwright.pipeline.tracking.headline import Figures, headlines, run_name, run_tags
from shardwright.pipeline.tracking.spool import StageRecord
from shardwright.pipeline.tracking.tracker import Tracker
from shardwright.pipeline.user.own_ops import know_own_ops


@dataclass(frozen=True)
class StageSpec:
    name: str
    reads: tuple[str, ...]  # kinds of artifact
    writes: str
    config: tuple[str, ...]  # groups or keys of the configuration that its result depends on


STAGES = {
    stage.name: stage
    for stage in (
        StageSpec("trace", (), "graph", ("model", "cluster.device")),
        StageSpec("profile", ("graph",), "profile", ("model.precision", "cluster.device", "train.optimizer")),
        StageSpec("cluster", (), "cluster", ("cluster",)),
        StageSpec("solve", ("graph", "profile", "cluster"), "frontier", ("solve", "train.gradient_accumulation")),
        StageSpec("checkpoint", ("graph", "profile", "cluster", "frontier"), "plan", ("checkpoint",)),
        StageSpec("codegen", ("graph", "plan"), "module", ("model",)),
        StageSpec("train", ("graph", "plan", "module"), "report", ("model", "data", "train")),
    )
}


@dataclass(frozen=True)
class Inputs:
    """What a stage reads, by kind, and where it works."""

    root: Path
    artifacts: dict[str, Artifact]
    log: Log
    tracker: Tracker

    def __getitem__(self, kind: str) -> Any:
        return self.artifacts[kind].body


Rows = Sequence[Mapping[str, float | None]]  # all with the same keys


@dataclass(frozen=True)
class Result:
    """What a stage made: the body of its artifact, and figures for the summary and the tracked run."""

    body: Any
    figures: Figures
    files: tuple[Path, ...] = field(default=())  # further files for the tracked run
    curves: Mapping[str, Rows] = field(default_factory=dict)  # by the name of the file that `dvc plots` draws
    settle: Callable[[], None] = lambda: None  # once all that is on the disk: until then the stage can be killed
    draw: Callable[[], object] = lambda: None  # writes those of `files` that only people read; not in memory


def execute(stage: StageSpec, run: Callable[[Inputs, Config], Result], root: Path, log: Log) -> Artifact:
    """Runs one stage on what is in runs/. The artifact is written last: until then the old one is not replaced."""
    with told(root), locked(root / "runs"):
        config, found = read(stage.reads, root)
        tracker = Tracker(root, config.tracking, log, run_name=run_name(config, found.get("plan")))
        started = time.perf_counter()
        names = ", ".join(KINDS[kind].file for kind in stage.reads)
        log.info(f"reading {names}" if names else "starting")
        for kind, artifact in found.items():
            log.debug("%s is %s", KINDS[kind].file, artifact.digest)

        def track(record: StageRecord, plan: Artifact | None) -> None:
            """With the name and the tags of the run, as far as the plan is known."""
            name = run_name(config, plan) if current_point() is None else None  # a sweep names its points
            tracker.stage(replace(record, run_name=name, tags=run_tags(config, plan)), _upstream(stage, root, config))

        try:
            with told(root):
                result = run(Inputs(root, found, log, tracker), config)
                result.draw()
                figures = {**result.figures, "seconds": round(time.perf_counter() - started, 3)}
                digests = {key: config.digest(key) for key in stage.config}
                made = artifacts.make(stage.writes, result.body, found.values(), digests)
                path = artifacts.save(made, root)
                summary = summary_path(stage.name, root)  # all figures, and those that DVC shows and compares
                for file, content in ((summary.name, figures), ("metrics.json", headlines(stage.name, figures))):
                    if content:
                        write_atomic(summary.with_name(file), (json.dumps(content, indent=1) + "\n").encode())
                for name, rows in result.curves.items():
                    write_atomic(summary.with_name(f"{name}.json"), _as_lines(rows))
                result.settle()
        except ShardwrightError as error:
            track(_record(stage, config, {}, status="failed", error=error.line()), found.get("plan"))
            raise
        log.info(f"wrote {path.relative_to(root)} in {figures['seconds']:.1f} s")
        plan = made if made.kind == "plan" else found.get("plan")
        track(_record(stage, config, figures, (path, *result.files)), plan)
        return made


def _as_lines(rows: Rows) -> bytes:
    """A list that DVC draws from: it reads no lists of plain numbers, and mixes all lists of a file."""
    return ("[\n" + ",\n".join(json.dumps(dict(row)) for row in rows) + "\n]\n").encode()


def read(kinds: Iterable[str], root: Path) -> tuple[Config, dict[str, Artifact]]:
    """The configuration and the artifacts of these kinds, which belong together and to it; own ops are then known.

    The cluster is as runs on it say that it is (conf/measured), or said when the frontier was made.
    """
    config = load_config(root)
    add_code_path(root, config.code)
    accept = config.train.accept_edited_module
    found = {kind: artifacts.load(kind, root, accept_edited=accept) for kind in kinds}
    keys = {key for stage in STAGES.values() for key in stage.config}
    artifacts.check_together(found.values(), {key: config.digest(key) for key in keys})
    know_own_ops(config, found["graph"].body if "graph" in found else None)
    check_sound(found)
    if "cluster" in found:
        own, frontier = found["cluster"], found.get("frontier")
        found["cluster"] = (
            with_correction(own, frontier.body.correction) if frontier else as_measured_here(own, config, root)
        )
    return config, found


def summary_path(stage: str, root: Path) -> Path:
    return root / "runs" / stage / "summary.json"


def read_summary(stage: str, root: Path) -> dict[str, Any] | None:
    try:
        data = json.loads(summary_path(stage, root).read_text())
    except (OSError, RecursionError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def _upstream(stage: StageSpec, root: Path, config: Config) -> list[StageRecord]:
    """The stages above, as they stand on disk: logged as cached where this execution did not run them."""
    above = [STAGES[name] for name in up_to(stage.name)[:-1]]
    summaries = [(each, read_summary(each.name, root)) for each in above]
    return [
        _record(each, config, summary, (KINDS[each.writes].path(root),), status="cached")
        for each, summary in summaries
        if summary is not None
    ]


def up_to(last: str) -> list[str]:
    """The stage and every one whose artifact it rests on, in the pipeline's order."""
    makers = {stage.writes: stage for stage in STAGES.values()}
    wanted, todo = {last}, [STAGES[last]]
    while todo:
        above = [makers[kind] for kind in todo.pop().reads if makers[kind].name not in wanted]
        wanted |= {stage.name for stage in above}
        todo += above
    return [name for name in STAGES if name in wanted]


def as_cached(stages: Iterable[str], config: Config, figures: Mapping[str, Figures]) -> list[StageRecord]:
    """Records of stages that did not run: their figures come from elsewhere."""
    found = (_record(STAGES[name], config, figures[name], status="cached") for name in stages)
    return [replace(record, tags=run_tags(config, None)) for record in found]


def _record(
    stage: StageSpec, config: Config, figures: Figures, files: tuple[Path, ...] = (), **more: Any
) -> StageRecord:
    """All may look into the store: its settings are without passwords of a URI."""
    plain = {key: config.plain(key) for key in stage.config}
    groups = {key: value if isinstance(value, Mapping) else {"value": value} for key, value in plain.items()}
    params = {name: value for key, group in groups.items() for name, value in flat(group, key)}
    shown = {name: without_secrets(str(v)) if isinstance(v, list | str) else v for name, v in params.items()}
    return StageRecord(stage.name, params=shown, figures=dict(figures), artifacts=files, **more)


def flat(value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Keys of mappings in mappings, joined by dots after the prefix."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from flat(inner, f"{prefix}.{key}")
    else:
        yield prefix, value
