"""The short summary after a run: the plan, predicted beside measured, and where everything is."""

from __future__ import annotations

from pathlib import Path

from pipeline.base import artifacts
from pipeline.base.artifacts import KINDS
from pipeline.base.secrets import without_secrets
from pipeline.base.stage import STAGES, read_summary
from pipeline.config import load_config
from pipeline.ir.plan import Partition, Plan, Sharding
from pipeline.ir.report import Report
from pipeline.tracking.tracker import latest_run_url


def summarise(root: Path) -> str:
    config = load_config(root)
    plan: Plan = artifacts.load("plan", root).body
    report: Report = artifacts.load("report", root).body
    regions = sum(region.recompute for partition in plan.partitions for region in partition.regions)
    whole = (read_summary("checkpoint", root) or {}).get("whole_ops")
    rows = [
        ("model", f"{config.choices['model']} on {config.choices['cluster']}"),
        *([("pipeline", _pipeline(plan))] if plan.pipelined else []),
        ("mesh", ", ".join(map(_mesh, plan.partitions))),
        ("inputs", ", ".join(dict.fromkeys(text for partition in plan.partitions for text in _inputs(partition)))),
        ("parameters", _parameters([partition.sharding for partition in plan.partitions])),
        ("recompute", f"{regions} regions{_but_last(plan)}" if regions else "nothing"),
        *([("whole ops", f"{whole}; for lack of a rule")] if whole else []),
        ("engine", report.engine),
        ("loss", f"{report.losses[0]:.4f} -> {report.losses[-1]:.4f} in {report.steps} steps"),
    ]
    rows += [
        ("evaluation", f"{one.loss:.4f} on held-out data after step {one.step + 1}") for one in report.evaluations[-1:]
    ]
    table = [("", "predicted", "measured", "ratio"), *_compared(report)]
    places = [f"  {KINDS[s.writes].path(root).relative_to(root)}" for s in STAGES.values()]
    uri = config.tracking.uri or "sqlite:///runs/mlflow.db"
    return "\n".join(
        [
            "",
            *(f"{name:12}{text}" for name, text in rows),
            "",
            *(f"{name:16}{left:>18}{right:>20}{ratio:>8}" for name, left, right, ratio in table),
            "",
            "artifacts",
            *places,
            *(f"  {page}" for page in ["runs/train/report.html"] if (root / page).is_file()),
            f"MLflow store  {without_secrets(uri, uris=[uri]) if config.tracking.enabled else 'tracking is off'}",
            f"MLflow UI     {latest_run_url(root, config.tracking) or '`make ui`'}",
        ]
    )


def _pipeline(plan: Plan) -> str:
    return f"{plan.schedule} of {len(plan.partitions)} partitions, {plan.micro_batches} micro-batches"


def _but_last(plan: Plan) -> str:
    return ", not in the last micro-batch" if plan.keeps_last else ""


def _mesh(partition: Partition) -> str:
    return " x ".join(f"{name}={size}" for name, size in partition.axes)


def _inputs(partition: Partition) -> list[str]:
    return [f"{name} {layout}" for name, layout in partition.sharding.inputs.items()]


def _parameters(shardings: list[Sharding]) -> str:
    storage = [layout for sharding in shardings for layout in sharding.storage.values()]
    split = sum(any(s.kind == "S" for s in layout.states) for layout in storage)
    counts = {
        "replicated": len(storage) - split,
        "split": split,
        "regathered": sum(len(sharding.regathered) for sharding in shardings),
        "with a split optimizer state": sum(len(sharding.state) for sharding in shardings),
    }
    return ", ".join(f"{count} {what}" for what, count in counts.items() if count or what in ("replicated", "split"))


def _compared(report: Report) -> list[tuple[str, str, str, str]]:
    """Rows of the table: parts of the step where they were measured, and of the ranks the one with the largest peak."""
    shown = {
        "step_ms": ("step", "{:.2f} ms"),
        "compute_ms": ("- compute", "{:.2f} ms"),
        "communication_ms": ("- communication", "{:.2f} ms"),
        "bubble_ms": ("- bubble", "{:.2f} ms"),
        "other_ms": ("- other", "{:.2f} ms"),
        "samples_per_second": ("throughput", "{:.1f} samples/s"),
        "peak_mb": ("peak memory", "{:.1f} MB a rank"),
    }
    found = {row.what: row for row in report.compared}
    return [
        (name, form.format(row.predicted), form.format(row.measured), "-" if row.ratio is None else f"{row.ratio:.2f}")
        for what, (name, form) in shown.items()
        if (row := found.get(what)) is not None
    ]
