"""What each op of the unsplit graph costs, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass


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
