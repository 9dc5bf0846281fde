"""Bytes that a kernel of a GPU's library takes beside its tensors while it runs.

Convolutions in half precision run on channels-last memory: cuDNN changes the format of what it is given and gives back
in a workspace, with channels padded to eight. Those of one element and stride one run as products and convert less;
their weight gradient is summed from partial sums. As measured on an H200 for all convolutions of a ResNet-50.
"""

from __future__ import annotations

from math import prod

from pipeline.ir.cluster import HALF
from pipeline.ir.profile import Kernel

PADDED = 8  # channels
LARGE = 2**19  # elements of a weight from which one-element convolutions are run as the others are
PARTIAL_SUMS, MOST_PARTIAL = 1024, 140e6  # bytes for each element of such a weight, and in all
FORWARD, BACKWARD = ("convolution", "cudnn_convolution"), ("convolution_backward",)


def workspace_bytes(kernel: Kernel) -> int:
    if kernel.dtype not in HALF or kernel.name not in (*FORWARD, *BACKWARD):
        return 0
    if kernel.name in FORWARD:
        given, weight, result = kernel.shapes[0], kernel.shapes[1], kernel.shapes[-1]
    else:
        result, given, weight = kernel.shapes[:3]
    if len(given) != 4:
        return 0
    as_product = prod(weight[2:]) == 1 and given[2:] == result[2:] and prod(weight) < LARGE
    whole, padded, made = 2 * prod(given), 2 * _padded(given), 2 * prod(result)
    if kernel.name in FORWARD:
        return made if as_product else padded + 2 * made
    if as_product:
        return whole + int(min(PARTIAL_SUMS * prod(weight), MOST_PARTIAL))
    return whole + padded + made


def _padded(shape: tuple[int, ...]) -> int:
    batch, channels, *sides = shape
    return batch * -(-channels // PADDED) * PADDED * prod(sides)
