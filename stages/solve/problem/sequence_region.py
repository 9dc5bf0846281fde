"""What lies between the blocks of a model: the values that sequence parallelism splits along the sequence.

In a transformer these are the sums of the residual stream with the norms and dropouts on them: what tensor parallelism
leaves whole (Korthikanti et al., 2022). They are found by the form of the graph, not by the names of ops:

    x --+--> norm --> up --> gelu --> down --+--> x'      `up` and `down` have a large weight, of more than one dim
        +------------------------------------+

Take the activations, (batch, sequence, width) or (batch sequence, width), and call two of them one where an op without
a large weight reads or writes both: {x, norm, x'} and {up, gelu}. A set is between the blocks where a way leaves it,
passes a large weight and comes back. `gelu` is not: nothing that `down` makes comes back to it.
"""

from __future__ import annotations

from collections import defaultdict

from shardwright.pipeline.ir.graph import Op, OpGraph, Role
from shardwright.pipeline.ir.layout import S, State


def between_blocks(graph: OpGraph) -> dict[str, State]:
    """Each of these values -> how an axis that splits the sequence splits it."""
    sets = _sets(graph)
    sources: defaultdict[str, int] = defaultdict(int)  # value -> bits of the sets that it was made from
    behind: defaultdict[str, int] = defaultdict(int)  # of those the ones with a large weight on the way
    returned = 0
    for op in graph.ops:
        made, passed = 0, 0
        for name in op.inputs:
            made |= sources[name] | (1 << sets[name] if name in sets else 0)
            passed |= behind[name]
        passed |= made if has_large_weight(graph, op) else 0
        for name in op.outputs:
            sources[name], behind[name] = made, passed
            returned |= passed & (1 << sets[name]) if name in sets else 0
    found = (name for name, number in sets.items() if returned >> number & 1)
    return {name: S(1) if len(graph.values[name].type.shape) == 3 else S(0, graph.batch) for name in found}


def has_large_weight(graph: OpGraph, op: Op) -> bool:
    read = (graph.values[name] for name in op.inputs)
    return any(value.role is Role.PARAMETER and len(value.type.shape) > 1 for value in read)


def _sets(graph: OpGraph) -> dict[str, int]:
    """Each activation -> the number of its set."""
    leader = {name: name for name in _activations(graph)}

    def find(name: str) -> str:
        while leader[name] != name:
            leader[name] = name = leader[leader[name]]
        return name

    for op in graph.ops:
        own = [name for name in (*op.inputs, *op.outputs) if name in leader]
        for name in () if has_large_weight(graph, op) else own[1:]:
            leader[find(name)] = find(own[0])
    numbers: dict[str, int] = {}
    return {name: numbers.setdefault(find(name), len(numbers)) for name in leader}


def _activations(graph: OpGraph) -> list[str]:
    """By their shapes; a sequence is as long as an op with a large weight reads it: not (batch, channels, pixels)."""
    trained = {value.name: value.type.shape for value in graph.of_role(Role.RESULT) if value.grad}
    read = {trained[n] for op in graph.ops if has_large_weight(graph, op) for n in op.inputs if n in trained}
    lengths = {shape[1] for shape in read if len(shape) == 3}
    lengths |= {shape[0] // graph.batch for shape in read if len(shape) == 2}
    wide = {shape for shape in trained.values() if len(shape) == 3 and shape[0] == graph.batch and shape[1] in lengths}
    flat = {(batch * sequence, width) for batch, sequence, width in wide}
    return [name for name, shape in trained.items() if shape in wide or shape in flat]
