"""A plan that was saved: read, checked against the model, the cluster and the user's settings, found among the choices.

A plan says how every op runs and how every tensor lies; what it costs is worked out anew. Names must be those of this
graph and layouts must fit its shapes, so that a plan also serves the same model with other sizes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TypeVar

from shardwright.pipeline.base.artifacts import load_saved
from shardwright.pipeline.base.errors import ArtifactError, SolveError
from shardwright.pipeline.config import Solve, saved_file
from shardwright.pipeline.ir.cluster import Cluster, Mesh
from shardwright.pipeline.ir.graph import OpGraph, Role, Value
from shardwright.pipeline.ir.layout import Layout
from shardwright.pipeline.ir.plan import Plan, Sharding
from shardwright.pipeline.ir.verify import InvalidSharding, gathered, verify_sharding
from shardwright.pipeline.ops.uneven import uneven_in
from shardwright.stages.solve.problem.build import Choices
from shardwright.stages.solve.problem.constraints import UserConstraints
from shardwright.stages.solve.problem.data import Problem
from shardwright.stages.solve.problem.storage import Stored, Way
from shardwright.stages.solve.search.restricted import Restricted

SHOWN = 3  # names in a message
T = TypeVar("T")


@dataclass(frozen=True)
class Saved:
    file: str
    sizes: tuple[int, ...]  # of the mesh's axes
    sharding: Sharding


def read_saved(name: str | None, root: Path, graph: OpGraph) -> tuple[Saved, ...]:
    """The plan of that name, or those of a frontier; none where no name is given."""
    if name is None:
        return ()
    file = saved_file(name)
    body = load_saved(file, root, ("plan", "frontier")).body
    if isinstance(body, Plan) and body.pipelined:
        what = f"the saved plan is a pipeline of {len(body.partitions)} partitions, and one without is needed"
        raise ArtifactError(what, where=file, remedy="save runs/solve/frontier.json instead, or set `plan: null`")
    if isinstance(body, Plan):
        found = [Saved(file, body.sizes, body.sharding)]
    else:
        found = [Saved(file, body.meshes[point.mesh].sizes, point.sharding) for point in body.points]
    for saved in found:
        _check_graph(saved, graph)
    return tuple(found)


def _check_graph(saved: Saved, graph: OpGraph) -> None:
    sharding = saved.sharding
    names: dict[str, tuple[Mapping[str, object], list[str]]] = {
        "op": (sharding.strategies, [op.name for op in graph.ops]),
        "parameter": (sharding.storage, [value.origin for value in graph.of_role(Role.PARAMETER)]),
        "input": (sharding.inputs, [value.name for value in graph.of_role(Role.INPUT)]),
    }
    odd = [f"has no {what} {name}" for what, (have, want) in names.items() for name in have if name not in set(want)]
    odd += [f"has {what} {name}" for what, (have, want) in names.items() for name in want if name not in have]
    if odd:
        raise _of_another("model", saved, f"which {_few(odd)}")
    misfits = [
        f"{value.origin} of {' x '.join(map(str, value.type.shape))} as {sharding.storage[value.origin]}"
        for value in graph.of_role(Role.PARAMETER)
        if not _may_lie(graph, value, sharding.storage[value.origin], saved)
    ]
    if misfits:
        raise _of_another("model", saved, f"it would store {_few(misfits)}")
    try:
        verify_sharding(graph, sharding, saved.sizes, uneven_in(graph).spots)
    except InvalidSharding as error:
        raise _of_another("model", saved, str(error)) from error


def _may_lie(graph: OpGraph, value: Value, layout: Layout, saved: Saved) -> bool:
    """In shards that are equal, or as they may be uneven: of a vocabulary, and of what is gathered to be read."""
    if len(layout.states) != len(saved.sizes) or not layout.holds(value.type.shape, saved.sizes):
        return False
    uneven = {(value.name, dim) for dim in layout.uneven(value.type.shape, saved.sizes)}
    return uneven <= uneven_in(graph).spots or value.origin in gathered(graph, saved.sharding, saved.sizes)


def _few(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
    return ", ".join(texts[:SHOWN]) + more


def _of_another(what: str, saved: Saved, why: str) -> ArtifactError:
    remedy = f"save one of this {what}, or set `plan: null`"
    return ArtifactError(f"the saved plan is of another {what}: {why}", where=saved.file, remedy=remedy)


def mesh_for(saved: Saved, meshes: Iterable[Mesh], cluster: Cluster, settings: Solve) -> Mesh:
    """The mesh of the plan: one of those that are planned for, or another that the cluster has."""
    known = (*meshes,) if settings.mesh else (*meshes, *cluster.mesh_candidates())
    for mesh in known:
        if mesh.sizes == saved.sizes:
            return mesh
    shown = [" x ".join(map(str, sizes)) for sizes in dict.fromkeys(mesh.sizes for mesh in known)]
    asked = "`mesh` asks for" if settings.mesh and prod(saved.sizes) == cluster.devices else "this one has"
    wanted = " x ".join(map(str, saved.sizes))
    raise _of_another("cluster", saved, f"it is for a mesh of {wanted}, {asked} {', '.join(shown)}")


def found_among(saved: Saved, graph: OpGraph, problem: Problem, choices: Choices) -> tuple[int, ...]:
    """The plan as choices of the problem."""
    sharding, picked = saved.sharding, [0] * len(problem.nodes)
    for name, options in choices.ops.items():
        strategy = sharding.strategies[name]
        picked[choices.index[name]] = _the(options, strategy, saved, f"{name} run as {strategy.name!r}")
    for name, layouts in choices.inputs.items():
        layout = sharding.inputs[name]
        picked[choices.index[name]] = _the(layouts, layout, saved, f"{name} as {layout}")
    gathered_ones = gathered(graph, sharding, saved.sizes)
    for name, ways in choices.storage.items():
        origin = graph.values[name].origin
        layout = sharding.storage[origin]
        state = sharding.state.get(origin, layout)
        kind = Way.gathered if origin in gathered_ones else Way.as_it_lies
        kind = Way.regathered if origin in sharding.regathered else Way.zero1 if state != layout else kind
        way = Stored(layout, state, kind)
        picked[choices.index[name]] = _the(ways, way, saved, f"{origin} stored as {way}")
    if not math.isfinite(problem.cost(picked)):
        raise _unknown(saved, "what its conversions ask for")
    return tuple(picked)


def check_allowed(picked: tuple[int, ...], choices: Choices, left: Restricted, hand: UserConstraints) -> None:
    """The plan keeps to what the user asks for."""
    for name, number in choices.index.items():
        if picked[number] not in left.kept[number]:
            what = hand.graph.values[name].origin if name in hand.graph.values else name
            raise SolveError(
                f"the saved plan goes against `{hand.forbids(name, choices, picked[number])}`, in {what}",
                where=f"{hand.where}: plan",
                remedy="drop one of them",
            )


def _the(options: Sequence[T], wanted: T, saved: Saved, what: str) -> int:
    if wanted not in options:
        raise _unknown(saved, what)
    return options.index(wanted)


def _unknown(saved: Saved, what: str) -> ArtifactError:
    return ArtifactError(
        f"the saved plan has {what}, which is not among what this program plans with",
        where=saved.file,
        remedy="save it again from a plan of this version, or set `plan: null`",
    )
