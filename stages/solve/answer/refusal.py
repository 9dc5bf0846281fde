"""Why nothing fits: the least that stays resident, the largest part of it, and what would make it less.

Every number that is named was worked out: a setting is blamed, or its lifting advised, only if the least falls with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from shardwright.pipeline.base.errors import BudgetError, SolveError
from shardwright.pipeline.config import Only, Solve
from shardwright.pipeline.cost.resident import Kept, ResidentPart, budget_of, gigabytes, resident_parts, total_of
from shardwright.pipeline.ir.graph import Role
from shardwright.pipeline.ir.plan import FrontierPoint, Sharding
from shardwright.stages.solve.on_mesh import MeshProblem
from shardwright.stages.solve.problem.storage import Way

MATTERS = 0.999  # of the least: what falls by less is not worth a word


@dataclass(frozen=True)
class LiftedSetting:
    """A setting of the user's that may stand in the way, and settings without it."""

    setting: str  # empty: several at once
    advice: str
    settings: Solve
    ways: tuple[Way, ...] = ()


Helping = list[tuple[LiftedSetting, int]]  # settings that help, each with the least that stays resident then


def refusal(mesh: MeshProblem, least: FrontierPoint, smallest: int, budget: int) -> BudgetError:
    """`least` is the plan that keeps least for good, `smallest` the least peak of a plan without recompute."""
    parts = resident_of(mesh, least.sharding)
    helping = _helping(mesh, parts[0], least.resident_bytes)
    classes = ", ".join(f"{kept} {gigabytes(total)}" for kept in Kept if (total := total_of(parts, kept)))
    return BudgetError(
        f"no plan fits {gigabytes(budget)}: parameters, gradients and optimizer state alone need "
        f"{budget_of(least.resident_bytes)} on each device ({classes}); the largest part is the {parts[0].label} with "
        f"{gigabytes(parts[0].nbytes)}, {_why(mesh, parts[0], helping)}",
        least=least.resident_bytes,
        budget=budget,
        where=f"{mesh.where}: memory_budget_gb",
        remedy=", or ".join(_remedies(mesh, least, parts, helping, smallest, budget)),
    )


def refusal_of_saved(mesh: MeshProblem, saved: FrontierPoint, budget: int) -> BudgetError:
    """The saved plan was to be taken as it is, and is too large."""
    largest = resident_of(mesh, saved.sharding)[0]
    return BudgetError(
        f"the saved plan does not fit {gigabytes(budget)}: parameters, gradients and optimizer state alone need "
        f"{budget_of(saved.resident_bytes)} on each device; the largest part is the {largest.label} with "
        f"{gigabytes(largest.nbytes)}",
        least=saved.resident_bytes,
        budget=budget,
        where=f"{mesh.where}: plan",
        remedy="set `plan_use: start` to look for a smaller one, or raise memory_budget_gb above that",
    )


def resident_of(mesh: MeshProblem, sharding: Sharding) -> tuple[ResidentPart, ...]:
    return resident_parts(mesh.workload.priced(sharding).sharded, mesh.workload.optimizer_copies)


def _lifts(settings: Solve, largest: ResidentPart) -> Iterator[LiftedSetting]:
    """Each setting on its own, the mildest change first; then all together."""
    everything = replace(settings, only=Only.any, constraints=None, shard_only=None)
    constraints = dict(settings.constraints or {})
    for pattern, text in constraints.items():
        others = {p: t for p, t in constraints.items() if p != pattern} or None
        setting = f"constraints.{pattern}: {text}"
        what, on, axis = text.partition(" on ")
        if what.strip() == "R" and largest.kept is Kept.state:
            zero1 = f"zero1{on}{axis}"
            changed = replace(settings, constraints={**constraints, pattern: zero1})
            yield LiftedSetting(setting, f"try ZeRO-1 (`constraints.{pattern}: {zero1}`)", changed)
        yield LiftedSetting(setting, f"drop `constraints.{pattern}`", replace(settings, constraints=others))
    if settings.only is Only.data:
        zero, where = replace(settings, only=Only.zero), "allowed by `only: zero`"
        yield LiftedSetting("only: data", f"try ZeRO-1 ({where})", zero, (Way.as_it_lies, Way.zero1))
        yield LiftedSetting("only: data", f"try ZeRO-3 ({where})", zero)
    if settings.only is not Only.any:
        yield LiftedSetting(
            f"only: {settings.only.value}", "allow every way (`only: any`)", replace(settings, only=Only.any)
        )
    if settings.shard_only:
        yield LiftedSetting(
            f"shard_only: {settings.shard_only}", "drop `shard_only`", replace(settings, shard_only=None)
        )
    asked = {"constraints": constraints, "only": settings.only is not Only.any, "shard_only": settings.shard_only}
    if len(constraints) + sum(bool(what) for key, what in asked.items() if key != "constraints") > 1:
        yield LiftedSetting("", f"drop {' and '.join(f'`{key}`' for key, what in asked.items() if what)}", everything)


def _helping(mesh: MeshProblem, largest: ResidentPart, least: int) -> Helping:
    found: Helping = []
    for lift in _lifts(mesh.settings, largest):
        with suppress(SolveError):  # what it asks for instead cannot be
            sharding = mesh.least(lift.settings, lift.ways)
            if sharding is not None:
                found.append((lift, sum(part.nbytes for part in resident_of(mesh, sharding))))
    return [(lift, nbytes) for lift, nbytes in found if nbytes < MATTERS * least]


def _why(mesh: MeshProblem, part: ResidentPart, helping: Helping) -> str:
    """Why the largest part is not smaller."""
    devices = mesh.cluster.devices
    if part.kept is Kept.buffers:
        return "which every device keeps whole"
    if devices == 1:
        return "on the only device"
    if part.shards == devices:
        return f"split over all {devices} devices"
    split = f"split into {part.shards}" if part.shards > 1 else "whole"
    if helping:
        settings = " or ".join(dict.fromkeys(f"`{lift.setting}`" for lift, _ in helping if lift.setting))
        return f"{split} on {devices} devices because of {settings or 'these settings'}"
    shape = next(v.type.shape for v in mesh.graph.of_role(Role.PARAMETER) if v.origin == part.names[0])
    return f"{split} on {devices} devices because no dim of {' x '.join(map(str, shape))} divides further"


def _remedies(
    mesh: MeshProblem,
    least: FrontierPoint,
    parts: tuple[ResidentPart, ...],
    helping: Helping,
    smallest: int,
    budget: int,
) -> Iterator[str]:
    """What fits, if anything does; else what comes nearest to it, and what goes further."""
    fitting = [found for found in helping if found[1] <= budget]
    nearest = sorted(helping, key=lambda found: found[1])
    for lift, nbytes in (fitting or nearest)[:1]:
        yield f"{lift.advice}, which needs {budget_of(nbytes)}"
    if not fitting:
        stateless = least.resident_bytes - total_of(parts, Kept.state)
        if stateless < MATTERS * least.resident_bytes:
            yield f"use an optimizer that keeps less: without any state it is {budget_of(stateless)}"
        sharding = least.sharding if not helping else mesh.least(nearest[0][0].settings, nearest[0][0].ways)
        if sharding is not None and (devices := _devices_for(mesh, sharding, budget)):
            yield f"use about {devices} devices"
    if least.resident_bytes <= mesh.cluster.memory_bytes:
        more = f" (about {gigabytes(smallest)} without recompute)" if smallest > least.resident_bytes else ""
        yield f"raise memory_budget_gb above {budget_of(least.resident_bytes)[:-3]}{more}"


def _devices_for(mesh: MeshProblem, sharding: Sharding, budget: int) -> int | None:
    """How many would hold it, if what is split over all devices now divides among more; None where none would."""
    devices = mesh.cluster.devices
    parts = resident_of(mesh, sharding)
    split = sum(p.nbytes for p in parts if p.kept is not Kept.buffers and p.shards == devices)
    room = budget - (sum(p.nbytes for p in parts) - split)
    return max(devices + 1, math.ceil(split * devices / room)) if split and room > 0 else None
