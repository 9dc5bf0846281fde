"""What the report page is made from, for the tests and the benchmark: small plans, and one of many layers."""

from __future__ import annotations

from dataclasses import replace

from shardwright.pipeline.config import Checkpoint, Recompute
from shardwright.pipeline.cost.step import Workload
from shardwright.pipeline.ir.cluster import Mesh
from shardwright.pipeline.ir.plan import Baseline, Frontier, Plan, Proof
from shardwright.pipeline.ir.report import Compared, Report
from shardwright.stages.checkpoint.choose import choose, evaluate
from shardwright.stages.profile.by_table import profile_graph
from shardwright.stages.report.priced import Sources
from shardwright.stages.solve.on_mesh import price_point
from tests.graphs import GRAPHS, frontier_of, gpt_graph, plan_of, preset, profile_of
from tests.pipeline_plans import plan_with_pipelines, with_submeshes
from tests.plans import data_parallel

BASELINES = (Baseline("DDP", 2e-3, 10**6, 0), Baseline("ZeRO-3", 3e-3, 5 * 10**5, 0))


def sources_of(name: str, budget: int | None = None, recompute: str = "optimal") -> Sources:
    frontier = replace(frontier_of(name), baselines=BASELINES)
    plan = plan_of(name, budget=budget, recompute=recompute)
    return Sources(name, plan, GRAPHS[name](), profile_of(name), preset(), frontier, digest="sha256:0123456789abcdef")


def piped_sources(name: str = "gpt", pipeline: str = "1f1b", **asked: object) -> Sources:
    cluster, frontier = with_submeshes(name)
    plan = plan_with_pipelines(name, pipeline=pipeline, **asked)
    return Sources(name, plan, GRAPHS[name](), profile_of(name), cluster, frontier, digest="sha256:0123456789abcdef")


def deep_sources(layers: int) -> Sources:
    """A GPT of so many layers, data parallel on two devices, every link computed again: nothing is solved."""
    graph = gpt_graph(layers)
    profile, cluster = profile_graph(graph), preset()
    sharding = data_parallel(graph, 2).sharding
    point = price_point(Workload(graph, profile, cluster, 2.0), sharding, Proof("none", "given", 0.0, 0.0, 0.0, 0, 0))
    frontier = Frontier(point.peak_bytes, 2.0, (Mesh(cluster.axes),), (point,), BASELINES)
    settings = Checkpoint(recompute=Recompute("full"))
    candidate = evaluate(graph, profile, cluster, frontier, 0, settings)
    plan = choose([candidate], cluster, frontier, "conf/solve", graph)
    return Sources(f"{layers} layers", plan, graph, profile, cluster, frontier, digest="sha256:0123456789abcdef")


def measured_of(plan: Plan) -> Report:
    step, peak = plan.prediction.step_seconds, plan.prediction.peak_bytes
    return Report(
        steps=3,
        ranks=plan.ranks,
        losses=(3.0, 2.5, 2.25),
        step_seconds=(2 * step, step, 1.1 * step),
        median_step_seconds=1.1 * step,
        samples_per_second=100.0,
        peak_bytes=(peak, peak + 8),
        predicted_step_seconds=step,
        predicted_peak_bytes=peak,
        module_edited=False,
        compared=(Compared("step_ms", 1.1e3 * step, 1e3 * step, 1.1), Compared("other_ms", 1.0, 0.0, None)),
    )
