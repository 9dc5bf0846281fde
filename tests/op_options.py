"""Forms of ops in which every argument that has a default is given another value.

An argument that no form gives is an argument that a rule may have forgotten: a size of the unsplit tensor among them
would reach the shards (`output_size` of `repeat_interleave`).
"""

from __future__ import annotations

from shardwright.pipeline.ops.own_names import EMBEDDING_BAG
from tests.one_op import t

# Arguments that choose a type, a place in memory or a kernel, and say nothing of shapes or values.
PLAIN = {
    "copy", "cudnn_enable", "cudnn_enabled", "device", "dtype", "generator", "implicit", "layout", "memory_format",
    "non_blocking", "out_dtype", "path", "pin_memory", "sparse", "sparse_grad",
}  # fmt: skip

REFUSED = {"aten._grouped_mm.default": {"bias"}}  # what torch's own kernels do not take

OPTIONS: dict[str, list[tuple]] = {
    "aten.add.Scalar": [(t(4, 6), 2, 3)],
    "aten.add_.Tensor": [(t(4, 6, grad=False), 1, {"alpha": 3})],
    "aten.addcmul.default": [(t(4, 6), t(4, 6), t(6), {"value": 2})],
    "aten.all.dim": [(t(4, 6, dtype="bool"), 1, True)],
    "aten.any.dim": [(t(4, 6, dtype="bool"), 0, True)],
    "aten.argsort.default": [(t(4, 6), 1, True)],
    "aten.avg_pool1d.default": [(t(4, 6, 7), (3,), (2,), (1,), True, False)],
    "aten.avg_pool2d.default": [(t(4, 6, 6, 5), (3, 3), (2, 2), (1, 1), True, False, 5)],
    "aten.baddbmm.default": [(t(12, 4, 6), t(12, 4, 4), t(12, 4, 6), {"beta": 2, "alpha": 3})],
    "aten.binary_cross_entropy.default": [
        (t(12, 4, positive=True), t(12, 4, positive=True, grad=False), t(12, 4, grad=False, positive=True), 2),
    ],
    "aten.binary_cross_entropy_with_logits.default": [
        (t(12, 4), t(12, 4, positive=True, grad=False), t(12, 4, grad=False), t(12, 4, grad=False, positive=True), 2),
        (t(12, 4), t(12, 4, positive=True, grad=False), None, t(4, grad=False, positive=True), 1),
    ],
    "aten.clamp.Tensor": [(t(4, 6), None, t(6))],
    "aten.conv3d.default": [(t(2, 4, 4, 4, 4), t(4, 2, 2, 2, 2), t(4), (2, 2, 2), (1, 1, 1), (1, 1, 1), 2)],
    "aten.conv_transpose1d.default": [(t(4, 6, 5), t(6, 2, 3), t(6), (2,), (1,), (1,), 3, (2,))],
    "aten.conv_transpose2d.input": [(t(4, 6, 5, 5), t(6, 2, 3, 3), t(4), (2, 2), (1, 1), (1, 1), 2, (2, 2))],
    "aten.conv_transpose3d.input": [
        (t(4, 4, 3, 3, 3), t(4, 2, 2, 2, 2), t(8), (2, 2, 2), (1, 1, 1), (1, 1, 1), 4, (2, 2, 2)),
    ],
    EMBEDDING_BAG: [
        (t(6, 4), t(5, high=6), t(4, values=(0, 2, 2, 5), dtype="int64"), 0, t(5), True, 1, True),
        (t(12, 4), t(6, 4, high=12), None, 2, None, False, 3),
        (t(12, 4), t(6, 4, high=12), None, 1, None, False, 3),
        (t(4, 4), t(0, values=(), dtype="int64"), t(2, values=(0, 0), dtype="int64"), 2),
    ],
    "aten.elu.default": [(t(4, 6), 0.7, 1.3, 2)],
    "aten.flatten.using_ints": [(t(4, 6, 2, 3), 1, 2)],
    "aten.group_norm.default": [(t(4, 12, 3), 4, t(12), t(12), 0.1)],
    "aten.huber_loss.default": [(t(12, 4), t(12, 4), 2, 0.5)],
    "aten.index_add.default": [(t(4, 6), 1, t(12, high=6), t(4, 12), {"alpha": 3})],
    "aten.layer_norm.default": [(t(12, 4), (4,), t(4), t(4), 0.1)],
    **{
        f"aten.{name}_cell.default": [(t(4, 3), t(4, 2), t(g * 2, 3), t(g * 2, 2), t(g * 2), t(g * 2))]
        for name, g in (("gru", 3), ("rnn_tanh", 1), ("rnn_relu", 1))
    },
    "aten.lstm_cell.default": [(t(4, 3), (t(4, 2), t(4, 2)), t(8, 3), t(8, 2), t(8), t(8))],
    "aten.leaky_relu.default": [(t(4, 6), 0.3)],
    "aten.linalg_vector_norm.default": [(t(4, 6), 3, (1,), True)],
    "aten.max_pool1d.default": [(t(4, 6, 9), (3,), (2,), (1,), (2,), True)],
    "aten.max_pool2d.default": [(t(4, 6, 6, 6), (3, 3), (2, 2), (1, 1), (2, 2), True)],
    "aten.nll_loss_nd.default": [(t(12, 4), t(12, high=4, sometimes=2), t(4, grad=False), 2, 2)],
    "aten.pad.default": [(t(4, 6, 12), (1, 2), "reflect"), (t(4, 6, 12), (1, 2), "circular"), (t(4, 6), (1, 0, 0, 0))],
    **{
        f"aten.fft_{n}.default": [(t(4, 6, 4, dtype="complex128"), (4, 2), (0, 2))] for n in ("fft2", "ifft2", "irfft2")
    },
    "aten.fft_rfft2.default": [(t(4, 6, 4), (4, 2), (0, 2))],
    **{
        f"aten.fft_{n}.default": [(t(4, 6, 4, dtype="complex128"), (4, 2), (0, 2), "ortho")]
        for n in ("fftn", "ifftn", "irfftn")
    },
    "aten.fft_rfftn.default": [(t(4, 6, 4), (4, 2), (0, 2), "ortho")],
    "aten.repeat_interleave.self_int": [
        (t(4, 6), 3, 1, {"output_size": 18}),
        (t(4, 6), 2, -1, {"output_size": 12}),
        (t(4, 6), 2, None, {"output_size": 48}),
    ],
    "aten.rsub.Scalar": [(t(4, 6), 2, 3)],
    "aten.slice_scatter.default": [(t(4, 6), t(4, 2), 1, 1, 5, 2)],
    "aten.smooth_l1_loss.default": [(t(12, 4), t(12, 4), 2, 0.5)],
    "aten.softplus.default": [(t(4, 6), 2, 3)],
    "aten.sort.default": [(t(4, 6), 1, True)],
    "aten.sum.dim_IntList": [(t(4, 6), (1,), True)],
    "aten.std.dim": [(t(4, 6), (1,), False, True)],
    "aten.topk.default": [(t(4, 6), 2, 1, False, False)],
    "aten.triu.default": [(t(4, 6), 1)],
    "aten.var.dim": [(t(4, 6), (1,), False, True)],
}
