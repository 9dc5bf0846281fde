"""The machine in seconds and bytes: devices, mesh axes, compute rates and collective curves."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


@dataclass(frozen=True)
class Curve:
    """A rate measured at several sizes; between two of them it is interpolated, outside it is constant."""

    sizes: tuple[float, ...]
    rates: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.sizes) != len(self.rates) or not self.sizes:
            raise ValueError("a curve needs as many rates as sizes, and at least one")
        if list(self.sizes) != sorted(self.sizes) or min(self.rates) <= 0:
            raise ValueError("a curve needs ascending sizes and positive rates")

    def at(self, size: float) -> float:
        right = bisect_left(self.sizes, size)
        if right == 0:
            return self.rates[0]
        if right == len(self.sizes):
            return self.rates[-1]
        low, high = self.sizes[right - 1], self.sizes[right]
        share = (size - low) / (high - low)
        return self.rates[right - 1] * (1 - share) + self.rates[right] * share


@dataclass(frozen=True)
class PerElement:
    """Seconds for each element of an op's largest tensor: for ops that are bound by arithmetic, not by memory."""

    forward: float
    backward: float


@dataclass(frozen=True)
class Compute:
    matmul: Curve  # FLOP/s by FLOPs of one call
    memory_rate: float  # bytes/s of element-wise work
    launch: float  # seconds that any op costs
    launch_backward: float
    ops: dict[str, PerElement] = field(default_factory=dict)  # by op; one that is missing is bound by memory
    optimizer_launch: float = 0.0  # seconds of an optimizer step for each parameter
    optimizer_rate: float | None = None  # bytes/s that an optimizer step moves; None is `memory_rate`


@dataclass(frozen=True)
class LinkCost:
    """A collective over the whole axis takes latency + bytes / bandwidth; bytes are those of the unsplit tensor."""

    latency: float
    bandwidth: float

    def seconds(self, nbytes: float) -> float:
        return self.latency + nbytes / self.bandwidth


@dataclass(frozen=True)
class Axis:
    name: str
    size: int
    links: dict[str, LinkCost]  # one for each of COLLECTIVES


@dataclass(frozen=True)
class Cluster:
    source: str  # probe or preset
    device: str  # cpu or cuda
    devices: int
    memory_bytes: int  # of one device
    compute: Compute
    axes: tuple[Axis, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(axis.size for axis in self.axes)
