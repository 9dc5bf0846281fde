"""A cluster from figures instead of measurements: `preset` takes them as they are, `simulate` measures them."""

from __future__ import annotations

import random
from itertools import accumulate

from shardwright.pipeline.config import ClusterSettings as Settings
from shardwright.pipeline.config import Device
from shardwright.pipeline.ir.cluster import Cluster, Compute, Curve, Group, Host, HostPace, Measured, Overlap, paced
from shardwright.stages.cluster.meshes import FASTEST, candidate_meshes, candidate_splits
from shardwright.stages.cluster.topology import device_order, find_groups, with_uplinks

# Bytes that torch gives cuBLAS on a Hopper GPU, for forward and for backward, and cuBLASLt; on older ones it is less.
WORKSPACE, WORKSPACE_BIASED = 2 << 25, 1 << 20
HIDDEN = 0.8  # kernels beside collectives take 1.19 times as long, on A100s and H100s (arXiv 2507.03114): 2 - 1.19
MOST_SIMULATED = 256  # devices whose pairs are drawn one by one; larger clusters are grouped as they are described


def from_preset(settings: Settings) -> Cluster:
    return _cluster(settings, describe_group(settings), None)


def simulate(settings: Settings) -> Cluster:
    """What the probe would find, up to its noise."""
    described = describe_group(settings)
    if len(described.ranks) > MOST_SIMULATED:
        return _cluster(settings, described, None)
    bandwidth, latency = draw_pairs(described, settings.simulate.noise, random.Random(settings.simulate.seed))
    hosts = [host.name for host in describe_hosts(settings) for _ in host.ranks]
    found = with_uplinks(find_groups(bandwidth, latency, hosts), described.uplink)
    count = len(hosts)
    measured = Measured(0.0, max(count - 1, 0), count * (count - 1) // 2, 0, settings.simulate.noise, 0.0)
    return _cluster(settings, found, measured)


def _cluster(settings: Settings, group: Group, measured: Measured | None) -> Cluster:
    assert settings.memory_gb  # the configuration's own check
    meshes = candidate_meshes(group)
    return Cluster(
        source=settings.source.value,
        device=settings.device.value,
        devices=len(group.ranks),
        memory_bytes=round(settings.memory_gb * 1e9),
        compute=describe_compute(settings),
        axes=meshes[0].axes,  # the one of one axis
        hosts=describe_hosts(settings),
        group=group,
        order=device_order(group),
        meshes=meshes,
        splits=candidate_splits(group),
        measured=measured,
        overlap=Overlap(settings.overlap.value, hidden_share(settings)),
    )


def hidden_share(settings: Settings) -> float:
    """A GPU's collectives take few of its processors; a CPU's take the cores, and the memory, of what is computed."""
    if settings.preset.hidden is not None:
        return settings.preset.hidden
    return HIDDEN if settings.device is Device.cuda else 0.0


def describe_compute(settings: Settings) -> Compute:
    preset, reached = settings.preset, settings.preset.reached
    assert preset.matmul_gflops and preset.memory_gbytes_per_s
    products = 1e9 * (reached.products or preset.efficiency)
    half = {"float16": preset.half_gflops, "bfloat16": preset.bf16_gflops or preset.half_gflops}
    return Compute(
        matmul=Curve((1.0,), (preset.matmul_gflops * products,)),
        memory_rate=preset.memory_gbytes_per_s * 1e9 * (reached.memory or preset.efficiency),
        launch=preset.launch_us / 1e6,
        launch_backward=2 * preset.launch_us / 1e6,
        matmul_by_dtype={dtype: Curve((1.0,), (rate * products,)) for dtype, rate in half.items() if rate},
        processors=preset.processors,
        unaligned=reached.unaligned,
        host=HostPace() if reached.kernel_us is None else paced(HostPace(), reached.kernel_us / 1e6),
        workspace=WORKSPACE if settings.device is Device.cuda else 0,
        workspace_biased=WORKSPACE_BIASED if settings.device is Device.cuda else 0,
    )


def describe_hosts(settings: Settings) -> tuple[Host, ...]:
    assert settings.memory_gb
    memory = round(settings.memory_gb * 1e9)
    return tuple(
        Host(f"host{number}", tuple(ranks), settings.device.value, memory)
        for number, ranks in enumerate(_ranks_of_hosts(settings))
    )


def describe_group(settings: Settings) -> Group:
    """Islands in hosts in the cluster, as far as there are several of them."""
    hosts = [_host(settings, ranks) for ranks in _ranks_of_hosts(settings)]
    if len(hosts) == 1:
        return hosts[0]
    preset = settings.preset
    assert preset.network_gbytes_per_s and preset.network_latency_us is not None
    uplink = preset.network_gbytes_per_s * preset.reached.network * 1e9
    shared = any(len(host.ranks) > 1 for host in hosts)
    return Group(
        kind="cluster",
        ranks=tuple(rank for host in hosts for rank in host.ranks),
        bandwidth=uplink / preset.network_cards,
        latency=preset.network_latency_us / 1e6,
        uplink=uplink if shared else None,
        members=tuple(hosts) if shared else (),
        start=preset.reached.collective_us / 1e6,
    )


def _host(settings: Settings, ranks: range) -> Group:
    preset, start = settings.preset, settings.preset.reached.collective_us / 1e6
    if len(ranks) == 1:
        return Group("host", tuple(ranks), FASTEST, 0.0)
    size = min(preset.island or len(ranks), len(ranks))
    islands = []
    for own in (tuple(ranks[at : at + size]) for at in range(0, len(ranks), size)):
        if len(own) == 1:
            islands.append(Group("device", own, FASTEST, 0.0))
        else:
            assert preset.link_gbytes_per_s and preset.latency_us is not None
            kind = "host" if size == len(ranks) else "island"
            bandwidth = preset.link_gbytes_per_s * preset.reached.links * 1e9
            islands.append(Group(kind, own, bandwidth, preset.latency_us / 1e6, start=start))
    if len(islands) == 1:
        return islands[0]
    assert preset.cross_gbytes_per_s
    latency = preset.latency_us if preset.cross_latency_us is None else preset.cross_latency_us
    members = tuple(islands) if size > 1 else ()
    bandwidth = preset.cross_gbytes_per_s * preset.reached.links * 1e9
    return Group("host", tuple(ranks), bandwidth, (latency or 0.0) / 1e6, members=members, start=start)


def _ranks_of_hosts(settings: Settings) -> list[range]:
    ends = accumulate(settings.host_sizes)
    return [range(end - size, end) for size, end in zip(settings.host_sizes, ends, strict=True)]


def draw_pairs(group: Group, noise: float, draw: random.Random) -> tuple[list[list[float]], list[list[float]]]:
    """Bandwidth and latency of each pair as its smallest common group has them, off by up to `noise`."""
    count = len(group.ranks)
    bandwidth, latency = ([[0.0] * count for _ in range(count)] for _ in range(2))

    def fill(part: Group) -> None:
        for i in part.ranks:
            for j in part.ranks:
                bandwidth[i][j], latency[i][j] = part.bandwidth, part.latency
        for member in part.members:
            fill(member)

    fill(group)
    return [[value * draw.uniform(1 - noise, 1 + noise) for value in row] for row in bandwidth], latency
