"""A plan in one line, for logs and the summary; and its parts in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod

from shardwright.pipeline.cost.corrected import basis_in_words
from shardwright.pipeline.ir.graph import OpGraph, Role
from shardwright.pipeline.ir.plan import Plan, Sharding

Axes = tuple[tuple[str, int], ...]


def describe(graph: OpGraph, plan: Plan) -> str:
    regions = sum(region.recompute for part in plan.partitions for region in part.regions)
    parts = [
        *(_pipeline(plan) if plan.pipelined else _alone(graph, plan)),
        recompute_in_words(regions, plan.keeps_last),
        *(["captured as a CUDA graph"] if plan.cuda_graphs else []),
        *([f"{plan.micro_batches} micro-batches a step"] if plan.micro_batches > 1 else []),
        f"predicted {plan.prediction.step_seconds * 1e3:.2f} ms a step{basis_in_words(plan, ', ')}",
        f"{plan.prediction.peak_bytes / 1e6:.1f} of {plan.budget_bytes / 1e6:.0f} MB",
    ]
    return "; ".join(parts)


def _alone(graph: OpGraph, plan: Plan) -> list[str]:
    stored = Counter(_stored(plan.sharding, name) for name in plan.sharding.storage)
    split = sum(any(s.kind == "S" for s in layout.states) for layout in plan.sharding.inputs.values())
    return [
        f"{prod(plan.sizes)} ranks",
        f"{split} of {len(list(graph.of_role(Role.INPUT)))} inputs split",
        "parameters " + ", ".join(f"{count}x{layout}" for layout, count in sorted(stored.items())),
    ]


def _pipeline(plan: Plan) -> list[str]:
    ranks = sum(prod(part.sizes) for part in plan.partitions) // plan.chunks
    waits = plan.prediction.bubble_seconds / plan.prediction.step_seconds
    spans = [(part.first, part.last, part.axes) for part in plan.partitions]
    return [f"{ranks} ranks", pipeline_in_words(plan.schedule, spans), f"bubble {waits:.0%}"]


def pipeline_in_words(schedule: str, spans: Sequence[tuple[int, int, Axes]]) -> str:
    """`1f1b of 2 partitions (links 0..4 on d0=2, 5..8 on d0=2)`"""
    where = ", ".join(f"{first}..{last} on {axes_in_words(axes)}" for first, last, axes in spans)
    return f"{schedule} of {len(spans)} partitions (links {where})"


def axes_in_words(axes: Axes) -> str:
    return " x ".join(f"{name}={size}" for name, size in axes)


def passes_in_words(micro_batches: int) -> str:
    return f"{micro_batches} micro-batch{'es' if micro_batches > 1 else ''}"


def recompute_in_words(regions: int, keeps_last: bool = False) -> str:
    but = " but in the last micro-batch" if keeps_last else ""
    return f"{regions} recompute regions{but}" if regions else "no recompute"


def _stored(sharding: Sharding, name: str) -> str:
    """`R`, `R (state S(0))` or `S(0) (regathered)`"""
    state, again = sharding.state.get(name), name in sharding.regathered
    more = [*([f"state {state}"] if state else []), *(["regathered"] if again else [])]
    return f"{sharding.storage[name]}" + (f" ({', '.join(more)})" if more else "")
