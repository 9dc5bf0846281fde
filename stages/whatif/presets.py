"""Clusters that are worth a comparison where none is named."""

from __future__ import annotations

from pathlib import Path

from shardwright.pipeline.config import ClusterSettings, ClusterSource, Device, listing, load_part


def described_gpus(root: Path) -> dict[str, ClusterSettings]:
    """The clusters of GPUs that files of conf/cluster describe: few devices first."""
    every = {name: load_part(root, "cluster", name) for name in listing(root, "cluster")}
    found = {n: own for n, own in every.items() if own.source is ClusterSource.preset and own.device is Device.cuda}
    return dict(sorted(found.items(), key=lambda pair: (sum(pair[1].host_sizes), pair[0])))


def that_may_have(devices: int, found: dict[str, ClusterSettings]) -> tuple[str, ...]:
    """Of these clusters those that could have so many devices: in one host, or in hosts whose network is described."""
    return tuple(
        name
        for name, own in found.items()
        if own.preset.network_gbytes_per_s is not None or sum(own.host_sizes) >= devices
    )
