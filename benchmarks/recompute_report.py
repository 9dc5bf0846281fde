"""What benchmarks.recompute says of its measurements: a table for each model, and figures over all of them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

EQUAL = 1.001  # peaks that differ by less are equal
NOISE = 0.005  # of a step


def report(found: dict[str, Any]) -> str:
    """A table for each model that was measured; the last line is one JSON object."""
    lines, rows, failed = [], [], 0
    for name, planned in found["ours"].items():
        plans = [one for one in planned if "measured" in one]
        if not plans:
            lines.append(f"{name}: planned and not measured")
            continue
        known = {label: one for label, one in found["peers"][name].items() if "error" not in one}
        for one in (one for one in plans if "error" in one["measured"]):
            failed += 1
            lines.append(f"{name}: {one['name']} failed: {one['measured']['error']}")
        lines += [f"{name}: peers", f"{'':26}{'peak GB':>9}{'ms':>9}"]
        lines += [f"  {label:24}{one['peak'] / 1e9:9.2f}{one['ms']:9.1f}" for label, one in known.items()]
        lines += [
            f"{name}: ours",
            f"  {'budget':>8}{'peak':>8}{'used':>8}{'ms':>9}{'predicted':>11}{'':4}best peer within",
        ]
        for one in sorted((one for one in plans if "error" not in one["measured"]), key=lambda one: -one["budget"]):
            rows.append(judged(one, known))
            lines.append(_line(one, rows[-1]))
    between = [row for row in rows if row["between"]]
    result = {
        "points": len(rows),
        "over_budget": sum(row["used"] > 1 for row in rows),
        "least_used": round(min((row["used"] for row in rows if row["recomputes"]), default=1.0), 4),
        "failed": failed,
        "worst_time_error": round(max((row["error"] for row in rows), default=0.0), 4),
        "slower_than_peers": sum((row["gain"] or 0.0) < -NOISE for row in rows),
        "least_gain_between": _least(row["gain"] for row in between),
        "least_gain_between_over_eager": _least(row["gain_over_eager"] for row in between),
    }
    return "\n".join([*lines, json.dumps(result)])


def _least(gains: Iterable[float | None]) -> float | None:
    known = [gain for gain in gains if gain is not None]
    return round(min(known), 4) if known else None


def judged(one: dict[str, Any], peers_: dict[str, Any]) -> dict[str, Any]:
    """One of our points: how much of its budget it used, and the fastest peer that needs no more than that budget."""
    measured = one["measured"]
    fitting = {label: peer["ms"] for label, peer in peers_.items() if peer["peak"] <= one["budget"] * EQUAL}
    eager = [ms for label, ms in fitting.items() if not label.startswith("compile")]
    best = min(fitting, key=lambda label: fitting[label], default=None)
    low, high = (peers_.get(label, {"peak": 0})["peak"] for label in ("per block", "none"))
    return {
        "used": measured["peak"] / one["budget"],
        "recomputes": one["recomputes"],
        "error": abs(one["predicted_ms"] / measured["ms"] - 1),
        "best": best,
        "gain": None if best is None else fitting[best] / measured["ms"] - 1,
        "gain_over_eager": min(eager) / measured["ms"] - 1 if eager else None,
        "between": low * EQUAL < one["budget"] < high,
    }


def _line(one: dict[str, Any], row: dict[str, Any]) -> str:
    measured = one["measured"]
    peer = f"{row['best']} ({100 * row['gain']:+.1f}%)" if row["best"] else "none fits"
    return (
        f"  {one['budget'] / 1e9:8.2f}{measured['peak'] / 1e9:8.2f}{100 * row['used']:7.1f}%{measured['ms']:9.1f}"
        f"{one['predicted_ms']:11.1f}    {peer}"
    )
