"""A described cluster as a price sees it: a card, and the links of groups of its devices.

It is as the cluster stage describes it: the card reaches what the preset says, and an axis of devices
that are so far apart has the links that a mesh of the planner would have there.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from shardwright.pipeline.base.errors import ClusterError
from shardwright.pipeline.config import ClusterSettings, ClusterSource
from shardwright.pipeline.cost.unsplit import card_of
from shardwright.pipeline.ir.cluster import Axis, Compute, LinkCost
from shardwright.pipeline.layouts.planner_stages import AxisLinks, PlannerStages
from shardwright.pipeline.rates.kernels import Card


@dataclass(frozen=True)
class Machine:
    settings: ClusterSettings
    stages: PlannerStages
    _axes: dict[tuple[str, int, int], Axis] = field(default_factory=dict, compare=False)
    _sent: dict[int, LinkCost] = field(default_factory=dict, compare=False)

    @property
    def host(self) -> int:
        """Devices of one."""
        return self.settings.host_sizes[0]

    @property
    def devices(self) -> int:
        return sum(self.settings.host_sizes)

    @property
    def memory_bytes(self) -> float:
        return 1e9 * (self.settings.memory_gb or 0.0)

    @property
    def rate(self) -> float:
        """FLOP/s in half precision, of the data sheet."""
        preset = self.settings.preset
        return 1e9 * (preset.bf16_gflops or preset.half_gflops or preset.matmul_gflops or 0.0)

    @cached_property
    def compute(self) -> Compute:
        return self.stages.compute(self.settings)

    @cached_property
    def hidden(self) -> float:
        """Of computation and a collective at once, the part of the shorter one that costs nothing."""
        return self.stages.hidden(self.settings)

    @cached_property
    def card(self) -> Card:
        return card_of(self.compute)

    @cached_property
    def links(self) -> AxisLinks:
        return self.stages.links(self.stages.group(self.settings))

    def axis(self, name: str, size: int, stride: int) -> Axis:
        """So many devices, each `stride` places from the next."""
        key = name, size, stride
        if key not in self._axes:
            self._axes[key] = Axis(name, size, self.links.along(stride, size))
        return self._axes[key]

    def sent(self, distance: int) -> LinkCost:
        """From all devices of a stage to those of the next."""
        if distance not in self._sent:
            self._sent[distance] = self.links.between(distance)
        return self._sent[distance]

    def sized(self, devices: int) -> Machine:
        """The same with so many devices: of one host, or of whole hosts."""
        host = min(devices, self.host)
        return self.with_settings(replace(self.settings, devices=host, nodes=-(-devices // host)))

    def with_links(self, bandwidth: float, latency: float) -> Machine:
        """With so many times the bandwidth and the latency of every link."""
        preset = self.settings.preset

        def times(factor: float, *names: str) -> dict[str, Any]:
            return {name: getattr(preset, name) * factor for name in names if getattr(preset, name) is not None}

        links = times(bandwidth, "link_gbytes_per_s", "cross_gbytes_per_s", "network_gbytes_per_s")
        links |= times(latency, "latency_us", "cross_latency_us", "network_latency_us")
        reached = replace(preset.reached, collective_us=preset.reached.collective_us * latency)
        return self.with_settings(replace(self.settings, preset=replace(preset, reached=reached, **links)))

    def with_settings(self, settings: ClusterSettings) -> Machine:
        return Machine(settings, self.stages)


def machine_of(settings: ClusterSettings, stages: PlannerStages, where: str) -> Machine:
    """`where` names it in errors."""
    if settings.source is ClusterSource.probe:
        raise ClusterError("it is measured, and a price needs figures", where=where, remedy="choose a preset")
    if len(set(settings.host_sizes)) > 1:
        raise ClusterError("its hosts differ", where=where, remedy="choose a cluster of hosts that are alike")
    return Machine(settings, stages)
