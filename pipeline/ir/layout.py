"""How one tensor lies on a mesh: one state per axis, which fixes the forward value and the gradient.

| state  | forward            | gradient           |
|--------|--------------------|--------------------|
| `R`    | replicated         | replicated         |
| `B`    | replicated         | partial (summands) |
| `S(d)` | split on dim d     | split on dim d     |
| `P`    | partial (summands) | replicated         |

Several axes may split one dim. Read the dim as digits, outermost first: an axis takes away one digit, of its own size.
`S(d:o)` says that the digits outside that one multiply to `o`; axes that say the same `o` take the digits that follow
one another from there, outermost first. So on axes of sizes 2 and 4:

    S(0),S(0)     a dim of 16 is (2 4 2): axis 0 takes the 2, axis 1 the 4
    S(0)',S(0)    the other order: (4 2 2)
    S(0),S(0:8)   a dim of 64 is (2 4 4 2), say 8 sequences of 8 tokens: axis 0 splits the sequences, axis 1 the tokens

An axis with a smaller `o` is applied first; for a later one the dim lies in fewer parts by then, `o` divided by what
the earlier ones took. A layout fits a shape where all the digits divide.

A dim that does not divide may be held in uneven shards, by one axis alone: 7 over 2 ranks are 4 and 3. Every rank has
room for as many as the first, and what it lacks of them is padding, at the end of its shard.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod


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

    @cached_property
    def _hash(self) -> int:
        """Of numbers alone: that of a text is another one in each process, and states are sent from one to another."""
        return hash((ord(self.kind), self.dim, self.outer, self.after))

    def __hash__(self) -> int:
        return self._hash

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
class Place:
    """The digit of a dim that an axis takes: the digits outside it multiply to `outside`."""

    dim: int
    outside: int

    def clear_of(self, size: int, other: Place, other_size: int) -> bool:
        """Whether axes of these sizes may take both digits: of different dims, or one wholly inside the other."""
        inside, other_inside = self.outside * size, other.outside * other_size
        return self.dim != other.dim or self.outside % other_inside == 0 or other.outside % inside == 0


@dataclass(frozen=True)
class AxisSplit:
    """What one axis does to the shard that the axes before it left: the dim lies in `parts`, each of which is split."""

    axis: int
    dim: int
    parts: int


Run = tuple[int, int]  # start, length


@dataclass(frozen=True, order=True)
class Layout:
    """The state on every axis of the mesh, in the mesh's order; printed as `S(0),R`.

    Primes that say no more than the order of the mesh are dropped: equal orders are equal layouts.
    """

    states: tuple[State, ...]

    def __post_init__(self) -> None:
        if any(s.after for s in self.states):
            object.__setattr__(self, "states", _fewest_primes(self.states))

    @cached_property
    def _hash(self) -> int:
        return hash(self.states)

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        return ",".join(str(s) for s in self.states)

    @staticmethod
    @lru_cache(maxsize=4096)
    def parse(text: str) -> Layout:
        return Layout(tuple(State.parse(part) for part in text.split(",")) if text.strip() else ())

    def to_json(self) -> str:
        return str(self)

    @staticmethod
    def from_json(data: object) -> Layout:
        if not isinstance(data, str):
            raise ValueError(f"expected a layout such as 'S(0)', found {data!r}")
        return Layout.parse(data)

    def places(self, sizes: tuple[int, ...]) -> dict[int, Place]:
        """Axis -> the digit it takes, outermost first; the digits of one dim must follow one another."""
        return dict(_places(self.states, sizes))

    def splits(self, sizes: tuple[int, ...]) -> tuple[AxisSplit, ...]:
        """The layout as splits of one axis after another, each of the shard that those before it left."""
        taken: dict[int, int] = {}
        found = []
        for axis, place in _places(self.states, sizes):
            before = taken.get(place.dim, 1)
            found.append(AxisSplit(axis, place.dim, place.outside // before))
            taken[place.dim] = before * sizes[axis]
        return tuple(found)

    def parts(self, axis: int, sizes: tuple[int, ...]) -> int:
        """In how many parts the dim lies that the axis splits, on a rank where the other axes have split it."""
        return next(split.parts for split in self.splits(sizes) if split.axis == axis)

    def fits(self, shape: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
        """Whether every split divides; a dim without elements is not split."""
        return self.holds(shape, sizes) and not self.uneven(shape, sizes)

    def holds(self, shape: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
        """Whether the tensor can lie so, in shards that may be uneven; a dim without elements is not split."""
        try:
            self.local_shape(shape, sizes)
        except (ValueError, IndexError):
            return False
        return all(shape[split.dim] > 0 for split in self.splits(sizes))

    def uneven(self, shape: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[int, ...]:
        """The dims of which the shards are padded."""
        local = self.local_shape(shape, sizes)
        taken = {split.dim for split in self.splits(sizes)}
        return tuple(d for d in sorted(taken) if local[d] * self._ranks_on(d, sizes) != shape[d])

    def _ranks_on(self, dim: int, sizes: tuple[int, ...]) -> int:
        return prod(size for state, size in zip(self.states, sizes, strict=True) if state.dim == dim)

    def local_shape(self, shape: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of one rank's shard, with its padding; a dim that does not divide is split by one axis alone."""
        local = list(shape)
        for split in self.splits(sizes):
            size = sizes[split.axis]
            alone = split.parts == 1 and self._ranks_on(split.dim, sizes) == size
            if local[split.dim] % (split.parts * size) and not alone:
                parts = f" in {split.parts} parts" if split.parts > 1 else ""
                raise ValueError(f"dim {split.dim} of {shape} does not divide by {size}{parts}")
            local[split.dim] = -(-local[split.dim] // size)
        return tuple(local)

    def shards(self, sizes: tuple[int, ...]) -> int:
        """In how many shards the tensor is split."""
        return prod(size for state, size in zip(self.states, sizes, strict=True) if state.kind == "S")

    def runs(
        self, shape: tuple[int, ...], sizes: tuple[int, ...], rank: tuple[int, ...]
    ) -> tuple[tuple[Run, ...], ...]:
        """What the rank at that place of the mesh holds of the unsplit tensor: for each dim, runs of indices in order.

        The shard is their product: the elements whose index is in a run of every dim. Padding is in none, so that the
        last shards of an uneven dim are shorter than their room, or have no run.
        """
        self.local_shape(shape, sizes)  # refuses what does not divide
        held: list[tuple[Run, ...]] = [((0, size),) for size in shape]
        for split in self.splits(sizes):
            held[split.dim] = _shard(held[split.dim], split.parts, sizes[split.axis], rank[split.axis])
        return tuple(held)

    def normal(self, sizes: tuple[int, ...]) -> Layout:
        """The one way to write this layout on a mesh of these sizes: `S(0),S(0:2)` is `S(0),S(0)` if axis 0 has 2."""
        return at_places(self.states, self.places(sizes), sizes)

    def further(self, finer: Layout, sizes: tuple[int, ...]) -> dict[int, Place]:
        """The digits of a rank's shard that a finer layout takes, by axis: what is split here is split there as well.

        `R,S(0)` of a dim of 24 on (2, 3) is `S(0)',S(0)` once axis 0 takes the outermost 2 of the 8 that a rank holds.
        """
        have, want = self.places(sizes), finer.places(sizes)
        changed = [axis for axis, (old, new) in enumerate(zip(self.states, finer.states, strict=True)) if old != new]
        if any(want.get(axis) != place for axis, place in have.items()) or any(
            axis not in have and (self.states[axis] != R or axis not in want) for axis in changed
        ):
            raise ValueError(f"{finer} is not {self} with more axes split")
        found = {}
        for axis, place in sorted(want.items()):
            if axis not in have:
                states = (*self.states[:axis], finer.states[axis], *self.states[axis + 1 :])
                parts = at_places(states, have | {axis: place}, sizes).parts(axis, sizes)
                found[axis] = Place(place.dim, parts)
        return found

    def nested(self, state: State, sizes: tuple[int, ...]) -> Layout | None:
        """This layout with one more axis, of the last of the sizes, in a state that is said of the local shard.

        None where the axis would cut across the parts that lie on a rank: that is no layout.
        """
        own = sizes[: len(self.states)]
        if state.kind != "S":
            return Layout((*self.states, state))
        outside, size = state.outer, sizes[-1]
        for split in self.splits(own):
            if split.dim != state.dim:
                continue
            if state.outer >= split.parts:  # inside what that axis took
                if state.outer % split.parts:
                    return None
                outside *= own[split.axis]
            elif split.parts % (state.outer * size):
                return None
        places = self.places(own) | {len(own): Place(state.dim, outside)}
        return at_places((*self.states, state), places, sizes)


@lru_cache(maxsize=65536)
def _places(states: tuple[State, ...], sizes: tuple[int, ...]) -> tuple[tuple[int, Place], ...]:
    """Each splitting axis with its place, dim by dim, outermost first."""
    split = [axis for axis, (state, _) in enumerate(zip(states, sizes, strict=True)) if state.kind == "S"]
    found = []
    last, inside = (-1, 0), 1  # the factor of the axis before, and the digits up to and with that one
    for axis in sorted(split, key=lambda a: (states[a].dim, states[a].outer, states[a].after, a)):
        state = states[axis]
        inside = inside if state.dim == last[0] else 1
        outside = inside if (state.dim, state.outer) == last else state.outer
        if outside % inside:
            raise ValueError(f"{Layout(states)} on {sizes}: {state} cuts across what the axes outside it split")
        found.append((axis, Place(state.dim, outside)))
        last, inside = (state.dim, state.outer), outside * sizes[axis]
    return tuple(found)


def at_places(states: tuple[State, ...], places: Mapping[int, Place], sizes: tuple[int, ...]) -> Layout:
    """The layout with these states, splitting axes at these places: in as few factors and primes as can say it."""
    written = list(states)
    last, inside, outer, before, primes = -1, 1, 1, -1, 0
    for axis in sorted(places, key=lambda a: (places[a], sizes[a] > 1, a)):
        place = places[axis]
        if place.dim != last or place.outside != inside:
            outer, primes = place.outside, 0
        elif axis < before:
            primes += 1
        written[axis] = S(place.dim, outer, primes)
        last, inside, before = place.dim, place.outside * sizes[axis], axis
    return Layout(tuple(written))


def _fewest_primes(states: tuple[State, ...]) -> tuple[State, ...]:
    written = list(states)
    last, before, primes = (-1, 0), -1, 0
    split = [axis for axis, state in enumerate(states) if state.kind == "S"]
    for axis in sorted(split, key=lambda a: (states[a].dim, states[a].outer, states[a].after, a)):
        factor = (states[axis].dim, states[axis].outer)
        primes = 0 if factor != last else primes + (axis < before)
        written[axis] = S(*factor, primes)
        last, before = factor, axis
    return tuple(written)


def _shard(runs: tuple[Run, ...], parts: int, size: int, own: int) -> tuple[Run, ...]:
    """Of each of `parts` equal parts of what the runs hold, shard number `own` of `size`."""
    length = -(-sum(length for _, length in runs) // (parts * size))
    found: list[Run] = []
    for part in range(parts):
        first, passed = (part * size + own) * length, 0  # of what the runs hold one after another
        for start, count in runs:
            low, high = max(first, passed), min(first + length, passed + count)
            begins = start + low - passed
            if low < high and found and sum(found[-1]) == begins:
                found[-1] = (found[-1][0], found[-1][1] + high - low)
            elif low < high:
                found.append((begins, high - low))
            passed += count
    return tuple(found) or ((0, 0),)  # nothing but padding


def replicated(axes: int) -> Layout:
    return Layout((R,) * axes)


def without_gradient(layout: Layout) -> Layout:
    """`B` and `R` differ in the gradient alone: a tensor that has none is `R`."""
    return Layout(tuple(R if s.kind == "B" else s for s in layout.states))


def of_gradient(layout: Layout) -> Layout:
    """How the gradient of a tensor in that layout lies."""
    return Layout(tuple({B: P, P: R}.get(state, state) for state in layout.states))
