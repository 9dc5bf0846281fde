"""`search`: presolve, then the search in some processes, until proven or out of time or interrupted."""

from __future__ import annotations

import contextlib
import ctypes
import math
import multiprocessing as mp
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stages.solve.data import Edge, Holding, Node, Problem
from stages.solve.large.arrays import Arrays, Floats, Ints, flatten
from stages.solve.large.descent import Searcher
from stages.solve.large.presolve import Reduced, reduce

POLL = 0.05  # seconds
SHARES = (0.5, 0.3)  # of the time for the bound, by process
PRESOLVE_SHARE = 0.4  # of the time, at most, before the search begins


@dataclass
class Found:
    """The best choices (None: none that fit are known), their cost, and what no solution can go below."""

    picked: Ints | None
    cost: float
    bound: float
    sizes: dict[str, int] = field(default_factory=dict)


def search(
    problem: Problem, limit: float, deadline: float, seed: int = 0, workers: int = 2, step: float = 0.0
) -> Found:
    """The best choices until `deadline` (time.monotonic), or until they are proven to be the best.

    `workers` processes search, and this one waits; 0: it searches itself, and is deterministic but for the time.
    `step`: costs are whole multiples of it. Interrupted (SIGINT), it returns the best so far.
    """
    warming = _fork(warm_up) if workers else None
    reduced = None
    try:
        now = time.monotonic()
        reduced = reduce(problem, now + PRESOLVE_SHARE * (deadline - now))
        arrays = flatten(reduced.problem, reduced.base, limit, reduced.constant)
        if not arrays.count:
            return _nothing_left(reduced, limit)
        if warming is None:
            return _alone(reduced, arrays, deadline, seed, step)
        warming.join(max(0.0, deadline - time.monotonic()))
        return _together(reduced, arrays, deadline, seed, workers, step)
    except KeyboardInterrupt:
        return Found(None, math.inf, -math.inf, _sizes(reduced))
    finally:
        if warming is not None and warming.is_alive():
            warming.kill()


def _nothing_left(reduced: Reduced, limit: float) -> Found:
    if reduced.base.max(initial=0.0) > limit:
        return Found(None, math.inf, math.inf, _sizes(reduced))
    return Found(reduced.expand([]), reduced.constant, reduced.constant, _sizes(reduced))


def _sizes(reduced: Reduced | None) -> dict[str, int]:
    if reduced is None:
        return {}
    small = reduced.problem
    choices = sum(len(node.costs) for node in small.nodes)
    return {"nodes": len(small.nodes), "edges": len(small.edges), "choices": choices, **reduced.counts}


def _alone(reduced: Reduced, arrays: Arrays, deadline: float, seed: int, step: float) -> Found:
    searcher = Searcher(arrays, deadline, seed, step)
    with contextlib.suppress(KeyboardInterrupt):
        searcher.run(SHARES[0])
    picked = None if searcher.best is None else reduced.expand(searcher.best)
    return Found(picked, searcher.cost, min(searcher.bound, searcher.cost), _sizes(reduced))


# -------------------------------------------------------------------- processes


class _Slot:
    """What one process has found, for the others to read without a lock: picks in two turns, then which is the last."""

    def __init__(self, nodes: int) -> None:
        self.picks = [np.frombuffer(mp.RawArray(ctypes.c_int64, nodes), np.int64) for _ in range(2)]
        self.numbers = np.frombuffer(mp.RawArray(ctypes.c_double, 4), np.float64)  # turn, cost, bound, done
        self.numbers[:] = (-1, math.inf, -math.inf, 0)

    def write(self, searcher: Searcher) -> None:
        self.numbers[2] = searcher.bound
        if searcher.best is not None and searcher.cost < self.numbers[1]:
            turn = 0 if self.numbers[0] == 1 else 1
            self.picks[turn][:] = searcher.best
            self.numbers[0] = turn
            self.numbers[1] = searcher.cost

    def read(self) -> tuple[float, Ints] | None:
        turn = int(self.numbers[0])
        return None if turn < 0 else (float(self.numbers[1]), self.picks[turn].copy())


def _together(reduced: Reduced, arrays: Arrays, deadline: float, seed: int, workers: int, step: float) -> Found:
    slots = [_Slot(arrays.count) for _ in range(workers)]
    processes = [_fork(_work, arrays, deadline, seed, w, slots, step) for w in range(workers)]
    try:
        while time.monotonic() < deadline and any(p.is_alive() for p in processes):
            if any(slot.numbers[3] for slot in slots):
                break
            time.sleep(POLL)
    except KeyboardInterrupt:
        pass
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
    return _best(reduced, arrays.limit, slots)


def _best(reduced: Reduced, limit: float, slots: list[_Slot]) -> Found:
    """The best of the slots, checked: a process may have been stopped while writing."""
    best, cost = None, math.inf
    found = [f for f in (slot.read() for slot in slots) if f is not None]
    for _, picked in sorted(found, key=lambda f: f[0]):  # looking at one takes a second, where there are many edges
        total = reduced.problem.cost(picked) + reduced.constant
        if math.isfinite(total) and (reduced.base + _held(reduced, picked)).max(initial=0.0) <= limit:
            best, cost = picked, total
            break
    bound = max(float(slot.numbers[2]) for slot in slots)
    if best is None:
        return Found(None, math.inf, bound, _sizes(reduced))
    return Found(reduced.expand(best), cost, min(bound, cost), _sizes(reduced))


def _held(reduced: Reduced, picked: Ints) -> Floats:
    held = np.zeros(len(reduced.base))
    own = reduced.problem.held(picked)
    held[: len(own)] = own
    return held


def _work(arrays: Arrays, deadline: float, seed: int, number: int, slots: list[_Slot], step: float) -> None:
    others = [slot for i, slot in enumerate(slots) if i != number]

    def fetch() -> tuple[float, Ints] | None:
        found = [f for f in (slot.read() for slot in others) if f is not None]
        return min(found, key=lambda f: f[0], default=None)

    searcher = Searcher(arrays, deadline, seed + number, step, slots[number].write, fetch)
    searcher.run(SHARES[number % len(SHARES)])
    slots[number].write(searcher)
    slots[number].numbers[3] = searcher.proven or searcher.impossible


def _fork(function: Any, *arguments: Any) -> Any:
    process = mp.get_context("fork").Process(target=_child, args=(os.getpid(), function, *arguments), daemon=True)
    process.start()
    return process


def _child(parent: int, function: Any, *arguments: Any) -> None:
    """A process that ends with its parent, however that ends, and leaves SIGINT to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() == parent:
        function(*arguments)


def warm_up() -> None:
    """Compile the loops, or load them compiled, on a problem of three nodes."""
    two = np.array([0.0, 1.0])
    nodes = tuple(Node(str(i), two, (Holding(0, 2, two[::-1].copy()),)) for i in range(3))
    edges = tuple(Edge(i, j, np.array([[0.0, 2.0], [2.0, math.inf]])) for i, j in ((0, 1), (1, 2), (0, 2)))
    searcher = Searcher(flatten(Problem(nodes, edges), np.zeros(2), 2.5, 0.0), math.inf, 0)
    searcher.start()
    searcher.pass_messages(2)
    searcher.repair(1)
    searcher.cost = math.inf
    for _ in range(8):
        searcher._region()
