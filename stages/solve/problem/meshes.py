"""The meshes to plan for: the one that the user fixes, or the cluster's candidates; and parts of it for pipelines."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import prod

from shardwright.pipeline.base.errors import SolveError
from shardwright.pipeline.config import PIPELINE_AXIS, Solve
from shardwright.pipeline.ir.cluster import Cluster, Mesh


def asks_for_pipeline(settings: Solve) -> bool:
    """Whether the mesh that the user fixes is that of a pipeline's submeshes."""
    return bool(settings.mesh) and dict(settings.mesh or {}).get(PIPELINE_AXIS, 1) > 1


def meshes_of(cluster: Cluster, settings: Solve, where: str) -> tuple[Mesh, ...]:
    """Of all devices; none where the user fixes a pipeline."""
    if settings.mesh is None:
        return cluster.mesh_candidates(settings.most_axes)[: settings.most_meshes]
    if asks_for_pipeline(settings):
        return ()
    return (_fixed(cluster, dict(settings.mesh), f"{where}: mesh"),)


def submeshes_of(cluster: Cluster, settings: Solve, where: str) -> dict[int, tuple[Mesh, ...]]:
    """By number of devices, most first: the meshes of the submeshes into which the cluster splits.

    Submeshes of one size lie in several splits, and are the slower the more they are scattered: the first split counts.
    """
    if asks_for_pipeline(settings):
        mesh = _submesh(cluster, dict(settings.mesh or {}), f"{where}: mesh")
        return {prod(mesh.sizes): (mesh,)}
    found: dict[int, tuple[Mesh, ...]] = {}
    for split in cluster.splits if settings.mesh is None and settings.submeshes else ():
        for size, meshes in split.meshes.items():
            narrow = [mesh for mesh in meshes if len(mesh.axes) <= settings.most_axes]
            found.setdefault(int(size), tuple(narrow[: settings.most_meshes]))
    return dict(sorted(found.items(), reverse=True))


def _fixed(cluster: Cluster, wanted: dict[str, int], where: str) -> Mesh:
    """The candidate with these sizes, outermost first, its axes called as the user calls them."""
    _check_product(wanted, cluster, where)
    wanted.pop(PIPELINE_AXIS, 1)
    return _named(cluster.mesh_candidates(), wanted, "the cluster", where)


def _submesh(cluster: Cluster, wanted: dict[str, int], where: str) -> Mesh:
    """Of a pipeline of equal submeshes: the mesh of one of them."""
    _check_product(wanted, cluster, where)
    submeshes = wanted.pop(PIPELINE_AXIS)
    size = cluster.devices // submeshes
    for split in cluster.splits:
        if split.sizes == (size,) * submeshes:
            return _named(split.meshes[str(size)], wanted, f"a submesh of {size} devices", where)
    known = ", ".join(str(len(split.sizes)) for split in cluster.splits if len(set(split.sizes)) == 1)
    raise SolveError(
        f"the cluster does not split into {submeshes} submeshes", where=where, remedy=f"it does into {known}"
    )


def _check_product(wanted: dict[str, int], cluster: Cluster, where: str) -> None:
    if prod(wanted.values()) != cluster.devices:
        shown = " x ".join(str(n) for n in wanted.values())
        raise SolveError(
            f"{shown} is {prod(wanted.values())} devices, the cluster has {cluster.devices}",
            where=where,
            remedy="name axes whose sizes multiply to that",
        )


def _named(meshes: Iterable[Mesh], wanted: dict[str, int], what: str, where: str) -> Mesh:
    """The mesh with these sizes, axes of one device left out, its axes called as the user calls them."""
    wide = {name: size for name, size in wanted.items() if size > 1} or {next(iter(wanted), "d0"): 1}
    candidates = tuple(meshes)
    for mesh in candidates:
        if mesh.sizes == tuple(wide.values()):
            return Mesh(tuple(replace(axis, name=name) for axis, name in zip(mesh.axes, wide, strict=True)))
    known = ", ".join(" x ".join(map(str, mesh.sizes)) for mesh in candidates)
    raise SolveError(
        f"{what} has no mesh of {' x '.join(map(str, wide.values()))}", where=where, remedy=f"it has {known}"
    )
