"""What a described cluster reaches: figures of the data sheet times the shares that steps were seen to reach.

n devices of a group, m of them in a host of H; N bytes of the whole tensor:

    around      links * share, and where the group leaves the host  min(that, m / H of the host's network * share)
    all-reduce  start + 2 (n-1)/n N / around;  gather, scatter: start + (n-1)/n N / around;  send: start + N / around

A group with m devices in a host has m / H of its network, because H / m groups like it use it at the same time. Of a
stage that ends in a host all devices send at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.base.errors import ClusterError
from pipeline.config import ClusterSettings, ClusterSource


@dataclass(frozen=True)
class Efficiency:
    """What steps reach of a card's figures: fitted by calibrate.py, or the schema's defaults."""

    products: float  # share of the rate, in large products
    unaligned: float  # of that share, in products with rows that do not begin on 16 bytes
    memory: float  # share of the memory's bandwidth, in kernels that move memory
    kernel: float  # seconds that any kernel takes, issued by the host
    links: float  # share of the links' bandwidth, in collectives
    network: float  # share of the network's bandwidth
    collective: float  # seconds that any collective takes beside its bytes


@dataclass(frozen=True)
class Machine:
    host: int  # devices of one
    hosts: int
    rate: float  # FLOP/s in half precision, of the data sheet
    memory_rate: float
    memory_bytes: int
    processors: int
    link: float  # bytes/s, one direction
    network: float  # bytes/s of one host, one direction
    reached: Efficiency

    @property
    def devices(self) -> int:
        return self.host * self.hosts

    @property
    def moved(self) -> float:
        """Bytes/s of kernels that move memory."""
        return self.memory_rate * self.reached.memory

    def around(self, size: int, stride: int) -> float:
        """Bytes/s of a group of which neighbours are `stride` ranks apart."""
        links = self.link * self.reached.links
        members = max(1, min(size, self.host // stride))  # of it in one host
        if members == size:
            return links
        network = self.network * self.reached.network * members / self.host
        return network if members == 1 else min(links, network)

    def all_reduce(self, nbytes: float, size: int, stride: int) -> float:
        return 2 * self.gather(nbytes, size, stride) - (self.reached.collective if size > 1 else 0.0)

    def gather(self, nbytes: float, size: int, stride: int) -> float:
        """An all-gather or a reduce-scatter."""
        if size == 1:
            return 0.0
        return self.reached.collective + (size - 1) / size * nbytes / self.around(size, stride)

    def send(self, nbytes: float, distance: int, devices: int) -> float:
        """To the device that many ranks further, from all of so many devices at once, over the slowest way."""
        rate = self.link * self.reached.links
        if devices > self.host:
            rate = min(rate, self.network * self.reached.network / min(distance, self.host))
        return self.reached.collective + nbytes / rate


def machine_of(cluster: ClusterSettings, where: str) -> Machine:
    """`where` names it in errors."""
    preset = cluster.preset
    if cluster.source is ClusterSource.probe:
        raise ClusterError("it is measured, and a price needs figures", where=where, remedy="choose a preset")
    if len(set(cluster.host_sizes)) > 1:
        raise ClusterError("its hosts differ", where=where, remedy="choose a cluster of hosts that are alike")
    assert cluster.memory_gb and preset.matmul_gflops and preset.memory_gbytes_per_s  # the configuration's own check
    reached = preset.reached
    fastest = preset.memory_gbytes_per_s  # a device to itself
    kernel = preset.launch_us if reached.kernel_us is None else reached.kernel_us
    islands = preset.island is not None and preset.island < cluster.host_sizes[0]
    slowest = (preset.cross_gbytes_per_s if islands else preset.link_gbytes_per_s) or fastest  # inside a host
    return Machine(
        host=cluster.host_sizes[0],
        hosts=len(cluster.host_sizes),
        rate=(preset.half_gflops or preset.matmul_gflops) * 1e9,
        memory_rate=preset.memory_gbytes_per_s * 1e9,
        memory_bytes=round(cluster.memory_gb * 1e9),
        processors=preset.processors or 132,
        link=slowest * 1e9,
        network=(preset.network_gbytes_per_s or fastest) * 1e9,
        reached=Efficiency(
            products=reached.products,
            unaligned=reached.unaligned,
            memory=reached.memory,
            kernel=kernel / 1e6,
            links=reached.links,
            network=reached.network,
            collective=reached.collective_us / 1e6,
        ),
    )
