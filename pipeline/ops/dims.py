"""Lines of named dims: reading them, and the strategies that follow from them on one mesh axis.

Put the axis on a letter: tensors with that letter are `S`, inputs without it `B`, outputs without it `P`. Put it on no
letter: all `R`; or all `B` (backward is linear, so the gradient may stay partial); or `P` through a group of inputs in
which the op is linear, the other factors `B` and the other addends `P`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pipeline.ir.layout import B, Layout, P, R, S, State
from pipeline.ir.plan import Strategy
from pipeline.ops.rule import OpRule, OpView

_TOKEN = re.compile(r"\([^)]*\)|\S+")
_ABSENT = -1


@dataclass(frozen=True)
class Dim:
    """One dim of a tensor: its letters, outermost first (more than one where the dim is a product)."""

    letters: tuple[str, ...]


@dataclass(frozen=True)
class Line:
    inputs: tuple[tuple[Dim, ...], ...]
    outputs: tuple[tuple[Dim, ...], ...]
    summed: frozenset[str]  # letters marked +
    fixed: frozenset[str]  # letters marked ^

    @property
    def letters(self) -> tuple[str, ...]:
        found = (x for tensor in (*self.outputs, *self.inputs) for dim in tensor for x in dim.letters)
        return tuple(dict.fromkeys(found))


def read_line(text: str, view: OpView) -> Line:
    """Reads a line for the op's own ranks; inputs that the op leaves out (a missing bias) are left out of the line."""
    summed: set[str] = set()
    fixed: set[str] = set()
    left, right = text.split("->")
    tensors = left.split(",")[: len(view.inputs)]
    outputs = right.split(",")
    if len(tensors) != len(view.inputs) or len(outputs) != len(view.outputs):
        raise ValueError(f"line {text!r} does not fit {view.op.target} with {len(view.inputs)} inputs")
    return Line(
        tuple(_read_tensor(t, len(v.shape), summed, fixed) for t, v in zip(tensors, view.inputs, strict=True)),
        tuple(_read_tensor(t, len(v.shape), summed, fixed) for t, v in zip(outputs, view.outputs, strict=True)),
        frozenset(summed),
        frozenset(fixed),
    )


def _read_tensor(text: str, rank: int, summed: set[str], fixed: set[str]) -> tuple[Dim, ...]:
    tokens = _TOKEN.findall(text)
    dims: list[Dim] = []
    for token in tokens:
        if token == "*":
            dims += [Dim((f"*{i}",)) for i in range(rank - len(tokens) + 1)]
            continue
        letters = []
        for letter in token.strip("()").split():
            name = letter.rstrip("+^")
            summed.update({name} if letter.endswith("+") else ())
            fixed.update({name} if letter.endswith("^") else ())
            letters.append(name)
        dims.append(Dim(tuple(letters)))
    if len(dims) != rank:
        raise ValueError(f"{text!r} names {len(dims)} dims, the tensor has {rank}")
    return tuple(dims)


def strategies(rule: OpRule | None, view: OpView, size: int) -> tuple[Strategy, ...]:
    """Every way the op may run on one axis of that many ranks, each with its own set of layouts."""
    found = [_uniform("R", R, view)]
    if size > 1:
        if any(view.input_grads):
            found.append(_uniform("B", B, view))
        if rule is not None:
            line = read_line(rule.line(view), view)
            found += [s for letter in line.letters if (s := _split(rule, view, line, letter, size)) is not None]
            found += [_partial(rule, view, group) for group in rule.linear if _is_linear(view, group)]
    distinct = {(s.inputs, s.outputs): s for s in reversed([_without_gradient(s, view) for s in found])}
    return tuple(reversed(distinct.values()))


def _uniform(name: str, state: State, view: OpView) -> Strategy:
    layout = Layout((state,))
    return Strategy(name, (layout,) * len(view.inputs), (layout,) * len(view.outputs))


def _split(rule: OpRule, view: OpView, line: Line, letter: str, size: int) -> Strategy | None:
    """The axis on a letter, or None where the letter may not be split or does not divide."""
    if letter in line.fixed:
        return None
    inputs: list[State] = []
    in_output = any(letter in dim.letters for tensor in line.outputs for dim in tensor)
    if not in_output and letter not in line.summed:
        return None
    for position, (dims, tensor) in enumerate(zip(line.inputs, view.inputs, strict=True)):
        place = _place(dims, tensor.shape, letter, size)
        if place is None:
            return None
        absent = P if position in rule.addends and not in_output else B
        inputs.append(absent if place == _ABSENT else S(place))
    outputs: list[State] = []
    for dims, tensor in zip(line.outputs, view.outputs, strict=True):
        place = _place(dims, tensor.shape, letter, size)
        if place is None or (place == _ABSENT and letter not in line.summed):
            return None
        outputs.append(P if place == _ABSENT else S(place))
    body = rule.body(view, letter)
    return Strategy(
        f"dim{letter[1:]}" if letter.startswith("*") else letter,
        tuple(Layout((s,)) for s in inputs),
        tuple(Layout((s,)) for s in outputs),
        body,
    )


def _place(dims: tuple[Dim, ...], shape: tuple[int, ...], letter: str, size: int) -> int | None:
    """The dim that the letter splits, _ABSENT where the tensor lacks it, None where it cannot be split there."""
    for index, dim in enumerate(dims):
        if letter in dim.letters:
            outermost = dim.letters[0] == letter
            return index if outermost and shape[index] and shape[index] % size == 0 else None
    return _ABSENT


def _is_linear(view: OpView, group: tuple[int, ...]) -> bool:
    """A group counts where all of it is there (x + 1 is not linear in x) and nothing is rounded to integers."""
    if max(group) >= len(view.inputs):
        return False
    return all(t.dtype.startswith(("float", "bfloat")) for t in (*(view.inputs[i] for i in group), *view.outputs))


def _partial(rule: OpRule, view: OpView, group: tuple[int, ...]) -> Strategy:
    states = [P if i in group or i in rule.addends else B for i in range(len(view.inputs))]
    return Strategy("P", tuple(Layout((s,)) for s in states), (Layout((P,)),) * len(view.outputs))


def _without_gradient(strategy: Strategy, view: OpView) -> Strategy:
    """`B` is `R` for a tensor that has no gradient."""
    inputs = tuple(
        layout if grad or layout.states[0] != B else Layout((R,))
        for layout, grad in zip(strategy.inputs, view.input_grads, strict=True)
    )
    outputs = strategy.outputs
    if not any(view.input_grads):
        outputs = tuple(Layout((R,)) if o.states[0] == B else o for o in outputs)
    return Strategy(strategy.name, inputs, outputs, strategy.body)
