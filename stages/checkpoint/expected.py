"""What is expected of a plan after runs were measured: the seconds of its own run, or its price with the rest.

The cluster's figures are corrected already (pipeline/cost/corrected.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from shardwright.pipeline.cost.corrected import as_measured, decisions_of, with_other
from shardwright.pipeline.ir.cluster import NO_HOST, Cluster
from shardwright.pipeline.ir.plan import Alternative, Plan, Prediction
from shardwright.stages.checkpoint.offers import Offer

Make = Callable[[Prediction, tuple[Alternative, ...]], Plan]  # of an offer its plan


def expected(offer: Offer, make: Make, cluster: Cluster) -> tuple[Offer, Make]:
    correction = cluster.correction
    if correction is None or offer.prediction is None:
        return offer, make
    priced = with_other(offer.prediction, correction)
    if correction.plans and (found := correction.measured(_decided(make(priced, ()), cluster))):
        return replace(offer, prediction=as_measured(priced, found), estimate=priced), make
    return replace(offer, prediction=priced), make


def with_basis(plan: Plan, offer: Offer, cluster: Cluster) -> Plan:
    """The plan says what its prediction rests on."""
    correction = cluster.correction
    if correction is None:
        return plan
    found = correction.measured(_decided(plan, cluster)) if offer.estimate else None
    return replace(plan, correction=replace(correction, plans=(found,) if found else ()), estimate=offer.estimate)


def _decided(plan: Plan, cluster: Cluster) -> str:
    """A step that is captured is planned without its host (captured.py)."""
    return decisions_of(replace(plan, cuda_graphs=cluster.compute.host == NO_HOST))
