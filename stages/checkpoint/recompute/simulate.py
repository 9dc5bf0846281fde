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

from shardwright.pipeline.base.errors import ShardwrightError
from shardwright.stages.checkpoint.recompute.chain import LAST, Chain
from shardwright.stages.checkpoint.recompute.schedule import OpKind, ScheduledOp


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

    def beside(self, nbytes: int) -> Outcome:
        """With that much more in memory all the time."""
        steps = tuple(replace(step, held=step.held + nbytes) for step in self.steps)
        return replace(self, steps=steps, peak=self.peak + nbytes)


def simulate(chain: Chain, sequence: Iterable[ScheduledOp], first: int = 0, last: int | None = None) -> Outcome:
    """Run links first..last; unless the last is the loss, the gradient of its output is there from the start."""
    begin = start(chain, first, chain.length if last is None else last)
    steps = run(chain, begin, sequence, first)
    check_end(steps[-1].state if steps else begin, first)
    return Outcome(tuple(steps), sum(step.seconds for step in steps), max(step.held for step in steps))


def start(chain: Chain, first: int, last: int) -> MemoryState:
    """Before the first op."""
    return MemoryState(frozenset({first}), frozenset(), None if last == chain.length else last + 1)


def run(chain: Chain, state: MemoryState, sequence: Iterable[ScheduledOp], first: int) -> list[ExecutedOp]:
    """The ops from that state on, one after another."""
    steps: list[ExecutedOp] = []
    for number, op in enumerate(sequence):
        steps.append(apply(chain, state, op, first, where=f"op {number}"))
        state = steps[-1].state
    return steps


def check_end(state: MemoryState, first: int) -> None:
    if state != MemoryState(frozenset(), frozenset(), first):
        raise InvalidSequence(f"it ends with {state}, not with the gradient of a_{first} alone", where="sequence")


def apply(chain: Chain, state: MemoryState, op: ScheduledOp, first: int = 0, where: str | None = None) -> ExecutedOp:
    """One op on one state; raises InvalidSequence where the op cannot run."""
    why = problem(chain, state, op, first)
    if why:
        raise InvalidSequence(f"{op} cannot run: {why}", where=where)
    i, option = op.link, chain.option(op.link, op.option)
    if op.kind is OpKind.B:
        after = MemoryState(state.activations - {i}, state.tapes - {(i, op.option)}, i)
        return ExecutedOp(op, after, state.bytes(chain) + chain.size(i) + option.bt, option.b)
    if op.kind is OpKind.F_ALL:
        after = replace(state, tapes=state.tapes | {(i, op.option)})
        return ExecutedOp(op, after, after.bytes(chain) + option.ft, option.f)
    both = replace(state, activations=state.activations | {i + 1})
    after = both if op.kind is OpKind.F_CK else replace(both, activations=both.activations - {i})
    return ExecutedOp(op, after, both.bytes(chain) + chain.ft_none[i], chain.f_none[i])


def problem(chain: Chain, state: MemoryState, op: ScheduledOp, first: int) -> str | None:
    """Why the op cannot run on the state, if it cannot."""
    i, loss, waits = op.link, op.link == chain.length, state.gradient
    known = op.option == LAST and chain.last and not loss
    if not first <= i <= chain.length or not (known or 0 <= op.option < len(chain.options(i))):
        return "there is no such link or option"
    if not state.has(i):
        return f"a_{i} is not in memory"
    if op.kind is OpKind.B:
        if loss:
            return None if waits is None else "the loss has been run"
        if waits != i + 1:
            return f"the gradient of a_{i + 1} is not in memory"
        return None if (i, op.option) in state.tapes else f"link {i} has not been run with this to keep"
    if loss:
        return "the loss has no forward of its own"
    if waits is not None and waits <= i:
        return "its backward has been run"
    if op.kind is OpKind.F_ALL and chain.last and (op.option == LAST) != (waits == i + 1):
        return "it is run as the last of a region where the gradient of its output waits, and only there"
    if state.has(i + 1):
        return f"a_{i + 1} is in memory already"
    if op.kind is OpKind.F_NONE and (i == first or i not in state.activations):
        return f"a_{i} cannot be dropped"
    return None
