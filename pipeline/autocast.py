"""In which numbers autocast runs an op on a GPU."""

from __future__ import annotations

from enum import Enum
from functools import cache


def _names(*lines: str) -> frozenset[str]:
    return frozenset(name for line in lines for name in line.split())


# Those of torch's documentation of autocast op eligibility, and the parts of which they consist.
LOW = _names(
    "__matmul__ addbmm addmm addmv addr baddbmm bmm chain_matmul multi_dot conv1d conv2d conv3d conv_transpose1d",
    "conv_transpose2d conv_transpose3d convolution gru_cell linear lstm_cell matmul mm mv prelu rnn_relu_cell",
    "rnn_tanh_cell scaled_dot_product_attention einsum linalg_multi_dot linalg_vecdot conv_tbc _convolution",
    "cudnn_convolution cudnn_convolution_transpose _scaled_dot_product_flash_attention _thnn_fused_lstm_cell",
    "_thnn_fused_gru_cell",
)
WIDEST = _names("addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put scatter_add tensordot")
# In float32, where the call names no type.
OF_THE_CALLER = _names("cumprod cumsum linalg_matrix_norm linalg_vector_norm log_softmax prod softmax sum")
REFUSED = "binary_cross_entropy"


class Policy(Enum):
    LOW = "low"  # autocast's own type
    FULL = "full"  # float32
    WIDEST = "widest"  # of its arguments
    REFUSED = "refused"


@cache
def policy_of(target: str, typed: bool = False) -> Policy | None:
    """Of an op such as `aten.linear.default`; None for one that runs in whatever it is given.

    `typed` says that the call itself names a type. Torch knows the ops, also where it is built without CUDA; of those
    that it casts it does not say to what.
    """
    import torch

    namespace, kind, overload = target.split(".")
    name = f"{namespace}::{kind}" if overload == "default" else f"{namespace}::{kind}.{overload}"
    if namespace != "aten" or not torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCUDA"):
        return None
    if kind == REFUSED or (typed and kind in OF_THE_CALLER):
        return Policy.REFUSED if kind == REFUSED else None
    return Policy.LOW if kind in LOW else Policy.WIDEST if kind in WIDEST else Policy.FULL
