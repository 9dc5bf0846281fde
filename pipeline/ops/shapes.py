"""Lines of named dims for ops whose line depends on the shapes: broadcasting and reshaping."""

from __future__ import annotations

import string
from collections.abc import Collection

from pipeline.ops.rule import OpView


def broadcast(view: OpView) -> str:
    """One letter per dim of the output; an input has it where it does not broadcast there."""
    if not view.inputs:
        return nothing_split(view)
    shape = view.output.shape
    letters = [f"{string.ascii_lowercase[i]}" for i in range(len(shape))]
    tensors = []
    for tensor in view.inputs:
        offset = len(shape) - len(tensor.shape)
        names = [
            letters[offset + i] if size == shape[offset + i] and size != 1 else f"one{offset + i}^"
            for i, size in enumerate(tensor.shape)
        ]
        tensors.append(" ".join(names))
    return f"{', '.join(tensors)} -> {', '.join([_output(letters, shape)] * len(view.outputs))}"


def _output(letters: list[str], shape: tuple[int, ...]) -> str:
    return " ".join(x if size != 1 else f"one{i}^" for i, (x, size) in enumerate(zip(letters, shape, strict=True)))


def reshape(view: OpView) -> str:
    """Factors both shapes into common letters: `(h d) -> h d`, `b s -> (b s)`; what does not factor is fixed."""
    before, after = view.inputs[0].shape, view.output.shape
    if 0 in before:
        return nothing_split(view)
    left: list[str] = []
    right: list[str] = []
    counter = iter(range(10_000))
    for old, new in _groups(before, after):
        if len(old) == 1 and len(new) == 1:
            name = f"d{next(counter)}" + ("^" if old[0] == 1 else "")
            left.append(name)
            right.append(name)
        elif len(old) == 1 and new:
            names = [f"d{next(counter)}" for _ in new]
            left.append(f"({' '.join(names)})")
            right += names
        elif len(new) == 1 and old:
            names = [f"d{next(counter)}" for _ in old]
            left += names
            right.append(f"({' '.join(names)})")
        else:
            left += [f"x{next(counter)}^" for _ in old]
            right += [f"x{next(counter)}^" for _ in new]
    return f"{' '.join(left)} -> {' '.join(right)}"


def _groups(before: tuple[int, ...], after: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The finest runs of dims with equal products, left to right; dims of size one stand alone."""
    groups: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    i = j = 0
    while i < len(before) or j < len(after):
        old: list[int] = []
        new: list[int] = []
        if i < len(before) and j < len(after) and before[i] == after[j]:
            groups.append(((before[i],), (after[j],)))
            i, j = i + 1, j + 1
            continue
        if i < len(before) and before[i] == 1:
            groups.append(((1,), ()))
            i += 1
            continue
        if j < len(after) and after[j] == 1:
            groups.append(((), (1,)))
            j += 1
            continue
        product_old = product_new = 1
        while not old or product_old != product_new:
            if product_old <= product_new and i < len(before):
                old.append(before[i])
                product_old *= before[i]
                i += 1
            else:
                new.append(after[j])
                product_new *= after[j]
                j += 1
        groups.append((tuple(old), tuple(new)))
    return groups


def nothing_split(view: OpView) -> str:
    """The line of an op that is not split: every dim is fixed."""
    tensors = (*view.inputs, *view.outputs)
    names = [" ".join(f"t{t}d{i}^" for i in range(len(x.shape))) for t, x in enumerate(tensors)]
    return f"{', '.join(names[: len(view.inputs)])} -> {', '.join(names[len(view.inputs) :])}"


def letters(rank: int, fixed: Collection[int] = (), mark: str = "^") -> str:
    """`d0 d1^ d2`: one letter per dim, with a mark on some of them."""
    return " ".join(f"d{i}{mark if i in fixed else ''}" for i in range(rank))


def kept(view: OpView, fixed: Collection[int]) -> str:
    """Tensors of one rank in and out, alike but for the fixed dims."""
    own = range(len(view.output.shape))
    names = [" ".join(f"t{t}d{i}^" if i in fixed else f"d{i}" for i in own) for t in range(len(view.inputs))]
    after = [" ".join(f"o{t}d{i}^" if i in fixed else f"d{i}" for i in own) for t in range(len(view.outputs))]
    return f"{', '.join(names)} -> {', '.join(after)}"


def dim_of(view: OpView, position: int, name: str = "dim", default: int = 0, rank: int | None = None) -> int:
    """A dim among the constants, counted from the front."""
    count = len(view.inputs[0].shape) if rank is None else rank
    return int(view.constant(position, name, default)) % max(count, 1)


def permuted(order: list[int]) -> str:
    """The line of a permutation: output dim i is input dim order[i]."""
    names = [f"d{i}" for i in range(len(order))]
    return f"{' '.join(names)} -> {' '.join(names[i] for i in order)}"
