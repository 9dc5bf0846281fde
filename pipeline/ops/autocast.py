"""In which numbers autocast runs an op, on a GPU and on a CPU."""

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
    "_thnn_fused_gru_cell _addmm_activation _native_multi_head_attention mkldnn_rnn_layer",
)
WIDEST = {
    "cuda": _names("addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put scatter_add tensordot"),
    "cpu": _names("cat index_copy stack"),
}
# In float32 on a GPU, where the call names no type.
FULL_UNLESS_TYPED = _names("cumprod cumsum linalg_matrix_norm linalg_vector_norm log_softmax prod softmax sum")
KEYS = {"cuda": "AutocastCUDA", "cpu": "AutocastCPU"}  # by which torch knows the ops of a device
REFUSED = "binary_cross_entropy"


class Policy(Enum):
    LOW = "low"  # autocast's own type
    FULL = "full"  # float32
    WIDEST = "widest"  # of its arguments
    REFUSED = "refused"


@cache
def policy_of(target: str, device: str = "cuda", *, typed: bool = False) -> Policy | None:
    """Of an op such as `aten.linear.default`; None for one that runs in whatever it is given.

    `typed` says that the call itself names a type. Torch knows the ops of both devices, however it is built; to what
    it casts them it does not say.
    """
    import torch

    namespace, kind, overload = target.split(".")
    name = f"{namespace}::{kind}" if overload == "default" else f"{namespace}::{kind}.{overload}"
    if namespace != "aten" or not torch._C._dispatch_has_kernel_for_dispatch_key(name, KEYS[device]):
        return None
    if device == "cuda" and kind == REFUSED:
        return Policy.REFUSED
    if device == "cuda" and typed and kind in FULL_UNLESS_TYPED:
        return None
    return Policy.LOW if kind in LOW else Policy.WIDEST if kind in WIDEST[device] else Policy.FULL
