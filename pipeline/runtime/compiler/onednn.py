"""Which kernels a CPU computes with: torch has its own for most ops, and those of oneDNN."""

from __future__ import annotations

from typing import Any

import torch


def use_kernels_of(program: Any) -> None:
    """As the cluster stage found them to be faster; a program that does not say leaves it to torch."""
    if hasattr(program, "ONEDNN"):
        torch.backends.mkldnn.enabled = program.ONEDNN
