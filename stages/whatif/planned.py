"""Answers by the planner: the configured model, traced, profiled, solved and checkpointed for every value tried.

Each question gives an answer after every try, coarse first: the last one is the best that is known.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any

from shardwright.pipeline.base.errors import BudgetError
from shardwright.pipeline.base.log import Log
from shardwright.pipeline.config import ClusterSource, Config, DType, TensorSpec, listing, load_part
from shardwright.pipeline.ir.codec import encode
from shardwright.pipeline.ir.graph import OpGraph, Role
from shardwright.pipeline.ir.plan import Plan
from shardwright.pipeline.tracking.headline import mesh_text
from shardwright.stages.whatif.answer import PLANNER, Answer, Question, Row, WhatIfError, largest_in_words, short
from shardwright.stages.whatif.planner import Planner, PlanOutcome, slower, with_budget
from shardwright.stages.whatif.presets import described_gpus
from shardwright.stages.whatif.search import FitLimit, changes, fewest, largest, least

NEAR = 0.01  # budgets are found to this part of themselves
GRID = 12  # budgets at which the plan is looked at before neighbours that differ are narrowed down
Answers = Iterator[Answer]  # better and better ones
LONGEST = ("context", "max_position_embeddings", "n_positions", "n_ctx", "block_size", "max_seq_len", "seq_len")


@dataclass(frozen=True)
class ByPlanner:
    """A method for each question."""

    root: Path
    question: Question
    planner: Planner
    config: Config
    log: Log

    def about(self) -> str:
        budget = self.config.solve.memory_budget_gb
        memory = "all of the memory" if budget is None else f"{budget:g} GB"
        return f"{self.config.choices['model']} on {self.config.choices['cluster']}, {memory} of each device"

    def plan(self, config: Config, what: str, *, of_any: bool = False) -> PlanOutcome:
        """`of_any`: all else that is tried fails as this does, unless it is for want of memory."""
        found = self.planner.plan(config)
        if of_any and found.error is not None and not isinstance(found.error, BudgetError):
            raise found.error
        told = f"{found.plan.prediction.step_seconds * 1e3:.2f} ms" if found.plan else f"no: {short(found.refused)}"
        self.log.info("%s: %s", what, told)
        return found

    def _plan_or_raise(self, config: Config, what: str) -> tuple[PlanOutcome, Plan]:
        found = self.plan(config, what, of_any=True)
        if found.plan is None:
            assert found.error is not None
            raise found.error
        return found, found.plan

    # ---- batch and sequence

    def batch(self) -> Answers:
        """The largest first dim of the batch: of one micro-batch, where a step has several."""
        start = _size(self.config, "batch", 0)
        return self._largest("batch", 0, start, self.question.step or self.planner.cluster(self.config).devices)

    def sequence(self) -> Answers:
        """The largest second dim of the batch; arguments of the module that limit it grow along."""
        return self._largest("sequence", 1, _size(self.config, "sequence", 1), self.question.step or 16)

    def _largest(self, name: str, dim: int, start: int, step: int) -> Answers:
        tried: dict[int, PlanOutcome] = {}

        def needs(size: int) -> float:
            tried[size] = self.plan(_with_dim(self.config, dim, size), f"{name} {size}", of_any=not tried)
            return needs_of(tried[size])

        limit = None
        for limit in largest(start, step, self.question.most or 1 << 20, needs):
            rows = tuple(
                {name: size, **_row(found, _samples(_with_dim(self.config, dim, size)))}
                for size, found in sorted(tried.items())
            )
            figures = {**vars(limit), "step": step}
            yield Answer(name, PLANNER, self.about(), largest_in_words(name, limit, step), rows, figures)
        if limit is None or limit.fits is None:
            smallest = tried[min(tried)].error
            assert smallest is not None
            if not isinstance(smallest, BudgetError):  # of the model, the devices or a setting
                raise smallest
            raise WhatIfError(f"not even a {name} of {min(tried)} fits: {smallest.what}", remedy=smallest.remedy)

    # ---- devices

    def devices(self) -> Answers:
        """The fewest: first of one host, then whole hosts."""
        cluster = self.config.cluster
        host = max(cluster.host_sizes)
        most = self.question.most or max(sum(cluster.host_sizes), 8 * host)
        floor = self._fewest_devices()
        tried: dict[int, PlanOutcome] = {}

        def fits(count: int) -> bool:
            nodes = max(1, count // host)
            on = replace(self.config, cluster=replace(cluster, devices=count // nodes, nodes=nodes, per_host=None))
            tried[count] = self.plan(on, f"{count} devices")
            return tried[count].fits

        counts = [*range(1, min(host, most) + 1)]
        if cluster.source is not ClusterSource.probe and cluster.preset.network_gbytes_per_s is not None:
            counts += range(2 * host, most + 1, host)  # more hosts only where their network is described
        within = [n for n in counts if n >= floor]
        for limit in fewest(within, fits) if within else [FitLimit(None, None)]:
            rows = [{"devices": count, **_row(found, _samples(self.config))} for count, found in tried.items()]
            yield Answer.of_devices(PLANNER, self.about(), limit, most, rows)

    def _fewest_devices(self) -> int:
        """Those that hold values and gradients alone, each once: fewer cannot do."""
        budget = self.config.solve.memory_budget_gb or self.config.cluster.memory_gb
        graph: OpGraph = self.planner.made("graph", self.config).body
        kept = 2 * sum(value.type.nbytes for value in graph.of_role(Role.PARAMETER))
        return 1 if budget is None else ceil(kept / (budget * 1e9))

    # ---- budget

    def budget(self) -> Answers:
        """Where the plan changes as the budget falls from what the fastest plan needs to the least that fits.

        Guessed along the frontier of one solve, by choosing recompute for each budget anew; then planned on both sides
        of every guess, and between two sides that differ until they are neighbours.
        """
        config, planner = with_budget(self.config, None), self.planner
        frontier = planner.frontier(config)
        _, fastest = self._plan_or_raise(config, "all of the memory")
        top = fastest.prediction.peak_bytes

        @cache
        def along(nbytes: int) -> PlanOutcome:
            return planner.plan(config, {"frontier": replace(frontier, budget_bytes=nbytes)})

        @cache
        def planned(nbytes: int) -> PlanOutcome:
            return self.plan(with_budget(config, nbytes), f"{nbytes / 1e9:.4g} GB")

        def told(by: Callable[[int], PlanOutcome], bottom: FitLimit, found: Sequence[tuple[int, int]]) -> Answer:
            edges = dict.fromkeys((bottom.fits or top, *(high for _, high in found)))
            rows = [(nbytes, by(nbytes)) for nbytes in edges]
            return self._of_budgets(top, bottom, found, rows, "guessed" if by is along else "planned")

        guess = _tightest(along, 1)
        yield told(along, FitLimit(guess, _below(guess)), ())
        even = [round(guess * (top / guess) ** (n / GRID)) for n in range(1, GRID)]
        tried = [guess, *even, top, *(p.peak_bytes for p in frontier.points if guess < p.peak_bytes < top)]
        guessed: list[tuple[int, int]] = []
        for guessed in changes(tried, NEAR, lambda nbytes: signature(along(nbytes).plan)):
            yield told(along, FitLimit(guess, _below(guess)), guessed)
        bottom = FitLimit(guess, _below(guess))
        if not planned(guess).fits or planned(_below(guess)).fits:  # planning does not agree with the frontier
            for bottom in least(0, _tightest(planned, 1), NEAR, lambda nbytes: planned(nbytes).fits):
                yield told(planned, bottom, guessed)
        assert bottom.fits is not None
        known = [bottom.fits, *(side for pair in guessed for side in pair if side > bottom.fits), top]
        for found in changes(known, NEAR, lambda nbytes: signature(planned(nbytes).plan)):
            yield told(planned, bottom, found)

    def _of_budgets(
        self,
        top: int,
        bottom: FitLimit,
        found: Sequence[tuple[int, int]],
        planned: Sequence[tuple[int, PlanOutcome]],
        how: str,
    ) -> Answer:
        assert bottom.fits is not None and bottom.fails is not None
        samples = _samples(self.config)
        rows = tuple({"from_gb": nbytes / 1e9, "by": how, **_row(one, samples)} for nbytes, one in planned)
        said = (
            f"{bottom.fits / 1e9:.4g} GB is the least that fits, to 1%; the plan changes at {len(found)} budgets above"
            f" it, and from {top / 1e9:.4g} GB on it is the fastest"
        )
        figures = {
            "least_gb": bottom.fits / 1e9,
            "too_small_gb": bottom.fails / 1e9,
            "changes": [{"below_gb": low / 1e9, "from_gb": high / 1e9} for low, high in found],
            "enough_gb": top / 1e9,
        }
        about = f"{self.config.choices['model']} on {self.config.choices['cluster']}"
        return Answer("budget", PLANNER, about, said, rows, figures)

    # ---- links and clusters

    def link(self) -> Answers:
        """Each factor beside the links as they are: with the same layouts, and planned anew."""
        config, planner = self.config, self.planner
        cluster, samples = planner.cluster(config), _samples(config)
        found, now = self._plan_or_raise(config, "links as they are")
        rows: list[Row] = [{"links": "as they are", "same_layouts_ms": _ms(now), **_row(found, samples)}]
        yield Answer.of_links(PLANNER, self.about(), rows)
        for factor in self.question.factors:
            frontier = planner.frontier(config)
            same_layouts = replace(  # none where the plan is a pipeline
                frontier,
                points=() if now.pipelined else tuple(p for p in frontier.points if p.sharding == now.sharding),
                submesh_points=(),
                meshes=tuple(slower(mesh, factor) for mesh in frontier.meshes),
            )
            changed = {"cluster": slower(cluster, factor)}
            again = planner.plan(config, changed)
            same = planner.plan(config, changed | {"frontier": same_layouts})
            self.log.info("%s: %s", factor, again.refused or f"{_ms(again.plan):.2f} ms")
            rows.append({"links": str(factor), "same_layouts_ms": _ms(same.plan), **_row(again, samples)})
            yield Answer.of_links(PLANNER, self.about(), rows)

    def clusters(self) -> Answers:
        names, known = self.question.clusters or self._comparable(), listing(self.root, "cluster")
        wrong = next((name for name in names if name not in known), None)
        if wrong is not None:
            raise WhatIfError(f"there is no cluster '{wrong}'", remedy=f"choose from: {', '.join(known)}")
        self.planner.made("graph", self.config)  # a model that cannot be traced is told once, not for each cluster
        rows: list[Row] = []
        for name in names:
            cluster, root = load_part(self.root, "cluster", name), replace(self.config.root, cluster=name)
            found = self.plan(replace(self.config, cluster=cluster, root=root), name)
            devices = sum(cluster.host_sizes)
            rows.append({"cluster": name, "devices": devices, **_row(found, _samples(self.config))})
            yield Answer.of_clusters(PLANNER, self.config.choices["model"], rows)

    def _comparable(self) -> tuple[str, ...]:
        """The chosen cluster, and those of GPUs on one host that are described: few devices first."""
        own = self.config.choices["cluster"]
        described = described_gpus(self.root).items()
        return (own, *(name for name, one in described if len(one.host_sizes) == 1 and name != own))


def needs_of(found: PlanOutcome) -> float:
    """Of what a device has; infinite where that is not known."""
    if found.plan is not None:
        return min(1.0, found.plan.prediction.peak_bytes / found.plan.budget_bytes)
    error = found.error
    return max(math.nextafter(1, 2), error.least / error.budget) if isinstance(error, BudgetError) else math.inf


def _tightest(at: Callable[[int], PlanOutcome], nbytes: int) -> int:
    """The least budget that is accepted, as refusals name it, from one that is too small."""
    while isinstance(error := at(nbytes).error, BudgetError):
        nbytes = max(nbytes + 1, error.least)
    return nbytes


def _below(nbytes: int) -> int:
    return int(nbytes * (1 - NEAR))


# ---- sizes that are tried


def _size(config: Config, name: str, dim: int) -> int:
    """The size of that dim, which all tensors of the batch that have it share."""
    found = {own: spec.shape[dim] for own, spec in config.model.batch.items() if _has(spec, dim)}
    if len(set(found.values())) != 1:
        sizes = ", ".join(f"{own} {size}" for own, size in found.items()) or "none has it"
        what = f"there is no one {name} among dims {dim}: {sizes}"
        raise WhatIfError(
            what, where=f"conf/model/{config.choices['model']}.yaml: batch", remedy="ask another question"
        )
    return next(iter(found.values()))


def _has(spec: TensorSpec, dim: int) -> bool:
    """Every tensor has a batch; tokens and vectors one after another have a sequence, features and images have none."""
    whole = spec.dtype in (DType.int64, DType.int32, DType.bool)
    return dim == 0 or (len(spec.shape) > 1 if whole else len(spec.shape) == 3)


def _with_dim(config: Config, dim: int, size: int) -> Config:
    specs = dict(config.model.batch)
    for name, spec in specs.items():
        if _has(spec, dim):
            specs[name] = replace(spec, shape=[size if at == dim else old for at, old in enumerate(spec.shape)])
    module = _room_for(config.model.module, size) if dim == 1 else config.model.module
    return replace(config, model=replace(config.model, batch=specs, module=module))


def _room_for(arguments: Any, size: int) -> Any:
    """With every argument that names the longest sequence at least this large."""
    if not isinstance(arguments, dict):
        return arguments
    return {
        name: max(value, size) if name in LONGEST and isinstance(value, int) else _room_for(value, size)
        for name, value in arguments.items()
    }


# ---- plans in words


def signature(plan: Plan | None) -> str:
    """Equal for plans with the same partitions, meshes, layouts and number of recompute regions."""
    if plan is None:
        return ""
    parts = [
        (part.first, part.last, part.axes, encode(part.sharding), sum(region.recompute for region in part.regions))
        for part in plan.partitions
    ]
    return json.dumps([plan.schedule, plan.micro_batches, plan.slices, parts], sort_keys=True)


def _samples(config: Config) -> int:
    """Of a step."""
    first = next(iter(config.model.batch.values())).shape[0]
    return int(first) * config.train.gradient_accumulation


def _ms(plan: Plan | None) -> float | None:
    return plan.prediction.step_seconds * 1e3 if plan else None


def _row(found: PlanOutcome, samples: int) -> Row:
    plan = found.plan
    return {
        "step_ms": _ms(plan),
        "samples_per_s": samples / plan.prediction.step_seconds if plan else None,
        "peak_gb": plan.prediction.peak_bytes / 1e9 if plan else None,
        "plan": _plan_words(plan) if plan else found.refused,
    }


def _plan_words(plan: Plan) -> str:
    """`d0=2 x d1=2, 3 of 12 parameters split, 4 with ZeRO, 2 recompute regions`"""
    shardings = [part.sharding for part in plan.partitions]
    names = {name for sharding in shardings for name in sharding.storage}
    split = {n for s in shardings for n, lies in s.storage.items() if any(state.kind == "S" for state in lies.states)}
    zero = {name for sharding in shardings for name in (*sharding.state, *sharding.regathered)}
    regions = sum(region.recompute for part in plan.partitions for region in part.regions)
    parts = [
        f"{plan.schedule}, {mesh_text(plan)}" if plan.pipelined else mesh_text(plan),
        f"{len(split)} of {len(names)} parameters split" if split else "",
        f"{len(zero)} with ZeRO" if zero else "",
        f"{regions} recompute regions" if regions else "no recompute",
    ]
    return ", ".join(part for part in parts if part)
