"""Train: the generated program on real ranks, with what it measured beside what was predicted."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from pipeline.artifacts import KINDS
from pipeline.config import Config
from pipeline.errors import TrainError
from pipeline.files import write_atomic
from pipeline.ir.plan import Plan
from pipeline.ir.report import Report
from pipeline.launch import LaunchFailed, run_ranks
from pipeline.log import Advance, progress
from pipeline.stage import Inputs, Result
from pipeline.tracker import Live

WARM_UP = 3  # steps that are left out of the median: allocators and caches fill up


def run(inputs: Inputs, config: Config) -> Result:
    plan: Plan = inputs["plan"]
    check_device(plan, f"conf/cluster/{config.choices['cluster']}.yaml: device")
    edited = inputs.artifacts["module"].edited
    if edited:
        inputs.log.warning("runs/codegen/module.py was edited by hand: training with it as it is")
    measured = launch(inputs, config, plan)
    if measured["held_whole"]:
        inputs.log.warning("every rank held the whole model while it was built: %s", measured["held_whole"])
    keep_weights(weights_path(inputs.root), config.train.export)
    report = make_report(measured, plan, edited)
    return Result(report, figures(report))


def weights_path(root: Path) -> Path:
    return root / "runs" / "train" / "weights" / "model.safetensors"


def keep_weights(path: Path, exported: bool) -> None:
    """What an earlier run wrote does not stay; DVC wants the folder in any case, with something in it."""
    if not exported:
        path.unlink(missing_ok=True)
    about = {"weights": path.name if exported else None}
    write_atomic(path.parent / "about.json", (json.dumps(about) + "\n").encode())


def check_device(plan: Plan, where: str) -> None:
    """A plan may be made for devices that this machine does not have; it cannot be trained there."""
    if plan.device != "cuda":
        return
    import torch  # slow to import, and only the ranks need it otherwise

    if not torch.cuda.is_available():
        raise TrainError(
            "the plan is for GPUs, and this machine has none that torch can use",
            where=where,
            remedy="train on a machine with GPUs, or plan for `device: cpu`",
        )


def launch(inputs: Inputs, config: Config, plan: Plan) -> dict:
    ranks = plan.ranks
    inputs.log.info("training %d steps on %d ranks", config.train.steps, ranks)
    try:
        with (
            inputs.tracker.live("train") as live,
            progress(inputs.log, "step", config.train.steps) as advance,
        ):
            follow = Follower(live, advance)
            return run_ranks("stages.train.worker", make_job(inputs, config), ranks, config.train.timeout_s, follow)
    except LaunchFailed as error:
        for line in error.log.splitlines():
            inputs.log.debug(line)
        raise TrainError(
            f"training failed: {error}",
            where=f"conf/train/{config.choices['train']}.yaml",
            remedy="run with -v for details" if "did not finish" not in str(error) else "raise timeout_s",
        ) from error


def make_job(inputs: Inputs, config: Config) -> dict:
    """Everything a rank needs, as plain values."""
    init_from = config.train.init_from
    return {
        "module_path": str(KINDS["module"].path(inputs.root)),
        "weights_path": str(weights_path(inputs.root)),
        "model": config.plain("model"),
        "data": config.plain("data"),
        "train": {**config.plain("train"), "init_from": init_from and str(inputs.root / init_from)},
        "where": {group: f"conf/{group}/{config.choices[group]}.yaml" for group in ("model", "data", "train")},
    }


class Follower:
    """Reads the steps that rank 0 has written so far, and passes them on to the bar and the tracked run."""

    def __init__(self, live: Live, advance: Advance) -> None:
        self.live, self.advance = live, advance
        self.position = 0

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
                self._pass_on(json.loads(line))

    def _pass_on(self, step: dict) -> None:
        values = {
            "loss": step["loss"],
            "step_ms": step["seconds"] * 1e3,
            "samples_per_second": step["samples"] / step["seconds"],
            "resident_mb": step["resident_bytes"] / 1e6,
        }
        self.live.log(step["step"], values)
        self.advance(step["step"] + 1, f"loss {step['loss']:.4f}")


def make_report(measured: dict, plan: Plan, edited: bool) -> Report:
    seconds = tuple(measured["seconds"])
    median = statistics.median(seconds[min(WARM_UP, len(seconds) - 1) :])
    return Report(
        steps=len(seconds),
        ranks=measured["ranks"],
        losses=tuple(measured["losses"]),
        step_seconds=seconds,
        median_step_seconds=median,
        samples_per_second=measured["samples"] / median,
        peak_bytes=tuple(measured["peak_bytes"]),
        predicted_step_seconds=plan.prediction.step_seconds,
        predicted_peak_bytes=plan.prediction.peak_bytes,
        module_edited=edited,
    )


def figures(report: Report) -> dict[str, float | int | str]:
    """None has the name of a series of `Follower`: in the tracked run they would be one metric."""
    return {
        "final_loss": report.losses[-1],
        "first_loss": report.losses[0],
        "median_step_ms": round(report.median_step_seconds * 1e3, 4),
        "predicted_step_ms": round(report.predicted_step_seconds * 1e3, 4),
        "step_ratio": round(report.median_step_seconds / report.predicted_step_seconds, 4),
        "median_samples_per_second": round(report.samples_per_second, 2),
        "peak_mb": round(max(report.peak_bytes) / 1e6, 3),
        "predicted_peak_mb": round(report.predicted_peak_bytes / 1e6, 3),
        "peak_ratio": round(max(report.peak_bytes) / report.predicted_peak_bytes, 4),
        "ranks": report.ranks,
    }
