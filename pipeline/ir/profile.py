"""What each op of the unsplit graph costs, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from shardwright.pipeline.ir.graph import OpGraph


@dataclass(frozen=True)
class Kernel:
    """One kernel of a step, as eager PyTorch would run it."""

    name: str
    flops: float
    read: int  # bytes; a broadcast tensor counts once
    written: int
    dtype: str  # of its largest tensor
    shapes: tuple[tuple[int, ...], ...]  # of the tensors it reads, then of those it writes
    op: str = ""  # the op of the graph that runs it
    scattered: bool = False  # reads a tensor that does not lie in memory as its dims do
    leading: int = 0  # of a product: the elements on which rows of all its matrices begin
    transposed: str = ""  # of a product: n or t for each operand, t if it is read across
    causal: bool = False
    dropout: bool = False
    waits: bool = False  # the host reads what the card has computed before it issues it


@dataclass(frozen=True)
class OpCost:
    flops_forward: float
    flops_backward: float
    bytes_forward: int  # read and written
    bytes_backward: int
    saves: tuple[str, ...]  # values kept for backward, by identity
    extra_saved: int  # bytes kept that are no value of the graph (row statistics, masks, cast copies)
    free: bool  # a view: no kernel runs
    kernels_forward: int = 1
    kernels_backward: int = 1
    temporary_forward: int = 0  # most bytes alive while it runs that are gone when it is done
    temporary_backward: int = 0

    def times(self, count: int) -> OpCost:
        """The work of so many."""
        return replace(
            self,
            flops_forward=count * self.flops_forward,
            flops_backward=count * self.flops_backward,
            bytes_forward=count * self.bytes_forward,
            bytes_backward=count * self.bytes_backward,
        )


@dataclass(frozen=True)
class Share:
    """A part of the memory that is alive at the step's peak."""

    name: str  # a class of memory, or a module
    nbytes: int


@dataclass(frozen=True)
class Step:
    """The unsplit step on one device: what its memory does from kernel to kernel."""

    resident_bytes: int
    after_forward_bytes: int
    peak_bytes: int
    peak_in: str  # forward, backward or optimizer
    peak_module: str  # whose kernel runs at the peak
    peak_by_class: tuple[Share, ...]
    peak_by_module: tuple[Share, ...]  # largest first
    kernels: tuple[int, ...]  # of forward, backward and optimizer
    moments: tuple[int, ...]  # numbers of kernels at which the curves are sampled, each at the most of its stretch
    curves: dict[str, tuple[int, ...]]  # class of memory -> bytes alive at those moments
    optimizer_bytes: int = 0  # that the optimizer takes at its peak beside parameters, gradients and state


@dataclass(frozen=True)
class Held:
    """Memory that a link holds from its kernel of number `born` until before that of number `died` (None: longer).

    Kernels count through the forward pass and on through the backward pass.
    """

    nbytes: int
    born: int
    died: int | None
    op: str  # whose kernel made it
    value: str  # the first value of the graph that lies in it; none for what is an op's own
    gradient: str = ""  # the value of the graph of which it is the gradient, or what one op adds to that


@dataclass(frozen=True)
class LinkKernels:
    """A link that was run by itself. Numbers are places in `held`; ops are those of the first link that is equal."""

    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    held: tuple[Held, ...] = ()  # but for what entered it, and the memory that was there before
    writes: tuple[int | None, ...] = ()  # what leaves it
    saved: dict[str, tuple[int, ...]] = field(default_factory=dict)  # op -> what it keeps for backward
    results: dict[str, tuple[int | None, ...]] = field(default_factory=dict)  # op -> where its outputs lie
    dropped_peak: int = 0  # of a forward pass that keeps nothing for backward


@dataclass(frozen=True)
class Joined:
    """Links first..last, between which nothing crosses that a backward needs, run as one."""

    first: int
    last: int
    run: int  # its place in `Kernels.runs`


@dataclass(frozen=True)
class Kernels:
    """Every kernel of the unsplit step: those of equal links once."""

    prologue: tuple[Kernel, ...]
    links: tuple[LinkKernels, ...]
    chain: tuple[int, ...]  # for each link of the graph's chain, its place in `links`
    optimizer: tuple[Kernel, ...]
    joined: tuple[Joined, ...] = ()  # in order; a link that stands alone is in none
    runs: tuple[LinkKernels, ...] = ()  # of these
    slices: int = 1  # ops are priced for so small a part of the batch for which the kernels were run


@dataclass(frozen=True)
class CompiledWay:
    """A block that was compiled to keep at most a part of what it has for backward, as it ran on the device.

    Peaks are those of its two passes: what entered is not counted, the gradient of what left is.
    """

    keeps: float  # that part
    forward: float  # seconds
    backward: float
    saved: int  # bytes after forward, what leaves it included
    saved_alone: int  # bytes after forward once what leaves it is gone
    forward_peak: int
    backward_peak: int
    cheapest: bool = False  # it makes again what takes least to make; else what torch chooses


@dataclass(frozen=True)
class CompiledBlock:
    first: int
    last: int  # of its links
    run: int  # its place in `Compiled.runs`


@dataclass(frozen=True)
class Compiled:
    """The blocks of the unsplit step, compiled and measured: equal ones once."""

    device: str  # that they ran on
    blocks: tuple[CompiledBlock, ...]
    runs: tuple[tuple[CompiledWay, ...], ...]  # each with all kept first


@dataclass(frozen=True)
class Profile:
    device: str  # that it is made for
    precision: str
    source: str  # symbolic: the step was run without memory; table: from the op table, where that cannot be done
    ops: dict[str, OpCost]
    storage: dict[str, str]  # value -> the value whose memory it shares (itself, unless it is a view)
    parameters: int
    parameter_bytes: int
    saved_bytes: int  # of one step, each storage counted once
    types: dict[str, str] = field(
        default_factory=dict
    )  # dtypes of values that autocast makes others than the graph has
    step: Step | None = None
    kernels: Kernels | None = None
    compiled: Compiled | None = None  # where blocks are compiled, and could be measured
    optimizer_copies: float = 0.0  # tensors of a parameter's size that the optimizer keeps


def as_run(graph: OpGraph, types: dict[str, str]) -> OpGraph:
    """The graph with the types that its values have under autocast: what is priced, not what is printed."""
    if not types:
        return graph
    values = {
        name: replace(value, type=replace(value.type, dtype=types.get(name, value.type.dtype)))
        for name, value in graph.values.items()
    }
    return replace(graph, values=values)
