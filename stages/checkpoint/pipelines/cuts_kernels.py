"""The inner loops of `cuts.py`, compiled by numba on first use and kept on disk."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@njit(cache=True, nogil=True)
def ahead(
    least: Floats,
    once: Floats,
    credit: Floats,
    devices: Ints,
    total: int,
    starts: Bools,
    slowest: float,
    most_once: float,
) -> Floats:
    """[i, d]: no less than that is the sum of partitions that hold links ..i-1 on d devices, whatever comes after them.

    `least[p, last, first]` are seconds with the best number in flight; transfers are left out.
    """
    plans, links = least.shape[0], least.shape[1]
    sums = np.full((links + 1, total + 1), np.inf)
    sums[0, 0] = 0.0
    for i in range(1, links + 1):
        for p in range(plans):
            size = devices[p]
            for first in range(i - 1, -1, -1):
                if once[p, i] - once[p, first] > most_once:
                    break
                time = least[p, i - 1, first]
                if time <= slowest and starts[first]:
                    time -= credit[p, i] - credit[p, first]
                    for d in range(size, total + 1):
                        sums[i, d] = min(sums[i, d], sums[first, d - size] + time)
    return sums


@njit(cache=True, nogil=True)
def sweep(
    values: Floats,
    before: Floats,
    seconds: Floats,
    send: Floats,
    send_in_peak: bool,
    once: Floats,
    credit: Floats,
    devices: Ints,
    flight: Ints,
    allowed: Bools,
    starts: Bools,
    slowest: float,
    most_once: float,
    limit: float,
) -> None:
    """values[s, d, i, p] = the least sum over s partitions of links i.. on d devices, the first of them with plan p.

    No partition is slower than `slowest` or has more than `most_once` to do once a step; what is above `limit` together
    with the partitions `before` it (from `ahead`) is left out. `cuts.py` says what the arrays are.
    """
    most, total, links, plans = len(flight), values.shape[1] - 1, values.shape[2], values.shape[3]
    values[:] = np.inf
    lowest = np.empty((plans, links), dtype=np.int64)
    sends, rests = np.empty(plans), np.empty(plans)
    for s in range(most):
        k = flight[s]
        for p in range(plans):  # the longest partition that is fast enough, by its last link
            for last in range(links):
                first = 0
                while first <= last and seconds[p, k, last, first] > slowest:
                    first += 1
                lowest[p, last] = first
        if s == 0:
            for p in range(plans):
                if allowed[0, p] and devices[p] <= total:
                    for i in range(lowest[p, links - 1], links):
                        value = seconds[p, k, links - 1, i] - (credit[p, links] - credit[p, i])
                        fits = once[p, links] - once[p, i] <= most_once
                        fits = fits and value + before[i, total - devices[p]] <= limit
                        if starts[i] and fits and seconds[p, k, links - 1, i] <= slowest:
                            values[1, devices[p], i, p] = value
            continue
        for d in range(1, total):
            for i in range(1, links):
                reached = False
                for q in range(plans):
                    reached = reached or values[s, d, i, q] < np.inf
                if not reached:
                    continue
                for p in range(plans):
                    after = d + devices[p]
                    if not allowed[s, p] or after > total:
                        continue
                    count = 0  # of next plans, without those that another beats in its transfer and in all
                    for q in range(plans):
                        rest, move = values[s, d, i, q], send[i, p, q]
                        beaten = rest == np.inf
                        for g in range(count):
                            beaten = beaten or (sends[g] <= move and rests[g] + sends[g] <= rest + move)
                        if not beaten:
                            sends[count], rests[count] = move, rest
                            count += 1
                    for g in range(count):
                        base = rests[g] + sends[g]
                        fast = slowest - (sends[g] if send_in_peak else 0.0)
                        for first in range(i - 1, lowest[p, i - 1] - 1, -1):
                            if once[p, i] - once[p, first] > most_once:
                                break
                            time = seconds[p, k, i - 1, first]
                            if time > fast or not starts[first]:
                                continue
                            value = base + time - (credit[p, i] - credit[p, first])
                            if value < values[s + 1, after, first, p] and value + before[first, total - after] <= limit:
                                values[s + 1, after, first, p] = value


@njit(cache=True, nogil=True)
def trace(
    values: Floats,
    partitions: int,
    plan: int,
    seconds: Floats,
    send: Floats,
    send_in_peak: bool,
    once: Floats,
    credit: Floats,
    devices: Ints,
    flight: Ints,
    slowest: float,
    most_once: float,
) -> Ints:
    """The partitions that `sweep` summed up, first to last: rows of first link and plan."""
    links, plans = values.shape[2], values.shape[3]
    found = np.empty((partitions, 2), dtype=np.int64)
    d, first, p = values.shape[1] - 1, 0, plan
    for number in range(partitions):
        found[number] = first, p
        s = partitions - number - 1
        best, where, then = np.inf, 0, 0
        for i in range(first + 1, links if s else first + 1):
            time = seconds[p, flight[s], i - 1, first]
            if once[p, i] - once[p, first] <= most_once:
                for q in range(plans):
                    peak = time + (send[i, p, q] if send_in_peak else 0.0)
                    value = values[s, d - devices[p], i, q] + send[i, p, q] + time - (credit[p, i] - credit[p, first])
                    if value < best and peak <= slowest * (1 + 1e-12):
                        best, where, then = value, i, q
        d, first, p = d - devices[p], where, then
    return found
