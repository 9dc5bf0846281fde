"""Cluster detect: the devices as seconds and bytes, measured on the real ranks or taken from a preset."""

from __future__ import annotations

from shardwright.pipeline.base.files import write_atomic
from shardwright.pipeline.base.stage import Inputs, Result
from shardwright.pipeline.config import ClusterSource, Config
from shardwright.pipeline.ir.cluster import Cluster
from shardwright.stages.cluster.described import from_preset, simulate
from shardwright.stages.cluster.measure import measure
from shardwright.stages.cluster.picture import draw_cluster
from shardwright.stages.cluster.topology import partition_of

PICTURE = "runs/cluster/topology.png"


def run(inputs: Inputs, config: Config) -> Result:
    settings = config.cluster
    if settings.source is ClusterSource.probe:
        cluster = measure(settings, config.choices["cluster"], inputs.log)
    else:
        cluster = simulate(settings) if settings.source is ClusterSource.simulate else from_preset(settings)
    inputs.log.info("candidate meshes: %s", ", ".join(mesh.label for mesh in cluster.mesh_candidates()))
    picture = inputs.root / PICTURE

    def draw() -> None:
        write_atomic(picture, draw_cluster(cluster, config.choices["cluster"]))

    return Result(cluster, figures(cluster), (picture,), draw=draw)


def figures(cluster: Cluster) -> dict[str, float | int | str]:
    link = cluster.axes[0].links["all_reduce"]
    found: dict[str, float | int | str] = {
        "devices": cluster.devices,
        "memory_bytes": cluster.memory_bytes,
        "matmul_gflops": round(max(cluster.compute.matmul.rates) / 1e9, 3),
        "memory_gbytes_per_s": round(cluster.compute.memory_rate / 1e9, 3),
        "all_reduce_latency_us": round(link.seconds(0) * 1e6, 2),
        "all_reduce_gbytes_per_s": round(link.bandwidth / 1e9, 3),
        "hosts": len(cluster.hosts),
        "groups": len(partition_of(cluster.group)) if cluster.group else 0,
        "meshes": len(cluster.meshes),
    }
    if cluster.measured:
        if cluster.device == "cpu":
            found["kernels"] = "oneDNN's and torch's" if cluster.compute.onednn else "torch's own"
        found |= {
            "probe_seconds": round(cluster.measured.seconds, 2),
            "probe_spread": round(cluster.measured.spread, 4),
            "probe_fit_error": round(cluster.measured.fit_error, 4),
        }
    if cluster.devices > 1:
        found["overlap"] = round(cluster.overlap.hidden, 3)
    return found
