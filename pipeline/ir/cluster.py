"""The machine in seconds and bytes: devices, how they are linked, mesh axes, compute rates and collective curves."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod

from shardwright.pipeline.ir.correction import Correction

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
SEND = "send_recv"  # from one device to one other
LATER = "reduce_scatter_later"  # without waiting for it, where that takes longer: gloo's is an all-reduce
HALF = ("bfloat16", "float16")


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
class Pace:
    """Seconds for each unit of work: an element of an op's largest tensor, a FLOP, a byte that is moved."""

    forward: float
    backward: float


@dataclass(frozen=True)
class HostPace:
    """Seconds of a GPU's host: in a forward pass for each op, each kernel and each module that is entered; in a
    backward pass for each kernel; in an optimizer step for each parameter; for a recompute region, each tensor that an
    op in it keeps, on each of its two runs and when backward asks for it, and each call of `kept`. As seen on the host
    of an H200; the cluster stage measures how much slower or faster another one is."""

    op: float = 9e-6
    kernel: float = 17e-6
    module: float = 24e-6
    backward_kernel: float = 22e-6
    parameter: float = 20e-6
    region: float = 370e-6
    saved: float = 4e-6
    kept: float = 300e-6


def paced(host: HostPace, kernel: float) -> HostPace:
    """The host that takes so many seconds for a kernel of a forward pass, and as much more or less for all else."""
    return HostPace(**{name: seconds * kernel / host.kernel for name, seconds in vars(host).items()})


NO_HOST = HostPace(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)  # of a step that is replayed


@dataclass(frozen=True)
class Compute:
    matmul: Curve  # FLOP/s by FLOPs of one call, in float32
    memory_rate: float  # bytes/s of element-wise work
    launch: float  # seconds that any op costs
    launch_backward: float
    ops: dict[str, Pace] = field(
        default_factory=dict
    )  # by op, for each element; one that is missing is bound by memory
    optimizer_launch: float = 0.0  # seconds of an optimizer step for each parameter
    optimizer_rate: float | None = None  # bytes/s that an optimizer step moves; None is `memory_rate`
    matmul_by_dtype: dict[str, Curve] = field(default_factory=dict)  # of the other dtypes
    processors: int | None = None  # of a GPU: multiprocessors, over which kernels are spread
    host: HostPace = field(default_factory=HostPace)  # of a GPU: what issues its kernels
    workspace: int = 0  # bytes that libraries of products keep on a GPU once they were called forward and backward
    workspace_biased: int = 0  # as many more for products with a bias: of forward, and of those that backward repeats
    flops: dict[str, Pace] = field(default_factory=dict)  # by op, for each FLOP; one that is missing is as a product
    unaligned: float | None = None  # of a GPU: share of its rate in products with rows that begin on no 16 bytes
    onednn: bool = True  # of a CPU: whether oneDNN's kernels, which torch takes by default, are the faster ones
    bodies: dict[str, Pace] = field(default_factory=dict)  # by local form: seconds of a call beside those of its op
    product_bytes: Pace = Pace(0.0, 0.0)  # what a product's bytes take beside its arithmetic: it counts with few rows

    def matmul_of(self, dtype: str) -> Curve:
        """The curve of a dtype; the two half precisions stand for each other, all else is as float32."""
        known = (dtype, *HALF) if dtype in HALF else (dtype,)
        return next((self.matmul_by_dtype[name] for name in known if name in self.matmul_by_dtype), self.matmul)


@dataclass(frozen=True)
class LinkCost:
    """A collective over the whole axis takes latency + bytes / bandwidth; bytes are those of the unsplit tensor.

    Where `points` (bytes, seconds) are given they say more: between two of them seconds are interpolated, below the
    first they are constant, and above the last `bandwidth` holds.
    """

    latency: float
    bandwidth: float
    points: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        if self.latency < 0 or self.bandwidth <= 0:
            raise ValueError("a link needs a latency that is not negative and a positive bandwidth")
        steps = list(pairwise(self.points))
        if any(after[0] <= before[0] or after[1] < before[1] for before, after in steps):
            raise ValueError("a link's points need ascending bytes and seconds that do not fall")

    def part(self, share: float) -> LinkCost:
        """What a tensor pays that is such a share of the bytes of one collective."""
        if share == 1.0:
            return self
        points = tuple((share * nbytes, share * seconds) for nbytes, seconds in self.points)
        return LinkCost(share * self.latency, self.bandwidth, points)

    def seconds(self, nbytes: float) -> float:
        if not self.points:
            return self.latency + nbytes / self.bandwidth
        right = bisect_left(self.points, nbytes, key=lambda point: point[0])
        if right == 0:
            return self.points[0][1]
        low, before = self.points[right - 1]
        if right == len(self.points):
            return before + (nbytes - low) / self.bandwidth
        high, after = self.points[right]
        return before + (after - before) * (nbytes - low) / (high - low)


@dataclass(frozen=True)
class Axis:
    name: str
    size: int
    links: dict[str, LinkCost]  # one for each of COLLECTIVES; SEND where it is known, LATER where it is another
    measured: bool = False  # or by formula


@dataclass(frozen=True)
class Mesh:
    """The devices as an array: in `Cluster.order`, row-major, the outermost axis (the slowest links) first."""

    axes: tuple[Axis, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(axis.size for axis in self.axes)

    @property
    def label(self) -> str:
        """`d0 2 x d1 4`"""
        return " x ".join(f"{axis.name} {axis.size}" for axis in self.axes)


@dataclass(frozen=True)
class Split:
    """The devices cut into submeshes for the partitions of a pipeline, one after another in `Cluster.order`."""

    sizes: tuple[int, ...]  # devices of each submesh
    link: LinkCost  # between neighbours, the slowest of them
    meshes: dict[str, tuple[Mesh, ...]]  # of a submesh, by its size; as slow as the slowest submesh of that size


@dataclass(frozen=True)
class Group:
    """Devices of which any two in different members are linked alike; inside a member the links are faster."""

    kind: str  # device, island, host, switch or cluster
    ranks: tuple[int, ...]
    bandwidth: float  # bytes/s from a device of one member to one of another, nothing else on the way
    latency: float
    uplink: float | None = None  # bytes/s out of a member, for all of its devices; None: each has links of its own
    members: tuple[Group, ...] = ()  # none: each rank is one
    start: float = 0.0  # seconds that any collective takes beside its messages

    def __post_init__(self) -> None:
        if self.members and sorted(r for m in self.members for r in m.ranks) != sorted(self.ranks):
            raise ValueError("the members of a group hold its ranks")


@dataclass(frozen=True)
class Host:
    name: str
    ranks: tuple[int, ...]
    device: str  # what it calls itself
    memory_bytes: int  # of one device


@dataclass(frozen=True)
class Measured:
    """How the figures were found, and how far they can be trusted."""

    seconds: float  # that the probe took
    rounds: int  # of pairs at once
    pairs: int  # measured; the others follow from these
    outliers: int  # times that were left out
    spread: float  # of repeated measurements, relative to their median: the median over all
    fit_error: float  # on message sizes that were not fitted, relative: the median over all


@dataclass(frozen=True)
class Overlap:
    """Collectives beside computation."""

    mode: str = "runtime"  # whose: `runtime` as programs run, `megatron` as Megatron does, `none` one after the other
    hidden: float = 0.0  # of computation and a collective at once: 1 hides the shorter of the two, 0 nothing

    @property
    def silent(self) -> bool:
        """Whether nothing runs beside computation, or might as well not."""
        return self.mode == "none" or not self.hidden


@dataclass(frozen=True)
class Cluster:
    source: str  # probe, preset or simulate
    device: str  # cpu or cuda
    devices: int
    memory_bytes: int  # of one device, the smallest
    compute: Compute  # of one device, the slowest
    axes: tuple[Axis, ...]  # the mesh that is planned for
    hosts: tuple[Host, ...] = ()
    group: Group | None = None  # all devices
    order: tuple[int, ...] = ()  # ranks as meshes and splits count them; () is 0, 1, 2...
    meshes: tuple[Mesh, ...] = ()  # candidates of one to three axes
    splits: tuple[Split, ...] = ()  # candidates for pipelines
    measured: Measured | None = None
    overlap: Overlap = Overlap()
    correction: Correction | None = None  # as runs say that it is: all above is corrected by it; not in the artifact

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(axis.size for axis in self.axes)

    def mesh_candidates(self, most_axes: int = 3) -> tuple[Mesh, ...]:
        """The meshes to plan for, of few axes first and then the most promising first, each with its curves.

        `pipeline.cost` prices with any of them: `Paths(mesh.axes, ...)`, `price_step(..., cluster.on(mesh), ...)`.
        """
        return tuple(mesh for mesh in self.meshes or (Mesh(self.axes),) if len(mesh.axes) <= most_axes)

    def on(self, mesh: Mesh) -> Cluster:
        """The same devices, planned for as this mesh."""
        if prod(mesh.sizes) != self.devices:
            raise ValueError(f"a mesh of {mesh.sizes} does not hold {self.devices} devices")
        return self.part(mesh)

    def part(self, mesh: Mesh) -> Cluster:
        """As many of the devices as this mesh has: a partition of a pipeline."""
        return replace(self, devices=prod(mesh.sizes), axes=mesh.axes)

    def links_of(self, axes: Sequence[int]) -> str:
        """The links that a collective over these axes of the mesh uses, by a name: those of the smallest group of
        devices that holds its ranks."""
        places = [0]
        for axis in axes:
            stride = prod(self.sizes[axis + 1 :])
            places = [place + stride * n for place in places for n in range(self.sizes[axis])]
        ranks = {self.order[place] if self.order else place for place in places}
        group, depth = self.group, 0
        while group is not None:
            group, depth = next((one for one in group.members if ranks.issubset(one.ranks)), None), depth + 1
        return f"links {depth}"
