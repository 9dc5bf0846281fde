"""Latency, bandwidth and curves from measured times, without torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import accumulate

from shardwright.pipeline.ir.cluster import COLLECTIVES, HostPace, LinkCost
from shardwright.stages.cluster.meshes import NOTHING

OUTLIER = 5.0  # times the median distance from the median
RISEN = 3.0  # times the seconds of the smallest message: where the bandwidth begins to show
KNOWN_HOST = 3.15e-3  # seconds of the work of host_probe.py where the defaults of `HostPace` hold, under torch 2.11

Points = list[dict[str, float]]  # bytes and seconds


@dataclass(frozen=True)
class ReducedTimes:
    seconds: float
    spread: float  # between the quarters, relative
    outliers: int
    mean: float  # of what is left without outliers


def reduce_times(times: Sequence[float]) -> ReducedTimes:
    """The lower quarter of what is left without outliers: other programs make times longer, never shorter.

    Not the shortest: a thread that happens to be awake answers at once, and how many do varies from size to size.
    """
    middle = statistics.median(times)
    near = statistics.median(abs(time - middle) for time in times)
    kept = sorted(time for time in times if time - middle <= OUTLIER * max(near, middle / 100))
    quarter = len(kept) // 4
    spread = (kept[-1 - quarter] - kept[quarter]) / middle if middle else 0.0
    return ReducedTimes(kept[quarter], spread, len(times) - len(kept), statistics.fmean(kept))


def fit_links(measured: Mapping[str, Points]) -> dict[str, LinkCost]:
    """One curve per collective; an axis of one rank has nothing to measure and costs nothing."""
    found = {name: fit_link([(m["bytes"], m["seconds"]) for m in points]) for name, points in measured.items()}
    return {name: NOTHING for name in COLLECTIVES} | found


def in_a_step(links: Mapping[str, LinkCost], apart: float) -> dict[str, LinkCost]:
    """Measured links as a step meets them: each call takes `apart` longer than right after a barrier.

    A link that has rested may carry a small message at once, out of what it may send in a burst. In a step messages
    follow one another: none is faster than the bandwidth.

    A half of an all-reduce may be measured to take longer than the whole: gloo's all-gather does at some sizes. The
    whole would do in its place; so that noise does not make such a detour look shorter, it costs no more.
    """
    whole = links["all_reduce"]
    found = {**links, **{name: _at_most(links[name], whole) for name in ("reduce_scatter", "all_gather")}}
    return {
        name: LinkCost(
            link.latency + apart,
            link.bandwidth,
            tuple((size, max(seconds, size / link.bandwidth) + apart) for size, seconds in link.points),
        )
        for name, link in found.items()
    }


def _at_most(link: LinkCost, other: LinkCost) -> LinkCost:
    sizes = sorted({size for size, _ in (*link.points, *other.points)})
    seconds = accumulate((min(link.seconds(size), other.seconds(size)) for size in sizes), max)  # but for rounding
    points = tuple(zip(sizes, seconds, strict=True))
    return LinkCost(min(link.latency, other.latency), max(link.bandwidth, other.bandwidth), points)


def fit_link(points: list[tuple[float, float]]) -> LinkCost:
    """The measured points made to rise; beyond them a line through all, or from the first to the last if steeper."""
    if not points:
        return NOTHING
    latency, per_byte = least_squares_line(points)
    found = rising(points)
    (smallest, shortest), (largest, longest) = found[0], found[-1]
    steady = (longest - shortest) / (largest - smallest) if largest > smallest else 0.0
    return LinkCost(latency, 1 / max(per_byte, steady), found)


def link_beyond(measured: LinkCost, formula: LinkCost) -> LinkCost:
    """Small messages do not tell the bandwidth: where time ran out before they rose, that of the pairs holds beyond."""
    risen = measured.points and measured.points[-1][1] > RISEN * measured.points[0][1]
    return measured if risen else replace(measured, bandwidth=min(measured.bandwidth, formula.bandwidth))


def rising(points: list[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Seconds that do not fall as bytes grow: neighbours that do are given their mean (isotonic regression)."""
    pools: list[list[tuple[float, float]]] = []
    for point in sorted(dict(points).items()):
        pools.append([point])
        while len(pools) > 1 and _mean(pools[-2]) >= _mean(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    return tuple((nbytes, _mean(pool)) for pool in pools for nbytes, _ in pool)


def _mean(pool: list[tuple[float, float]]) -> float:
    return statistics.fmean(seconds for _, seconds in pool)


def fit_errors(links: Mapping[str, LinkCost], unseen: Mapping[str, Points]) -> list[float]:
    """Relative errors on measurements that the links were not fitted to."""
    return [
        abs(links[name].seconds(m["bytes"]) - m["seconds"]) / m["seconds"]
        for name, points in unseen.items()
        for m in points
    ]


def host_pace(seconds: float) -> HostPace:
    """Of a host that took so long for the work of host_probe.py."""
    return HostPace(*(pace * seconds / KNOWN_HOST for pace in astuple(HostPace())))


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
