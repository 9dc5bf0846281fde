"""Train: the generated program on real ranks, with what it measured beside what was predicted."""

from __future__ import annotations

import errno
import json
import os
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.base.artifacts import KINDS
from pipeline.base.errors import TrainError
from pipeline.base.files import write_atomic
from pipeline.base.log import Advance, Log, progress
from pipeline.base.stage import STAGES, Inputs, Result, read
from pipeline.config import Config, TrainEngine
from pipeline.ir.graph import OpGraph, Role
from pipeline.ir.plan import Plan
from pipeline.ir.report import Breakdown, Evaluation, Report
from pipeline.launch.launch import Supervision
from pipeline.launch.place import find_place
from pipeline.launch.work_folder import ROOM, LaunchFailed
from pipeline.tracking.tracker import Live, Tracker
from stages.train.engines.choice import check_batch, ranks_of
from stages.train.measured import compare
from stages.train.ranks.outside import start_ranks
from stages.train.snapshots.manifest import finish
from stages.train.snapshots.starting import prepare
from stages.train.tell import tell

JOB_GROUPS = ("model", "data", "train")
GPU_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/kfd"), Path("/dev/dxg"))  # NVIDIA's, AMD's, and Windows' under WSL
WARM_UP = 3  # steps that are left out of the median: allocators and caches fill up


Note = dict[str, Any]  # a line that rank 0 has written: a step, or something to tell


def run(inputs: Inputs, config: Config) -> Result:
    plan: Plan = inputs["plan"]
    check(inputs, config)
    tell_shared_gpus(plan, ranks_of(plan, config.train.engine), inputs.log)
    edited = inputs.artifacts["module"].edited
    if edited:
        inputs.log.warning("runs/codegen/module.py was edited by hand: training with it as it is")
    trace_path(inputs.root).unlink(missing_ok=True)  # of an earlier run
    job = make_job(inputs, config, plan)
    measured = launch(inputs, config, plan, job)
    if measured["held_whole"]:
        inputs.log.warning("every rank held the whole model while it was built: %s", measured["held_whole"])
    keep_weights(weights_path(inputs.root), config.train.export)
    if measured["engine"] != config.train.engine.value:
        inputs.log.warning("no step was left to take: the report is of those that %s took", measured["engine"])
    report = make_report(measured, plan, edited)
    trace = trace_path(inputs.root)  # there if it was asked for, and its step was not taken before this run went on
    files = (trace,) if trace.exists() else ()
    return Result(report, figures(report), files, settle=partial(finish, Path(job["safety"]["folder"])))


def trace_path(root: Path) -> Path:
    return root / "runs" / "train" / "trace-rank0.json"


def take_part(root: Path, log: Log) -> None:
    """What ranks but the first do where a launcher outside has started them: the first writes the run down."""
    config, found = read(STAGES["train"].reads, root)
    untracked = Tracker(root, replace(config.tracking, enabled=False), log)
    inputs = Inputs(root, found, log, untracked)
    check(inputs, config)
    launch(inputs, config, inputs["plan"], make_job(inputs, config, inputs["plan"], first=False))


def check(inputs: Inputs, config: Config) -> None:
    plan: Plan = inputs["plan"]
    check_batch(config, ranks_of(plan, config.train.engine))
    check_device(plan, f"{_where(config)['cluster']}: device")
    check_export(inputs["graph"], config)


def check_export(graph: OpGraph, config: Config) -> None:
    """Before training, not after its last step."""
    if not config.train.export:
        return
    from pipeline.user.weights import TYPES  # needs torch

    stored = {str(dtype).removeprefix("torch.") for dtype in TYPES}
    for value in (*graph.of_role(Role.PARAMETER), *graph.of_role(Role.BUFFER)):
        if value.type.dtype not in stored:
            raise TrainError(
                f"{value.origin} is {value.type.dtype}, for which safetensors files have no type",
                where=f"conf/train/{config.choices['train']}.yaml: export",
                remedy="set `export: false`, and take the weights from a snapshot",
            )


def weights_path(root: Path) -> Path:
    return root / "runs" / "train" / "weights" / "model.safetensors"


def keep_weights(path: Path, exported: bool) -> None:
    """What an earlier run wrote does not stay; DVC wants the folder in any case, with something in it."""
    if not exported:
        path.unlink(missing_ok=True)
    about = {"weights": path.name if exported else None}
    write_atomic(path.parent / "about.json", (json.dumps(about) + "\n").encode())


def check_device(plan: Plan, where: str) -> None:
    """A plan may be made for devices that this machine does not have; it cannot be trained there.

    Where there is a driver the ranks look closer.
    """
    if plan.device != "cuda" or any(driver.exists() for driver in GPU_DRIVERS):
        return
    from stages.train.ranks.joining import require_gpu  # needs torch, as only the ranks do otherwise

    require_gpu(where)


def tell_shared_gpus(plan: Plan, ranks: int, log: Log) -> None:
    """Ranks that share a GPU train as well (ranks/joining.py); nobody should take it for what was planned."""
    place = find_place(os.environ)
    here = place.local_ranks if place else ranks
    if plan.device != "cuda" or here == 1:
        return
    import torch

    if (there := torch.cuda.device_count()) < here:
        log.warning("%d ranks share %d GPUs here: their memory is shared too, and they talk over the host", here, there)


def launch(inputs: Inputs, config: Config, plan: Plan, job: dict[str, Any]) -> dict[str, Any]:
    engine, ranks = config.train.engine, ranks_of(plan, config.train.engine)
    inputs.log.info("training %d steps on %d ranks%s", config.train.steps, ranks, _named(engine))
    try:
        with (
            inputs.tracker.live("train") as live,
            progress(inputs.log, "step", config.train.steps) as advance,
        ):
            follow = Follower(live, advance, lambda note: tell(inputs.log, inputs.root, note))
            settings = config.train
            watch = Supervision(settings.hang_s, True, inputs.log.warning, settings.max_restarts)
            return start_ranks(job, ranks, settings.timeout_s, follow, watch)
    except LaunchFailed as error:
        for line in error.log.splitlines():
            inputs.log.debug(line)
        raise TrainError(
            f"training failed: {error}",
            where=f"conf/train/{config.choices['train']}.yaml",
            remedy=_remedy(str(error)),
        ) from error


def _remedy(told: str) -> str | None:
    if "did not finish within" in told:
        return "raise timeout_s"
    if ROOM in told:
        return None
    if os.strerror(errno.ENOSPC) in told:
        return ROOM
    return "run with -v for details"


def _named(engine: TrainEngine) -> str:
    return "" if engine is TrainEngine.planned else f" with {engine.value}"


def make_job(inputs: Inputs, config: Config, plan: Plan, first: bool = True) -> dict[str, Any]:
    """Everything a rank needs, as plain values; `first` is false for the others that a launcher outside started."""
    init_from = config.train.init_from
    return {
        "module_path": str(KINDS["module"].path(inputs.root)),
        "weights_path": str(weights_path(inputs.root)),
        "trace_path": str(trace_path(inputs.root)),
        "spare_result": str(inputs.root / "runs" / "train" / ".result.json") if first else None,
        "device": plan.device,
        "digests": _digests(inputs, config),
        "model": config.plain("model"),
        "data": config.plain("data"),
        "train": {**config.plain("train"), "init_from": init_from and str(inputs.root / init_from)},
        "where": _where(config),
        "safety": prepare(inputs, config, first),
    }


def _where(config: Config) -> dict[str, str]:
    return {group: f"conf/{group}/{config.choices[group]}.yaml" for group in (*JOB_GROUPS, "cluster")}


def _digests(inputs: Inputs, config: Config) -> dict[str, str]:
    """By what they are of, as the user knows it."""
    found = {str(KINDS[kind].path(Path())): artifact.digest for kind, artifact in inputs.artifacts.items()}
    return found | {f"conf/{group}/{config.choices[group]}.yaml": config.digest(group) for group in JOB_GROUPS}


class Follower:
    """Reads the steps that rank 0 has written so far, and passes them on to the bar and the tracked run.

    Lines that are no steps are told; a step that is taken again after a restart is passed on once.
    """

    def __init__(self, live: Live, advance: Advance, tell: Callable[[Note], None] = lambda note: None) -> None:
        self.live, self.advance, self.tell = live, advance, tell
        self.position = 0
        self.next = 0

    def __call__(self, work: Path) -> None:
        path = work / "steps.jsonl"
        if not path.exists():
            return
        with open(path, "rb") as file:
            file.seek(self.position)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # still being written
                self.position += len(line)
                found = json.loads(line)
                if "step" in found:
                    self._pass_on(found)
                else:
                    self._note(found)

    def _note(self, note: Note) -> None:
        self.tell(note)
        for step in range(self.next, note.get("resumed", 0)):  # taken before this run was started
            self.live.log(step, {"loss": note["losses"][step]})
            self.next = step + 1

    def _pass_on(self, step: Note) -> None:
        if step["step"] < self.next:
            return
        self.next = step["step"] + 1
        values = {
            "loss": step["loss"],
            "step_ms": step["seconds"] * 1e3,
            "samples_per_second": step["samples"] / step["seconds"],
            "resident_mb": step["resident_bytes"] / 1e6,
        }
        values |= {name: step[name] for name in ("learning_rate", "eval_loss") if name in step}
        self.live.log(step["step"], values)
        self.advance(step["step"] + 1, f"loss {step['loss']:.4f}")


def make_report(measured: dict[str, Any], plan: Plan, edited: bool) -> Report:
    seconds = tuple(measured["seconds"])
    median = median_seconds(seconds, measured["profiled_at"])
    breakdown = Breakdown(**measured["breakdown"]) if measured["breakdown"] else None
    peaks = measured["peak_bytes"]
    told = plan.rank_peak_bytes if len(peaks) == plan.ranks else [plan.prediction.peak_bytes] * len(peaks)
    return Report(
        steps=len(measured["losses"]),
        ranks=measured["ranks"],
        losses=tuple(measured["losses"]),
        step_seconds=seconds,
        median_step_seconds=median,
        samples_per_second=measured["samples"] / median,
        peak_bytes=tuple(peaks),
        predicted_step_seconds=plan.prediction.step_seconds,
        predicted_peak_bytes=plan.prediction.peak_bytes,
        module_edited=edited,
        evaluations=tuple(Evaluation(step, loss) for step, loss in measured["evaluated"]),
        breakdown=breakdown,
        compared=compare(plan.prediction, median, measured["samples"], list(zip(peaks, told, strict=True)), breakdown),
        engine=measured["engine"],
    )


def median_seconds(seconds: tuple[float, ...], profiled: int) -> float:
    """Of the steps that are as all others; of the last one where there are so few."""
    usual = [second for step, second in enumerate(seconds) if step >= WARM_UP and step != profiled]
    return statistics.median(usual or seconds[-1:])


def figures(report: Report) -> dict[str, float | int | str]:
    """None has the name of a series of `Follower`: in the tracked run they would be one metric."""
    found: dict[str, float | int | str] = {
        "final_loss": report.losses[-1],
        "first_loss": report.losses[0],
        "ranks": report.ranks,
        "engine": report.engine,
    }
    if report.evaluations:
        found["final_eval_loss"] = report.evaluations[-1].loss
    highest = {row.predicted for row in report.compared if row.what == "peak_mb"}
    for row in report.compared:
        own = {"step_ms": "median_step_ms", "samples_per_second": "median_samples_per_second"}.get(row.what, row.what)
        name = row.what.removesuffix("_ms").replace("_mb", "")
        found[own] = round(row.measured, 4)
        if row.ratio is not None:
            found[f"{name}_ratio"] = round(row.ratio, 4)
        if row.ratio is not None and ("_rank_" not in row.what or row.predicted not in highest):
            found[f"predicted_{row.what}"] = round(row.predicted, 4)
    return found
