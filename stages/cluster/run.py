"""Cluster detect: the devices as seconds and bytes, measured on the real ranks or taken from a preset."""

from __future__ import annotations

from pipeline.config import Cluster as Settings
from pipeline.config import ClusterSource, Config, Device
from pipeline.errors import ClusterError
from pipeline.ir.cluster import Axis, Cluster, Compute, Curve, PerElement
from pipeline.launch import LaunchFailed, run_ranks
from pipeline.log import Log
from pipeline.stage import Inputs, Result
from stages.cluster.described import from_preset, simulate
from stages.cluster.fit import fit_links, least_squares_line

AXIS = "d0"


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


def measure(settings: Settings, choice: str, log: Log) -> Cluster:
    """Starts the probe on the real ranks and fits what it measured."""
    if settings.device is Device.cuda:
        raise ClusterError(
            "GPUs cannot be measured yet",
            where=f"conf/cluster/{choice}.yaml: device",
            remedy="use `source: preset` with the card's figures, or `device: cpu`",
        )
    job = {"max_message_bytes": settings.probe.max_message_mb * 1e6, "repeats": settings.probe.repeats}
    log.info("measuring %d ranks", settings.devices)
    try:
        found = run_ranks("stages.cluster.probe", job, settings.devices, settings.probe.timeout_s)
    except LaunchFailed as error:
        raise ClusterError(
            f"the probe failed: {error}",
            where=f"conf/cluster/{choice}.yaml",
            remedy="lower `devices`, raise `probe.timeout_s`, or use `source: preset`",
        ) from error
    memory = settings.memory_gb * 1e9 if settings.memory_gb else found["memory_bytes"]
    return Cluster(
        source="probe",
        device=settings.device.value,
        devices=settings.devices,
        memory_bytes=round(memory),
        compute=_compute(found),
        axes=(Axis(AXIS, settings.devices, fit_links(found["collectives"])),),
    )


def _compute(found: dict) -> Compute:
    sizes, rates = zip(*((m["flops"], m["flops"] / m["seconds"]) for m in found["matmul"]), strict=True)
    _, seconds_per_byte = least_squares_line([(m["bytes"], m["seconds"]) for m in found["copy"]])
    optimizer_launch, optimizer_per_byte = least_squares_line([(m["bytes"], m["seconds"]) for m in found["optimizer"]])
    return Compute(
        matmul=Curve(sizes, rates),
        memory_rate=1 / seconds_per_byte,
        launch=found["launch"],
        launch_backward=found["launch_backward"],
        ops={name: PerElement(**seconds) for name, seconds in found["ops"].items()},
        optimizer_launch=optimizer_launch,
        optimizer_rate=1 / optimizer_per_byte,
    )
