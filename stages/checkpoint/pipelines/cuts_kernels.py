"""The inner loops of `cuts.py`, compiled by numba on first use and kept on disk."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.pipeline.base.kernel_cache import kernel

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


class Costs(NamedTuple):
    """What is known of every partition; times are seconds of one micro-batch, forwards and backwards."""

    seconds: Floats  # [plan, flight, last link, first link]; infinite where it does not fit
    send: Floats  # [cut, plan before, plan after]: both transfers
    send_in_peak: bool  # they count in how slow a partition is
    once: Floats  # [plan, link]: seconds once a step, summed up to each link
    credit: Floats  # [plan, link]: off the sum, summed up to each link
    devices: Ints  # of each plan
    flight: Ints  # [number from the end]: which of the flights of `seconds`
    allowed: Bools  # [number from the end, plan]
    starts: Bools  # [link]: whether a partition may begin with it


class Bounds(NamedTuple):
    """No partition is slower than `slowest` or has more than `once` to do once a step; `limit` is of the sum."""

    slowest: float
    once: float
    limit: float


@kernel()
def ahead(least: Floats, costs: Costs, total: int, bounds: Bounds) -> Floats:
    """[i, d]: no less than that is the sum of partitions that hold links ..i-1 on d devices, whatever comes after them.

    `least[p, last, first]` are seconds with the best number in flight; transfers are left out.
    """
    plans, links = least.shape[0], least.shape[1]
    sums = np.full((links + 1, total + 1), np.inf)
    sums[0, 0] = 0.0
    for i in range(1, links + 1):
        for p in range(plans):
            size = costs.devices[p]
            for first in range(i - 1, -1, -1):
                if costs.once[p, i] - costs.once[p, first] > bounds.once:
                    break
                time = least[p, i - 1, first]
                if time <= bounds.slowest and costs.starts[first]:
                    time -= costs.credit[p, i] - costs.credit[p, first]
                    for d in range(size, total + 1):
                        sums[i, d] = min(sums[i, d], sums[first, d - size] + time)
    return sums


@kernel()
def sweep(values: Floats, before: Floats, costs: Costs, bounds: Bounds) -> None:
    """values[s, d, i, p] = the least sum over s partitions of links i.. on d devices, the first of them with plan p.

    What is above the limit together with the partitions `before` it (from `ahead`) is left out.
    """
    most, total, links, plans = len(costs.flight), values.shape[1] - 1, values.shape[2], values.shape[3]
    values[:] = np.inf
    longest = np.empty((plans, links), dtype=np.int64)
    sends, rests = np.empty(plans), np.empty(plans)
    for s in range(most):
        _longest(longest, costs, s, bounds.slowest)
        if s == 0:
            _last_partition(values, before, costs, bounds, longest)
            continue
        for d in range(1, total):
            for i in range(1, links):
                if values[s, d, i].min() == np.inf:
                    continue
                for p in range(plans):
                    if costs.allowed[s, p] and d + costs.devices[p] <= total:
                        count = _unbeaten(values[s, d, i], costs.send[i, p], sends, rests)
                        for g in range(count):
                            after = sends[g], rests[g]
                            _extend(values, before, costs, bounds, (s, d, i, p), after, longest[p, i - 1])


@kernel()
def _longest(longest: Ints, costs: Costs, s: int, slowest: float) -> None:
    """[p, last] = the first link of the longest partition that is fast enough."""
    plans, links = longest.shape
    for p in range(plans):
        for last in range(links):
            first = 0
            while first <= last and costs.seconds[p, costs.flight[s], last, first] > slowest:
                first += 1
            longest[p, last] = first


@kernel()
def _last_partition(values: Floats, before: Floats, costs: Costs, bounds: Bounds, longest: Ints) -> None:
    total, links, plans = values.shape[1] - 1, values.shape[2], values.shape[3]
    for p in range(plans):
        if costs.allowed[0, p] and costs.devices[p] <= total:
            for i in range(longest[p, links - 1], links):
                seconds = costs.seconds[p, costs.flight[0], links - 1, i]
                value = seconds - (costs.credit[p, links] - costs.credit[p, i])
                fits = costs.once[p, links] - costs.once[p, i] <= bounds.once
                fits = fits and value + before[i, total - costs.devices[p]] <= bounds.limit
                if costs.starts[i] and fits and seconds <= bounds.slowest:
                    values[1, costs.devices[p], i, p] = value


@kernel()
def _unbeaten(after: Floats, moves: Floats, sends: Floats, rests: Floats) -> int:
    """Into `sends` and `rests`, the next plans without those that another beats in its transfer and in all."""
    count = 0
    for q in range(len(after)):
        rest, move = after[q], moves[q]
        beaten = rest == np.inf
        for g in range(count):
            beaten = beaten or (sends[g] <= move and rests[g] + sends[g] <= rest + move)
        if not beaten:
            sends[count], rests[count] = move, rest
            count += 1
    return count


@kernel()
def _extend(
    values: Floats,
    before: Floats,
    costs: Costs,
    bounds: Bounds,
    place: tuple[int, int, int, int],
    others: tuple[float, float],
    longest: int,
) -> None:
    """Partitions of plan p that end before link i, in front of s others on d devices: of these the transfer and sum."""
    (s, d, i, p), (send, rest) = place, others
    total, after, k = values.shape[1] - 1, d + costs.devices[p], costs.flight[s]
    base, fast = rest + send, bounds.slowest - (send if costs.send_in_peak else 0.0)
    for first in range(i - 1, longest - 1, -1):
        if costs.once[p, i] - costs.once[p, first] > bounds.once:
            break
        time = costs.seconds[p, k, i - 1, first]
        if time > fast or not costs.starts[first]:
            continue
        value = base + time - (costs.credit[p, i] - costs.credit[p, first])
        if value < values[s + 1, after, first, p] and value + before[first, total - after] <= bounds.limit:
            values[s + 1, after, first, p] = value


@kernel()
def trace(values: Floats, partitions: int, plan: int, costs: Costs, bounds: Bounds) -> Ints:
    """The partitions that `sweep` summed up, first to last: rows of first link and plan."""
    links, plans = values.shape[2], values.shape[3]
    found = np.empty((partitions, 2), dtype=np.int64)
    d, first, p = values.shape[1] - 1, 0, plan
    for number in range(partitions):
        found[number] = first, p
        s = partitions - number - 1
        best, where, then = np.inf, 0, 0
        for i in range(first + 1, links if s else first + 1):
            time = costs.seconds[p, costs.flight[s], i - 1, first]
            if costs.once[p, i] - costs.once[p, first] <= bounds.once:
                credit = costs.credit[p, i] - costs.credit[p, first]
                for q in range(plans):
                    send = costs.send[i, p, q]
                    peak = time + (send if costs.send_in_peak else 0.0)
                    value = values[s, d - costs.devices[p], i, q] + send + time - credit
                    if value < best and peak <= bounds.slowest * (1 + 1e-12):
                        best, where, then = value, i, q
        d, first, p = d - costs.devices[p], where, then
    return found
