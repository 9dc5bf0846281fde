"""Train: the generated program on real ranks, with what it measured beside what was predicted."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from shardwright.pipeline.base.artifacts import KINDS
from shardwright.pipeline.base.errors import TrainError
from shardwright.pipeline.base.files import write_atomic
from shardwright.pipeline.base.log import Log, progress
from shardwright.pipeline.base.stage import STAGES, Inputs, Result, read
from shardwright.pipeline.config import Config, TrainEngine
from shardwright.pipeline.ir.graph import OpGraph, Role
from shardwright.pipeline.ir.plan import Plan
from shardwright.pipeline.launch.launch import Supervision, run_ranks
from shardwright.pipeline.launch.place import find_place
from shardwright.pipeline.launch.work_folder import ROOM, LaunchFailed
from shardwright.pipeline.tracking.tracker import Tracker
from shardwright.stages.train.job import Job
from shardwright.stages.train.journal import Follower, tell
from shardwright.stages.train.measured import figures, make_report, step_curve
from shardwright.stages.train.snapshots.manifest import finish
from shardwright.stages.train.snapshots.starting import prepare

WORKER = "shardwright.stages.train.worker"
JOB_GROUPS = ("model", "data", "train")
GPU_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/kfd"), Path("/dev/dxg"))  # NVIDIA's, AMD's, and Windows' under WSL


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
    settle = partial(finish, Path(job["safety"]["folder"]))
    return Result(report, figures(report), files, {"steps": step_curve(report)}, settle)


def take_part(root: Path, log: Log) -> None:
    """What ranks but the first do where a launcher outside has started them: the first writes the run down."""
    config, found = read(STAGES["train"].reads, root)
    untracked = Tracker(root, replace(config.tracking, enabled=False), log)
    inputs = Inputs(root, found, log, untracked)
    check(inputs, config)
    launch(inputs, config, inputs["plan"], make_job(inputs, config, inputs["plan"], first=False))


# ---- before anything is started, so without torch where that can be


def check(inputs: Inputs, config: Config) -> None:
    plan: Plan = inputs["plan"]
    check_batch(config, ranks_of(plan, config.train.engine))
    check_device(plan, f"{_where(config)['cluster']}: device")
    check_export(inputs["graph"], config)


def ranks_of(plan: Plan, engine: TrainEngine) -> int:
    """All devices of the plan; partitions that take turns on the same ones count once."""
    return 1 if engine is TrainEngine.single else plan.ranks


def check_batch(config: Config, ranks: int) -> None:
    """The program of a plan cuts its batch as the plan says; the other engines cut every input into equal parts."""
    if config.train.engine is TrainEngine.planned:
        return
    for name, spec in config.model.batch.items():
        if spec.shape[0] % ranks:
            raise TrainError(
                f"{name} has {spec.shape[0]} samples, which do not divide over the {ranks} ranks of"
                f" `engine: {config.train.engine.value}`",
                where=f"conf/model/{config.choices['model']}.yaml: batch.{name}.shape",
                remedy=f"give a multiple of {ranks}, or train with `engine: planned`",
            )


def check_export(graph: OpGraph, config: Config) -> None:
    """Before training, not after its last step."""
    if not config.train.export:
        return
    from shardwright.pipeline.user.weights import TYPES  # needs torch

    stored = {str(dtype).removeprefix("torch.") for dtype in TYPES}
    for value in (*graph.of_role(Role.PARAMETER), *graph.of_role(Role.BUFFER)):
        if value.type.dtype not in stored:
            what = f"{value.origin} is {value.type.dtype}, for which safetensors files have no type"
            remedy = "set `export: false`, and take the weights from a snapshot"
            raise TrainError(what, where=f"conf/train/{config.choices['train']}.yaml: export", remedy=remedy)


def check_device(plan: Plan, where: str) -> None:
    """A plan may be made for devices that this machine does not have; it cannot be trained there.

    Where there is a driver the ranks look closer.
    """
    if plan.device != "cuda" or any(driver.exists() for driver in GPU_DRIVERS):
        return
    from shardwright.stages.train.ranks.joining import require_gpu  # needs torch, as only the ranks do otherwise

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


# ---- the ranks


def launch(inputs: Inputs, config: Config, plan: Plan, job: Job) -> dict[str, Any]:
    """All ranks on this machine, or the one of a launcher outside (torchrun, Slurm) that this process is.

    What rank 0 found; on other ranks nothing.
    """
    train, ranks, place = config.train, ranks_of(plan, config.train.engine), find_place(os.environ)
    named = "" if train.engine is TrainEngine.planned else f" with {train.engine.value}"
    inputs.log.info("training %d steps on %d ranks%s", train.steps, ranks, named)
    if place and place.ranks != ranks:
        what = f"the run needs {ranks} ranks, and {place.ranks} were started"
        remedy = f"start {ranks}, one for each device, or plan for a cluster of {place.ranks} devices"
        raise TrainError(what, where="runs/checkpoint/plan.json", remedy=remedy)
    watch = Supervision(train.hang_s, True, inputs.log.warning, train.max_restarts)
    try:
        with inputs.tracker.live("train") as log_point, progress(inputs.log, "step", train.steps) as advance:
            follow = Follower(log_point, advance, lambda note: tell(inputs.log, inputs.root, note))
            return run_ranks(WORKER, job, ranks, train.timeout_s, follow, place, watch)
    except LaunchFailed as error:
        for line in error.log.splitlines():
            inputs.log.debug(line)
        remedies = {"did not finish within": "raise timeout_s", ROOM: None, os.strerror(errno.ENOSPC): ROOM}
        advice = next((one for sign, one in remedies.items() if sign in str(error)), "run with -v for details")
        what = f"training failed: {error}"
        raise TrainError(what, where=f"conf/train/{config.choices['train']}.yaml", remedy=advice) from error


def make_job(inputs: Inputs, config: Config, plan: Plan, first: bool = True) -> Job:
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


# ---- files


def trace_path(root: Path) -> Path:
    return root / "runs" / "train" / "trace-rank0.json"


def weights_path(root: Path) -> Path:
    return root / "runs" / "train" / "weights" / "model.safetensors"


def keep_weights(path: Path, exported: bool) -> None:
    """What an earlier run wrote does not stay; DVC wants the folder in any case, with something in it."""
    if not exported:
        path.unlink(missing_ok=True)
    about = {"weights": path.name if exported else None}
    write_atomic(path.parent / "about.json", (json.dumps(about) + "\n").encode())
