"""What it takes to bring a tensor from one state to another on one axis: the conversion table.

| from -> to     | function        | forward        | backward                   | known as                            |
|----------------|-----------------|----------------|----------------------------|-------------------------------------|
| `R -> B`       | sum_gradient    | nothing        | all-reduce                 | Megatron's f; for a weight, DDP     |
| `P -> R`       | all_reduce      | all-reduce     | nothing                    | Megatron's g                        |
| `S -> B`       | all_gather      | all-gather     | reduce-scatter             | sequence parallelism; weights: ZeRO |
| `S -> B`       | regather        | all-gather     | all-gather, reduce-scatter | ZeRO-3: the shard alone is kept (1) |
| `S -> R`       | gather          | all-gather     | slice                      |                                     |
| `P -> S`       | reduce_scatter  | reduce-scatter | all-gather                 | sequence parallelism                |
| `P -> B`       | all_reduce_both | all-reduce     | all-reduce                 |                                     |
| `R -> S`       | shard           | slice          | all-gather                 |                                     |
| `S(a) -> S(b)` | all_to_all      | all-to-all     | all-to-all                 |                                     |
| `R -> P`       | mask            | mask           | nothing                    | local                               |
| `B -> R`       | mask_gradient   | nothing        | mask                       | local                               |
| `B -> S`       | narrow          | slice          | zero-pad                   | local                               |
| `S -> P`       | pad             | zero-pad       | slice                      | local                               |
| `B -> P`       | mask_both       | mask           | mask                       | local                               |

(1) Every step on the way of such a parameter to its readers is made again in backward; the others keep their names:
`again(gather, ...)`.

The parameters of a link that are gathered over one axis, `S -> B` or `S -> R`, are one collective (large ones each
their own, begun together), `all_gather_together` or, where it is made again, `regather_together`.

A step changes the state on one axis. The digits that the other axes take (see pipeline.ir.layout) stay where they are:
gathering the outer of two axes on one dim leaves the inner one on a factor, `S(0),S(0) -> R,S(0:2)`; only where the
inner one is gathered is it `S(0),S(0) -> S(0),R`. What lies between other layouts is for pipeline.sharding.paths to
find.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby

from shardwright.pipeline.ir.cluster import COLLECTIVES, Axis, Compute
from shardwright.pipeline.ir.graph import OpGraph
from shardwright.pipeline.ir.layout import Layout, State
from shardwright.pipeline.ir.program import GATHERED_ALONE, Convert, Step, Tensor
from shardwright.pipeline.rates.compute import Seconds


@dataclass(frozen=True)
class Conversion:
    function: str  # its name in pipeline.runtime
    forward: str  # a collective, a local move of bytes, or "" for nothing
    backward: str
    again: str = ""  # what backward does first, to have the value once more


TABLE = {
    "RB": Conversion("sum_gradient", "", "all_reduce"),
    "PR": Conversion("all_reduce", "all_reduce", ""),
    "SB": Conversion("all_gather", "all_gather", "reduce_scatter"),
    "SR": Conversion("gather", "all_gather", "slice"),
    "PS": Conversion("reduce_scatter", "reduce_scatter", "all_gather"),
    "PB": Conversion("all_reduce_both", "all_reduce", "all_reduce"),
    "RS": Conversion("shard", "slice", "all_gather"),
    "SS": Conversion("all_to_all", "all_to_all", "all_to_all"),
    "RP": Conversion("mask", "mask", ""),
    "BR": Conversion("mask_gradient", "", "mask"),
    "BS": Conversion("narrow", "slice", "pad"),
    "SP": Conversion("pad", "pad", "slice"),
    "BP": Conversion("mask_both", "mask", "mask"),
}


GATHERS = TABLE["SB"], TABLE["SR"]  # several by one collective


def made_again(entry: Conversion) -> Conversion:
    """The same where backward does not keep the result, but makes it once more."""
    return replace(entry, function="regather" if entry is TABLE["SB"] else entry.function, again=entry.forward)


REGATHER = made_again(TABLE["SB"])


def conversion(source: State, target: State) -> Conversion:
    return TABLE[source.kind + target.kind]


def entry_seconds(entry: Conversion, nbytes: int, grad: bool, axis: Axis, compute: Compute) -> Seconds:
    """To convert a tensor of that many bytes (not split on this axis), and its gradient where it has one."""

    def seconds(move: str) -> float:
        if move in COLLECTIVES:
            return axis.links[move].seconds(nbytes)
        return compute.launch + nbytes / compute.memory_rate if move else 0.0

    backward = (entry.again, entry.backward) if grad else ()
    return Seconds(seconds(entry.forward), sum(map(seconds, backward)))


@lru_cache(maxsize=1 << 14)
def step_axis(source: Layout, target: Layout, sizes: tuple[int, ...]) -> int:
    """The one axis on which two layouts differ, digits of the other axes compared where they lie."""
    before, after = source.places(sizes), target.places(sizes)
    changed = [
        axis
        for axis, (old, new) in enumerate(zip(source.states, target.states, strict=True))
        if old.kind != new.kind or before.get(axis) != after.get(axis)
    ]
    if len(changed) != 1:
        raise ValueError(f"{source} -> {target} is not one step: it changes {len(changed)} axes")
    return changed[0]


def conversion_of(source: Layout, target: Layout, sizes: tuple[int, ...]) -> Conversion:
    """The table's entry for one step between layouts."""
    axis = step_axis(source, target, sizes)
    return conversion(source.states[axis], target.states[axis])


def gathered_together(graph: OpGraph, steps: Sequence[Step], sizes: tuple[int, ...]) -> list[tuple[Convert, ...]]:
    """Steps next to each other that gather parameters over one axis: a program has one collective for them."""
    found: list[tuple[Convert, ...]] = []
    made = {step.target for step in steps if isinstance(step, Convert)}
    for over, run in groupby(steps, lambda step: _gathers_over(graph, step, made, sizes)):
        together = tuple(step for step in run if isinstance(step, Convert))
        if over is not None and len(together) > 1:
            found.append(together)
    return found


def _gathers_over(
    graph: OpGraph, step: Step, made: Container[Tensor], sizes: tuple[int, ...]
) -> tuple[int, bool, bool] | None:
    """The axis, whether it is done once more in backward, and whether that is of something that was converted before.

    What is gathered as it is stored begins ahead of time (pipeline.runtime.step.gradients), so nothing else is joined
    to it. None for what is made before the chain for many links.
    """
    if not isinstance(step, Convert) or not (step.again or graph.beside(step.source.value)):
        return None
    ends = step.source.layout, step.target.layout
    if conversion_of(*ends, sizes) not in GATHERS:
        return None
    return step_axis(*ends, sizes), step.again, step.again and step.source in made


def gathered_beside(graph: OpGraph, step: Convert, sizes: tuple[int, ...]) -> tuple[int, int]:
    """Bytes that a gather of a parameter takes beside the whole: of what it sends, and of what it receives.

    A large one is a collective of its own, which sends the shard that is stored, and receives the whole itself where it
    is split on its first dim (pipeline.runtime.programs.collectives.Joining).
    """
    ends = step.source.layout, step.target.layout
    whole = graph.values[step.target.value].type.nbytes // step.target.layout.shards(sizes)
    if whole < GATHERED_ALONE:
        return whole // sizes[step_axis(*ends, sizes)], whole
    return 0, 0 if step_arguments(*ends, sizes) == {"dim": 0} else whole


def gathered_share(graph: OpGraph, value: str) -> float:
    """The part that a parameter has of what its link gathers by one collective, if it gathers all of its parameters.

    How the others are stored is not asked, so that what a parameter costs depends on how it is stored alone.
    """
    own = graph.values[value].type
    others = graph.types(graph.beside(value)) or (own,)
    return own.nbytes / sum(other.nbytes for other in others if other.dtype == own.dtype) if own.nbytes else 1.0


def step_arguments(
    source: Layout, target: Layout, sizes: tuple[int, ...], shape: tuple[int, ...] = ()
) -> dict[str, int]:
    """What the step's function is told besides the tensor and the axis: dims, and parts where there are several.

    And the size of a dim that comes together, where its shards are uneven in a tensor of that shape.
    """
    axis = step_axis(source, target, sizes)
    split = [layout for layout in (source, target) if layout.states[axis].kind == "S"]
    found = {}
    for layout, (dim, parts) in zip(split, (("dim", "parts"), ("to", "to_parts")), strict=False):
        found[dim] = layout.states[axis].dim
        count = layout.parts(axis, sizes)
        found |= {parts: count} if count > 1 else {}
    if shape and source.states[axis].kind == "S" and found["dim"] in source.uneven(shape, sizes):
        found["size"] = shape[found["dim"]]
    return found
