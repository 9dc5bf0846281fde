"""Convolutions.

Letters: b batch, g groups, c channels in, o channels out (of one group), y0 y1 .. the dims of the image.
"""

from __future__ import annotations

from collections.abc import Callable

from pipeline.ir.graph import Arg
from pipeline.ops.rule import OpRule, OpView, Rendered, call
from pipeline.ops.shapes import nothing_split


def _each(value: Arg, count: int) -> tuple[int, ...]:
    """One number per image dim, or one for all."""
    numbers = value if isinstance(value, tuple) else (value,)
    return tuple(numbers) * count if len(numbers) == 1 else tuple(numbers)


def _convolution(view: OpView, groups: int, stride: Arg, padding: Arg, dilation: Arg) -> str:
    """Where patches do not overlap, their rows and columns may be split; elsewhere pieces would need their borders."""
    image, kernel = view.inputs[0].shape, view.inputs[1].shape
    rank = len(kernel) - 2
    if len(image) != rank + 2 or isinstance(padding, str):
        return nothing_split(view)
    strides = _each(stride, rank)
    apart = [
        s >= k and p == 0 and d == 1 and n % s == 0
        for s, k, p, d, n in zip(
            strides, kernel[2:], _each(padding, rank), _each(dilation, rank), image[2:], strict=True
        )
    ]
    before = " ".join(f"(y{i} s{i}={strides[i]}^)" if alone else f"i{i}^" for i, alone in enumerate(apart))
    after = " ".join(f"y{i}" if alone else f"y{i}^" for i, alone in enumerate(apart))
    patch = " ".join(f"k{i}^" for i in range(rank))
    if groups == 1:
        return f"b c+ {before}, o c+ {patch}, o -> b o {after}"
    return f"b (g c+) {before}, (g o) c+ {patch}, (g o) -> b (g o) {after}"


def _plain(view: OpView) -> str:
    """conv1d, conv2d, conv3d take (input, weight, bias, stride, padding, dilation, groups)."""
    return _convolution(
        view, view.constant(6, "groups", 1), view.constant(3, "stride", 1), view.constant(4, "padding", 0),
        view.constant(5, "dilation", 1),
    )  # fmt: skip


def _general(view: OpView) -> str:
    """`convolution` takes (..., stride, padding, dilation, transposed, output_padding, groups)."""
    if view.constant(6, "transposed", False):
        return nothing_split(view)
    return _convolution(
        view, view.constant(8, "groups", 1), view.constant(3, "stride", 1), view.constant(4, "padding", 0),
        view.constant(5, "dilation", 1),
    )  # fmt: skip


def _transposed(view: OpView) -> str:
    """conv_transpose1d, 2d, 3d take (input, weight, bias, stride, padding, output_padding, groups, dilation)."""
    rank = len(view.inputs[1].shape) - 2
    if len(view.inputs[0].shape) != rank + 2:
        return nothing_split(view)
    before, after, kernel = (" ".join(f"{x}{i}^" for i in range(rank)) for x in "iyk")
    if view.constant(6, "groups", 1) == 1:
        return f"b c+ {before}, c+ o {kernel}, o -> b o {after}"
    return f"b (g c+) {before}, (g c+) o {kernel}, (g o) -> b (g o) {after}"


def _with_groups(function: str, position: int) -> Callable[[Rendered], str]:
    """Prints the call with the number of groups that this rank has."""

    def render(r: Rendered) -> str:
        groups = r.view.constant(position, "groups", 1)
        if groups == 1:
            return call(function)(r)
        whole = r.local_output if "transpose" in function else r.local_inputs[0]  # of which a group has the kernel's
        here = str(whole[1] // r.local_inputs[1][1])
        positional, named = list(r.positional), dict(r.named)
        if position < len(positional):
            positional[position] = here
        else:
            named["groups"] = here
        return f"{function}({', '.join([*positional, *(f'{k}={v}' for k, v in named.items())])})"

    return render


def _flops(view: OpView) -> float:
    kernel = view.inputs[1].numel / view.inputs[1].shape[0]
    return 2.0 * view.output.numel * kernel


def _transposed_flops(view: OpView) -> float:
    return 2.0 * view.inputs[0].numel * view.inputs[1].numel / view.inputs[1].shape[0]


def _rule(target: str, dims: Callable[[OpView], str], function: str, groups: int) -> OpRule:
    return OpRule(
        target, dims, _with_groups(function, groups), linear=((0,), (1,)), addends=(2,), saves_inputs=(0, 1),
        crosswise=True, flops=_transposed_flops if "transpose" in target else _flops,
    )  # fmt: skip


RULES = [
    _rule("aten.conv1d.default", _plain, "F.conv1d", 6),
    _rule("aten.conv2d.default", _plain, "F.conv2d", 6),
    _rule("aten.conv3d.default", _plain, "F.conv3d", 6),
    _rule("aten.convolution.default", _general, "torch.convolution", 8),
    _rule("aten.conv_transpose1d.default", _transposed, "F.conv_transpose1d", 6),
    _rule("aten.conv_transpose2d.input", _transposed, "F.conv_transpose2d", 6),
    _rule("aten.conv_transpose3d.input", _transposed, "F.conv_transpose3d", 6),
]
