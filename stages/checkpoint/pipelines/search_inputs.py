"""What `partition` is given: devices as submeshes with their plans, what the user fixes, how finely to search."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from shardwright.pipeline.base.errors import SolveError
from shardwright.pipeline.cost.pipelines.schedules import Pipeline
from shardwright.pipeline.ir.cluster import Overlap
from shardwright.stages.checkpoint.pipelines.submesh_plans import Recompute, SubmeshPlan
from shardwright.stages.checkpoint.recompute.chain import SLOTS, Slots
from shardwright.stages.checkpoint.recompute.schedule import ScheduledOp

Reshard = Callable[
    [int, SubmeshPlan, SubmeshPlan], float
]  # seconds to lay out the activation before a link from plan to plan


class PartitionError(SolveError):
    """No pipeline fits, or what was asked for does not exist; if it is the memory, `floor` is what would do."""

    floor: PipelineFloor | None = None


@dataclass(frozen=True)
class PipelineFloor:
    """The least memory in which a pipeline was found, and the partition of it that needs the most."""

    memory: int
    pipeline: Pipeline
    partition: int
    partitions: int
    first: int
    last: int
    flight: int
    resident_bytes: float  # whatever is recomputed
    waiting_bytes: float  # held by micro-batches that wait
    op: ScheduledOp  # at whose peak the rest is held


@dataclass(frozen=True)
class Division:
    """The devices as submeshes, one after another: `sizes` if given, else any submeshes that plans are for."""

    devices: int
    submeshes: Mapping[int, tuple[SubmeshPlan, ...]]  # by number of micro-batches, of which the costs depend
    link: Callable[[float], float]  # seconds for so many bytes between neighbours
    sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.sizes and sum(self.sizes) != self.devices:
            raise PartitionError(f"submeshes of {self.sizes} devices are not {self.devices}", where="division")


@dataclass(frozen=True)
class UserChoices:
    """What the user fixes; what is not fixed is searched for."""

    pipelines: tuple[Pipeline, ...] = (Pipeline.ONE_F_ONE_B,)
    micro_batches: tuple[int, ...] = ()  # of those that the divisions offer; () is all
    boundaries: tuple[int, ...] | None = None  # first links of all partitions but the first
    partitions: tuple[int, ...] = ()  # how many; () is any number
    recompute: Recompute = Recompute.SOLVED
    spans: tuple[tuple[int, int], ...] = ()  # for Recompute.MARKED: the first and last links of what is recomputed
    chunks: tuple[int, ...] = (2,)  # partitions on a device, for interleaved
    buffers: bool = False  # what is being sent counts (submesh_plans.py)
    overlap: Overlap = field(default_factory=lambda: Overlap("runtime", 1.0))  # whose way to send


@dataclass(frozen=True)
class Effort:
    """How finely to search; the defaults lose little."""

    slots: Slots = SLOTS
    gap: float = 1e-4  # of the estimate, within which the search is optimal
    candidates: int = 16  # of each schedule and number of micro-batches that are worked out in full
    most_partitions: int = 64
    most_tasks: int = 8  # zero_bubble and interleaved: numbers of partitions that are searched in full, the likeliest


@dataclass(frozen=True, eq=False)
class SearchInputs:
    divisions: tuple[Division, ...]
    memory: int
    wishes: UserChoices
    effort: Effort
    reshard: Reshard | None
