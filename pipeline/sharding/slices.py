"""The batch in slices, and the graph and its profile for one of them: what a smaller micro-batch costs.

The graph is traced for one pass. A plan may cut a pass into q: values that depend on an input have a q-th of their
elements, and so have arithmetic, bytes and temporaries of the ops that write them, less what belongs to parameters
(weights are read, and their gradients written, whole). Launches stay. Only the number of elements counts for a price:
the first dim that q divides is cut, whatever it means.

Slices that are not equal count as equal ones: arithmetic of each is a q-th of all, and sizes (memory, messages) are
those of the largest, so that what is predicted to fit does.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from math import ceil

from shardwright.pipeline.ir.graph import Op, OpGraph, Role, TensorType
from shardwright.pipeline.ir.plan import Sharding
from shardwright.pipeline.ir.profile import Compiled, CompiledWay, OpCost, Profile
from shardwright.pipeline.sharding.lowering import home_layouts

HELD = ("saved", "saved_alone", "forward_peak", "backward_peak")  # bytes of a compiled block


def slices_of(batch: int, count: int, grain: int = 1) -> tuple[int, ...] | None:
    """So many samples each, larger ones first, alike but for one grain; None where there are not enough grains.

    A grain is what devices share out: where two split the batch, slices have two, four, six samples.
    """
    if batch % grain or batch // grain < count:
        return None
    least, more = divmod(batch // grain, count)
    return tuple(grain * (least + (place < more)) for place in range(count))


def sliced(graph: OpGraph, profile: Profile, slices: tuple[int, ...]) -> tuple[OpGraph, Profile]:
    """Both for one of these slices of the batch."""
    if len(slices) < 2:
        return graph, profile
    cut, largest, count = _depending(graph), Fraction(slices[0], sum(slices)), len(slices)
    values = {
        name: replace(value, type=_cut(value.type, largest)) if name in cut else value
        for name, value in graph.values.items()
    }
    costs = {
        op.name: _scaled(graph, op, profile.ops[op.name], count, largest) for op in graph.ops if cut & set(op.outputs)
    }
    kernels = replace(profile.kernels, slices=count) if profile.kernels else None
    compiled = profile.compiled and _compiled_for(profile.compiled, count, largest, known=kernels is not None)
    profile = replace(profile, ops={**profile.ops, **costs}, kernels=kernels, compiled=compiled)
    return replace(graph, values=values), profile


def grown(graph: OpGraph, profile: Profile, times: int) -> tuple[OpGraph, Profile]:
    """Both with what so many times the samples hold, for memory: seconds stay."""
    more, part = _depending(graph), Fraction(times)
    values = {
        name: replace(value, type=_cut(value.type, part)) if name in more else value
        for name, value in graph.values.items()
    }
    costs = {op.name: _scaled(graph, op, profile.ops[op.name], 1, part) for op in graph.ops if more & set(op.outputs)}
    return replace(graph, values=values), replace(profile, ops={**profile.ops, **costs})


def _compiled_for(compiled: Compiled, count: int, largest: Fraction, known: bool) -> Compiled:
    """Blocks that were measured with the whole batch. Where `known`, prices divide them by the number of slices, as
    they do kernels: what is left is that the bytes are those of the largest."""
    seconds = Fraction(1) if known else Fraction(1, count)

    def of_slice(way: CompiledWay) -> CompiledWay:
        nbytes = {name: ceil(getattr(way, name) * seconds * count * largest) for name in HELD}
        return replace(way, forward=way.forward * float(seconds), backward=way.backward * float(seconds), **nbytes)

    return replace(compiled, runs=tuple(tuple(map(of_slice, ways)) for ways in compiled.runs))


def fits(graph: OpGraph, sharding: Sharding, sizes: tuple[int, ...], slices: tuple[int, ...]) -> bool:
    """Whether each of these can still be split as the sharding splits the batch: on the dim that is cut.

    Other dims may be in uneven shards, as they are of the whole batch.
    """
    if len(slices) < 2:
        return True
    home = home_layouts(graph, sharding)

    def divides(name: str, part: Fraction) -> bool:
        whole, cut, layout = graph.values[name].type.shape, _cut(graph.values[name].type, part).shape, home[name]
        return layout.holds(cut, sizes) and layout.uneven(cut, sizes) == layout.uneven(whole, sizes)

    return all(
        divides(name, part)
        for part in {Fraction(samples, sum(slices)) for samples in slices}
        for name in _depending(graph)
        # Where it is not the first dim that is cut, that need not be the batch.
        if (shape := graph.values[name].type.shape) and shape[0] % part.denominator == 0
    )


def _depending(graph: OpGraph) -> set[str]:
    """The inputs, and what is computed from them."""
    found = {value.name for value in graph.of_role(Role.INPUT)}
    for op in graph.ops:
        if found & set(op.inputs):
            found |= set(op.outputs)
    return found


def _cut(kind: TensorType, part: Fraction) -> TensorType:
    for dim, size in enumerate(kind.shape):
        if size % part.denominator == 0:
            return replace(kind, shape=(*kind.shape[:dim], int(size * part), *kind.shape[dim + 1 :]))
    return kind


def _scaled(graph: OpGraph, op: Op, cost: OpCost, count: int, largest: Fraction) -> OpCost:
    """Bytes that are moved are those of the mean, bytes that are held those of the largest."""
    read = (graph.values[name] for name in dict.fromkeys(op.inputs))
    parameters = sum(value.type.nbytes for value in read if value.role is Role.PARAMETER)

    def part(nbytes: int, share: Fraction, whole: int = parameters) -> int:
        kept = min(nbytes, whole)
        return kept + ceil((nbytes - kept) * share)

    mean = Fraction(1, count)
    return replace(
        cost,
        flops_forward=cost.flops_forward / count,
        flops_backward=cost.flops_backward / count,
        bytes_forward=part(cost.bytes_forward, mean),
        bytes_backward=part(cost.bytes_backward, mean, 2 * parameters),
        extra_saved=part(cost.extra_saved, largest),
        temporary_forward=part(cost.temporary_forward, largest),
        temporary_backward=part(cost.temporary_backward, largest),
    )
