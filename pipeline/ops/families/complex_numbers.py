"""Complex numbers: what makes them and takes them apart, and Fourier transforms.

All but `polar`, `angle` and `sgn` are linear over the real numbers, which is all that summands ask for: the conjugate
of a sum is the sum of the conjugates. `polar` is in its first argument, but torch's gradient of it takes that as
positive, which a summand need not be.
"""

from __future__ import annotations

from shardwright.pipeline.ops.rule import OpRule, OpView, call, method
from shardwright.pipeline.ops.shapes import along, along_last, broadcast, letters, permuted


def _as_complex(view: OpView) -> str:
    names = letters(len(view.output.shape))
    return f"{names} two^ -> {names}"


def _as_real(view: OpView) -> str:
    names = letters(len(view.inputs[0].shape))
    return f"{names} -> {names} two^"


def _adjoint(view: OpView) -> str:
    order = range(len(view.output.shape))
    return permuted([*order[:-2], *reversed(order[-2:])])


def _along_some(view: OpView) -> str:
    """(input, s, dim): all dims, or the last of which sizes are given."""
    sizes, dims = view.constant(1, "s", None), view.constant(2, "dim", None)
    return along_last(len(sizes))(view) if dims is None and sizes is not None else along(2, None)(view)


TRANSFORMS = {  # (input, n, dim): a transform of every line along the dim, or of every block along several
    **dict.fromkeys(("fft", "ifft", "rfft", "irfft", "hfft", "ihfft"), along(2, -1)),
    **dict.fromkeys(("fft2", "ifft2", "rfft2", "irfft2"), along(2, (-2, -1))),
    **dict.fromkeys(("fftn", "ifftn", "rfftn", "irfftn"), _along_some),
    **dict.fromkeys(("fftshift", "ifftshift"), along(1, None)),
}

RULES = [
    OpRule("aten.view_as_complex.default", _as_complex, call("torch.view_as_complex"), linear=((0,),), is_view=True),
    OpRule("aten.view_as_real.default", _as_real, call("torch.view_as_real"), linear=((0,),), is_view=True),
    OpRule("aten.real.default", broadcast, call("torch.real"), linear=((0,),), is_view=True),
    OpRule("aten.imag.default", broadcast, call("torch.imag"), linear=((0,),), is_view=True),
    OpRule("aten._conj.default", broadcast, method("conj"), linear=((0,),), is_view=True),
    OpRule("aten.resolve_conj.default", broadcast, method("resolve_conj"), linear=((0,),)),
    OpRule("aten.resolve_neg.default", broadcast, method("resolve_neg"), linear=((0,),)),
    OpRule("aten.conj_physical.default", broadcast, call("torch.conj_physical"), linear=((0,),), keeps_order=True),
    OpRule("aten.mH.default", _adjoint, lambda r: f"{r.tensors[0]}.mH", linear=((0,),), is_view=True, permutes=True),
    OpRule("aten.adjoint.default", _adjoint, method("adjoint"), linear=((0,),), is_view=True, permutes=True),
    OpRule("aten.complex.default", broadcast, call("torch.complex"), linear=((0, 1),), addends=(0, 1)),
    OpRule("aten.polar.default", broadcast, call("torch.polar"), saves_output=True),
    OpRule("aten.angle.default", broadcast, call("torch.angle"), saves_inputs=(0,), keeps_order=True),
    OpRule("aten.sgn.default", broadcast, call("torch.sgn"), saves_inputs=(0,), keeps_order=True),
    *(
        OpRule(f"aten.fft_{name}.default", dims, call(f"torch.fft.{name}"), linear=((0,),))
        for name, dims in TRANSFORMS.items()
    ),
]
