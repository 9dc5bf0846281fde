"""How a parameter may be kept: whole, split as its ops read it, or as one of the forms of ZeRO.

| way        | value on a rank    | gradient | optimizer state | to read it                                           |
|------------|--------------------|----------|-----------------|------------------------------------------------------|
| as it lies | as the layout says | same     | same            | nothing; on a replicated axis its gradient is summed |
| zero1      | as the layout says | same     | a shard         | gradient reduce-scattered, new values gathered, once |
| gathered   | a shard            | a shard  | a shard         | gathered, and the whole kept until backward          |
| regathered | a shard            | a shard  | a shard         | gathered, dropped, and gathered again for backward   |

A shard is cut from what the other axes left: ZeRO is innermost. It is cut on the first dim that divides; where none
does, in uneven shards on the dim that needs the least padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain, combinations
from math import prod

from shardwright.pipeline.ir.layout import Layout, R, State, replicated

MOST_PADDED = 1.125  # of a parameter, with the padding of its shards: beyond that they are not worth it


class Way(StrEnum):
    as_it_lies = "as it lies"
    zero1 = "zero1"
    gathered = "gathered"
    regathered = "regathered"


@dataclass(frozen=True)
class Stored:
    layout: Layout  # of the value and its gradient
    state: Layout  # of the optimizer's state
    way: Way

    def __str__(self) -> str:
        return f"{self.layout} {self.way}" + (f" state {self.state}" if self.state != self.layout else "")


def storage_choices(
    shape: tuple[int, ...], wanted: Iterable[Layout], sizes: tuple[int, ...], *, shards: bool
) -> tuple[Stored, ...]:
    """Every way to store a parameter of that shape which its readers want in these layouts."""
    bases = dict.fromkeys([replicated(len(sizes)), *sorted({_kept(layout) for layout in wanted})])
    found = [Stored(base, base, Way.as_it_lies) for base in bases]
    for base in bases if shards else ():
        for axes in _subsets([a for a, state in enumerate(base.states) if state == R and sizes[a] > 1]):
            shard = _shard(base, axes, shape, sizes)
            if shard is not None:
                found.append(Stored(base, shard, Way.zero1))
                found += [Stored(shard, shard, way) for way in (Way.gathered, Way.regathered)]
    return tuple(dict.fromkeys(found))


def _kept(layout: Layout) -> Layout:
    """The layout with its splits alone."""
    return Layout(tuple(state if state.kind == "S" else R for state in layout.states))


def _subsets(axes: list[int]) -> Iterator[tuple[int, ...]]:
    return chain.from_iterable(combinations(axes, count) for count in range(1, len(axes) + 1))


def _shard(base: Layout, axes: tuple[int, ...], shape: tuple[int, ...], sizes: tuple[int, ...]) -> Layout | None:
    """What is left when these axes too split a dim, inside all others: the first that divides, or the least uneven."""
    cuts = [cut for dim in range(len(shape)) if (cut := _inside(base, axes, dim, sizes)) is not None]
    for cut in cuts:
        if cut.fits(shape, sizes):
            return cut
    held = [cut for cut in cuts if cut.holds(shape, sizes)]
    least = min(held, key=lambda cut: prod(cut.local_shape(shape, sizes)), default=None)
    if least is None or prod(least.local_shape(shape, sizes)) * least.shards(sizes) > MOST_PADDED * prod(shape):
        return None
    return least


def _inside(base: Layout, axes: tuple[int, ...], dim: int, sizes: tuple[int, ...]) -> Layout | None:
    taken = [place for place in base.places(sizes).items() if place[1].dim == dim]
    outside = max((place.outside * sizes[axis] for axis, place in taken), default=1)
    primes = 1 + max((base.states[axis].after for axis, _ in taken), default=-1)
    last = max(taken, key=lambda item: item[1].outside, default=None)
    outer = base.states[last[0]].outer if last else 1
    states = list(base.states)
    for axis in axes:
        states[axis] = State("S", dim, outer, primes)
    try:
        found = Layout(tuple(states)).normal(sizes)
    except ValueError:
        return None
    innermost = all(found.places(sizes)[axis].outside >= outside for axis in axes)
    return found if innermost else None
