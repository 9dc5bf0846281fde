"""How the loss of a model grows with the number of samples, from its graphs for two numbers of them.

Were every sample there twice, a mean over samples would stay what it is (power 0) and a sum would double (power 1). A
step takes the mean of its micro-batches' losses, which is the loss of the whole pass for power 0 alone. An op that is
not known here makes the answer unknown, as does one that takes samples together in its own way (a product over them).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from math import isclose, prod

from pipeline.ir.graph import Arg, Op, OpGraph, Ref
from pipeline.ops.families.loss import SUM
from pipeline.ops.public import overload_of

Powers = frozenset[int]  # of the terms of a value; none: not known
STAYS: Powers = frozenset({0})
UNKNOWN: Powers = frozenset()
# Twice the input is twice the output, whatever else they do to it.
LINEAR = {
    "_to_copy", "abs", "clone", "contiguous", "dropout", "expand", "flatten", "index", "index_select", "neg", "permute",
    "relu", "reshape", "select", "slice", "squeeze", "t", "to", "transpose", "unsqueeze", "view",
}  # fmt: skip
ADDING = {"add", "sub", "cat", "stack", "where"}


def loss_growth(larger: OpGraph, smaller: OpGraph) -> Powers:
    """`smaller` is the same graph for fewer samples."""
    return _Growth(larger, smaller).of_loss()


class _Growth:
    def __init__(self, larger: OpGraph, smaller: OpGraph) -> None:
        self.larger, self.smaller = larger, smaller
        self.ratio = larger.batch / smaller.batch
        self.known: dict[str, Powers] = {}

    def of_loss(self) -> Powers:
        for op in self.larger.ops:
            powers = self._of(op)
            self.known.update(dict.fromkeys(op.outputs, powers))
        return self._read(Ref(self.larger.output))

    def _of(self, op: Op) -> Powers:
        name = op.target.split(".")[1]
        reduction = _reduction(op)
        if name == "sum":
            return self._sum(op, op.args.get(1, "dim", None))
        if reduction == SUM:
            return self._sum(op, None)
        if name == "mul":
            return _each(int.__add__, *self._arguments(op))
        if name == "div":
            return _each(int.__sub__, *self._arguments(op))
        own = [self._read(Ref(value)) for value in op.inputs]
        if name in ADDING:
            return _union([*own, *self._literals(op)])
        if name in LINEAR or name == "mean":
            return own[0] if all(powers == STAYS for powers in own[1:]) else UNKNOWN
        reduces = reduction is not None  # by a mean, or not at all
        return STAYS if all(powers == STAYS for powers in own) and (reduces or self._keeps_samples(op)) else UNKNOWN

    def _sum(self, op: Op, dims: Arg) -> Powers:
        shapes = [graph.values[op.inputs[0]].type.shape for graph in (self.larger, self.smaller)]
        chosen = range(len(shapes[0])) if dims is None or dims == () else dims
        power = self._power(*(prod(shape[dim] for dim in chosen) for shape in shapes))
        if not all(self._read(Ref(value)) == STAYS for value in op.inputs[1:]):
            return UNKNOWN
        return _each(int.__add__, self._read(Ref(op.inputs[0])), power)

    def _keeps_samples(self, op: Op) -> bool:
        """Something of it has as many of a thing as there are samples, or nothing had before."""
        return not self._sized(op.inputs) or self._sized(op.outputs)

    def _sized(self, names: Iterable[str]) -> bool:
        return any(self.larger.values[name].type != self.smaller.values[name].type for name in names)

    def _arguments(self, op: Op) -> tuple[Powers, Powers]:
        """Of the two that are multiplied or divided, however they are given."""
        ours, theirs = ([a.get(n, name, None) for n, name in enumerate(("self", "other"))]
                        for a in (op.args, self.smaller.op(op.name).args))  # fmt: skip
        return self._read(ours[0], theirs[0]), self._read(ours[1], theirs[1])

    def _literals(self, op: Op) -> list[Powers]:
        """Of numbers that are added; positions and dims are none of them."""
        numbers = [a for a in op.args.positional[:2] if isinstance(a, float | int) and a != 0]
        return [STAYS] * (len(numbers) if op.target.startswith(("aten.add", "aten.sub")) else 0)

    def _read(self, arg: Arg, other: Arg = None) -> Powers:
        if isinstance(arg, Ref):
            return self.known.get(arg.value, STAYS)
        numbers = isinstance(arg, float | int) and isinstance(other, float | int)
        return self._power(arg, other) if numbers else UNKNOWN

    def _power(self, larger: float, smaller: float) -> Powers:
        """By which a number follows that of the samples."""
        if larger == smaller:
            return STAYS
        powers = (1, -1) if larger and smaller else ()
        return frozenset(power for power in powers if isclose(larger / smaller, self.ratio**power))


def _reduction(op: Op) -> int | None:
    position, default = _reduction_of(op.target)
    if position is None:
        return None
    found = op.args.get(position, "reduction", default)
    return int(found)


@functools.cache
def _reduction_of(target: str) -> tuple[int | None, int]:
    """Where an op has its argument `reduction`, and what it is by default."""
    overload = overload_of(target)
    for position, argument in enumerate(overload._schema.arguments if overload else ()):
        if argument.name == "reduction":
            return position, argument.default_value
    return None, 0


def _each(joined: Callable[[int, int], int], *two: Powers) -> Powers:
    first, second = two
    return frozenset(joined(a, b) for a in first for b in second)


def _union(several: list[Powers]) -> Powers:
    return frozenset().union(*several) if all(several) else UNKNOWN
