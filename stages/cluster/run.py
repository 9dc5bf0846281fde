"""Cluster detect: the devices as seconds and bytes, measured on the real ranks or taken from a preset."""

from __future__ import annotations

from pipeline.config import ClusterSource, Config
from pipeline.ir.cluster import Cluster
from pipeline.stage import Inputs, Result
from stages.cluster.described import from_preset, simulate
from stages.cluster.measure import measure


def run(inputs: Inputs, config: Config) -> Result:
    settings = config.cluster
    if settings.source is ClusterSource.probe:
        cluster = measure(settings, config.choices["cluster"], inputs.log)
    else:
        cluster = simulate(settings) if settings.source is ClusterSource.simulate else from_preset(settings)
    return Result(cluster, figures(cluster))


def figures(cluster: Cluster) -> dict[str, float | int | str]:
    link = cluster.axes[0].links["all_reduce"]
    return {
        "devices": cluster.devices,
        "memory_bytes": cluster.memory_bytes,
        "matmul_gflops": round(max(cluster.compute.matmul.rates) / 1e9, 3),
        "memory_gbytes_per_s": round(cluster.compute.memory_rate / 1e9, 3),
        "all_reduce_latency_us": round(link.latency * 1e6, 2),
        "all_reduce_gbytes_per_s": round(link.bandwidth / 1e9, 3),
    }
