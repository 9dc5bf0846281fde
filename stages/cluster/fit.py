"""Latency and bandwidth from measured times, without torch."""

from __future__ import annotations

from pipeline.ir.cluster import COLLECTIVES, LinkCost
from stages.cluster.formulas import FASTEST


def fit_links(measured: dict[str, list[dict[str, float]]]) -> dict[str, LinkCost]:
    """One line per collective; an axis of one rank has nothing to measure and costs nothing."""
    links = {}
    for name in COLLECTIVES:
        points = [(m["bytes"], m["seconds"]) for m in measured.get(name, [])]
        if points:
            latency, per_byte = least_squares_line(points)
            links[name] = LinkCost(latency, 1 / per_byte)
        else:
            links[name] = LinkCost(0.0, FASTEST)
    return links


def least_squares_line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """The line `offset + slope * x` with the least squared *relative* error: small messages count as much as large.

    Both are kept positive: the offset is at least a tenth of the shortest time, the slope at least that of the pair of
    extreme points divided by a hundred.
    """
    weights = [1 / (y * y) for _, y in points]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    joint = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points, strict=True))
    shortest, longest = min(points), max(points)
    least_slope = longest[1] / max(longest[0], 1.0) / 100
    slope = max(joint / spread if spread else 0.0, least_slope)
    offset = max(mean_y - slope * mean_x, shortest[1] / 10)
    return offset, slope
