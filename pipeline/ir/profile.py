"""What each op of the unsplit graph costs, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass


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


@dataclass(frozen=True)
class OpCost:
    flops_forward: float
    flops_backward: float
    bytes_forward: int  # read and written
    bytes_backward: int
    saves: tuple[str, ...]  # values kept for backward, by identity
    extra_saved: int  # bytes kept that are no value of the graph (row statistics, masks)
    free: bool  # a view: no kernel runs


@dataclass(frozen=True)
class Profile:
    ops: dict[str, OpCost]
    storage: dict[str, str]  # value -> the value whose memory it shares (itself, unless it is a view)
    parameters: int
    parameter_bytes: int
    saved_bytes: int  # of one step, each storage counted once
