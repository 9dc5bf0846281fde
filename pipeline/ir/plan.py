"""Everything that is decided: layouts, strategies, recompute; with what it is predicted to cost."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeline.ir.cluster import Mesh
from pipeline.ir.layout import Layout


@dataclass(frozen=True)
class Strategy:
    """How one op runs on the mesh: the layout of each tensor it reads and writes."""

    name: str  # per axis the letter that is split, or R, B, P
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    body: str = ""  # per axis a local form of the op that is not the op itself (a mean over a split dim), or nothing


@dataclass(frozen=True)
class Sharding:
    """One strategy per op, one storage layout per parameter, one layout per input of the step, and the ways between."""

    strategies: dict[str, Strategy]
    storage: dict[str, Layout]
    inputs: dict[str, Layout]
    paths: dict[str, tuple[Layout, ...]] = field(default_factory=dict)  # `value: source -> target` -> what lies between
    state: dict[str, Layout] = field(default_factory=dict)  # of the optimizer's, where it is not the storage's (ZeRO-1)
    regathered: tuple[str, ...] = ()  # parameters of which only the shard is kept: gathered again in backward (ZeRO-3)

    def between(self, value: str, source: Layout, target: Layout) -> tuple[Layout, ...]:
        """The layouts that a value passes through; none where one step leads from the source to the target."""
        return self.paths.get(path_name(value, source, target), ())


def path_name(value: str, source: Layout, target: Layout) -> str:
    return f"{value}: {source} -> {target}"


@dataclass(frozen=True)
class Proof:
    """How good the solver's answer is known to be."""

    backend: str
    method: str  # elimination, prices (of bytes), the integer program; or given: it was saved
    objective: float
    bound: float
    gap: float
    variables: int
    constraints: int
    seed: int = 0


@dataclass(frozen=True)
class FrontierPoint:
    sharding: Sharding
    seconds: float  # of a step without recompute
    resident_bytes: int  # parameters, gradients, optimizer state
    peak_bytes: int  # without recompute
    proof: Proof
    mesh: int = 0  # of the frontier's, for which it is


@dataclass(frozen=True)
class Baseline:
    """The fastest plan of a kind that has a name, by the same costs."""

    name: str
    seconds: float
    peak_bytes: int
    mesh: int  # of the frontier's


@dataclass(frozen=True)
class Frontier:
    budget_bytes: int
    optimizer_copies: float  # tensors of a parameter's size that the optimizer keeps
    meshes: tuple[Mesh, ...]
    points: tuple[FrontierPoint, ...]  # fastest first
    baselines: tuple[Baseline, ...] = ()
    pieces: tuple[FrontierPoint, ...] = ()  # plans on meshes of fewer devices, for the partitions of a pipeline
    micro_batches: int = 1  # forward and backward passes of a step


@dataclass(frozen=True)
class Region:
    """Links first..last run in order; a region with `recompute` drops what is inside and computes it again."""

    first: int
    last: int
    recompute: bool
    inner: tuple[Region, ...]
    kept: tuple[str, ...] = ()  # ops, and conversions, inside it whose results are not dropped


@dataclass(frozen=True)
class Alternative:
    point: int  # index on the frontier
    seconds: float | None  # None: does not fit at any recompute
    peak_bytes: int


@dataclass(frozen=True)
class Prediction:
    step_seconds: float
    peak_bytes: int
    resident_bytes: int
    compute_seconds: float
    communication_seconds: float
    recompute_seconds: float
    optimizer_seconds: float


@dataclass(frozen=True)
class Plan:
    axes: tuple[tuple[str, int], ...]
    device: str
    budget_bytes: int
    sharding: Sharding
    regions: tuple[Region, ...]
    prediction: Prediction
    alternatives: tuple[Alternative, ...]
    micro_batches: int = 1  # forward and backward passes of a step
    released: tuple[str, ...] = ()  # values that backward does not keep, and that are large: let go once they are read

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.axes)
