"""How one tensor lies on a mesh: one state per axis, which fixes the forward value and the gradient.

| state  | forward            | gradient           |
|--------|--------------------|--------------------|
| `R`    | replicated         | replicated         |
| `B`    | replicated         | partial (summands) |
| `S(d)` | split on dim d     | split on dim d     |
| `P`    | partial (summands) | replicated         |
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, order=True)
class State:
    """`S(1:3)` splits a factor of dim 1: the dim is three equal parts, one after another, and each of them is split.

    Axes that split the same factor are ordered, outermost first: as in the mesh, an axis with a prime after those
    without (`S(0)'` lies inside `S(0)`).
    """

    kind: str
    dim: int = -1  # the split dim; -1 for the states that have none
    outer: int = 1  # in how many equal parts the dim lies, each of which is split
    after: int = 0  # primes

    def __post_init__(self) -> None:
        if self.kind not in ("R", "B", "S", "P"):
            raise ValueError(f"unknown state {self.kind!r}: use R, B, S(dim) or P")
        if (self.kind == "S") != (self.dim >= 0):
            raise ValueError(f"state {self.kind} with dim {self.dim}: S needs a dim, the others have none")
        if self.outer < 1 or self.after < 0 or (self.kind != "S" and (self.outer, self.after) != (1, 0)):
            raise ValueError(f"state {self.kind} with {self.outer} parts and {self.after} primes: only S has them")

    def __str__(self) -> str:
        parts = f":{self.outer}" if self.outer > 1 else ""
        return f"S({self.dim}{parts})" + "'" * self.after if self.kind == "S" else self.kind

    @staticmethod
    def parse(text: str) -> State:
        found = re.fullmatch(r"\s*(?:([RBP])|S\((\d+)(?::(\d+))?\)('*))\s*", text)
        if not found:
            raise ValueError(f"cannot read the state {text!r}: use R, B, S(dim), S(dim:parts) or P")
        return State(found[1]) if found[1] else State("S", int(found[2]), int(found[3] or 1), len(found[4]))


R, B, P = State("R"), State("B"), State("P")


def S(dim: int, outer: int = 1, after: int = 0) -> State:
    return State("S", dim, outer, after)


@dataclass(frozen=True, order=True)
class Layout:
    """The state on every axis of the mesh, in the mesh's order; printed as `S(0),R`."""

    states: tuple[State, ...]

    def __str__(self) -> str:
        return ",".join(str(s) for s in self.states)

    @staticmethod
    @lru_cache(maxsize=4096)
    def parse(text: str) -> Layout:
        return Layout(tuple(State.parse(part) for part in text.split(",") if part.strip()))

    def to_json(self) -> str:
        return str(self)

    @staticmethod
    def from_json(data: object) -> Layout:
        if not isinstance(data, str):
            raise ValueError(f"expected a layout such as 'S(0)', found {data!r}")
        return Layout.parse(data)

    def local_shape(self, shape: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of one rank's piece; every split must divide."""
        local = list(shape)
        for state, size in zip(self.states, sizes, strict=True):
            if state.kind == "S":
                if local[state.dim] % size:
                    raise ValueError(f"dim {state.dim} of {shape} does not divide by {size}")
                local[state.dim] //= size
        return tuple(local)

    def pieces(self, sizes: tuple[int, ...]) -> int:
        """In how many pieces the tensor is split."""
        count = 1
        for state, size in zip(self.states, sizes, strict=True):
            count *= size if state.kind == "S" else 1
        return count


def replicated(axes: int) -> Layout:
    return Layout((R,) * axes)


def without_gradient(layout: Layout) -> Layout:
    """`B` and `R` differ in the gradient alone: a tensor that has none is `R`."""
    return Layout(tuple(R if s.kind == "B" else s for s in layout.states))
