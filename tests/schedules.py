"""The judges of Rotor: a search of all persistent schedules, and its recurrences written out, with no table."""

# ruff: noqa: E741 - `l` is the last link of a sub-chain, as in C(i,l,m).
from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from functools import cache

from shardwright.stages.checkpoint.recompute.chain import LAST, Chain
from shardwright.stages.checkpoint.recompute.schedule import OpKind, ScheduledOp
from shardwright.stages.checkpoint.recompute.simulate import ExecutedOp, MemoryState, apply, problem, start

Moves = Callable[[MemoryState], list[ExecutedOp]]


def moves(chain: Chain, first: int, last: int) -> Moves:
    """What the simulator makes of a state by each op that can run; each state is tried once."""
    links = range(first, last + 1)
    ops = [ScheduledOp(kind, i) for kind in (OpKind.F_CK, OpKind.F_NONE) for i in links]
    ops += [ScheduledOp(kind, i, k) for kind in (OpKind.F_ALL, OpKind.B) for i in links for k in options(chain, i)]

    def possible(state: MemoryState, op: ScheduledOp) -> bool:
        return in_backward(state, op) and not problem(chain, state, op, first)

    return cache(lambda state: [apply(chain, state, op, first) for op in ops if possible(state, op)])


def in_backward(state: MemoryState, op: ScheduledOp) -> bool:
    """A program runs a link again when backward has come to it: nothing is left of the links after it.

    Else one could run to the end, go back, and so be through with some links before gradients of parameters appear.
    """
    later = any(i > op.link for i in state.activations) or any(link > op.link for link, _ in state.tapes)
    return op.kind is OpKind.B or not later


def pins(pinned: frozenset[int], step: ExecutedOp) -> frozenset[int] | None:
    """Persistent: an activation that F_ck or F_all has left in place is pinned, and not dropped before its backward."""
    if step.op.kind is OpKind.F_NONE and step.op.link in pinned:
        return None
    left = pinned | {step.op.link} if step.op.kind in (OpKind.F_CK, OpKind.F_ALL) else pinned
    return left & step.state.activations


def fastest(
    chain: Chain, memory: float, first: int = 0, last: int | None = None, through: ScheduledOp | None = None
) -> float:
    """Dijkstra over the simulator's states, by every op that fits; infinite where no persistent sequence ends.

    With `through`, only sequences in which that op once holds all of the memory count.
    """
    last = chain.length if last is None else last
    steps = moves(chain, first, last)
    ticket = itertools.count()
    queue = [(0.0, next(ticket), (start(chain, first, last), frozenset({first}), through is None))]
    done = set()
    while queue:
        time, _, node = heapq.heappop(queue)
        if node in done:
            continue
        done.add(node)
        state, pinned, met = node
        if state.gradient == first and met:
            return time
        for step in steps(state):
            if step.held <= memory and (left := pins(pinned, step)) is not None:
                after = (step.state, left, met or (step.op == through and step.held == memory))
                if after not in done:
                    heapq.heappush(queue, (time + step.seconds, next(ticket), after))
    return math.inf


def options(chain: Chain, i: int) -> range:
    """Numbers of them, also that of the link as the last of a region."""
    return range(LAST if chain.last and i < chain.length else 0, len(chain.options(i)))


def recurrence(chain: Chain) -> Callable[[int, int, int], float]:
    """C(i,l,m) as the docstring of rotor.py has it, one number at a time."""

    @cache
    def least(i: int, l: int, m: int) -> float:
        if i > l:
            return 0.0
        found, waiting = math.inf, chain.size(l + 1) + sum(chain.grown[l + 1 :])
        around = chain.size(i) + chain.size(i + 1) + sum(chain.grown[i + 1 :])
        for o in chain.ends(i) if i == l else chain.options(i):
            floor = max(waiting + o.saved + o.ft, around + o.saved + o.bt)
            if m >= floor:
                found = min(found, o.f + o.b + least(i + 1, l, m - o.saved))
        held = 0
        for j in range(i + 1, l + 1):
            k = j - 1
            held = max(held, chain.a[j] + chain.ft_none[k] + (chain.a[k] if k > i else 0))
            if m >= max(waiting + held, chain.a[j]):
                found = min(found, sum(chain.f_none[i:j]) + least(j, l, m - chain.a[j]) + least(i, j - 1, m))
        return found

    return least
