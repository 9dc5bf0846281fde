"""`search`: presolve, then the search in some processes, until proven or out of time or interrupted.

This process keeps the time, and nothing that takes long happens in it: it forks a leader (team.py), looks at what the
leader has found, checks that, and answers at the deadline whatever the others are at.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing as mp
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from stages.solve.problem.data import Problem
from stages.solve.search.large.arrays import Ints, flatten
from stages.solve.search.large.descent import Searcher
from stages.solve.search.large.presolve import NoChoice, reduce
from stages.solve.search.large.team import PRESOLVE_SHARE, SHARES, Board, fork, lead, sizes

POLL = 0.05  # seconds
ENDING = 1.0  # seconds that processes which were told to end are waited for


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
    if not workers:
        return _alone(problem, limit, deadline, seed, step)
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

    def answer(self) -> Found:
        self.look()
        if self.failure is not None and (self.best is None or isinstance(self.failure, NoChoice)):
            raise self.failure
        bound = max(board.bound for board in self.boards)
        return Found(self.best, self.cost, min(bound, self.cost), self.sizes)


def _alone(problem: Problem, limit: float, deadline: float, seed: int, step: float) -> Found:
    now = time.monotonic()
    reduced = reduce(problem, now + PRESOLVE_SHARE * (deadline - now))
    if not reduced.problem.nodes:
        fits = reduced.base.max(initial=0.0) <= limit
        cost = reduced.constant if fits else math.inf
        return Found(reduced.expand([]) if fits else None, cost, cost, sizes(reduced))
    arrays = flatten(reduced.problem, reduced.base, limit, reduced.constant)
    searcher = Searcher(arrays, deadline, seed, step)
    with contextlib.suppress(KeyboardInterrupt):
        searcher.run(SHARES[0])
    picked = None if searcher.best is None else np.asarray(reduced.expand(searcher.best))
    return Found(picked, searcher.cost, min(searcher.bound, searcher.cost), sizes(reduced))
