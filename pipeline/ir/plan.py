"""Everything that is decided: layouts, strategies, partitions, recompute; with what it is predicted to cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

from shardwright.pipeline.ir.cluster import Mesh
from shardwright.pipeline.ir.correction import Correction
from shardwright.pipeline.ir.layout import Layout


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
    inputs: dict[str, Layout]  # of a partition also of what enters it, and of what leaves it otherwise than written
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
    submesh_points: tuple[FrontierPoint, ...] = ()  # plans on meshes of fewer devices, for the partitions of a pipeline
    micro_batches: int = 1  # forward and backward passes of a step
    correction: Correction | None = None  # by which the cluster was corrected, for these plans and what follows


@dataclass(frozen=True)
class Region:
    """Links first..last run in order; a region with `recompute` drops what is inside and computes it again."""

    first: int
    last: int
    recompute: bool
    inner: tuple[Region, ...]
    kept: tuple[str, ...] = ()  # ops, and conversions, inside it whose results are not dropped
    compiled: float | None = None  # without recompute: its links are one compiled function, which keeps this part
    cheapest: bool = False  # compiled: it makes again what takes least to make; else what torch chooses


@dataclass(frozen=True)
class Partition:
    """Links first..last of the model on devices of their own: all links where there is no pipeline."""

    first: int
    last: int
    axes: tuple[tuple[str, int], ...]
    sharding: Sharding  # of a pipeline's partition: of its own ops, and what it needs of the prologue
    regions: tuple[Region, ...]
    in_flight: int  # micro-batches whose forward has begun and whose backward has not ended, at most
    peak_bytes: int
    seconds: float  # of one micro-batch, forward, backward and recomputed

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.axes)


@dataclass(frozen=True)
class Alternative:
    """Another plan, and why it lost."""

    what: str  # mesh, partitions, schedule, micro-batches, recompute
    seconds: float | None  # None: does not fit at any recompute
    peak_bytes: int
    lost: str
    point: int | None = None  # index on the frontier; None is a pipeline


@dataclass(frozen=True)
class Event:
    """Something that the devices of a partition do."""

    what: str  # forward, recompute, backward, weight gradients; prologue, gradient sums, optimizer
    partition: int
    first: int  # links
    last: int
    micro_batch: int | None  # None: once a step
    start: float
    seconds: float
    held_bytes: int | None = None  # meanwhile; None where only the peak of the partition is known


@dataclass(frozen=True)
class Total:
    """A partition's seconds of a step by what it does."""

    partition: int
    what: str
    seconds: float


@dataclass(frozen=True)
class Timeline:
    """The step as it is predicted to run; what is in the middle of a long one is left out, and `note` says so."""

    events: tuple[Event, ...] = ()
    totals: tuple[Total, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Prediction:
    step_seconds: float
    peak_bytes: int
    resident_bytes: int
    compute_seconds: float
    communication_seconds: float
    recompute_seconds: float
    optimizer_seconds: float
    bubble_seconds: float = 0.0  # in which the busiest devices of a pipeline wait; the seconds above are theirs
    host_seconds: float = 0.0  # in which a GPU waits for the host to issue its kernels
    hidden_seconds: float = 0.0  # of collectives behind what is computed: no part of the step, nor of those above


def _is_compiled(region: Region) -> bool:
    return region.compiled is not None or any(map(_is_compiled, region.inner))


@dataclass(frozen=True)
class Plan:
    device: str
    budget_bytes: int
    partitions: tuple[Partition, ...]  # one where there is no pipeline
    prediction: Prediction
    alternatives: tuple[Alternative, ...] = ()
    micro_batches: int = 1  # forward and backward passes of a step
    schedule: str = ""  # of a pipeline: one of SCHEDULES in invariants.py
    chunks: int = 1  # partitions on the same devices
    timeline: Timeline = field(default_factory=Timeline)
    released: tuple[str, ...] = ()  # values that backward does not keep, and that are large: let go once they are read
    onednn: bool = True  # on a CPU: whether torch may take oneDNN's kernels, as it does by default
    slices: tuple[int, ...] = ()  # samples of the micro-batches into which a pass is cut; () is one of all
    cuda_graphs: bool = False  # the passes of a step are captured once and replayed
    keeps_last: bool = False  # of a pipeline: the last micro-batch of a step runs its regions once and keeps everything
    correction: Correction | None = None  # in the prediction; of `plans` just this one, where a run measured it
    estimate: Prediction | None = None  # where a run measured this very plan: what it was priced at

    @property
    def pipelined(self) -> bool:
        return len(self.partitions) > 1

    @property
    def compiled(self) -> bool:
        """Whether some of its blocks are."""
        return any(_is_compiled(region) for partition in self.partitions for region in partition.regions)

    @property
    def ranks(self) -> int:
        """Of all submeshes of the devices; partition n is on submesh n modulo their number."""
        return sum(prod(partition.sizes) for partition in self.partitions[: len(self.partitions) // self.chunks])

    @property
    def rank_peak_bytes(self) -> tuple[int, ...]:
        """Of each rank: all partitions of its submesh of the devices together."""
        submeshes = len(self.partitions) // self.chunks
        own = [sum(part.peak_bytes for part in self.partitions[n::submeshes]) for n in range(submeshes)]
        return tuple(peak for n, peak in enumerate(own) for _ in range(prod(self.partitions[n].sizes)))

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        return self._only.axes

    @property
    def sharding(self) -> Sharding:
        return self._only.sharding

    @property
    def regions(self) -> tuple[Region, ...]:
        return self._only.regions

    @property
    def sizes(self) -> tuple[int, ...]:
        return self._only.sizes

    @property
    def _only(self) -> Partition:
        if self.pipelined:
            raise ValueError(f"the plan is a pipeline of {len(self.partitions)} partitions: ask each of them")
        return self.partitions[0]
