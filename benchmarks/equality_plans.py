"""The plans of benchmarks.equality: the solver's own, plans with a name, and any valid strategy for each op."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from math import isfinite, prod

from benchmarks.equality_models import GPT, MODELS, build
from shardwright.pipeline.base.errors import ShardwrightError
from shardwright.pipeline.config import Backend, Checkpoint, Recompute, Solve
from shardwright.pipeline.cost.step import Workload
from shardwright.pipeline.ir.cluster import COLLECTIVES, Axis, Cluster, Compute, Curve, LinkCost, Mesh
from shardwright.pipeline.ir.graph import OpGraph, Role
from shardwright.pipeline.ir.layout import Layout, R, S
from shardwright.pipeline.ir.plan import Frontier, FrontierPoint, Plan, Prediction, Proof, Region, Sharding
from shardwright.pipeline.ir.verify import gathered, verify_graph, verify_sharding
from shardwright.pipeline.ops.mesh import op_strategies, view_op
from shardwright.pipeline.ops.uneven import uneven_in
from shardwright.pipeline.sharding.lowering import with_paths
from shardwright.pipeline.tracing.build import fake_mode, to_fake
from shardwright.pipeline.tracing.chain import find_chain
from shardwright.pipeline.tracing.export import export_loss
from shardwright.pipeline.tracing.lower import lower as to_ops
from shardwright.pipeline.tracing.simplify import simplify
from shardwright.stages.checkpoint.choose import choose, evaluate
from shardwright.stages.codegen.module import write_module
from shardwright.stages.profile.by_table import profile_graph
from shardwright.stages.solve.on_mesh import MeshProblem, price_point
from shardwright.stages.solve.problem.build import to_sharding
from shardwright.stages.solve.problem.families import Families, Parallel
from shardwright.stages.solve.problem.storage import Way, storage_choices
from shardwright.stages.solve.search.decomposition import fastest
from shardwright.stages.solve.search.restricted import restrict
from tests.unpipelined import whole_plan

COPIES, MEMORY, SECONDS = 2.0, 4 * 10**9, 5.0
TIGHT = 0.6  # of what the solver's plan needs beyond what stays, where it is to recompute
ROLES = {
    "ddp": Parallel.data,
    "zero1": Parallel.zero1,
    "zero3": Parallel.zero3,
    "tensor": Parallel.tensor,
    "sequence": Parallel.sequence,
}
SOLVER, VOCABULARY, BOTH = "solver", "vocabulary", "ddp x tensor"
RANDOM = "random"
NAMES = (SOLVER, *ROLES, VOCABULARY, BOTH)
Kept = tuple[tuple[int, ...], ...]  # of each node of a problem the choices that are left
_PROOF = Proof("", "given", 0.0, 0.0, 0.0, 0, 0)


@dataclass(frozen=True)
class Case:
    """A program, and what it was written from."""

    model: str
    name: str
    sizes: tuple[int, ...]
    graph: OpGraph
    plan: Plan
    text: str

    @property
    def ranks(self) -> int:
        return prod(self.sizes)

    @property
    def label(self) -> str:
        return f"{self.model}, {' x '.join(map(str, self.sizes))}, {self.name}"


@dataclass(frozen=True)
class Skipped:
    """A plan that a model does not allow on so many ranks."""

    model: str
    ranks: int
    name: str
    why: str

    @property
    def label(self) -> str:
        return f"{self.model}, {self.ranks}, {self.name}"


class NotPossible(Exception):
    """There is no plan of a kind, and why."""


def cases(model: str, ranks: int, names: tuple[str, ...]) -> Iterator[Case | Skipped]:
    """Each plan without and with recompute, or once that and why it is skipped."""
    planners = {1: _Planner(model, (ranks,))}
    if ranks > 2 and ranks % 2 == 0:
        planners[2] = _Planner(model, (2, ranks // 2))
    for name in names:
        planner = planners.get(2 if name == BOTH else 1)
        try:
            if planner is None:
                raise NotPossible(f"{ranks} ranks are no mesh of two axes")
            sharding = planner.sharding(name)
        except NotPossible as why:
            yield Skipped(model, ranks, name, str(why))
            continue
        for recompute in ("off", "optimal" if name == SOLVER else "full"):
            plan = planner.plan(sharding, Recompute(recompute))
            label = name if recompute == "off" else f"{name} + recompute"
            yield _case(model, label, planner.graph, plan, planner.sizes)


def _case(model: str, name: str, graph: OpGraph, plan: Plan, sizes: tuple[int, ...]) -> Case:
    verify_sharding(graph, plan.sharding, plan.sizes, uneven_in(graph).spots)
    text = write_module(graph, plan)
    return Case(model, name, sizes, graph, plan, text)


@cache
def graph_of(model: str) -> OpGraph:
    """As the stage traces it, in float32."""
    mode = fake_mode()
    module = to_fake(build(model), mode).train()
    batch = {name: mode.from_tensor(tensor) for name, tensor in MODELS[model][1](0).items()}
    graph = find_chain(simplify(to_ops(export_loss(module, batch), module, tuple(batch))))
    verify_graph(graph)
    return graph


def cluster_of(sizes: tuple[int, ...]) -> Cluster:
    """Links and launches that cost little: tiny models are worth splitting. An all-reduce moves its bytes twice."""
    costs = {kind: LinkCost(5e-8, 1e9 if kind == "all_reduce" else 2e9) for kind in COLLECTIVES}
    axes = tuple(Axis(f"d{n}", size, costs) for n, size in enumerate(sizes))
    compute = Compute(Curve((1.0,), (5e10,)), 1e10, 1e-8, 1e-8)
    return Cluster("preset", "cpu", prod(sizes), MEMORY, compute, axes)


class _Planner:
    def __init__(self, model: str, sizes: tuple[int, ...]) -> None:
        self.graph, self.cluster = graph_of(model), cluster_of(sizes)
        self.profile = profile_graph(self.graph)
        settings = Solve(backend=Backend.highs, frontier_points=1)
        log = logging.getLogger("benchmarks.equality")
        self.workload = Workload(self.graph, self.profile, self.cluster, COPIES)
        self.solver = MeshProblem(self.workload, settings, "", log)

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.solver.choices.sizes

    def sharding(self, name: str) -> Sharding:
        problem, choices = self.solver.problem, self.solver.choices
        if name == SOLVER:
            return to_sharding(self.graph, choices, fastest(problem, SECONDS))
        left = restrict(problem, self._vocabulary() if name == VOCABULARY else self._family(name))
        picked = left.expand(fastest(left.problem, SECONDS))
        if not isfinite(problem.cost(picked)):
            raise NotPossible("its choices do not go together")
        return to_sharding(self.graph, choices, picked)

    def _family(self, name: str) -> Kept:
        roles = (Parallel.data, Parallel.tensor) if name == BOTH else (ROLES[name],)
        families = Families(self.graph, self.solver.choices)
        kept = families.kept(roles)
        if kept is None:
            along = Parallel.sequence not in roles or families.splits_sequence(0)
            what = "not every op and parameter" if along else "nothing between the blocks"
            raise NotPossible(f"{what} can be split so on {' x '.join(map(str, self.sizes))} ranks")
        return kept

    def _vocabulary(self) -> Kept:
        """Tables and heads with a row for each class of the loss: read and stored in shards of these rows."""
        choices, graph = self.solver.choices, self.graph
        losses = [op for op in graph.ops if op.target.startswith("aten.cross_entropy")]
        classes = {graph.values[op.inputs[0]].type.shape[1] for op in losses}
        split, readers = Layout((S(0),)), graph.consumers()
        rows = [v.name for v in graph.of_role(Role.PARAMETER) if len(v.type.shape) == 2 and v.type.shape[0] in classes]
        beside = {name for table in rows for op in readers[table] for name in op.inputs}  # biases among them
        tables = {
            value.name
            for value in graph.of_role(Role.PARAMETER)
            if value.name in beside and value.type.shape[0] in classes and split.holds(value.type.shape, choices.sizes)
        }
        if not tables:
            raise NotPossible(f"no table with a row for each class of the loss divides by {self.sizes[0]}")
        kept: list[tuple[int, ...]] = [()] * len(choices.index)
        for name, number in choices.index.items():
            if name in choices.ops:
                read = [i for i, n in enumerate(graph.op(name).inputs) if n in tables]
                options = choices.ops[name]
                kept[number] = tuple(
                    k for k, option in enumerate(options) if all(option.inputs[i] == split for i in read)
                )
            elif name in tables:
                kept[number] = tuple(k for k, way in enumerate(choices.storage[name]) if way.layout == split)
            else:
                kept[number] = tuple(range(len(self.solver.problem.nodes[number].costs)))
            if not kept[number]:
                raise NotPossible(f"{name} cannot take the table in shards")
        return tuple(kept)

    def plan(self, sharding: Sharding, recompute: Recompute) -> Plan:
        point = price_point(self.workload, sharding, _PROOF)
        if recompute is Recompute.optimal:
            span = point.peak_bytes - point.resident_bytes
            for share in (TIGHT, (1 + TIGHT) / 2):
                try:
                    return self._chosen(point, recompute, point.resident_bytes + int(share * span))
                except ShardwrightError:
                    continue
            recompute = Recompute.full
        return self._chosen(point, recompute, MEMORY)

    def _chosen(self, point: FrontierPoint, recompute: Recompute, budget: int) -> Plan:
        frontier = Frontier(budget, COPIES, (Mesh(self.cluster.axes),), (point,))
        settings = Checkpoint(recompute=recompute)
        candidate = evaluate(self.graph, self.profile, self.cluster, frontier, 0, settings)
        return choose([candidate], self.cluster, frontier, "")


# ---- any valid strategy for each op


def random_cases(count: int, meshes: list[tuple[int, ...]], seed: int = 0) -> Iterator[Case]:
    for number in range(count):
        sizes = meshes[number % len(meshes)]
        graph, draw = graph_of(GPT), random.Random(1000 * seed + number)
        plan = _random_plan(graph, sizes, draw)
        yield _case(GPT, f"{RANDOM} {number}", graph, plan, sizes)


@cache
def _options(sizes: tuple[int, ...]) -> dict:
    graph = graph_of(GPT)
    return {op.name: op_strategies(view_op(graph, op), sizes) for op in graph.ops}


def _random_plan(graph: OpGraph, sizes: tuple[int, ...], draw: random.Random) -> Plan:
    """Each plan likes some states more than others on each axis, so that runs of equal ones occur."""
    options = _options(sizes)
    liking = [{state: draw.choice([0.1, 1.0, 5.0]) for state in "RBSP"} for _ in sizes]

    def weight(layout: Layout) -> float:
        return prod(like[state.kind] for like, state in zip(liking, layout.states, strict=True))

    picked = {n: draw.choices(o, [weight(s.outputs[0]) for s in o])[0] for n, o in options.items()}
    readers = graph.consumers()
    stored = {}
    for value in graph.of_role(Role.PARAMETER):
        reading = [(op, i) for op in readers[value.name] for i, n in enumerate(op.inputs) if n == value.name]
        wanted = {s.inputs[i] for op, i in reading for s in options[op.name]}
        stored[value.origin] = draw.choice(storage_choices(value.type.shape, wanted, sizes, shards=True))
    inputs = {v.name: _any_input(v.type.shape, sizes, draw) for v in graph.of_role(Role.INPUT)}
    sharding = Sharding(
        picked,
        {name: way.layout for name, way in stored.items()},
        inputs,
        state={name: way.state for name, way in stored.items() if way.state != way.layout},
    )
    there = gathered(graph, sharding, sizes)
    again = tuple(name for name, way in stored.items() if way.way is Way.regathered and name in there)
    cluster = cluster_of(sizes)
    sharding = with_paths(graph, replace(sharding, regathered=again), cluster)
    axes = tuple((axis.name, axis.size) for axis in cluster.axes)
    regions = _any_regions(0, len(graph.chain) - 1, draw, draw.randint(0, 2))
    return whole_plan(axes, "cpu", 0, sharding, regions, Prediction(*[0] * 7), draw.choice([1, 1, 2]))


def _any_input(shape: tuple[int, ...], sizes: tuple[int, ...], draw: random.Random) -> Layout:
    while True:
        layout = Layout(tuple(draw.choice([R, *(S(d) for d in range(len(shape)))]) for _ in sizes))
        if layout.fits(shape, sizes):
            return layout


def _any_regions(first: int, last: int, draw: random.Random, depth: int, inner: bool = False) -> tuple[Region, ...]:
    """Links one by one, and regions that recompute, nested up to a depth."""
    found: list[Region] = []
    while first <= last:
        end = draw.randint(first, last)
        whole = inner and not found and end == last  # a region that is its only inner region is one region
        if depth and not whole and draw.random() < 0.6:
            found.append(Region(first, end, True, _any_regions(first, end, draw, depth - 1, inner=True)))
            first = end + 1
        else:
            found.append(Region(first, first, False, ()))
            first += 1
    return tuple(found)
