"""A model traced and shortened, and what is found of it on a cluster: plans, the largest batch, the fewest devices."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardwright.pipeline.base.errors import BudgetError
from shardwright.pipeline.base.log import Log
from shardwright.pipeline.config import (
    ClusterSettings,
    Config,
)
from shardwright.pipeline.config.schema import Backend, Checkpoint, Pipeline, Precision, Recompute, Search, Solve
from shardwright.pipeline.cost.resident import Kept, resident_parts, total_of
from shardwright.pipeline.cost.step import Workload
from shardwright.pipeline.cost.unsplit import card_of, step_seconds
from shardwright.pipeline.ir.cluster import NO_HOST, Cluster, Mesh
from shardwright.pipeline.ir.graph import OpGraph, Role
from shardwright.pipeline.ir.plan import Frontier, FrontierPoint, Plan, Sharding
from shardwright.pipeline.ir.profile import Profile, as_run
from shardwright.pipeline.ir.verify import verify_sharding
from shardwright.pipeline.ops.uneven import uneven_in
from shardwright.pipeline.sharding.lowering import with_paths
from shardwright.pipeline.sharding.slices import fits, grown, sliced
from shardwright.pipeline.tracing.shortened import Shortened, shortened
from shardwright.pipeline.tracing.trace import trace
from shardwright.pipeline.tracking.headline import mesh_text
from shardwright.pipeline.user.optimizer import build_optimizer
from shardwright.stages.fit.answer import MOST_TIMES, FitAnswer, FitRow
from shardwright.stages.fit.question import WHERE, FitQuestion

FIRST_TIMES = 8  # the batch, where the largest is looked for first
WORTH = 0.15  # of a step's seconds: for less no second mesh is searched
SECONDS = 3.0  # of one solve, where elimination cannot do it
SETTINGS = Solve(backend=Backend.highs, search=Search.dp, frontier_points=2, gap=1e-2, time_limit_s=SECONDS)
WHOLE = Checkpoint(recompute=Recompute.optimal, pipeline=Pipeline("off"))
CUT = replace(WHOLE, micro_batches="solve")  # where the whole batch at once does not fit


@dataclass(frozen=True)
class FitStages:
    """What the stages do for it: no stage imports another."""

    profile: Callable[..., tuple[Profile, str]]
    optimizer_copies: Callable[..., float]
    cluster: Callable[[ClusterSettings], Cluster]
    mesh_problem: Callable[..., Any]  # of solve
    find_alone: Callable[..., list[Any]]  # of checkpoint, as the next two
    choose: Callable[..., Plan]
    evaluate: Callable[..., Any]


@dataclass(frozen=True)
class PlanFound:
    """On a cluster: the plan, or why there is none, and the plans that it was chosen from."""

    plan: Plan | None
    refused: BudgetError | None
    cluster: Cluster
    frontier: Frontier

    @property
    def seconds(self) -> float:
        return self.plan.prediction.step_seconds if self.plan else math.inf


@dataclass(frozen=True)
class FittedModel:
    """A model traced and profiled for one kind of device; all clusters of that kind share it."""

    config: Config
    stages: FitStages
    graph: OpGraph
    profile: Profile
    short: Shortened
    short_profile: Profile
    log: Log

    @classmethod
    def of(cls, config: Config, stages: FitStages, log: Log) -> FittedModel:
        traced = trace(config)
        short = shortened(traced)
        profile, small = (_profile(graph, config, stages, log) for graph in (traced, short.graph))
        graph = as_run(traced, profile.types)
        short = replace(short, whole=graph, graph=as_run(short.graph, small.types))
        return cls(config, stages, graph, profile, short, small, log)

    # ---- plans

    def plan(self, machine: ClusterSettings) -> PlanFound:
        """The fastest that fits: on one axis of all devices, and where that leaves enough to gain, on hosts x devices.

        A search on two axes takes longer than all else.
        """
        cluster = self.stages.cluster(machine)
        found = self._plan_on(cluster, cluster.mesh_candidates(1)[0])
        mesh = hosts_by_devices(cluster)
        if mesh is None or found.seconds * (1 - WORTH) < self.least_seconds(cluster):
            return found
        self.log.info("planning for %d hosts of %d", *mesh.sizes)
        return min(found, self._plan_on(cluster, mesh), key=lambda one: one.seconds)

    def least_seconds(self, cluster: Cluster) -> float:
        """Of a step on any mesh: all kernels of the unsplit one in equal parts, nothing sent, no host waited for."""
        kernels, card = self.profile.kernels, card_of(replace(cluster.compute, host=NO_HOST))
        return step_seconds(self.graph, kernels, card).step / cluster.devices if kernels else 0.0

    def _plan_on(self, cluster: Cluster, mesh: Mesh) -> PlanFound:
        points = tuple(sorted(self._points(cluster, mesh), key=lambda point: point.seconds))
        frontier = Frontier(cluster.memory_bytes, self.profile.optimizer_copies, (mesh,), points)
        refused: BudgetError | None = None
        for settings in (WHOLE, CUT):
            candidates = self._candidates(cluster, frontier, settings)
            try:
                return PlanFound(self.stages.choose(candidates, cluster, frontier, WHERE), None, cluster, frontier)
            except BudgetError as error:
                refused = error
        return PlanFound(None, refused, cluster, frontier)

    def _candidates(self, cluster: Cluster, frontier: Frontier, settings: Checkpoint) -> list[Any]:
        """Each plan with its recompute, until one fits without: those that are slower cannot be better."""
        found: list[Any] = []
        for point in frontier.points:
            one = replace(frontier, points=(point,))
            found += self.stages.find_alone(self.graph, self.profile, cluster, one, settings, WHERE)
            if found and found[-1].regions is not None and not _recomputes(found[-1]):
                break
        return found

    def _problem(self, cluster: Cluster, mesh: Mesh) -> Any:
        """Of the short model."""
        load = Workload(self.short.graph, self.short_profile, cluster.part(mesh), self.profile.optimizer_copies)
        return self.stages.mesh_problem(load, SETTINGS, WHERE, self.log)

    def _points(self, cluster: Cluster, mesh: Mesh) -> Iterator[FrontierPoint]:
        """From the fastest to the smallest: the sharding of the whole model, the price of the short one."""
        problem = self._problem(cluster, mesh)
        problem.settle(self.log)
        found = problem.points(float(cluster.memory_bytes), lambda done, note="": None)
        least = problem.least_point()
        known: list[Sharding] = []
        for point in (*found, *([least] if least else ())):
            if point.sharding not in known:
                known.append(point.sharding)
                yield self._whole(point, cluster, mesh)

    def _whole(self, point: FrontierPoint, cluster: Cluster, mesh: Mesh) -> FrontierPoint:
        expanded = self.short.expanded(point.sharding)
        verify_sharding(self.graph, expanded, mesh.sizes, uneven_in(self.graph).spots)
        return replace(point, sharding=with_paths(self.graph, expanded, cluster.part(mesh)))

    # ---- the other questions

    def least_bytes(self, cluster: Cluster, mesh: Mesh, point: FrontierPoint, parts: int) -> int | None:
        """What a plan needs for one of so many equal parts of the batch, with the recompute that needs least; None
        where the batch cannot be cut so."""
        batch = self.graph.batch
        cut = (batch // parts,) * parts
        if batch % parts or not fits(self.graph, point.sharding, mesh.sizes, cut):
            return None
        return self._needed(cluster, mesh, point, *sliced(self.graph, self.profile, cut))

    def _needed(self, cluster: Cluster, mesh: Mesh, point: FrontierPoint, graph: OpGraph, profile: Profile) -> int:
        none = Frontier(1, self.profile.optimizer_copies, (mesh,), (point,))
        return int(self.stages.evaluate(graph, profile, cluster, none, 0, WHOLE).peak_bytes)

    def largest_batch(self, found: PlanFound) -> int | None:
        """A multiple of the devices.

        The memory of a batch is the most of several straight lines. So between two batches it is no more than the line
        through theirs, by which what is named fits, and beyond them no less, by which nothing larger is tried.
        """
        batch, devices, room = self.graph.batch, found.cluster.devices, found.cluster.memory_bytes
        point = min(found.frontier.points, key=lambda point: (point.resident_bytes, point.peak_bytes))
        (mesh,) = found.frontier.meshes
        own = found.cluster, mesh, point

        def needed(times: int) -> int:
            return self._needed(*own, *grown(self.graph, self.profile, times))

        fits, least = (1.0, needed(1))
        if least > room:
            return self._within(batch, least, own) // devices * devices or None
        times, more = FIRST_TIMES, needed(FIRST_TIMES)
        if more <= room:
            most = 1 + (times - 1) * (room - least) / (more - least) if more > least else math.inf
            fits, least, times = times, more, min(MOST_TIMES, max(times + 1, math.ceil(most)))
            more = needed(times)
        largest = times if more <= room else fits + (times - fits) * (room - least) / (more - least)
        return int(batch * largest) // devices * devices

    def _within(self, batch: int, whole: int, own: tuple[Cluster, Mesh, FrontierPoint]) -> int:
        """Where the batch does not fit: by what the smallest part of it needs."""
        room = own[0].memory_bytes
        for parts in (count for count in range(batch, 1, -1) if batch % count == 0):
            least = self.least_bytes(*own, parts)
            if least is not None:
                part = batch / parts
                return int(part + (batch - part) * (room - least) / (whole - least)) if least <= room else 0
        return 0

    def fewest_devices(self, machine: ClusterSettings, found: PlanFound) -> tuple[int | None, int | None]:
        """The smallest half, quarter ... of the devices that fits, and the next one, which does not."""
        if found.plan is None:
            return None, found.cluster.devices
        fitting = found.cluster.devices
        for count in self._fewer(fitting):
            own = _sized(machine, count)
            if count < self._floor(found):
                return fitting, count
            if own is None:
                break
            self.log.info("trying %d devices", count)
            if not self._can_hold(self.stages.cluster(own)):
                return fitting, count
            fitting = count
        return fitting, None

    def _can_hold(self, cluster: Cluster) -> bool:
        """Whether the plan that keeps least for good fits, with as many micro-batches as there can be."""
        mesh, batch = cluster.mesh_candidates(1)[0], self.graph.batch
        problem = self._problem(cluster, mesh)
        least = problem.least_point() or problem.points(1.0, lambda done, note="": None)[-1]
        point = self._whole(least, cluster, mesh)
        counts = [count for count in range(batch, 0, -1) if batch % count == 0]
        needed = (self.least_bytes(cluster, mesh, point, count) for count in counts)
        return next((own for own in needed if own is not None), math.inf) <= cluster.memory_bytes

    def _fewer(self, devices: int) -> Iterator[int]:
        while devices % 2 == 0:
            devices //= 2
            yield devices

    def _floor(self, found: PlanFound) -> int:
        """Fewer cannot hold values, gradients and the optimizer's state, each once."""
        values = list(self.graph.of_role(Role.PARAMETER))
        kept = sum(value.type.nbytes for value in values) * (2 + self.profile.optimizer_copies)
        return math.ceil(kept / found.cluster.memory_bytes)

    # ---- answers

    def row(self, name: str, machine: ClusterSettings, alone: bool) -> FitRow:
        """`alone`: the only cluster, of which more is told."""
        found = self.plan(machine)
        devices, plan = found.cluster.devices, found.plan
        row = FitRow(name, devices, found.cluster.memory_bytes)
        if alone:
            fewest, fails = self.fewest_devices(machine, found)
            row = replace(row, fewest=fewest, too_few=fails, largest_batch=self.largest_batch(found))
        if plan is None:
            assert found.refused is not None
            return replace(row, why=found.refused.what)
        predicted, part = plan.prediction, plan.partitions[0]
        (mesh,) = found.frontier.meshes
        load = Workload(self.graph, self.profile, found.cluster.part(mesh), self.profile.optimizer_copies)
        kept = resident_parts(load.priced(part.sharding).sharded, self.profile.optimizer_copies)
        memory = {own.value: total_of(kept, own) for own in Kept}
        rest = predicted.peak_bytes - sum(memory.values())
        flops = sum(cost.flops_forward + cost.flops_backward for cost in self.profile.ops.values())
        half = self.config.model.precision is not Precision.fp32
        rate = (half and machine.preset.half_gflops) or machine.preset.matmul_gflops or math.inf
        return replace(
            row,
            step_seconds=predicted.step_seconds,
            samples=self.graph.batch,
            tokens=self._tokens(),
            mfu=flops / predicted.step_seconds / devices / (rate * 1e9),
            peak_bytes=predicted.peak_bytes,
            memory=memory | {"activations and what kernels need": max(0, rest)},
            seconds={
                "computing": predicted.compute_seconds,
                "computing again": predicted.recompute_seconds,
                "communication": predicted.communication_seconds,
                "optimizer": predicted.optimizer_seconds,
                "waiting for the host": predicted.host_seconds,
            },
            plan=plan_in_words(plan),
        )

    def _tokens(self) -> int | None:
        """Of a step, of a model of tokens."""
        spec = self.config.model.batch.get("input_ids")
        return spec.shape[0] * spec.shape[1] if spec is not None and len(spec.shape) > 1 else None

    def answer(self, question: FitQuestion, batch: int, rows: Sequence[FitRow]) -> FitAnswer:
        trained = sum(value.type.numel for value in self.graph.of_role(Role.PARAMETER))
        frozen = sum(v.type.numel for v in self.graph.of_role(Role.BUFFER)) if question.lora else 0
        shapes = ", ".join(f"{name} {list(spec.shape)}" for name, spec in self.config.model.batch.items())
        left, links = len(self.short.graph.chain), len(self.graph.chain)
        how = f"the solver's for {left} links of {links}, repeated for equal blocks" if left < links else "the solver's"
        return FitAnswer(
            model=question.model,
            parameters=trained,
            frozen=frozen,
            fed=shapes,
            precision=self.config.model.precision.value,
            optimizer=str(self.config.train.optimizer["_target_"]).rpartition(".")[2],
            rows=tuple(rows),
            how=f"by the planner: sharding is {how}; recompute, memory and time are those of the whole model",
        )


def _profile(graph: OpGraph, config: Config, stages: FitStages, log: Log) -> Profile:
    """As the stage makes it, without its pictures."""
    device, where = config.cluster.device.value, "conf/train: optimizer"
    build = functools.partial(build_optimizer, config.train.optimizer, where)
    profile, _ = stages.profile(graph, device, config.model.precision.value, build, log)
    return replace(profile, optimizer_copies=stages.optimizer_copies(config.train.optimizer, where, device))


def _recomputes(candidate: Any) -> bool:
    return any(region.recompute for region in candidate.regions or ())


def _sized(machine: ClusterSettings, devices: int) -> ClusterSettings | None:
    """The cluster with so many: whole hosts, or a part of one."""
    host = max(machine.host_sizes)
    if devices <= host:
        return replace(machine, devices=devices, nodes=1, per_host=None)
    return replace(machine, devices=host, nodes=devices // host, per_host=None) if devices % host == 0 else None


def hosts_by_devices(cluster: Cluster) -> Mesh | None:
    """Of a cluster of equal hosts."""
    hosts = [len(host.ranks) for host in cluster.hosts]
    sizes = (len(hosts), *set(hosts))
    return next((mesh for mesh in cluster.mesh_candidates(2) if len(hosts) > 1 and mesh.sizes == sizes), None)


def plan_in_words(plan: Plan) -> str:
    """`d0=8, 290 of 291 parameters in shards, no recompute, 2 micro-batches`"""
    sharding = plan.partitions[0].sharding
    split = {n for n, lies in sharding.storage.items() if any(state.kind == "S" for state in lies.states)}
    zero = set(sharding.state) | set(sharding.regathered)
    regions = sum(region.recompute for region in plan.partitions[0].regions)
    parts = [
        mesh_text(plan),
        f"{len(split)} of {len(sharding.storage)} parameters in shards",
        f"{len(zero)} with ZeRO" if zero else "",
        f"{regions} recompute regions" if regions else "no recompute",
        f"{plan.micro_batches} micro-batches" if plan.micro_batches > 1 else "",
    ]
    return ", ".join(part for part in parts if part)
