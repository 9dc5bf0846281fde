"""What benchmarks.recompute plans: our schedules for one model on one card, as programs. It needs no GPU."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from torch.optim import AdamW

from benchmarks.profile_accuracy import card_of
from shardwright.pipeline.cost.groups import Join
from shardwright.pipeline.cost.step import Workload
from shardwright.pipeline.ir.cluster import COLLECTIVES, NO_HOST, Axis, Cluster, Compute, Curve, LinkCost
from shardwright.pipeline.ir.graph import OpGraph, Role
from shardwright.pipeline.ir.layout import Layout, R
from shardwright.pipeline.ir.plan import Prediction, Sharding, Strategy
from shardwright.pipeline.ir.profile import Compiled, as_run
from shardwright.stages.checkpoint.recompute import rotor, schedule
from shardwright.stages.checkpoint.recompute.linearize import linearize
from shardwright.stages.checkpoint.recompute.released import released
from shardwright.stages.checkpoint.recompute.rotor import fastest_within
from shardwright.stages.checkpoint.recompute.simulate import simulate
from shardwright.stages.codegen.module import write_module
from shardwright.stages.profile.run import make_profile
from tests.unpipelined import whole_plan


class Planner:
    """Our schedules for one model on one card."""

    def __init__(self, graph: OpGraph, calibration: dict[str, Any], compiled: Compiled | None) -> None:
        self.graph = graph
        profile, _ = make_profile(self.graph, "cuda", "amp", AdamW, logging.getLogger())
        self.profile = replace(profile, compiled=compiled)
        typed = as_run(self.graph, self.profile.types)
        cluster = one_card(calibration)
        self.sharding = unsplit(self.graph)
        workload = Workload(typed, self.profile, cluster, optimizer_copies=2.0)
        priced = workload.priced(self.sharding)
        self.linear = linearize(priced, Join.COMPILED if compiled else Join.NEEDLESS)
        self.optimizer_seconds = priced.step.optimizer
        self.released = released(typed, self.profile)

    def schedule(self, budget: int) -> dict[str, Any] | None:
        """Its program, predicted peak and milliseconds; None where nothing fits."""
        chain, fixed = self.linear.chain, self.linear.fixed_bytes
        room, slots = budget - fixed, max(500, 20 * (chain.length + 1))
        if budget < self.linear.optimizer_peak:
            return None
        found = everything = schedule.no_recompute(chain)
        if simulate(chain, found.sequence).peak > room:
            if room <= 0 or not rotor.fits(chain, slots, room):
                return None
            found = fastest_within(chain, room, slots)
        outcome = simulate(chain, found.sequence)
        nothing = Prediction(0.0, 0, 0, 0.0, 0.0, 0.0, 0.0)
        regions = self.linear.regions(found.regions)
        plan = whole_plan((("d0", 1),), "cuda", budget, self.sharding, regions, nothing)
        plan = replace(plan, released=self.released)
        text = write_module(self.graph, plan)
        return {
            "budget": budget,
            "predicted_peak": max(fixed + int(outcome.peak), self.linear.optimizer_peak),
            "recomputes": found != everything,
            "predicted_ms": 1e3 * (outcome.time + self.optimizer_seconds),
            "regions": str(found.regions),
            "text": text,
        }

    def budgets(self, count: int) -> list[int]:
        """From what keeping everything takes to the tightest, in even steps."""
        chain, fixed = self.linear.chain, self.linear.fixed_bytes
        top = int(simulate(chain, schedule.no_recompute(chain).sequence).peak)
        low = rotor.tightest(chain, max(500, 20 * (chain.length + 1))).memory
        low = max(low, self.linear.optimizer_peak - fixed)
        return [fixed + top - (top - low) * n // (count - 1) for n in range(count)]


def one_card(calibration: dict[str, Any]) -> Any:
    """The card that was measured, as a cluster of one."""
    card = card_of(calibration)
    products = {dtype: Curve((1.0,), (rate,)) for dtype, rate in card.products.items()}
    rest = {"matmul_by_dtype": products, "processors": card.processors, "host": NO_HOST}  # the card alone
    compute = Compute(products["float32"], card.memory, 1e-5, 1e-5, **rest)
    axis = Axis("d0", 1, {name: LinkCost(0.0, 1e12) for name in COLLECTIVES})
    return Cluster("preset", "cuda", 1, 141 * 10**9, compute, (axis,))


def unsplit(graph: Any) -> Any:
    """Every op as it is, on one device."""
    whole = Layout((R,))
    return Sharding(
        {op.name: Strategy("R", (whole,) * len(op.inputs), (whole,) * len(op.outputs)) for op in graph.ops},
        {value.origin: whole for value in graph.of_role(Role.PARAMETER)},
        {value.name: whole for value in graph.of_role(Role.INPUT)},
    )
