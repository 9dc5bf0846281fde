"""Random numbers on several ranks, out of one stream that all ranks share.

Every rank seeds the default generator alike, and an op that runs whole draws from it: so replicated values are equal
on all ranks. An op that is split draws one number from that stream, which is again the same everywhere, and its own
numbers from a stream seeded with it and the rank's place: different on every rank. The default stream stays in step,
and as a recompute region restores it, the split draws are repeated too; no second stream has to be saved.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shardwright.pipeline.runtime.programs.mesh import position

_SEEDS = 2**62
_SPREAD = 0x9E3779B97F4A7C15  # so that the seeds of neighbours have nothing in common


def drawn_apart(draw: Callable[[], Tensor], axis: str) -> Tensor:
    """Runs a random op with this rank's own numbers."""
    shared = int(torch.randint(_SEEDS, ()))
    # Not `is_available`: a program on CPUs must not wake the GPU, and inside a recompute region torch refuses it.
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        seed = seed_apart(shared, position(axis)[0] + 1)
        # Not `torch.manual_seed`: for each kind of device that is absent, every call keeps the stack it came from.
        torch.default_generator.manual_seed(seed)
        for device in devices:
            torch.cuda.default_generators[device].manual_seed(seed)
        return draw()


def seed_apart(seed: int, place: int) -> int:
    """Of the stream at that place, out of a seed that all places have; place 0 has that itself."""
    return (seed + place * _SPREAD) % _SEEDS


def go_apart(place: int) -> None:
    """From a stream that all ranks are in, each to one of its own place; place 0 goes on in it."""
    if place:
        torch.manual_seed(seed_apart(int(torch.randint(_SEEDS, ())), place))
