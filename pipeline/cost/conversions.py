"""What it takes to bring a tensor from one state to another on one axis: the conversion table.

| from -> to     | function         | forward        | backward       | known as                                |
|----------------|------------------|----------------|----------------|-----------------------------------------|
| `R -> B`       | sum_gradient     | nothing        | all-reduce     | Megatron's f; for a parameter, DDP      |
| `P -> R`       | all_reduce       | all-reduce     | nothing        | Megatron's g                            |
| `S -> B`       | all_gather       | all-gather     | reduce-scatter | sequence parallelism; a parameter: ZeRO |
| `S -> R`       | gather           | all-gather     | slice          |                                         |
| `P -> S`       | reduce_scatter   | reduce-scatter | all-gather     | sequence parallelism                    |
| `P -> B`       | all_reduce_both  | all-reduce     | all-reduce     |                                         |
| `R -> S`       | shard            | slice          | all-gather     |                                         |
| `S(a) -> S(b)` | all_to_all       | all-to-all     | all-to-all     |                                         |
| `R -> P`       | mask             | mask           | nothing        | local                                   |
| `B -> R`       | mask_gradient    | nothing        | mask           | local                                   |
| `B -> S`       | narrow           | slice          | zero-pad       | local                                   |
| `S -> P`       | pad              | zero-pad       | slice          | local                                   |
| `B -> P`       | mask_both        | mask           | mask           | local                                   |
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.cost.compute import Seconds
from pipeline.ir.cluster import COLLECTIVES, Axis, Compute
from pipeline.ir.layout import State


@dataclass(frozen=True)
class Conversion:
    function: str  # its name in pipeline.runtime
    forward: str  # a collective, a local move of bytes, or "" for nothing
    backward: str


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


def conversion(source: State, target: State) -> Conversion:
    return TABLE[source.kind + target.kind]


def conversion_seconds(source: State, target: State, nbytes: int, grad: bool, axis: Axis, compute: Compute) -> Seconds:
    """Seconds to convert a tensor of that many bytes (unsplit), and its gradient where it has one."""
    if source == target:
        return Seconds(0.0, 0.0)
    steps = conversion(source, target)
    backward = _step_seconds(steps.backward, nbytes, axis, compute) if grad else 0.0
    return Seconds(_step_seconds(steps.forward, nbytes, axis, compute), backward)


def _step_seconds(step: str, nbytes: int, axis: Axis, compute: Compute) -> float:
    if step in COLLECTIVES:
        return axis.links[step].seconds(nbytes)
    return compute.launch + nbytes / compute.memory_rate if step else 0.0
