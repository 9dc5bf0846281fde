"""Lines of named dims: reading them, and the strategies that follow from them on one mesh axis.

Put the axis on a letter: tensors with that letter are `S`, inputs without it `B`, outputs without it `P`. Put it on no
letter: all `R`; or all `B` (backward is linear, so the gradient may stay partial); or `P` through a group of inputs in
which the op is linear, the other factors `B` and the other addends `P`.

A letter inside a product, h in `(t h d)`, is split within each of the t parts: `S(dim:t)`. A letter whose dim another
op takes apart, (t h d) say, may be split the same way here: the view's `factors` name t.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from shardwright.pipeline.ir.layout import B, Layout, P, R, S, State, without_gradient
from shardwright.pipeline.ir.plan import Strategy
from shardwright.pipeline.ops.rule import OpRule, OpView

_TOKEN = re.compile(r"\([^)]*\)|\S+")
_LETTER = re.compile(r"(\w+)(?:=(\d+))?([+^!]?)")
_PLACELESS_BODIES = ("", "mean", "apart")  # local forms that do not ask which part of the dim a rank holds


Dim = tuple[str, ...]  # of a tensor: its letters, outermost first (more than one where the dim is a product)


@dataclass(frozen=True)
class LetterPlace:
    """Where a letter lies in a tensor: its dim, and in how many parts the letters before it cut that dim."""

    dim: int
    outer: int


@dataclass(frozen=True)
class Line:
    inputs: tuple[tuple[Dim, ...], ...]
    outputs: tuple[tuple[Dim, ...], ...]
    summed: frozenset[str]  # letters marked +
    fixed: frozenset[str]  # letters marked ^
    whole: frozenset[str]  # letters marked !
    sizes: dict[str, int]  # of the letters whose size can be told

    @property
    def letters(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(x for tensor in (*self.outputs, *self.inputs) for dim in tensor for x in dim))

    def place(self, dims: tuple[Dim, ...], letter: str) -> LetterPlace | None:
        """None where the tensor lacks the letter; ValueError where it cannot be split there."""
        found = [(i, dim) for i, dim in enumerate(dims) if letter in dim]
        if not found:
            return None
        (index, letters), *others = found
        before = letters[: letters.index(letter)]
        if others or letters.count(letter) > 1 or any(x not in self.sizes for x in before):
            raise ValueError(f"{letter} has no one place")
        return LetterPlace(index, prod(self.sizes[x] for x in before))

    def places(self, letter: str) -> tuple[tuple[LetterPlace | None, ...], tuple[LetterPlace | None, ...]] | None:
        """The letter's places in the inputs and in the outputs, or None where it may not be split."""
        if letter in self.fixed or letter not in self.sizes:
            return None
        try:
            inputs = tuple(self.place(dims, letter) for dims in self.inputs)
            outputs = tuple(self.place(dims, letter) for dims in self.outputs)
        except ValueError:
            return None
        reduces = letter in self.summed or letter in self.whole
        return (inputs, outputs) if reduces or None not in outputs else None


def read_line(text: str, view: OpView) -> Line:
    """Reads a line for the op's own ranks; inputs that the op leaves out (a missing bias) are left out of the line."""
    marks: dict[str, set[str]] = {"+": set(), "^": set(), "!": set(), "": set()}
    sizes: dict[str, int] = {}
    left, arrow, right = text.partition("->")
    tensors = left.split(",")[: len(view.inputs)] if view.inputs else []
    outputs = right.split(",")
    if not arrow or len(tensors) != len(view.inputs) or len(outputs) != len(view.outputs):
        raise ValueError(
            f"line {text!r} does not fit {view.op.target} with {len(view.inputs)} tensors in, {len(view.outputs)} out"
        )
    kinds = zip((*tensors, *outputs), (*view.inputs, *view.outputs), strict=True)
    read = [(_read_tensor(one, len(kind.shape), marks, sizes), kind.shape) for one, kind in kinds]
    _find_sizes([pair for dims, shape in read for pair in zip(dims, shape, strict=True)], sizes, text, view)
    sides = tuple(dims for dims, _ in read)
    summed, fixed, whole = (frozenset(marks[mark]) for mark in "+^!")
    return Line(sides[: len(tensors)], sides[len(tensors) :], summed, fixed, whole, sizes)


def check_line(text: str) -> None:
    """Whether a text is a line at all, whatever op it is for."""
    left, arrow, right = text.partition("->")
    if not arrow or "->" in right:
        raise ValueError("a line has one '->' between its inputs and its outputs, such as 'b n, n -> b n'")
    for tensor in (*left.split(","), *right.split(",")):
        for token in _TOKEN.findall(tensor):
            inner = token[1:-1].split() if token.startswith("(") and token.endswith(")") else [token]
            if token != "*" and not (inner and all(_LETTER.fullmatch(x) for x in inner)):
                raise ValueError(
                    f"{token!r} is not a dim: use names, marked '+' or '^', and products such as '(h=8 d)'"
                )


def _read_tensor(text: str, rank: int, marks: dict[str, set[str]], sizes: dict[str, int]) -> tuple[Dim, ...]:
    tokens = _TOKEN.findall(text)
    dims: list[Dim] = []
    for token in tokens:
        if token == "*":
            dims += [(f"*{i}",) for i in range(rank - len(tokens) + 1)]
            continue
        letters = []
        for letter in token.strip("()").split():
            found = _LETTER.fullmatch(letter)
            if not found:
                raise ValueError(f"{letter!r} in {text!r} is not the name of a dim")
            name, size, mark = found.groups()
            marks[mark].add(name)
            sizes.update({name: int(size)} if size else {})
            letters.append(name)
        dims.append(tuple(letters))
    if len(dims) != rank:
        raise ValueError(f"{text!r} names {len(dims)} dims, the tensor has {rank}")
    return tuple(dims)


def _find_sizes(dims: list[tuple[Dim, int]], sizes: dict[str, int], text: str, view: OpView) -> None:
    """Adds the size of each letter: given as `g=4`, of its own dim, or what the other letters leave of a product."""
    for dim, size in dims:
        if len(dim) == 1 and sizes.setdefault(dim[0], size) != size:
            raise ValueError(f"line {text!r}: {dim[0]} is both {sizes[dim[0]]} and {size} in {view.op.target}")
    products = [(dim, size) for dim, size in dims if len(dim) > 1]
    for _ in products:
        for dim, size in products:
            unknown = [x for x in dim if x not in sizes]
            known = prod(sizes.get(x, 1) for x in dim)
            if len(unknown) == 1 and known and size % known == 0:
                sizes[unknown[0]] = size // known


def strategies(rule: OpRule | None, view: OpView, size: int) -> tuple[Strategy, ...]:
    """Every way the op may run on one axis of that many ranks, each with its own set of layouts."""
    found = [_uniform("R", R, view)]
    if size > 1 and any(view.input_grads):
        found.append(_uniform("B", B, view))
    if size > 1 and rule is None:
        from shardwright.pipeline.ops.discovery.discover import (
            discovered,  # needs torch, and only ops without a rule need it
        )

        found += discovered(view, size)
    elif size > 1 and rule is not None:
        line, factors = read_line(rule.line(view), view), dict(view.factors)
        cuts = [(letter, factor) for letter in line.letters for factor in (1, *factors.get(letter, ()))]
        found += filter(None, (_split(rule, view, line, letter, factor, size) for letter, factor in cuts))
        found += [_partial(rule, view, group) for group in rule.linear_groups(view) if _is_linear(view, group)]
    after = [any(view.input_grads) and t.is_inexact for t in view.outputs]
    for number, one in enumerate(found):
        inputs, outputs = _carrying(one.inputs, view.input_grads), _carrying(one.outputs, after)
        found[number] = Strategy(one.name, inputs, outputs, one.body)
    distinct = {(s.inputs, s.outputs): s for s in reversed(found)}
    return tuple(reversed(distinct.values()))


def _carrying(layouts: tuple[Layout, ...], grads: Sequence[bool]) -> tuple[Layout, ...]:
    """`B` is `R` for a tensor that has no gradient."""
    return tuple(one if grad else without_gradient(one) for one, grad in zip(layouts, grads, strict=True))


def local_factors(view: OpView, strategy: Strategy, sizes: tuple[int, ...]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The factors of the shards that a strategy on a mesh leaves: half of a dim lies in half as many parts."""
    found = []
    for letter, parts in view.factors:
        left = set(parts)
        for name, size in zip(strategy.name.split(","), sizes, strict=True):
            left = {n // size if name == _shown(letter) and n % size == 0 else n for n in left}
        found.append((letter, tuple(sorted(n for n in left if n > 1))))
    return tuple((letter, own) for letter, own in found if own)


def still_uneven(view: OpView, strategy: Strategy) -> tuple[str, ...]:
    """The letters that a further axis may split in uneven shards: not those that one has split already."""
    return tuple(letter for letter in view.uneven if _shown(letter) not in strategy.name.split(","))


def _shown(letter: str) -> str:
    return f"dim{letter[1:]}" if letter.startswith("*") else letter


def _uniform(name: str, state: State, view: OpView) -> Strategy:
    layout = Layout((state,))
    return Strategy(name, (layout,) * len(view.inputs), (layout,) * len(view.outputs))


def _split(rule: OpRule, view: OpView, line: Line, letter: str, factor: int, size: int) -> Strategy | None:
    """The axis on a letter, or None where the letter may not be split or does not divide."""
    places, whole_size = line.places(letter), line.sizes.get(letter)
    if places is None or not whole_size:
        return None
    # In uneven shards where the graph lets it, with something left for the last rank.
    unevenly = factor == 1 and letter in view.uneven and (size - 1) * -(-whole_size // size) < whole_size
    if whole_size % (factor * size) and not unevenly:
        return None
    body = rule.body(view, letter)
    if factor > 1 and body not in _PLACELESS_BODIES:
        return None

    def state(place: LetterPlace | None, absent: State) -> Layout:
        return Layout((absent if place is None else S(place.dim, place.outer * factor),))

    inside, outside = places
    added = rule.addends if all(place is None for place in outside) else ()
    whole = R if letter in line.whole else None
    inputs = tuple(state(place, whole or (P if n in added else B)) for n, place in enumerate(inside))
    outputs = tuple(state(place, whole or P) for place in outside)
    return Strategy(_shown(letter) if factor == 1 else f"{_shown(letter)}:{factor}", inputs, outputs, body)


def _is_linear(view: OpView, group: tuple[int, ...]) -> bool:
    """A group counts where all of it is there (x + 1 is not linear in x) and nothing is rounded to integers."""
    if not group or max(group) >= len(view.inputs):
        return False
    return all(t.is_inexact for t in (*(view.inputs[i] for i in group), *view.outputs))


def _partial(rule: OpRule, view: OpView, group: tuple[int, ...]) -> Strategy:
    states = [P if i in group or i in rule.addends else B for i in range(len(view.inputs))]
    return Strategy("P", tuple(Layout((s,)) for s in states), (Layout((P,)),) * len(view.outputs))
