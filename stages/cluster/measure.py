"""Starts the probe on the real ranks, of one host or several, and makes a cluster of what it measured."""

from __future__ import annotations

import os
import socket
import statistics
from dataclasses import replace
from math import prod
from typing import Any

from shardwright.pipeline.base.errors import ClusterError
from shardwright.pipeline.base.log import Log
from shardwright.pipeline.config import ClusterSettings as Settings
from shardwright.pipeline.config import Device
from shardwright.pipeline.ir.cluster import (
    LATER,
    Cluster,
    Compute,
    Curve,
    Host,
    HostPace,
    LinkCost,
    Measured,
    Mesh,
    Overlap,
    Pace,
)
from shardwright.pipeline.launch.launch import LaunchNode, run_ranks
from shardwright.pipeline.launch.work_folder import LaunchFailed
from shardwright.stages.cluster.fit import fit_errors, fit_links, host_pace, in_a_step, least_squares_line, link_beyond
from shardwright.stages.cluster.meshes import candidate_meshes, candidate_splits
from shardwright.stages.cluster.topology import common_group, device_order, find_groups, pair_matrices, with_uplinks

TWO = 2  # processes are measured on any machine, also on one core: the smallest plan there is
Fitted = dict[tuple[int, int], dict[str, LinkCost]]  # links by stride and size of an axis
OWN_LINKS = 0.7  # of what a pair of hosts' devices has alone: where each has more while others cross, nothing is shared


def measure(settings: Settings, choice: str, log: Log) -> Cluster:
    where = f"conf/cluster/{choice}.yaml"
    check_devices(settings, where)
    try:
        found = run_probe(settings, log)
    except LaunchFailed as error:
        for line in error.log.splitlines():
            log.debug(line)
        remedy = "lower `devices`, raise `probe.timeout_s`, or use `source: preset`"
        raise ClusterError(f"the probe failed: {error}", where=where, remedy=remedy) from error
    return make_cluster(settings, found)


def check_devices(settings: Settings, where: str) -> None:
    """Devices that this machine does not have cannot be measured: processes on a shared core wait for one another."""
    if settings.device is Device.cuda:
        import torch  # slow to import, and the ranks need it otherwise

        there, what = torch.cuda.device_count(), "torch sees {} GPUs on this machine"
        remedy = "lower it, use `source: preset` with the card's figures, or `device: cpu`"
    else:
        there, what = max(TWO, cores()), "this machine has {} cores"
        remedy = "lower it, or use `source: preset` with the figures of a core"
    if there < settings.devices:
        got = f"got {settings.devices}, and {what.format(there)}"
        raise ClusterError(got, where=f"{where}: devices", remedy=remedy)


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_probe(settings: Settings, log: Log) -> dict[str, Any]:
    """What the ranks measured, as plain values."""
    from shardwright.stages.cluster.meeting import Arrival, Meeting

    probe = settings.probe
    names = tuple(probe.hosts or [socket.gethostname()])
    meeting = Meeting(Arrival(names[0], settings.devices), names[1:], probe.port)
    if names[1:]:
        join = f"shardwright.stages.cluster.join {names[0]}:{probe.port} --host NAME --devices {settings.devices}"
        log.info("waiting for %s; on each: python -m %s", ", ".join(names[1:]), join)
    arrived = meeting.gather(probe.join_s)
    job = {
        "device": settings.device.value,
        "host": names[0],
        "max_message_bytes": probe.max_message_mb * 1e6,
        "repeats": probe.repeats,
        "budget_s": probe.budget_s,
        "timeout_s": probe.timeout_s,
        "meeting": meeting.address,
    }
    node = LaunchNode(len(names), 0, names[0], probe.port + 1) if names[1:] else None
    log.info("measuring %d ranks on %d hosts", sum(a.devices for a in arrived), len(names))
    meeting.start({"job": job, "nodes": len(names), "hosts": names, "torchrun": (names[0], probe.port + 1)})
    try:
        found = run_ranks(
            "shardwright.stages.cluster.probe", job, settings.devices, probe.timeout_s, meeting.listen, node
        )
    except LaunchFailed as error:
        reason = LaunchFailed(meeting.explain(str(error)))
        reason.log = error.log
        meeting.stop(str(reason))
        raise reason from error
    meeting.part()
    return found


# ---- from measurements to a cluster


def make_cluster(settings: Settings, found: dict[str, Any]) -> Cluster:
    ranks = found["ranks"]
    names = [rank["host"] for rank in ranks]
    group = find_groups(*pair_matrices(found["pairs"], len(ranks)), names)
    crossing = found["crossing"]  # what one pair has between two hosts, and all devices of a host together
    if crossing and crossing["each"] <= OWN_LINKS * crossing["alone"]:
        faster = crossing["alone"] / common_group(group, set(crossing["ranks"])).bandwidth
        group = with_uplinks(group, crossing["pairs"] * crossing["each"], faster)
    axes = {(axis["stride"], axis["size"]): axis for axis in found["axes"]}
    measured = {key: fit_links(axis["fitted"]) for key, axis in axes.items()}
    errors = [error for key, axis in axes.items() for error in fit_errors(measured[key], axis["unseen"])]
    apart = {key: axis["apart"] for key, axis in axes.items()}
    gloo = settings.device is Device.cpu
    meshes = tuple(_with_measured(mesh, measured, apart, gloo) for mesh in candidate_meshes(group))
    hosts = []
    for name in dict.fromkeys(names):
        own = [number for number, host in enumerate(names) if host == name]
        least = min(ranks[number]["memory_bytes"] for number in own)
        hosts.append(Host(name, tuple(own), ranks[own[0]]["device"], least))
    memory = settings.memory_gb * 1e9 if settings.memory_gb else min(host.memory_bytes for host in hosts)
    return Cluster(
        source="probe",
        device=settings.device.value,
        devices=len(ranks),
        memory_bytes=round(memory),
        compute=_compute(found["compute"]),
        axes=meshes[0].axes,  # the one of one axis
        hosts=tuple(hosts),
        group=group,
        order=device_order(group),
        meshes=meshes,
        splits=candidate_splits(group),
        measured=Measured(
            seconds=found["seconds"],
            rounds=found["rounds"],
            pairs=len(found["pairs"]),
            outliers=found["outliers"],
            spread=found["spread"],
            fit_error=statistics.median(errors) if errors else 0.0,
        ),
        overlap=Overlap(settings.overlap.value, found.get("overlap", 0.0)),
    )


def _with_measured(mesh: Mesh, measured: Fitted, apart: dict[tuple[int, int], float], gloo: bool) -> Mesh:
    """Measured links in the place of formulas, for the axes that were measured.

    Gloo scatters sums that a rank does not wait for by an all-reduce.
    """
    axes = list(mesh.axes)
    for number, axis in enumerate(mesh.axes):
        key = prod(mesh.sizes[number + 1 :]), axis.size
        if key in measured:
            beyond = {name: link_beyond(link, axis.links[name]) for name, link in measured[key].items()}
            axes[number] = replace(axis, links=in_a_step(beyond, apart[key]), measured=True)
        if gloo:
            links = axes[number].links
            axes[number] = replace(axes[number], links=links | {LATER: links["all_reduce"]})
    return Mesh(tuple(axes))


def _compute(found: dict[str, Any]) -> Compute:
    (_, per_byte), (optimizer_launch, optimizer_per_byte) = (
        least_squares_line([(m["bytes"], m["seconds"]) for m in found[what]]) for what in ("copy", "optimizer")
    )
    matmul = _curve(found["matmul"])
    return Compute(
        matmul=matmul,
        memory_rate=1 / per_byte,
        launch=found["launch"],
        launch_backward=found["launch_backward"],
        ops={name: Pace(**seconds) for name, seconds in found["ops"].items()},
        optimizer_launch=optimizer_launch,
        optimizer_rate=1 / optimizer_per_byte,
        matmul_by_dtype={dtype: _curve(products) for dtype, products in found["half"].items()},
        processors=found["processors"],
        workspace=found.get("workspace", 0),
        workspace_biased=found.get("workspace_biased", 0),
        host=host_pace(found["host"]) if found.get("host") else HostPace(),
        onednn=found["onednn"],
        flops={name: Pace(**seconds) for name, seconds in found["flops"].items()},
        bodies={name: Pace(**seconds) for name, seconds in found.get("bodies", {}).items()},
        product_bytes=beside_arithmetic(found["thin"] or [], max(matmul.rates)),
    )


def beside_arithmetic(thin: list[dict[str, float]], rate: float) -> Pace:
    """Seconds for each byte of products with few rows, their arithmetic taken off; backward does all twice."""
    flops, moved, forward, backward = (sum(m[key] for m in thin) for key in ("flops", "bytes", "forward", "backward"))
    if not moved:
        return Pace(0.0, 0.0)
    return Pace(max(forward - flops / rate, 0.0) / moved, max(backward - 2 * flops / rate, 0.0) / (2 * moved))


def _curve(products: list[dict[str, float]]) -> Curve:
    sizes, rates = zip(*((m["flops"], m["flops"] / m["seconds"]) for m in products), strict=True)
    return Curve(sizes, rates)
