"""Which dims of a graph may lie in uneven shards: vocabularies, whose sizes are what the data has.

What a rank lacks of an uneven dim is padding behind its shard. A weight's padding is zeros, and gets no gradient where
all that reads the dim works on each of its elements by itself until a lookup or a cross entropy, which know the true
size, ends it. So a dim may be uneven where every op that touches it, from the weights to those ends, is one of these.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from shardwright.pipeline.ir.graph import Op, OpGraph, Role
from shardwright.pipeline.ops.factors import Letter, Spot, letters_of, once_per_graph
from shardwright.pipeline.ops.own_names import EMBEDDING_BAG

# With the letter that they end.
ENDS = {"aten.embedding.default": "v", EMBEDDING_BAG: "v", "aten.cross_entropy_loss.default": "c"}
THROUGH = frozenset({
    "linear", "matmul", "mm", "addmm", "add", "sub", "mul", "neg", "tanh", "dropout", "t", "transpose", "permute",
    "view", "reshape", "_unsafe_view", "flatten", "squeeze", "unsqueeze", "slice", "to", "_to_copy", "contiguous",
    "clone", "alias", "detach",
})  # fmt: skip
DIVIDES = "div"  # by what does not have the dim: zeros divided by zeros would be no numbers


@dataclass(frozen=True)
class Uneven:
    letters: dict[str, tuple[str, ...]]  # of ops
    spots: frozenset[Spot]  # dims of values


@once_per_graph
def uneven_in(graph: OpGraph) -> Uneven:
    """What may be split in uneven shards."""
    search = _Search(graph)
    found: dict[str, list[str]] = defaultdict(list)
    seen: set[Spot] = set()
    allowed: set[Spot] = set()
    for op in graph.ops:
        for letter in search.letters(op) if op.target in ENDS else ():
            spot = letter[2][0][0]
            if letter[0] == ENDS[op.target] and spot not in seen:
                spots, touched = search.around(spot)
                seen |= spots
                allowed |= spots if touched else set()
                for name, own in touched:
                    found[name].append(own)
    return Uneven({name: tuple(dict.fromkeys(letters)) for name, letters in found.items()}, frozenset(allowed))


class _Search:
    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self.readers = graph.consumers()
        self.writer = {name: op for op in graph.ops for name in op.outputs}
        self._letters: dict[str, list[Letter]] = {}

    def letters(self, op: Op) -> list[Letter]:
        if op.name not in self._letters:
            self._letters[op.name] = letters_of(self.graph, op.name)
        return self._letters[op.name]

    def around(self, start: Spot) -> tuple[set[Spot], list[tuple[str, str]]]:
        """All dims that hang together with one, and the letters of the ops between them; none if one may not."""
        spots, left, touched = {start}, [start], []
        while left:
            value, dim = left.pop()
            if self.graph.values[value].role not in (Role.PARAMETER, Role.RESULT):
                return spots, []
            writer = [self.writer[value]] if value in self.writer else []
            for op in (*writer, *self.readers[value]):
                letter = self._at(op, (value, dim))
                if letter is None:
                    return spots, []
                touched.append((op.name, letter[0]))
                fresh = {spot for spot, _ in letter[2]} - spots
                spots |= fresh
                left += sorted(fresh)
        return spots, touched

    def _at(self, op: Op, spot: Spot) -> Letter | None:
        """The letter of an op that is a whole dim of a value, if the op lets it be uneven."""
        for letter in self.letters(op):
            name, size, places = letter
            if spot in (place for place, _ in places):
                whole = all(
                    outer == 1 and self.graph.values[value].type.shape[dim] == size for (value, dim), outer in places
                )
                return letter if whole and self._allows(op, name, {value for (value, _), _ in places}) else None
        return None

    def _allows(self, op: Op, letter: str, values: set[str]) -> bool:
        kind = op.target.split(".")[1]
        if op.target in ENDS:
            return ENDS[op.target] == letter
        divides = kind == DIVIDES and op.inputs[-1] not in (values if len(op.inputs) > 1 else ())
        return (kind in THROUGH or divides) and values >= set(op.outputs)
