"""Predictions corrected by what runs measured (pipeline/ir/correction.py).

The cluster's figures are made slower by the measured ratios before anything is searched or priced, so that plans are
also chosen by them. What goes on beside computation and collectives is added to every step; a plan that was itself
measured has the seconds of that run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from shardwright.pipeline.ir.cluster import Cluster, Compute, Curve, Group, LinkCost, Pace
from shardwright.pipeline.ir.codec import encode
from shardwright.pipeline.ir.correction import Correction, MeasuredPlan, StepParts
from shardwright.pipeline.ir.plan import Plan, Prediction

DECIDED = ("axes", "first", "last", "sharding", "regions", "in_flight")  # of a partition
DECIDED_OF_ALL = ("device", "micro_batches", "schedule", "chunks", "slices", "keeps_last", "onednn", "cuda_graphs")

# ---- the machine


def corrected(cluster: Cluster, correction: Correction | None) -> Cluster:
    if correction is None:
        return cluster
    linked: Cluster = scaled_links(cluster, 1 / correction.links, correction.links)
    return replace(linked, compute=slower_compute(cluster.compute, correction.compute), correction=correction)


def slower_compute(compute: Compute, factor: float) -> Compute:
    """All that a device does takes so many times as long; what issues its kernels is as fast as it was."""

    def curve(one: Curve) -> Curve:
        return Curve(one.sizes, tuple(rate / factor for rate in one.rates))

    def pace(one: Pace) -> Pace:
        return Pace(one.forward * factor, one.backward * factor)

    def paces(found: Mapping[str, Pace]) -> dict[str, Pace]:
        return {name: pace(one) for name, one in found.items()}

    return replace(
        compute,
        matmul=curve(compute.matmul),
        matmul_by_dtype={dtype: curve(one) for dtype, one in compute.matmul_by_dtype.items()},
        memory_rate=compute.memory_rate / factor,
        launch=compute.launch * factor,
        launch_backward=compute.launch_backward * factor,
        optimizer_launch=compute.optimizer_launch * factor,
        optimizer_rate=compute.optimizer_rate and compute.optimizer_rate / factor,
        ops=paces(compute.ops),
        flops=paces(compute.flops),
        bodies=paces(compute.bodies),
        product_bytes=pace(compute.product_bytes),
    )


def scaled_links(value: Any, bandwidth: float, latency: float) -> Any:
    """A cluster, a mesh or a part of them, with every link inside scaled, wherever it stands.

    Of measured points the first counts as latency, what comes on top of it as bytes on the way.
    """
    if isinstance(value, LinkCost):
        start = value.points[0][1] if value.points else 0.0
        points = tuple((n, start * latency + (s - start) / bandwidth) for n, s in value.points)
        return LinkCost(value.latency * latency, value.bandwidth * bandwidth, points)
    if isinstance(value, Group):
        value = replace(
            value,
            bandwidth=value.bandwidth * bandwidth,
            latency=value.latency * latency,
            uplink=None if value.uplink is None else value.uplink * bandwidth,
        )
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value, **{one.name: scaled_links(getattr(value, one.name), bandwidth, latency) for one in fields(value)}
        )
    if isinstance(value, tuple):
        return tuple(scaled_links(item, bandwidth, latency) for item in value)
    if isinstance(value, dict):
        return {name: scaled_links(item, bandwidth, latency) for name, item in value.items()}
    return value


# ---- the plan


def decisions_of(plan: Plan) -> str:
    """A digest of all that the plan decides, and of nothing that is predicted of it."""
    decided = {name: encode(getattr(plan, name)) for name in DECIDED_OF_ALL}
    parts = [{name: encode(getattr(part, name)) for name in DECIDED} for part in plan.partitions]
    text = json.dumps([decided, parts], sort_keys=True, separators=(",", ":"), allow_nan=False)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def with_other(prediction: Prediction, correction: Correction) -> Prediction:
    """With what goes on beside computation and collectives; on a corrected cluster all else is corrected already."""
    host = max(0.0, prediction.host_seconds + correction.other_seconds)
    step = prediction.step_seconds + host - prediction.host_seconds
    return replace(prediction, step_seconds=step, host_seconds=host)


def as_measured(prediction: Prediction, measured: MeasuredPlan) -> Prediction:
    """The same plan with the seconds of a run; computation divides as it was priced."""
    found = measured.seconds
    whole = found.step / prediction.step_seconds if prediction.step_seconds else 1.0
    if not found.parted:
        seconds = {one.name for one in fields(prediction) if one.name.endswith("_seconds")}
        return replace(prediction, **{name: whole * getattr(prediction, name) for name in seconds})
    known = _computing(prediction)
    factor = found.compute / known if known else 1.0
    return replace(
        prediction,
        step_seconds=found.step,
        compute_seconds=factor * prediction.compute_seconds if known else found.compute,
        recompute_seconds=factor * prediction.recompute_seconds,
        optimizer_seconds=factor * prediction.optimizer_seconds,
        communication_seconds=found.communication,
        hidden_seconds=found.hidden,
        bubble_seconds=found.bubble,
        host_seconds=found.other,
    )


def uncorrected_parts(plan: Plan) -> StepParts:
    """What the plan was priced at before any correction."""
    found, correction = plan.estimate or plan.prediction, plan.correction or Correction()
    compute, links = _computing(found) / correction.compute, correction.links
    bubble, other = found.bubble_seconds / correction.compute, found.host_seconds - correction.other_seconds
    communication, hidden = found.communication_seconds / links, found.hidden_seconds / links
    return StepParts(compute + communication + bubble + other, compute, communication, hidden, bubble, other)


def _computing(found: Prediction) -> float:
    return found.compute_seconds + found.recompute_seconds + found.optimizer_seconds


def basis_in_words(plan: Plan, before: str = "") -> str:
    """On what measurements the prediction rests, after `before`; nothing where there are none."""
    correction = plan.correction
    if correction is None:
        return ""
    if plan.estimate is not None:
        date = max((one.date for one in correction.plans), default="")
        return f"{before}as the run of {date} measured this plan; priced at {plan.estimate.step_seconds * 1e3:.2f} ms"
    if not correction.dates:
        return ""
    if correction.parted:
        beside = f"{correction.other_seconds * 1e3:+.2f} ms beside"
        what = f"computing x{correction.compute:.2f}, collectives x{correction.links:.2f}, {beside}"
    else:
        what = f"steps x{correction.compute:.2f}"
    dates = correction.dates
    runs = f"the run of {dates[0]}" if len(dates) == 1 else f"{len(dates)} runs until {dates[-1]}"
    return f"{before}corrected by what {runs} measured: {what}"
