"""How the loss of a model grows with the number of samples, from its graphs for two numbers of them.

Were every sample there twice, a mean over samples would stay what it is (power 0) and a sum would double (power 1). A
step takes the mean of its micro-batches' losses, which is the loss of the whole pass for power 0 alone. An op that is
not known here makes the answer unknown, as does one that takes samples together in its own way (a product over them).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import isclose, prod

from shardwright.pipeline.ir.graph import Arg, Op, OpGraph, Ref
from shardwright.pipeline.ops.families.loss import SUM
from shardwright.pipeline.ops.public import overload_of

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
    growth = _Growth(larger, smaller)
    for op in larger.ops:
        growth.known |= dict.fromkeys(op.outputs, growth.of(op))
    return growth.read(Ref(larger.output))


class _Growth:
    def __init__(self, larger: OpGraph, smaller: OpGraph) -> None:
        self.larger, self.smaller = larger, smaller
        self.ratio = larger.batch / smaller.batch
        self.known: dict[str, Powers] = {}

    def of(self, op: Op) -> Powers:
        name = op.target.split(".")[1]
        reduction = _reduction(op)
        if name == "sum":
            return self._sum(op, op.args.get(1, "dim", None))
        if reduction == SUM:
            return self._sum(op, None)
        if name in ("mul", "div"):
            joined = int.__add__ if name == "mul" else int.__sub__
            return _each(joined, self._argument(op, 0, "self"), self._argument(op, 1, "other"))
        own = [self.read(Ref(value)) for value in op.inputs]
        if name in ("add", "sub"):
            own = self._terms(op)
        if name in ADDING:
            return frozenset().union(*own) if all(own) else UNKNOWN
        if name in LINEAR or name == "mean":
            return own[0] if all(powers == STAYS for powers in own[1:]) else UNKNOWN
        # It reduces by a mean or not at all; or something of it has as many of a thing as there are samples, or nothing
        # had before.
        keeps = reduction is not None or not self._sized(op.inputs) or self._sized(op.outputs)
        return STAYS if keeps and all(powers == STAYS for powers in own) else UNKNOWN

    def _sum(self, op: Op, dims: Arg) -> Powers:
        shapes = [graph.values[op.inputs[0]].type.shape for graph in (self.larger, self.smaller)]
        chosen = range(len(shapes[0])) if dims is None or dims == () else dims
        power = self._power(*(prod(shape[dim] for dim in chosen) for shape in shapes))
        if not all(self.read(Ref(value)) == STAYS for value in op.inputs[1:]):
            return UNKNOWN
        return _each(int.__add__, self.read(Ref(op.inputs[0])), power)

    def _sized(self, names: Iterable[str]) -> bool:
        return any(self.larger.values[name].type != self.smaller.values[name].type for name in names)

    def _terms(self, op: Op) -> list[Powers]:
        """Of the two that are added; also a number is one, but for zero."""
        mine, other = self._argument(op, 0, "self"), self._argument(op, 1, "other")
        terms = {"self": mine, "other": _each(int.__add__, other, self._argument(op, 2, "alpha", 1))}
        return [powers for n, (name, powers) in enumerate(terms.items()) if op.args.get(n, name, None) != 0]

    def _argument(self, op: Op, position: int, name: str, default: Arg = None) -> Powers:
        """However it is given."""
        ours, theirs = (own.args.get(position, name, default) for own in (op, self.smaller.op(op.name)))
        return self.read(ours, theirs)

    def read(self, arg: Arg, other: Arg = None) -> Powers:
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
    """As its argument of that name has it, or the default; None where it has no such argument."""
    overload = overload_of(op.target)
    for position, argument in enumerate(overload._schema.arguments if overload else ()):
        if argument.name == "reduction":
            return int(op.args.get(position, "reduction", argument.default_value))
    return None


def _each(joined: Callable[[int, int], int], first: Powers, second: Powers) -> Powers:
    return frozenset(joined(a, b) for a in first for b in second)
