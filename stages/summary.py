"""The short summary after a run: the plan, predicted beside measured, and where everything is."""

from __future__ import annotations

from pathlib import Path

from shardwright.pipeline.base import artifacts
from shardwright.pipeline.base.artifacts import KINDS
from shardwright.pipeline.base.secrets import without_secrets
from shardwright.pipeline.base.stage import STAGES, read_summary
from shardwright.pipeline.config import load_config
from shardwright.pipeline.cost.corrected import basis_in_words
from shardwright.pipeline.ir.plan import Plan, Sharding
from shardwright.pipeline.ir.report import Report
from shardwright.pipeline.tracking.tracker import latest_run_url


def summarise(root: Path) -> str:
    config = load_config(root)
    plan: Plan = artifacts.load("plan", root).body
    report: Report = artifacts.load("report", root).body
    shardings = [partition.sharding for partition in plan.partitions]
    pipeline = f"{len(plan.partitions)} partitions, {plan.micro_batches} micro-batches"
    meshes = (" x ".join(f"{name}={size}" for name, size in partition.axes) for partition in plan.partitions)
    inputs = (f"{name} {layout}" for sharding in shardings for name, layout in sharding.inputs.items())
    regions = sum(region.recompute for partition in plan.partitions for region in partition.regions)
    but_last = ", not in the last micro-batch" if plan.keeps_last else ""
    whole = (read_summary("checkpoint", root) or {}).get("whole_ops")
    rows = [
        ("model", f"{config.choices['model']} on {config.choices['cluster']}"),
        *([("pipeline", f"{plan.schedule} of {pipeline}")] if plan.pipelined else []),
        ("mesh", ", ".join(meshes)),
        ("inputs", ", ".join(dict.fromkeys(inputs))),
        ("parameters", _parameters(shardings)),
        ("recompute", f"{regions} regions{but_last}" if regions else "nothing"),
        *([("whole ops", f"{whole}; for lack of a rule")] if whole else []),
        ("engine", report.engine),
        ("loss", f"{report.losses[0]:.4f} -> {report.losses[-1]:.4f} in {report.steps} steps"),
    ]
    if basis := basis_in_words(plan):
        rows.append(("prediction", basis))
    rows += [
        ("evaluation", f"{one.loss:.4f} on held-out data after step {one.step + 1}") for one in report.evaluations[-1:]
    ]
    table = [("", "predicted", "measured", "ratio"), *_compared(report)]
    places = [f"  {KINDS[s.writes].path(root).relative_to(root)}" for s in STAGES.values()]
    if (root / "runs/train/report.html").is_file():
        places.append("  runs/train/report.html")
    uri = config.tracking.uri or "sqlite:///runs/mlflow.db"
    lines = ["", *(f"{name:12}{text}" for name, text in rows), ""]
    lines += (f"{name:16}{left:>18}{right:>20}{ratio:>8}" for name, left, right, ratio in table)
    if not plan.estimate and report.engine == "planned" and not report.module_edited:
        lines += ["", "`shardwright calibrate` takes what was measured into the next prediction"]
    lines += ["", "artifacts", *places]
    lines += [f"MLflow store  {without_secrets(uri, uris=[uri]) if config.tracking.enabled else 'tracking is off'}"]
    lines += [f"MLflow UI     {latest_run_url(root, config.tracking) or '`shardwright ui`'}"]
    return "\n".join(lines)


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
        "optimizer_ms": ("  - of it the optimizer", "{:.2f} ms"),
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
