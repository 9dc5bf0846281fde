"""Schedules of a chain: nested as the program is, flat as it executes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from shardwright.stages.checkpoint.recompute.chain import LAST, Chain


class OpKind(Enum):
    """What an op does; the loss is a backward."""

    F_ALL = "F_all"
    F_CK = "F_ck"
    F_NONE = "F_none"
    B = "B"


@dataclass(frozen=True)
class ScheduledOp:
    """One step of a sequence: a forward or the backward of a link; `option` is which one F_all keeps."""

    kind: OpKind
    link: int
    option: int = 0

    def __str__(self) -> str:
        return f"{self.kind.value}({self.link}{f', option {self.option}' if self.option else ''})"


@dataclass(frozen=True)
class Keep:
    """A link run once, everything for its backward kept."""

    link: int
    option: int = 0

    def __str__(self) -> str:
        return f"{self.link}.{self.option}" if self.option else str(self.link)


@dataclass(frozen=True)
class Nesting:
    """Links first..last in order, each kept or in an inner region, which is one `checkpoint(...)` call.

    `run(region)(x)` applies the steps in turn: a `Keep` is `link(x)`, a `Region` is `checkpoint(run(step), x)`. So
    "0 (1 (2)) 3" keeps link 0, recomputes 1 and 2 when their gradient comes, and then 2 once more.
    """

    steps: tuple[Keep | Nesting, ...]

    @property
    def repeats(self) -> bool:
        """Whether anything is run again; a link that keeps a part of itself runs the rest again."""
        return any(isinstance(step, Nesting) or step.option for step in self.steps)

    @property
    def first(self) -> int:
        step = self.steps[0]
        return step.link if isinstance(step, Keep) else step.first

    @property
    def last(self) -> int:
        step = self.steps[-1]
        return step.link if isinstance(step, Keep) else step.last

    def __str__(self) -> str:
        return " ".join(str(step) if isinstance(step, Keep) else f"({step})" for step in self.steps)


@dataclass(frozen=True)
class Schedule:
    """What to run: `regions` nested as the program is, `sequence` flat as it executes; `time` if predicted."""

    regions: Nesting
    sequence: tuple[ScheduledOp, ...] = field(repr=False)
    time: float | None = None


def flatten(region: Nesting, loss: int, early: bool = False) -> tuple[ScheduledOp, ...]:
    """The ops of a region in the order of execution; link `loss`, if it is in there, has no forward of its own.

    With `early`, the second run of a region ends where its last link has all that its backward needs (`LAST`).
    """
    return (*forwards(region, loss), *_backwards(region, loss, early))


def forwards(region: Nesting, loss: int) -> Iterator[ScheduledOp]:
    """What runs before the first backward of a region."""
    for step in region.steps:
        if isinstance(step, Nesting):
            yield ScheduledOp(OpKind.F_CK, step.first)
            yield from (ScheduledOp(OpKind.F_NONE, k) for k in range(step.first + 1, step.last + 1))
        elif step.link != loss:
            yield ScheduledOp(OpKind.F_ALL, step.link, step.option)


def _backwards(region: Nesting, loss: int, early: bool) -> Iterator[ScheduledOp]:
    for step in reversed(region.steps):
        if isinstance(step, Nesting):
            yield from flatten(_ended(step) if early else step, loss, early)
        else:
            yield ScheduledOp(OpKind.B, step.link, step.option)


def _ended(region: Nesting) -> Nesting:
    *before, end = region.steps
    return Nesting((*before, Keep(end.link, LAST))) if isinstance(end, Keep) else region


def no_recompute(chain: Chain) -> Schedule:
    """The user's `off`: every link kept."""
    return scheduled(Nesting(tuple(Keep(i) for i in range(chain.length + 1))), chain)


def full_recompute(chain: Chain) -> Schedule:
    """The user's `full`: every link its own region, except the loss."""
    return scheduled(Nesting((*(Nesting((Keep(i),)) for i in range(chain.length)), Keep(chain.length))), chain)


def scheduled(regions: Nesting, chain: Chain, time: float | None = None) -> Schedule:
    """A sub-chain without the loss is the second run of a region."""
    early = bool(chain.last)
    run = _ended(regions) if early and regions.last < chain.length else regions
    return Schedule(regions, flatten(run, chain.length, early), time)
