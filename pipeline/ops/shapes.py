"""Lines of named dims for ops whose line depends on the shapes: broadcasting, reshaping, dims that are worked along."""

from __future__ import annotations

import string
from collections.abc import Callable, Collection, Sequence
from itertools import count

from shardwright.pipeline.ops.rule import OpView


def broadcast(view: OpView) -> str:
    """One letter per dim of the output; an input has it where it does not broadcast there."""
    if not view.inputs:
        return nothing_split(view)
    shape = view.output.shape
    after = " ".join(aligned(shape, shape, string.ascii_lowercase))
    before = (" ".join(aligned(t.shape, shape, string.ascii_lowercase)) for t in view.inputs)
    return f"{', '.join(before)} -> {', '.join([after] * len(view.outputs))}"


def aligned(own: Sequence[int], shape: Sequence[int], names: Sequence[str]) -> list[str]:
    """The dims of a tensor that broadcasts to a shape with these names: fixed ones where it does."""
    offset = len(shape) - len(own)
    return [
        names[place] if size == shape[place] and size != 1 else f"one{place}^" for place, size in enumerate(own, offset)
    ]


def reshape(view: OpView) -> str:
    """Factors both shapes into common letters: `(h d) -> h d`, `b s -> (b s)`; what does not factor is fixed."""
    before, after = view.inputs[0].shape, view.output.shape
    if 0 in before:
        return nothing_split(view)
    sides: tuple[list[str], list[str]] = ([], [])
    numbers = count()
    for group in _groups(before, after):
        if min(map(len, group)) == 1:
            factors = max(group, key=len)
            names = [f"d{next(numbers)}{'^' if factors == (1,) else ''}" for _ in factors]
            for side, own in zip(sides, group, strict=True):
                side.extend(names if len(own) == len(names) else [f"({' '.join(names)})"])
        else:
            for side, own in zip(sides, group, strict=True):
                side.extend(f"x{next(numbers)}^" for _ in own)
    return f"{' '.join(sides[0])} -> {' '.join(sides[1])}"


def _groups(before: tuple[int, ...], after: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The finest runs of dims with equal products, left to right; dims of size one stand alone."""
    groups: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    i = j = 0
    while i < len(before) or j < len(after):
        first, other = i, j
        if before[i : i + 1] == after[j : j + 1]:
            i, j = i + 1, j + 1
        elif before[i : i + 1] == (1,):
            i += 1
        elif after[j : j + 1] == (1,):
            j += 1
        else:
            old = new = 1
            while i == first or old != new:
                if old <= new and i < len(before):
                    old *= before[i]
                    i += 1
                else:
                    new *= after[j]
                    j += 1
        groups.append((before[first:i], after[other:j]))
    return groups


def nothing_split(view: OpView) -> str:
    """The line of an op that is not split: every dim is fixed."""
    tensors = (*view.inputs, *view.outputs)
    names = [" ".join(f"t{t}d{i}^" for i in range(len(x.shape))) for t, x in enumerate(tensors)]
    return f"{', '.join(names[: len(view.inputs)])} -> {', '.join(names[len(view.inputs) :])}"


def letters(rank: int, fixed: Collection[int] = (), mark: str = "^") -> str:
    """`d0 d1^ d2`: one letter per dim, with a mark on some of them."""
    return " ".join(f"d{i}{mark if i in fixed else ''}" for i in range(rank))


def without(rank: int, dim: int) -> str:
    """`d0 d2`: the letters of all dims but one."""
    return " ".join(f"d{i}" for i in range(rank) if i != dim)


def kept(view: OpView, fixed: Collection[int]) -> str:
    """Tensors of one rank in and out, alike but for the fixed dims."""
    own = range(len(view.output.shape))
    names = [" ".join(f"t{t}d{i}^" if i in fixed else f"d{i}" for i in own) for t in range(len(view.inputs))]
    after = [" ".join(f"o{t}d{i}^" if i in fixed else f"d{i}" for i in own) for t in range(len(view.outputs))]
    return f"{', '.join(names)} -> {', '.join(after)}"


def along(position: int, default: int | tuple[int, ...] | None = 0, name: str = "dim") -> Callable[[OpView], str]:
    """The line of an op that works along the dims among its constants, which stay whole; None is all of them."""

    def line(view: OpView) -> str:
        rank, dims = len(view.output.shape), view.constant(position, name, default)
        named = (dims,) if isinstance(dims, int) else range(rank) if dims is None else dims
        return kept(view, {d % max(rank, 1) for d in named})

    return line


def along_last(count: int) -> Callable[[OpView], str]:
    """The last dims, so many of them, are whole."""
    return lambda view: kept(view, range(len(view.output.shape) - count, len(view.output.shape)))


def dim_of(view: OpView, position: int, default: int = 0, rank: int | None = None) -> int:
    """A dim among the constants, counted from the front."""
    count = len(view.inputs[0].shape) if rank is None else rank
    return int(view.constant(position, "dim", default)) % max(count, 1)


def permuted(order: Sequence[int]) -> str:
    """The line of a permutation: output dim i is input dim order[i]."""
    return f"{letters(len(order))} -> {' '.join(f'd{i}' for i in order)}"
