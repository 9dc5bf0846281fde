"""The meshes to plan for: the one that the user fixes, or the cluster's candidates; and parts of it for pipelines."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from pipeline.config import Solve
from pipeline.errors import SolveError
from pipeline.ir.cluster import Cluster, Mesh

PIPELINE = "pp"


def meshes_of(cluster: Cluster, settings: Solve, where: str) -> tuple[Mesh, ...]:
    if settings.mesh is None:
        return cluster.mesh_candidates(settings.most_axes)[: settings.most_meshes]
    return (_fixed(cluster, dict(settings.mesh), f"{where}: mesh"),)


def pieces_of(cluster: Cluster, settings: Solve) -> dict[int, tuple[Mesh, ...]]:
    """By number of devices, most first: the meshes of the pieces into which the cluster splits.

    Pieces of one size lie in several splits, and are the slower the more they are scattered: the first split counts.
    """
    found: dict[int, tuple[Mesh, ...]] = {}
    for split in cluster.splits if settings.mesh is None and settings.piece_meshes else ():
        for size, meshes in split.meshes.items():
            narrow = [mesh for mesh in meshes if len(mesh.axes) <= settings.most_axes]
            found.setdefault(int(size), tuple(narrow[: settings.most_meshes]))
    return dict(sorted(found.items(), reverse=True))


def _fixed(cluster: Cluster, wanted: dict[str, int], where: str) -> Mesh:
    """The candidate with these sizes, outermost first, its axes called as the user calls them."""
    if wanted.pop(PIPELINE, 1) != 1:
        raise SolveError("pipelines cannot be planned yet", where=where, remedy=f"leave out {PIPELINE}, or set it to 1")
    if prod(wanted.values()) != cluster.devices:
        shown = " x ".join(str(n) for n in wanted.values())
        raise SolveError(
            f"{shown} is {prod(wanted.values())} devices, the cluster has {cluster.devices}",
            where=where,
            remedy="name axes whose sizes multiply to that",
        )
    wide = {name: size for name, size in wanted.items() if size > 1} or {next(iter(wanted)): 1}
    for mesh in cluster.mesh_candidates():
        if mesh.sizes == tuple(wide.values()):
            return Mesh(tuple(replace(axis, name=name) for axis, name in zip(mesh.axes, wide, strict=True)))
    known = ", ".join(" x ".join(map(str, mesh.sizes)) for mesh in cluster.mesh_candidates())
    raise SolveError(
        f"the cluster has no mesh of {' x '.join(map(str, wide.values()))}", where=where, remedy=f"it has {known}"
    )
