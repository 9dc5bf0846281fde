"""Checkpoint: for every plan of the frontier the best recompute within the budget, and pipelines; the best of all."""

from __future__ import annotations

from dataclasses import replace

from shardwright.pipeline.base.stage import Inputs, Result
from shardwright.pipeline.config import Config
from shardwright.pipeline.cost.whole_ops import figures_of, whole_ops_of
from shardwright.pipeline.ir.cluster import Cluster
from shardwright.pipeline.ir.plan import Plan
from shardwright.pipeline.ir.profile import as_run
from shardwright.pipeline.ir.verify import verify_sharding
from shardwright.pipeline.ops.discovery.remembered import remember_in
from shardwright.pipeline.ops.uneven import uneven_in
from shardwright.stages.checkpoint.captured import captured_or_not
from shardwright.stages.checkpoint.choose import choose
from shardwright.stages.checkpoint.curves import memory_curve, plan_points
from shardwright.stages.checkpoint.describe import describe
from shardwright.stages.checkpoint.pipelines.pipelined import find_pipelines
from shardwright.stages.checkpoint.recompute.released import released
from shardwright.stages.checkpoint.unpipelined import find_alone


def run(inputs: Inputs, config: Config) -> Result:
    profile, cluster, frontier = (inputs[kind] for kind in ("profile", "cluster", "frontier"))
    graph = as_run(inputs["graph"], profile.types)
    where = f"conf/solve/{config.choices['solve']}.yaml: memory_budget_gb"
    for point in (*frontier.points, *frontier.submesh_points):
        verify_sharding(graph, point.sharding, frontier.meshes[point.mesh].sizes, uneven_in(graph).spots)
    if cluster.correction is not None:
        own = cluster.correction.of_profile(inputs.artifacts["profile"].digest)
        cluster = replace(cluster, correction=own)
    settings, file = config.checkpoint, f"conf/checkpoint/{config.choices['checkpoint']}.yaml"

    def planned(cluster: Cluster) -> Plan:
        candidates = find_alone(graph, profile, cluster, frontier, settings, file)
        pipelines = find_pipelines(graph, profile, cluster, frontier, settings, file)
        return choose(candidates, cluster, frontier, where, graph, pipelines)

    wish = config.model.cuda_graphs
    plan = captured_or_not(planned, cluster, wish, f"conf/model/{config.choices['model']}.yaml: cuda_graphs")
    plan = replace(plan, released=released(graph, profile))
    inputs.log.info(describe(graph, plan))
    remember_in(inputs.root / "runs" / "ops")
    whole = whole_ops_of(plan, graph, profile, cluster)
    curves = {"memory": memory_curve(plan), "plans": plan_points(plan, frontier)}
    return Result(plan, figures(plan) | figures_of(whole), curves=curves)


def figures(plan: Plan) -> dict[str, float | int | str]:
    predicted = plan.prediction
    return {
        "step_ms": round(predicted.step_seconds * 1e3, 4),
        "peak_mb": round(predicted.peak_bytes / 1e6, 3),
        "resident_mb": round(predicted.resident_bytes / 1e6, 3),
        "compute_ms": round(predicted.compute_seconds * 1e3, 4),
        "communication_ms": round(predicted.communication_seconds * 1e3, 4),
        "recompute_ms": round(predicted.recompute_seconds * 1e3, 4),
        "optimizer_ms": round(predicted.optimizer_seconds * 1e3, 4),
        "budget_mb": round(plan.budget_bytes / 1e6, 3),
        "bubble_ms": round(predicted.bubble_seconds * 1e3, 4),
        "host_ms": round(predicted.host_seconds * 1e3, 4),
        "hidden_ms": round(predicted.hidden_seconds * 1e3, 4),
        "recompute_regions": sum(region.recompute for part in plan.partitions for region in part.regions),
        "partitions": len(plan.partitions),
        "schedule": plan.schedule or "none",
        "micro_batches": plan.micro_batches,
        "cuda_graphs": int(plan.cuda_graphs),
    }
