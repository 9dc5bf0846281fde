"""A plan in one line, for logs and the summary."""

from __future__ import annotations

from collections import Counter

from pipeline.ir.graph import OpGraph, Role
from pipeline.ir.plan import Plan, Sharding


def describe(graph: OpGraph, plan: Plan) -> str:
    ranks = 1
    for _, size in plan.axes:
        ranks *= size
    stored = Counter(_stored(plan.sharding, name) for name in plan.sharding.storage)
    split = sum(any(s.kind == "S" for s in layout.states) for layout in plan.sharding.inputs.values())
    regions = sum(region.recompute for region in plan.regions)
    parts = [
        f"{ranks} ranks",
        f"{split} of {len(list(graph.of_role(Role.INPUT)))} inputs split",
        "parameters " + ", ".join(f"{count}x{layout}" for layout, count in sorted(stored.items())),
        f"{regions} recompute regions" if regions else "no recompute",
        *([f"{plan.micro_batches} micro-batches a step"] if plan.micro_batches > 1 else []),
        f"predicted {plan.prediction.step_seconds * 1e3:.2f} ms a step",
        f"{plan.prediction.peak_bytes / 1e6:.1f} of {plan.budget_bytes / 1e6:.0f} MB",
    ]
    return "; ".join(parts)


def _stored(sharding: Sharding, name: str) -> str:
    """`R`, `R (state S(0))` or `S(0) (regathered)`"""
    state, again = sharding.state.get(name), name in sharding.regathered
    more = [*([f"state {state}"] if state else []), *(["regathered"] if again else [])]
    return f"{sharding.storage[name]}" + (f" ({', '.join(more)})" if more else "")
