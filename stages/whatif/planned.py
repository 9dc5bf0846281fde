"""Answers by the planner: the configured model, traced, profiled, solved and checkpointed for every value tried."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any

from pipeline.base.errors import BudgetError
from pipeline.base.log import Log
from pipeline.config import ClusterSource, Config, DType, TensorSpec, listing, load_part
from pipeline.ir.codec import encode
from pipeline.ir.graph import OpGraph, Role
from pipeline.ir.plan import Frontier, Plan
from pipeline.tracking.headline import mesh_text
from stages.whatif.answer import PLANNER, Answer, Row, WhatIfError, short, shown
from stages.whatif.links import Slower, slower
from stages.whatif.planner import Outcome, Planner, with_budget
from stages.whatif.search import Edge, changes, fewest, largest, least

NEAR = 0.01  # budgets are found to this part of themselves
GRID = 12  # budgets at which the plan is looked at before neighbours that differ are narrowed down
LONGEST = ("context", "max_position_embeddings", "n_positions", "n_ctx", "block_size", "max_seq_len", "seq_len")


@dataclass(frozen=True)
class Asking:
    root: Path
    planner: Planner
    config: Config
    log: Log

    def about(self) -> str:
        chosen, budget = self.config.choices, self.config.solve.memory_budget_gb
        held = "all of the memory" if budget is None else f"{budget:g} GB"
        return f"{chosen['model']} on {chosen['cluster']}, {held} of each device"

    def plan(self, config: Config, what: str, *, of_any: bool = False) -> Outcome:
        """`of_any`: all else that is tried fails as this does, unless it is for want of memory."""
        found = self.planner.plan(config)
        if of_any and found.error is not None and not isinstance(found.error, BudgetError):
            raise found.error
        told = f"{found.plan.prediction.step_seconds * 1e3:.2f} ms" if found.plan else f"no: {short(found.refused)}"
        self.log.info("%s: %s", what, told)
        return found


# --------------------------------------------------------------------------------------------------- batch and sequence


def batch(asking: Asking, step: int | None, most: int | None) -> Answer:
    """The largest first dim of the batch: of one micro-batch, where a step has several."""
    start = _sizes(asking.config, 0)
    unit = step or asking.planner.cluster(asking.config).devices
    return _largest(asking, "batch", start, unit, most or 1 << 20, lambda size: _with_dim(asking.config, 0, size))


def sequence(asking: Asking, step: int | None, most: int | None) -> Answer:
    """The largest second dim of the batch; arguments of the module that limit it grow along."""
    start = _sizes(asking.config, 1)
    return _largest(
        asking, "sequence", start, step or 16, most or 1 << 20, lambda size: _with_dim(asking.config, 1, size)
    )


def _largest(asking: Asking, name: str, start: int, step: int, most: int, at: Callable[[int], Config]) -> Answer:
    tried: dict[int, Outcome] = {}

    def fits(size: int) -> bool:
        tried[size] = asking.plan(at(size), f"{name} {size}", of_any=not tried)
        return tried[size].fits

    edge = largest(start, step, most, fits)
    if edge.fits is None:
        smallest = tried[min(tried)].error
        assert smallest is not None
        if not isinstance(smallest, BudgetError):  # of the model, the devices or a setting
            raise smallest
        raise WhatIfError(f"not even a {name} of {min(tried)} fits: {smallest.what}", remedy=smallest.remedy)
    rows = [{name: size, **_row(found, _samples(at(size)))} for size, found in sorted(tried.items())]
    return Answer(
        name, PLANNER, asking.about(), _edge_words(name, edge, step), tuple(rows),
        {"fits": edge.fits, "fails": edge.fails, "step": step},
    )  # fmt: skip


def _edge_words(name: str, edge: Edge, step: int) -> str:
    if edge.fails is None:
        return f"a {name} of {edge.fits} fits, and no larger one was tried (--most)"
    return f"the largest {name} that fits is {edge.fits}; {edge.fails} does not (in steps of {step})"


def _sizes(config: Config, dim: int) -> int:
    """The size of that dim, which all tensors of the batch that have it share."""
    what = ("batch", "sequence")[dim]
    found = {name: spec.shape[dim] for name, spec in config.model.batch.items() if _has(spec, dim)}
    if len(set(found.values())) != 1:
        where = f"conf/model/{config.choices['model']}.yaml: batch"
        sizes = ", ".join(f"{name} {size}" for name, size in found.items()) or "none has it"
        raise WhatIfError(
            f"there is no one {what} among dims {dim}: {sizes}", where=where, remedy="ask another question"
        )
    return next(iter(found.values()))


def _has(spec: TensorSpec, dim: int) -> bool:
    """Every tensor has a batch; tokens and vectors one after another have a sequence, features and images have none."""
    whole = spec.dtype in (DType.int64, DType.int32, DType.bool)
    return dim == 0 or (len(spec.shape) > 1 if whole else len(spec.shape) == 3)


def _with_dim(config: Config, dim: int, size: int) -> Config:
    def resized(spec: TensorSpec) -> TensorSpec:
        shape = [size if at == dim and _has(spec, dim) else old for at, old in enumerate(spec.shape)]
        return replace(spec, shape=shape)

    specs = {name: resized(spec) for name, spec in config.model.batch.items()}
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


# ---- devices


def devices(asking: Asking, most: int | None) -> Answer:
    """The fewest: first of one host, then whole hosts."""
    cluster = asking.config.cluster
    host = max(cluster.host_sizes)
    limit = most or max(sum(cluster.host_sizes), 8 * host)
    counts = [n for n in _counts(asking.config, host, limit) if n >= _floor(asking)]
    tried: dict[int, Outcome] = {}

    def fits(count: int) -> bool:
        tried[count] = asking.plan(_on(asking.config, count, host), f"{count} devices")
        return tried[count].fits

    edge = fewest(counts, fits)
    samples = _samples(asking.config)
    rows = tuple({"devices": count, **_row(found, samples)} for count, found in tried.items())
    said = f"{edge.fits} devices are the fewest that fit" if edge.fits else f"up to {limit} devices do not fit (--most)"
    return Answer("devices", PLANNER, asking.about(), said, rows, {"fits": edge.fits, "fails": edge.fails})


def _counts(config: Config, host: int, limit: int) -> Iterator[int]:
    """What a measured cluster has, or what is described: more hosts only where their network is."""
    yield from range(1, min(host, limit) + 1)
    described = config.cluster.source is not ClusterSource.probe
    if described and config.cluster.preset.network_gbytes_per_s is not None:
        yield from range(2 * host, limit + 1, host)


def _on(config: Config, count: int, host: int) -> Config:
    nodes = max(1, count // host)
    return replace(config, cluster=replace(config.cluster, devices=count // nodes, nodes=nodes, per_host=None))


def _floor(asking: Asking) -> int:
    """Devices that hold values and gradients alone, each in one piece: fewer cannot do."""
    config = asking.config
    budget = config.solve.memory_budget_gb or config.cluster.memory_gb
    graph: OpGraph = asking.planner.made("graph", config).body
    half = config.model.precision.value == "bf16"
    kept = sum(value.type.nbytes for value in graph.of_role(Role.PARAMETER)) * (1 if half else 2)
    return 1 if budget is None else ceil(kept / (budget * 1e9))


# ---- budget


def budget(asking: Asking) -> Answer:
    """Where the plan changes as the budget falls from what the fastest plan needs to the least that fits.

    Guessed along the frontier of one solve, by choosing recompute for each budget anew; then planned on both sides of
    every guess, and between two sides that differ until they are neighbours.
    """
    config, planner = with_budget(asking.config, None), asking.planner
    frontier = planner.frontier(config)
    fastest = asking.plan(config, "all of the memory", of_any=True)
    if fastest.plan is None:
        assert fastest.error is not None
        raise fastest.error

    @cache
    def planned(nbytes: int) -> Outcome:
        return asking.plan(with_budget(config, nbytes), f"{nbytes / 1e9:.4g} GB")

    def along(nbytes: int) -> Plan | None:
        return planner.plan(config, {"frontier": replace(frontier, budget_bytes=nbytes)}).plan

    top = fastest.plan.prediction.peak_bytes
    bottom = _least(top, lambda nbytes: along(nbytes) is not None, lambda nbytes: planned(nbytes).fits)
    assert bottom.fits is not None and bottom.fails is not None
    guessed = changes(_grid(bottom.fits, top, frontier), NEAR, lambda nbytes: signature(along(nbytes)))
    known = [bottom.fits, *(side for pair in guessed for side in pair), top]
    found = changes(known, NEAR, lambda nbytes: signature(planned(nbytes).plan))
    samples = _samples(config)
    first = {"from_gb": bottom.fits / 1e9, **_row(planned(bottom.fits), samples)}
    rows = (first, *({"from_gb": high / 1e9, **_row(planned(high), samples)} for _, high in found))
    said = (
        f"{bottom.fits / 1e9:.4g} GB is the least that fits, to 1%; the plan changes at {len(found)} budgets above it,"
        f" and from {top / 1e9:.4g} GB on it is the fastest"
    )
    return Answer(
        "budget", PLANNER, f"{config.choices['model']} on {config.choices['cluster']}", said, rows,
        {
            "least_gb": bottom.fits / 1e9,
            "too_small_gb": bottom.fails / 1e9,
            "changes": [{"below_gb": low / 1e9, "from_gb": high / 1e9} for low, high in found],
            "enough_gb": top / 1e9,
        },
    )  # fmt: skip


def _least(top: int, along: Callable[[int], bool], planned: Callable[[int], bool]) -> Edge:
    """Where the frontier of one solve puts it, if planning agrees on both sides; else planned step by step."""
    edge = least(0, top, NEAR, along)
    assert edge.fits is not None and edge.fails is not None
    if planned(edge.fits) and not planned(edge.fails):
        return edge
    return least(0, top, NEAR, planned)


def _grid(low: int, high: int, frontier: Frontier) -> list[int]:
    ratio = high / low
    even = [round(low * ratio ** (n / GRID)) for n in range(GRID)]
    return [*even, high, *(point.peak_bytes for point in frontier.points if low < point.peak_bytes < high)]


def signature(plan: Plan | None) -> str:
    """Equal for plans with the same partitions, meshes, layouts and number of recompute regions."""
    if plan is None:
        return ""
    parts = [
        (part.first, part.last, part.axes, encode(part.sharding), sum(region.recompute for region in part.regions))
        for part in plan.partitions
    ]
    return json.dumps([plan.schedule, plan.micro_batches, plan.slices, parts], sort_keys=True)


# ---- links and clusters


def link(asking: Asking, factors: Sequence[Slower]) -> Answer:
    """Each factor beside the links as they are: with the same layouts, and planned anew."""
    config, planner = asking.config, asking.planner
    cluster, samples = planner.cluster(config), _samples(config)
    now = asking.plan(config, "links as they are", of_any=True)
    if now.plan is None:
        assert now.error is not None
        raise now.error
    rows: list[Row] = [{"links": "as they are", "same_layouts_ms": _ms(now.plan), **_row(now, samples)}]
    for factor in factors:
        changed = {"cluster": slower(cluster, factor)}
        again = planner.plan(config, changed)
        same = planner.plan(config, changed | {"frontier": _only(planner.frontier(config), now.plan, factor)})
        asking.log.info("%s: %s", factor, again.refused or f"{_ms(again.plan):.2f} ms")
        rows.append({"links": str(factor), "same_layouts_ms": _ms(same.plan), **_row(again, samples)})
    last = rows[-1]
    takes = f"a step takes {shown(last['step_ms'])} ms" if last["step_ms"] is not None else "there is no plan"
    said = f"with {last['links']} {takes} instead of {shown(rows[0]['step_ms'])} ms"
    return Answer("link", PLANNER, asking.about(), said, tuple(rows), {"now_ms": rows[0]["step_ms"]})


def _only(frontier: Frontier, plan: Plan, factor: Slower) -> Frontier:
    """With the layouts of the plan alone, none where it is a pipeline, and its meshes over the slower links."""
    points = () if plan.pipelined else tuple(p for p in frontier.points if p.sharding == plan.sharding)
    meshes = tuple(slower(mesh, factor) for mesh in frontier.meshes)
    return replace(frontier, points=points, pieces=(), meshes=meshes)


def clusters(asking: Asking, names: Sequence[str]) -> Answer:
    known = listing(asking.root, "cluster")
    wrong = next((name for name in names if name not in known), None)
    if wrong is not None:
        raise WhatIfError(f"there is no cluster '{wrong}'", remedy=f"choose from: {', '.join(known)}")
    samples = _samples(asking.config)
    asking.planner.made("graph", asking.config)  # a model that cannot be traced is told once, not for each cluster
    rows: list[Row] = []
    for name in names:
        config = replace(
            asking.config,
            cluster=load_part(asking.root, "cluster", name),
            root=replace(asking.config.root, cluster=name),
        )
        found = asking.plan(config, name)
        rows.append({"cluster": name, "devices": sum(config.cluster.host_sizes), **_row(found, samples)})
    fitting = [row for row in rows if row["step_ms"] is not None]
    best = min(fitting, key=lambda row: row["step_ms"], default=None)
    said = f"{best['cluster']} is the fastest, {shown(best['step_ms'])} ms a step" if best else "it fits none of them"
    about = f"{asking.config.choices['model']}"
    return Answer("clusters", PLANNER, about, said, tuple(rows), {"fastest": best["cluster"] if best else None})


# ---- the rows


def _samples(config: Config) -> int:
    """Of a step."""
    first = next(iter(config.model.batch.values())).shape[0]
    return int(first) * config.train.micro_batches


def _ms(plan: Plan | None) -> float | None:
    return plan.prediction.step_seconds * 1e3 if plan else None


def _row(found: Outcome, samples: int) -> Row:
    plan = found.plan
    return {
        "step_ms": _ms(plan),
        "samples_per_s": samples / plan.prediction.step_seconds if plan else None,
        "peak_gb": plan.prediction.peak_bytes / 1e9 if plan else None,
        "plan": plan_words(plan) if plan else found.refused,
    }


def plan_words(plan: Plan) -> str:
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
