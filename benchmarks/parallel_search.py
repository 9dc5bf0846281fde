"""The search of stages/solve/search/large in some processes, until it is proven, out of time or interrupted.

    search          keeps the time: looks at what the leader has found, checks that, and answers at the deadline
      leader        presolve; then it gathers what the searchers find, as choices of the whole problem
        warming     compiles the loops, or loads them compiled, while presolve is under way
        first       from the cheap part of presolve to a first solution: there is one even where presolve takes all its
                    time, or where the searchers fail
        searchers   the search on the reduced problem; they exchange solutions

Each is a copy of the process that started it, and ends with that one, however that ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import multiprocessing as mp
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.contest_search import ContestSearcher
from shardwright.stages.solve.problem.data import Edge, Holding, Node, Problem
from shardwright.stages.solve.search.large.arrays import Arrays, Ints, flatten
from shardwright.stages.solve.search.large.descent import Searcher
from shardwright.stages.solve.search.large.partial_elimination import grow_ball
from shardwright.stages.solve.search.large.presolve import NoChoice, Presolved, reduce

POLL = 0.05  # seconds
SHARES = (0.5, 0.3)  # of the time for the bound, by process
PRESOLVE_SHARE = 0.4  # of the time, at most, before the search begins
FIRST_SHARE = 0.2  # of its time that the first solution's process spends on the bound
PACE = 10  # to tell of a solution takes at most one part in so many of the time
ENDING = 1.0  # seconds that processes which were told to end are waited for
LAST = 0.15  # seconds before the end at which the leader tells for the last time, and twice what telling takes


@dataclass
class SearchResult:
    """The best choices (None: none that fit are known), their cost, and what no solution can go below."""

    picked: Ints | None
    cost: float
    bound: float
    sizes: dict[str, int] = field(default_factory=dict)


def search(
    problem: Problem, limit: float, deadline: float, seed: int = 0, workers: int = 2, step: float = 0.0
) -> SearchResult:
    """The best choices until `deadline` (time.monotonic), or until they are proven to be the best.

    `workers` processes search, and this one waits; 0: it searches itself, and is deterministic but for the time.
    `step`: costs are whole multiples of it. Interrupted (SIGINT), it returns the best so far.
    """
    if not workers:
        return _in_this_process(problem, limit, deadline, seed, step)
    boards = [Board(len(problem.nodes)) for _ in range(2)]  # the leader's, and that of the first solution
    news, ours = mp.Pipe(duplex=False)
    watch = _Watch(problem, limit, boards)
    with (
        contextlib.suppress(KeyboardInterrupt),
        _led(problem, limit, deadline, seed, workers, step, boards, ours) as it,
    ):
        watch.wait(it, news, deadline)
    return watch.answer()


@contextlib.contextmanager
def _led(*arguments: Any) -> Iterator[Any]:
    """The leader, and the end of it and of all whom it started."""
    leader = fork(lead, *arguments, daemon=False)
    try:
        yield leader
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has no group yet, or is gone
            os.killpg(leader.pid, signal.SIGKILL)
        leader.kill()
        leader.join(ENDING)


class _Watch:
    def __init__(self, problem: Problem, limit: float, boards: list[Board]) -> None:
        self.problem, self.limit, self.boards = problem, limit, boards
        self.best: Ints | None = None
        self.cost = math.inf
        self.sizes: dict[str, int] = {}
        self.failure: Exception | None = None
        self.refused = [math.inf for _ in boards]  # what a board claimed and did not keep

    def wait(self, leader: Any, news: Connection, deadline: float) -> None:
        alive = True
        while alive and time.monotonic() < deadline:
            alive = leader.is_alive()  # before its news are read: none come after
            while news.poll():
                said = news.recv()
                if isinstance(said, Exception):
                    self.failure = said
                else:
                    self.sizes = said
            self.look()
            if alive:
                leader.join(max(0.0, min(POLL, deadline - time.monotonic())))
        if not alive and leader.exitcode and self.failure is None:
            self.failure = RuntimeError(f"the search's process ended with status {leader.exitcode}")

    def look(self) -> None:
        """Take what is better; checked, for a process may have been stopped while writing."""
        for number, board in enumerate(self.boards):
            found = board.read()
            if found is None or not found[0] < min(self.cost, self.refused[number]):
                continue
            cost = self.problem.cost(found[1])
            if math.isfinite(cost) and self.problem.held(found[1]).max(initial=0.0) <= self.limit:
                if cost < self.cost:
                    self.best, self.cost = found[1], cost
            else:
                self.refused[number] = found[0]

    def answer(self) -> SearchResult:
        self.look()
        if self.failure is not None and (self.best is None or isinstance(self.failure, NoChoice)):
            raise self.failure
        bound = max(board.bound for board in self.boards)
        return SearchResult(self.best, self.cost, min(bound, self.cost), self.sizes)


def _in_this_process(problem: Problem, limit: float, deadline: float, seed: int, step: float) -> SearchResult:
    now = time.monotonic()
    reduced = reduce(problem, now + PRESOLVE_SHARE * (deadline - now))
    if not reduced.problem.nodes:
        fits = reduced.base.max(initial=0.0) <= limit
        cost = reduced.constant if fits else math.inf
        return SearchResult(reduced.expand([]) if fits else None, cost, cost, sizes(reduced))
    arrays = flatten(reduced.problem, reduced.base, limit, reduced.constant)
    searcher = ContestSearcher(arrays, deadline, seed, step)
    with contextlib.suppress(KeyboardInterrupt):
        searcher.run(SHARES[0])
    picked = None if searcher.best is None else np.asarray(reduced.expand(searcher.best))
    return SearchResult(picked, searcher.cost, min(searcher.bound, searcher.cost), sizes(reduced))


# ---- the processes


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


def sizes(reduced: Presolved) -> dict[str, int]:
    small = reduced.problem
    choices = sum(len(node.costs) for node in small.nodes)
    return {"nodes": len(small.nodes), "edges": len(small.edges), "choices": choices, **reduced.counts}


def _nothing_left(reduced: Presolved, limit: float, board: Board) -> None:
    fits = reduced.base.max(initial=0.0) <= limit
    board.bound = reduced.constant if fits else math.inf
    if fits:
        board.write(reduced.expand([]), reduced.constant)


def _first(
    finish: Callable[[], Presolved], limit: float, deadline: float, seed: int, step: float, board: Board
) -> None:
    reduced = finish()
    if reduced.problem.nodes:
        teller = _Teller(reduced, board)
        arrays = flatten(reduced.problem, reduced.base, limit, reduced.constant)
        ContestSearcher(arrays, deadline, seed, step, teller.publish).run(FIRST_SHARE)


class _Teller:
    """Tells of solutions of the reduced problem as choices of the whole one, but not of each: that takes time."""

    def __init__(self, reduced: Presolved, board: Board) -> None:
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
    reduced: Presolved, slots: list[Board], searchers: list[Any], first: Any, early: Board, ours: Board, deadline: float
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

    searcher = ContestSearcher(arrays, deadline, seed + number, step, slots[number].publish, fetch)
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
    searcher = ContestSearcher(flatten(Problem(nodes, edges), np.zeros(2), 2.5, 0.0), math.inf, 0)
    searcher.start()
    searcher.pass_messages(2)
    searcher.repair(1)
    searcher._narrow(searcher._ranks())
    searcher.cost = math.inf  # else it is proven, and no region is looked at
    for _ in range(8):
        searcher._region()
    grow_ball(searcher.arrays.graph, 0, 2, searcher.everything.copy(), 0)  # three nodes are no ball
