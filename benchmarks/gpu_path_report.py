"""What benchmarks.gpu_path says of its measurements: a table for each model, and figures over all points."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable
from typing import Any

from benchmarks.gpu_path_models import EAGER_WAYS, WAYS

EAGER_FORMS = ("eager", "fused")
BESIDE = {"eager": EAGER_WAYS, "fused": ()}  # peers of a form, else all; none steps with a fused optimizer
NOISE = 1.02  # of a step
BARS = {
    "over_budget": 0,
    "failed": 0,
    "peak_error_median": 0.003,
    "peak_error_worst": 0.01,
    "step_error_median": 0.05,
    "step_error_worst": 0.15,
    "slower_than_best_peer": 0,
    "geomean_eager": 0.97,
    "geomean_compiled": 0.87,
    "first_step_over_peer_s": 10.0,
    "optimizer_error_fused": 0.1,
}
HEAD = ("budget GB", "peak", "predicted", "step ms", "predicted", "first s")
LEAST_USED = 0.95  # of a budget, where something is recomputed

State = dict[str, Any]  # {"peers": {project: {way: measured}}, "points": {name: point}}


def report(state: State) -> str:
    """The last line is one JSON object."""
    lines, rows, failed = [], [], 0
    for project, peers in state["peers"].items():
        lines += [f"{project}: peers", f"  {'':32}{'peak GB':>9}{'ms':>9}{'first step s':>14}"]
        lines += [_peer_line(way, one) for way, one in peers.items()]
        points = {name: one for name, one in state["points"].items() if one["project"] == project}
        lines += [f"{project}: plans", f"  {'':18}{''.join(f'{name:>10}' for name in HEAD)}   best peer within"]
        for one in points.values():
            if "refused" in one or "error" in one:
                failed += "error" in one
                lines.append(f"  {one['form']:11}{one['share']:6.0%} {one.get('refused') or 'FAILED: ' + one['error']}")
                continue
            rows.append(judged(one, peers))
            lines.append(_line(one, rows[-1]))
    result = figures(rows, failed)
    return "\n".join([*lines, *_bars(result), json.dumps(result)])


def judged(one: dict[str, Any], peers: dict[str, Any]) -> dict[str, Any]:
    """A plan beside the fastest of its peers that needs no more than its budget."""
    measured = one["measured"]
    known = {way: peer for way, peer in peers.items() if "error" not in peer}
    fitting = {
        way: peer["ms"]
        for way, peer in known.items()
        if peer["peak"] <= one["budget"] and way in BESIDE.get(one["form"], WAYS)
    }
    best = min(fitting, key=lambda way: fitting[way], default=None)
    alike = known.get("plain" if one["form"] in EAGER_FORMS else "compile")
    return {
        "form": one["form"],
        "recomputes": one["recomputes"],
        "used": measured["peak"] / one["budget"],
        "peak_error": abs(one["predicted"]["peak"] / measured["peak"] - 1),
        "step_error": abs(one["predicted"]["ms"] / measured["ms"] - 1),
        "optimizer_error": _optimizer_error(one),
        "best": best,
        "ratio": None if best is None else measured["ms"] / fitting[best],
        "first_over": None if alike is None else measured["first_s"] - alike["first_s"],
    }


def _optimizer_error(one: dict[str, Any]) -> float | None:
    measured = one["measured"].get("optimizer_ms")
    return abs(one["predicted"]["optimizer_ms"] / measured - 1) if measured else None


def figures(rows: list[dict[str, Any]], failed: int) -> dict[str, Any]:
    ratios = [row["ratio"] for row in rows if row["ratio"] is not None]
    used = [row["used"] for row in rows if row["recomputes"]]
    return {
        "points": len(rows),
        "over_budget": sum(row["used"] > 1 for row in rows),
        "failed": failed,
        "peak_error_median": _middle(row["peak_error"] for row in rows),
        "peak_error_worst": _largest(row["peak_error"] for row in rows),
        "step_error_median": _middle(row["step_error"] for row in rows),
        "step_error_worst": _largest(row["step_error"] for row in rows),
        "slower_than_best_peer": sum(ratio > NOISE for ratio in ratios),
        "geomean_eager": _geomean(row["ratio"] for row in rows if row["form"] in EAGER_FORMS),
        "geomean_compiled": _geomean(row["ratio"] for row in rows if row["form"] not in EAGER_FORMS),
        "first_step_over_peer_s": _largest((row["first_over"] for row in rows), 1),
        "optimizer_error_fused": _largest(row["optimizer_error"] for row in rows if row["form"] == "fused"),
        "least_used": round(min(used), 4) if used else None,
    }


def met(result: dict[str, Any]) -> bool:
    return not _missed(result)


def _missed(result: dict[str, Any]) -> list[str]:
    missed = [name for name, bar in BARS.items() if result[name] is not None and result[name] > bar]
    return missed + ["least_used"] * (result["least_used"] is not None and result["least_used"] < LEAST_USED)


def _bars(result: dict[str, Any]) -> list[str]:
    missed = _missed(result)
    return [f"not met: {', '.join(missed)}"] if missed else ["all bars are met"]


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _middle(values: Iterable[float]) -> float | None:
    found = list(values)
    return round(statistics.median(found), 4) if found else None


def _largest(values: Iterable[float | None], digits: int = 4) -> float | None:
    return round(max(found), digits) if (found := _known(values)) else None


def _geomean(values: Iterable[float | None]) -> float | None:
    found = _known(values)
    return round(math.exp(statistics.mean(map(math.log, found))), 4) if found else None


def _peer_line(way: str, one: dict[str, Any]) -> str:
    if "error" in one:
        return f"  {way:32}{one['error'][:80]}"
    return f"  {way:32}{one['peak'] / 1e9:9.2f}{one['ms']:9.1f}{one['first_s']:14.1f}"


def _line(one: dict[str, Any], row: dict[str, Any]) -> str:
    measured, predicted = one["measured"], one["predicted"]
    peer = f"{row['best']} ({row['ratio']:.3f})" if row["best"] else "none"
    sizes = "".join(f"{nbytes / 1e9:10.2f}" for nbytes in (one["budget"], measured["peak"], predicted["peak"]))
    times = "".join(f"{value:10.1f}" for value in (measured["ms"], predicted["ms"], measured["first_s"]))
    return f"  {one['form']:11}{one['share']:6.0%} {sizes}{times}   {peer}"
