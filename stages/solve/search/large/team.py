"""The processes behind `run.search`, each a copy of the one that started it.

    search          keeps the time (run.py)
      leader        presolve; then it gathers what the searchers find, as choices of the whole problem
        warming     compiles the loops, or loads them compiled, while presolve is under way
        first       from the cheap part of presolve to a first solution: there is one even where presolve takes all its
                    time, or where the searchers fail
        searchers   the search on the reduced problem; they exchange solutions

A process ends with the one that started it, however that ends.
"""

from __future__ import annotations

import ctypes
import math
import multiprocessing as mp
import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stages.solve.problem.data import Edge, Holding, Node, Problem
from stages.solve.search.large.arrays import Arrays, Ints, flatten
from stages.solve.search.large.descent import Searcher
from stages.solve.search.large.plans import grow_ball
from stages.solve.search.large.presolve import NoChoice, Reduced, reduce

POLL = 0.05  # seconds
SHARES = (0.5, 0.3)  # of the time for the bound, by process
PRESOLVE_SHARE = 0.4  # of the time, at most, before the search begins
FIRST_SHARE = 0.2  # of its time that the first solution's process spends on the bound
PACE = 10  # to tell of a solution takes at most one part in so many of the time
LAST = 0.15  # seconds before the end at which the leader tells for the last time, and twice what telling takes


def _shared(kind: Any, count: int) -> NDArray[Any]:
    """Numbers that processes share."""
    return np.ctypeslib.as_array(mp.RawArray(kind, count))


class Board:
    """What one process has found, for the others to read without a lock: picks in two turns, then which is the last."""

    def __init__(self, nodes: int) -> None:
        self.picks = [_shared(ctypes.c_int64, max(1, nodes))[:nodes] for _ in range(2)]
        self.numbers = _shared(ctypes.c_double, 4)  # turn, cost, bound, done
        self.numbers[:] = (-1, math.inf, -math.inf, 0)

    def write(self, picked: Ints, cost: float) -> None:
        turn = 0 if self.numbers[0] == 1 else 1
        self.picks[turn][:] = picked
        self.numbers[0] = turn
        self.numbers[1] = cost

    def publish(self, searcher: Searcher) -> None:
        self.bound = searcher.bound
        if searcher.best is not None and searcher.cost < self.numbers[1]:
            self.write(searcher.best, searcher.cost)

    def read(self) -> tuple[float, Ints] | None:
        turn = int(self.numbers[0])
        return None if turn < 0 else (float(self.numbers[1]), self.picks[turn].copy())

    @property
    def bound(self) -> float:
        return float(self.numbers[2])

    @bound.setter
    def bound(self, value: float) -> None:
        self.numbers[2] = value


def lead(
    problem: Problem, limit: float, deadline: float, seed: int, workers: int, step: float, boards: list[Board],
    news: Connection,
) -> None:  # fmt: skip
    os.setpgid(0, 0)  # to be ended with all that it starts
    ours, early = boards
    warming = fork(warm_up)
    first: list[Any] = []
    now = time.monotonic()
    try:
        reduced = reduce(
            problem,
            now + PRESOLVE_SHARE * (deadline - now),
            lambda finish: first.append(fork(_first, finish, limit, deadline, seed, step, early)),
        )
    except NoChoice as error:
        news.send(error)
        return
    news.send(sizes(reduced))
    if not reduced.problem.nodes:
        _nothing_left(reduced, limit, ours)
        return
    arrays = flatten(reduced.problem, reduced.base, limit, reduced.constant)
    warming.join(max(0.0, deadline - time.monotonic()))
    slots = [Board(arrays.count) for _ in range(workers)]
    searchers = [fork(_search, arrays, deadline, seed, w, slots, step) for w in range(workers)]
    _gather(reduced, slots, searchers, first[0], early, ours, deadline)


def sizes(reduced: Reduced) -> dict[str, int]:
    small = reduced.problem
    choices = sum(len(node.costs) for node in small.nodes)
    return {"nodes": len(small.nodes), "edges": len(small.edges), "choices": choices, **reduced.counts}


def _nothing_left(reduced: Reduced, limit: float, board: Board) -> None:
    fits = reduced.base.max(initial=0.0) <= limit
    board.bound = reduced.constant if fits else math.inf
    if fits:
        board.write(reduced.expand([]), reduced.constant)


def _first(finish: Callable[[], Reduced], limit: float, deadline: float, seed: int, step: float, board: Board) -> None:
    reduced = finish()
    if reduced.problem.nodes:
        teller = _Teller(reduced, board)
        arrays = flatten(reduced.problem, reduced.base, limit, reduced.constant)
        Searcher(arrays, deadline, seed, step, teller.publish).run(FIRST_SHARE)


class _Teller:
    """Tells of solutions of the reduced problem as choices of the whole one, but not of each: that takes time."""

    def __init__(self, reduced: Reduced, board: Board) -> None:
        self.reduced, self.board = reduced, board
        self.told, self.takes, self.after = math.inf, 0.0, -math.inf

    def publish(self, searcher: Searcher) -> None:
        self.board.bound = searcher.bound
        if searcher.best is not None and time.monotonic() > self.after:
            self.tell(searcher.best, searcher.cost)

    def tell(self, picked: Ints, cost: float) -> None:
        if cost < self.told:
            begin = time.monotonic()
            self.board.write(self.reduced.expand(picked), cost)
            now = time.monotonic()
            self.told, self.takes, self.after = cost, now - begin, now + PACE * (now - begin)


def _gather(
    reduced: Reduced, slots: list[Board], searchers: list[Any], first: Any, early: Board, ours: Board, deadline: float
) -> None:
    teller = _Teller(reduced, ours)
    running = True
    while running:
        now = time.monotonic()
        running = any(s.is_alive() for s in searchers) and not any(slot.numbers[3] for slot in slots)
        running &= now < deadline - LAST - 2 * teller.takes
        ours.bound = max(slot.bound for slot in slots)
        found = min((f for f in (slot.read() for slot in slots) if f is not None), key=lambda f: f[0], default=None)
        if found is not None and (now > teller.after or not running):
            teller.tell(found[1], found[0])
        if first.is_alive() and (found is not None or early.numbers[0] >= 0):
            first.kill()  # its core serves the searchers better
        time.sleep(POLL if running else 0.0)


def _search(arrays: Arrays, deadline: float, seed: int, number: int, slots: list[Board], step: float) -> None:
    others = [slot for i, slot in enumerate(slots) if i != number]

    def fetch() -> tuple[float, Ints] | None:
        found = [f for f in (slot.read() for slot in others) if f is not None]
        return min(found, key=lambda f: f[0], default=None)

    searcher = Searcher(arrays, deadline, seed + number, step, slots[number].publish, fetch)
    searcher.run(SHARES[number % len(SHARES)])
    slots[number].publish(searcher)
    slots[number].numbers[3] = searcher.proven or searcher.impossible


def fork(function: Any, *arguments: Any, daemon: bool = True) -> Any:
    process = mp.get_context("fork").Process(target=_child, args=(os.getpid(), function, *arguments), daemon=daemon)
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
    searcher._narrow(searcher._ranks())
    searcher.cost = math.inf  # else it is proven, and no region is looked at
    for _ in range(8):
        searcher._region()
    arrays = searcher.arrays
    grow_ball(0, arrays.arc_start, arrays.arc_to, 0, 2, searcher.everything.copy())  # three nodes are no ball
