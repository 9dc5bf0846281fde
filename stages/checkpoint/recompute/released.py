"""Values that no op keeps for backward: a program that lets go of them after their last use needs less at its peaks."""

from __future__ import annotations

from shardwright.pipeline.ir.graph import OpGraph
from shardwright.pipeline.ir.profile import Profile

LARGE = 0.03  # of all that its link writes: what is smaller is not worth a line


def released(graph: OpGraph, profile: Profile) -> tuple[str, ...]:
    """In the order of the program; with every view of them, whose name holds the memory too."""
    kept = {profile.storage[name] for cost in profile.ops.values() for name in cost.saves}
    found: list[str] = []
    for link in graph.chain:
        written = [name for op in link.ops for name in graph.op(op).outputs]
        owners = {profile.storage[name] for name in written}
        total = sum(graph.values[owner].type.nbytes for owner in owners)
        for name in written:
            owner = profile.storage[name]
            if owner not in kept and graph.values[owner].type.nbytes >= LARGE * total:
                found.append(name)
    return tuple(found)
