"""Verify: the written program on real processes, beside the user's own unsplit module, in float64 and float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardwright.pipeline.base.artifacts import KINDS
from shardwright.pipeline.base.errors import TrainError
from shardwright.pipeline.base.log import Log, say
from shardwright.pipeline.base.stage import read
from shardwright.pipeline.config import Config
from shardwright.pipeline.ir.graph import OpGraph
from shardwright.pipeline.ir.plan import Plan
from shardwright.pipeline.launch.launch import run_ranks
from shardwright.pipeline.launch.work_folder import LaunchFailed

Write = Callable[[OpGraph, Plan, Config], tuple[str, tuple[OpGraph, ...]]]
SHOWN = 8  # rows of the table, beside the loss
WORKER = "shardwright.stages.verify.worker"
FILE = "runs/codegen/module.py"


def verify(root: Path, steps: int, write: Write, log: Log, everything: bool = False) -> int:
    """`write` is codegen's: an edited program is held against what it was. It tells the micro-batches' graphs, too.

    `everything` prints the rows of all that is compared; else of the loss and what is furthest.
    """
    config, found = read(("graph", "plan", "module"), root)
    graph, plan = found["graph"].body, found["plan"].body
    if found["module"].edited:
        log.warning(f"{FILE} was edited by hand: verifying it as it is")
    written, graphs = write(graph, plan, config)
    log.info("%d steps on %d ranks, in float64 and the first in float32, on the CPU", steps, plan.ranks)
    try:
        job = job_of(root, config, steps, written, graphs if len(plan.slices) > 1 else ())
        result = run_ranks(WORKER, job, plan.ranks, config.train.timeout_s)
    except LaunchFailed as error:
        return _failed(error, config, log)
    say(in_words(result, everything))
    return 0 if result["equal"] else 1


def in_words(result: dict[str, Any], everything: bool) -> str:
    """What the ranks found."""
    shown = len(result["rows"]) if everything else SHOWN
    return "\n".join([*_notes(result), *_table(result, shown), *_verdict(result)])


def job_of(root: Path, config: Config, steps: int, written: str, graphs: tuple[OpGraph, ...] = ()) -> dict[str, Any]:
    """Everything a rank needs, as plain values; graphs where they are not that of trace."""
    return {
        "root": str(root),
        "module_path": str(KINDS["module"].path(root)),
        "written": written,
        "graphs": [graph.to_json() for graph in graphs],
        "steps": steps,
        **{group: config.plain(group) for group in ("model", "data", "train")},
        "where": {group: f"conf/{group}/{config.choices[group]}.yaml" for group in ("model", "data", "train")},
    }


def _failed(error: LaunchFailed, config: Config, log: Log) -> int:
    """A program that cannot be run is not equal; anything else is not the program's fault."""
    from shardwright.stages.verify.worker import AT

    for line in error.log.splitlines():
        log.debug(line)
    if str(error).startswith(AT):
        say(f"not equal: the program fails in {FILE}, {error}")
        return 1
    late = "did not finish" in str(error)
    where = f"conf/train/{config.choices['train']}.yaml" if late else None
    remedy = "raise timeout_s" if late else "run with -v for details"
    raise TrainError(f"verification failed: {error}", where=where, remedy=remedy) from error


def _notes(result: dict[str, Any]) -> list[str]:
    notes = []
    if result["casts"] and result["as_written"]:
        notes.append("the model itself casts to float32: compared as it is written, and in float64 throughout")
    elif result["casts"]:
        notes.append(
            "the model itself casts to lower types, in a way that has no float64: compared in float64 throughout"
        )
    if result["draws"] and result["draw"]:
        notes.append("random ops draw the same numbers on both sides")
    elif result["draws"]:
        notes.append("random ops are split: dropout is off on both sides, other ops give their mean")
        notes += [f"numbers of one seed on both sides: {', '.join(result['others'])}"] if result["others"] else []
    if result["norm_parts"]:
        parts = " or ".join(map(str, result["norm_parts"]))
        notes.append(
            f"batch norms are of each rank's own samples (batch_norm: per_rank): compared with the unsplit module whose"
            f" batch norms normalise {parts} parts of the batch apart, as DistributedDataParallel on {parts} ranks,"
            " and keep the running statistics of the first"
        )
    return notes


def _table(result: dict[str, Any], count: int) -> list[str]:
    """The loss, then as many rows, the furthest first."""
    rows = result["rows"]
    shown = [row for row in rows if row["kind"] == "loss"] + [row for row in rows if row["kind"] != "loss"][:count]
    named = {"loss": "loss", "gradient": "gradient of {}", "buffer": "buffer {}"}
    names = [named[row["kind"]].format(row["name"]) for row in shown]
    width = max(map(len, names))
    lines = [f"{'':{width}}  difference  tolerance  step"]
    for name, row in zip(names, shown, strict=True):
        lines.append(f"{name:{width}}  {row['relative']:10.1e}  {row['tolerance']:9.0e}  {row['step'] + 1:4}")
    left = len(rows) - len(shown)
    return [*lines, *([f"and {left} more, each nearer; --all shows them"] if left > 0 else [])]


def _verdict(result: dict[str, Any]) -> list[str]:
    rows = result["rows"]
    furthest = f"{rows[0]['relative']:.1e}, tolerance {rows[0]['tolerance']:g}"
    if result["equal"]:
        counts = {kind: sum(row["kind"] == kind for row in rows) for kind in ("gradient", "buffer")}
        told = ", ".join(["loss", *(f"{count} {kind}s" for kind, count in counts.items() if count)])
        worst = result["float32"]  # it comes nearest to its tolerance, which has other units than those in float64
        in_float32 = f"; in float32 {worst['relative']:.1e}, tolerance {worst['tolerance']:.1e}" if worst else ""
        return [f"equal: {told}; largest relative difference {furthest}{in_float32}"]
    wrong = sum(row["relative"] > row["tolerance"] for row in rows)
    told = f"{wrong} of {len(rows)} differ, the furthest by {furthest}" if wrong else "results are, but not the types"
    return [f"not equal: {told}", *_fault(result["fault"], "first differing" if wrong else "found")]


def _fault(fault: dict[str, Any], named: str) -> list[str]:
    lines = [f"{named}: {fault['what']}"]
    if fault["op"]:
        module = f" in {fault['module']}" if fault["module"] else ""
        source = f" ({fault['source']})" if fault["source"] else ""
        lines.append(f"  op {fault['op']}, {fault['target']}{module}{source}")
    if fault["line"]:
        lines.append(f"  {FILE}, line {fault['line']}: {fault['text']}")
    if fault["size"] or fault["difference"]:
        lines.append(f"  largest difference {fault['difference']:.3g} of values up to {fault['size']:.3g}")
    return lines
