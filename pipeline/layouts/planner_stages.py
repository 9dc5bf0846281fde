"""What the stages of the planner do for a price: this package may not import them, and is given them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from shardwright.pipeline.config import ClusterSettings
from shardwright.pipeline.cost.step import Workload
from shardwright.pipeline.ir.cluster import Compute, Group, LinkCost
from shardwright.pipeline.ir.graph import OpGraph
from shardwright.pipeline.ir.plan import Sharding
from shardwright.pipeline.ir.profile import Profile


class AxisLinks(Protocol):
    def along(self, stride: int, size: int) -> dict[str, LinkCost]:
        """Of an axis over so many devices, each `stride` places from the next."""

    def between(self, distance: int) -> LinkCost:
        """From each device of a submesh to the one so many places further, all at once."""


@dataclass(frozen=True)
class PlannerStages:
    profile: Callable[[OpGraph], Profile]  # of a graph in half precision, on a GPU
    tensor_parallel: Callable[[Workload, bool], Sharding]  # and whether the sequence is split between the blocks
    compute: Callable[[ClusterSettings], Compute]
    hidden: Callable[[ClusterSettings], float]  # of what overlaps (pipeline.cost.lines)
    group: Callable[[ClusterSettings], Group]
    links: Callable[[Group], AxisLinks]
