"""Small traced models, clusters and frontiers that several tests share; each is made once."""

from __future__ import annotations

import logging
from collections.abc import Container
from dataclasses import replace
from math import prod

import torch
from torch import nn

from shardwright.pipeline.config import Backend, Checkpoint, ClusterSettings, Preset, Recompute, Solve
from shardwright.pipeline.config.schema import ClusterSource, Device
from shardwright.pipeline.cost.step import Workload
from shardwright.pipeline.ir.cluster import Cluster, Mesh
from shardwright.pipeline.ir.graph import OpGraph
from shardwright.pipeline.ir.plan import Frontier, Plan, Strategy
from shardwright.pipeline.ir.profile import Profile
from shardwright.pipeline.ir.verify import verify_graph
from shardwright.pipeline.models.gpt import GPT
from shardwright.pipeline.models.mlp import MLP
from shardwright.pipeline.ops.mesh import op_strategies, view_op
from shardwright.pipeline.tracing.chain import find_chain
from shardwright.pipeline.tracing.export import export_loss
from shardwright.pipeline.tracing.lower import lower
from shardwright.pipeline.tracing.simplify import simplify
from shardwright.stages.checkpoint.choose import choose, evaluate
from shardwright.stages.cluster.run import from_preset
from shardwright.stages.profile.by_table import profile_graph
from shardwright.stages.solve.answer.frontier import FrontierSearch, Solution
from shardwright.stages.solve.on_mesh import price_point
from shardwright.stages.solve.problem.build import Choices, build, to_sharding
from shardwright.stages.solve.problem.data import Problem
from tests.made import made_once
from tests.skips import Ladder, Shared, sequences

SILENT = logging.getLogger("tests.silent")
SILENT.addHandler(logging.NullHandler())
SILENT.propagate = False


def trace(
    model: nn.Module,
    batch: dict[str, torch.Tensor],
    device: str = "cpu",
    *,
    amp: bool = False,
    stay: Container[str] = (),
) -> OpGraph:
    """What the stage does, without its configuration."""
    program = export_loss(model.train(), batch, device, amp=amp)
    graph = find_chain(simplify(lower(program, model, tuple(batch), amp=amp, stay=stay)))
    verify_graph(graph)
    return graph


def gpt(layers: int = 2, tie: bool = False) -> GPT:
    torch.manual_seed(0)
    return GPT(vocab_size=40, context=8, width=16, layers=layers, heads=2, tie=tie)


def gpt_batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(40, (4, 9), generator=generator)
    return {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def mlp() -> MLP:
    torch.manual_seed(0)
    return MLP(features=12, width=32, classes=6, depth=3)


def mlp_batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "inputs": torch.randn(8, 12, generator=generator),
        "targets": torch.randint(6, (8,), generator=generator),
    }


@made_once
def gpt_graph(layers: int = 2, tie: bool = False) -> OpGraph:
    return trace(gpt(layers, tie), gpt_batch())


@made_once
def mlp_graph() -> OpGraph:
    return trace(mlp(), mlp_batch())


@made_once
def ladder_graph() -> OpGraph:
    torch.manual_seed(0)
    return trace(Ladder(), sequences())


@made_once
def shared_graph() -> OpGraph:
    torch.manual_seed(0)
    return trace(Shared(), sequences())


GRAPHS = {
    "gpt": gpt_graph,
    "gpt_tied": lambda: gpt_graph(tie=True),
    "mlp": mlp_graph,
    "ladder": ladder_graph,
    "shared": shared_graph,
}


@made_once
def profile_of(name: str) -> Profile:
    return profile_graph(GRAPHS[name]())


def preset(devices: int = 2, **figures: float) -> Cluster:
    """A laptop's figures; tiny models need tiny launches, or nothing else would count."""
    known = {
        "matmul_gflops": 50,
        "memory_gbytes_per_s": 10,
        "launch_us": 0.01,
        "latency_us": 0.05,
        "link_gbytes_per_s": 2,
    }
    settings = ClusterSettings(
        source=ClusterSource.preset,
        device=Device.cpu,
        devices=devices,
        memory_gb=4,
        preset=Preset(**{**known, **figures}),
    )
    return from_preset(settings)


def mesh(sizes: tuple[int, ...], **figures: float) -> Cluster:
    """The same figures on every axis of a mesh."""
    cluster = preset(2, **figures)
    axes = tuple(replace(cluster.axes[0], name=f"d{n}", size=size) for n, size in enumerate(sizes))
    return replace(cluster, devices=prod(sizes), axes=axes)


BACKENDS = [own.value for own in Backend]


def solve_settings(backend: str = "highs", **changes: object) -> Solve:
    return Solve(**{"backend": Backend(backend), "gap": 1e-9, "frontier_points": 6, **changes})


@made_once
def solved(
    name: str, devices: int = 2, copies: float = 2.0, micro_batches: int = 1, gap: float = 1e-2
) -> tuple[Problem, Choices, tuple[Solution, ...]]:
    """By default with a gap that few plans have to be searched for by the integer program."""
    problem, choices = build(Workload(GRAPHS[name](), profile_of(name), preset(devices), copies, micro_batches))
    sweep = FrontierSearch(problem, solve_settings(gap=gap), "conf/solve/test.yaml", SILENT)
    return problem, choices, tuple(sweep.frontier(float("inf"), lambda done, note="": None))


@made_once
def frontier_of(name: str, devices: int = 2, micro_batches: int = 1) -> Frontier:
    graph, cluster = GRAPHS[name](), preset(devices)
    workload = Workload(graph, profile_of(name), cluster, 2.0, micro_batches)
    _, choices, solutions = solved(name, devices, micro_batches=micro_batches)
    points = [price_point(workload, to_sharding(graph, choices, s.picked), s.proof) for s in solutions]
    return Frontier(cluster.memory_bytes, 2.0, (Mesh(cluster.axes),), tuple(points), micro_batches=micro_batches)


def plan_of(
    name: str, devices: int = 2, budget: int | None = None, recompute: str = "optimal", points: slice = slice(None)
) -> Plan:
    """The plan that the checkpoint stage would choose of the frontier's points, within a budget in bytes."""
    frontier = frontier_of(name, devices)
    frontier = replace(frontier, points=frontier.points[points], budget_bytes=budget or frontier.budget_bytes)
    graph, profile, cluster = GRAPHS[name](), profile_of(name), preset(devices)
    settings = Checkpoint(recompute=Recompute(recompute))
    candidates = [evaluate(graph, profile, cluster, frontier, i, settings) for i in range(len(frontier.points))]
    return choose(candidates, cluster, frontier, "conf/solve/test.yaml: memory_budget_gb")


def graph_strategies(graph: OpGraph, sizes: tuple[int, ...]) -> dict[str, tuple[Strategy, ...]]:
    return {op.name: op_strategies(view_op(graph, op), sizes) for op in graph.ops}
