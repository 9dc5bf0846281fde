"""Execute a sequence of ops on a chain and see what it takes: the judge of `rotor`, sharing none of its formulas.

Memory is what is there: activations on their own, tapes (what F_all kept, its output included), one gradient. An op
holds all of that, its output and its temporaries; what it consumed leaves afterwards.

    op         reads                          writes        then leaves
    F_all(i)   a_i                            tape i        nothing
    F_ck(i)    a_i                            a_{i+1}       nothing
    F_none(i)  a_i on its own, not the first  a_{i+1}       a_i
    B(i)       a_i, tape i, gradient i+1      gradient i    tape i, gradient i+1, a_i if on its own
    B(L)       a_L                            gradient L    a_L if on its own         (the loss)

What backwards leave (gradients of parameters) stays. Where a chain says how a link is run as the last of a region
(`Chain.last`), F_all of a link whose output's gradient waits is that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from pipeline.base.errors import ShardwrightError
from stages.checkpoint.recompute.chain import LAST, Chain
from stages.checkpoint.recompute.schedule import OpKind, ScheduledOp


class InvalidSequence(ShardwrightError):
    """An op lacks what it reads, or a sequence stops before its end."""


@dataclass(frozen=True)
class MemoryState:
    """What is in memory: activations on their own, (link, option) of each tape, and the gradient, if any."""

    activations: frozenset[int]
    tapes: frozenset[tuple[int, int]]
    gradient: int | None

    def has(self, i: int) -> bool:
        """Whether a_i can be read, on its own or from the tape of the link before."""
        return i in self.activations or any(link == i - 1 for link, _ in self.tapes)

    def bytes(self, chain: Chain) -> float:
        own = sum(chain.size(i) for i in self.activations)
        tapes = sum(chain.option(link, option).saved for link, option in self.tapes)
        if self.gradient is None:
            return own + tapes
        return own + tapes + chain.size(self.gradient) + sum(chain.grown[self.gradient :])


@dataclass(frozen=True)
class ExecutedOp:
    """An op as it ran: the state it left, the bytes held while it ran, its seconds."""

    op: ScheduledOp
    state: MemoryState
    held: float
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """A sequence as it ran; `peak` counts the chain's input."""

    steps: tuple[ExecutedOp, ...]
    time: float
    peak: float
    waited: float = 0.0  # of that time, for the host


def simulate(chain: Chain, sequence: Iterable[ScheduledOp], first: int = 0, last: int | None = None) -> Outcome:
    """Run links first..last; unless the last is the loss, the gradient of its output is there from the start."""
    last = chain.length if last is None else last
    state = start(chain, first, last)
    steps: list[ExecutedOp] = []
    for number, op in enumerate(sequence):
        steps.append(apply(chain, state, op, first, where=f"op {number}"))
        state = steps[-1].state
    if state != MemoryState(frozenset(), frozenset(), first):
        raise InvalidSequence(f"it ends with {state}, not with the gradient of a_{first} alone", where="sequence")
    peak = max(step.held for step in steps)
    return Outcome(tuple(steps), sum(step.seconds for step in steps), peak)


def start(chain: Chain, first: int, last: int) -> MemoryState:
    """Before the first op."""
    return MemoryState(frozenset({first}), frozenset(), None if last == chain.length else last + 1)


def apply(chain: Chain, state: MemoryState, op: ScheduledOp, first: int = 0, where: str | None = None) -> ExecutedOp:
    """One op on one state; raises InvalidSequence where the op cannot run."""
    why = problem(chain, state, op, first)
    if why:
        raise InvalidSequence(f"{op} cannot run: {why}", where=where)
    run = {OpKind.F_ALL: _save, OpKind.F_CK: _pass, OpKind.F_NONE: _pass, OpKind.B: _back}[op.kind]
    return run(chain, state, op)


def problem(chain: Chain, state: MemoryState, op: ScheduledOp, first: int) -> str | None:
    """Why the op cannot run on the state, if it cannot."""
    i = op.link
    known = op.option == LAST and chain.last and i < chain.length
    if not first <= i <= chain.length or not (known or 0 <= op.option < len(chain.options(i))):
        return "there is no such link or option"
    if not state.has(i):
        return f"a_{i} is not in memory"
    return _backward_problem(chain, state, op) if op.kind is OpKind.B else _forward_problem(chain, state, op, first)


def _forward_problem(chain: Chain, state: MemoryState, op: ScheduledOp, first: int) -> str | None:
    i = op.link
    if i == chain.length:
        return "the loss has no forward of its own"
    if state.gradient is not None and state.gradient <= i:
        return "its backward has been run"
    if op.kind is OpKind.F_ALL and chain.last and (op.option == LAST) != (state.gradient == i + 1):
        return "it is run as the last of a region where the gradient of its output waits, and only there"
    if state.has(i + 1):
        return f"a_{i + 1} is in memory already"
    if op.kind is OpKind.F_NONE and (i == first or i not in state.activations):
        return f"a_{i} cannot be dropped"
    return None


def _backward_problem(chain: Chain, state: MemoryState, op: ScheduledOp) -> str | None:
    i = op.link
    if i == chain.length:
        return None if state.gradient is None else "the loss has been run"
    if state.gradient != i + 1:
        return f"the gradient of a_{i + 1} is not in memory"
    return None if (i, op.option) in state.tapes else f"link {i} has not been run with this to keep"


def _save(chain: Chain, state: MemoryState, op: ScheduledOp) -> ExecutedOp:
    option = chain.option(op.link, op.option)
    after = replace(state, tapes=state.tapes | {(op.link, op.option)})
    return ExecutedOp(op, after, after.bytes(chain) + option.ft, option.f)


def _pass(chain: Chain, state: MemoryState, op: ScheduledOp) -> ExecutedOp:
    i = op.link
    both = replace(state, activations=state.activations | {i + 1})
    after = both if op.kind is OpKind.F_CK else replace(both, activations=both.activations - {i})
    return ExecutedOp(op, after, both.bytes(chain) + chain.ft_none[i], chain.f_none[i])


def _back(chain: Chain, state: MemoryState, op: ScheduledOp) -> ExecutedOp:
    i, option = op.link, chain.option(op.link, op.option)
    held = state.bytes(chain) + chain.size(i) + option.bt
    after = MemoryState(state.activations - {i}, state.tapes - {(i, op.option)}, i)
    return ExecutedOp(op, after, held, option.b)
