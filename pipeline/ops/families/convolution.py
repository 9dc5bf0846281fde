"""Convolutions.

Letters: b batch, g groups, c channels in, o channels out (of one group), y0 y1 .. the dims of the image.
"""

from __future__ import annotations

from dataclasses import replace

from shardwright.pipeline.ir.graph import Arg
from shardwright.pipeline.ops.rule import OpRule, OpView, Rendered, call
from shardwright.pipeline.ops.shapes import nothing_split

GENERAL = "aten.convolution.default"


def _groups_at(target: str) -> int:
    """(input, weight, bias, stride, padding, dilation, groups); or (..., transposed, output_padding, groups)."""
    return 8 if target == GENERAL else 6


def _groups(view: OpView) -> int:
    return int(view.constant(_groups_at(view.op.target), "groups", 1))


def _each(value: Arg, count: int) -> tuple[int, ...]:
    """One number per image dim, or one for all."""
    numbers = value if isinstance(value, tuple) else (value,)
    return tuple(numbers) * count if len(numbers) == 1 else tuple(numbers)


def _convolution(view: OpView) -> str:
    """Where patches do not overlap, their rows and columns may be split; elsewhere shards would need their borders."""
    image, kernel = view.inputs[0].shape, view.inputs[1].shape
    rank, padding = len(kernel) - 2, view.constant(4, "padding", 0)
    transposed = view.op.target == GENERAL and view.constant(6, "transposed", False)
    if len(image) != rank + 2 or isinstance(padding, str) or transposed:
        return nothing_split(view)
    strides = _each(view.constant(3, "stride", 1), rank)
    borders = zip(_each(padding, rank), _each(view.constant(5, "dilation", 1), rank), strict=True)
    apart = [
        s >= k and border == (0, 1) and n % s == 0
        for s, k, border, n in zip(strides, kernel[2:], borders, image[2:], strict=True)
    ]
    before = " ".join(f"(y{i} s{i}={strides[i]}^)" if alone else f"i{i}^" for i, alone in enumerate(apart))
    after = " ".join(f"y{i}" if alone else f"y{i}^" for i, alone in enumerate(apart))
    patch = " ".join(f"k{i}^" for i in range(rank))
    if _groups(view) == 1:
        return f"b c+ {before}, o c+ {patch}, o -> b o {after}"
    return f"b (g c+) {before}, (g o) c+ {patch}, (g o) -> b (g o) {after}"


def _transposed(view: OpView) -> str:
    """conv_transpose1d, 2d, 3d take (input, weight, bias, stride, padding, output_padding, groups, dilation)."""
    rank = len(view.inputs[1].shape) - 2
    if len(view.inputs[0].shape) != rank + 2:
        return nothing_split(view)
    before, after, kernel = (" ".join(f"{x}{i}^" for i in range(rank)) for x in "iyk")
    if _groups(view) == 1:
        return f"b c+ {before}, c+ o {kernel}, o -> b o {after}"
    return f"b (g c+) {before}, (g c+) o {kernel}, (g o) -> b (g o) {after}"


def _flops(view: OpView) -> float:
    """Each element of the image that has the kernel's channels meets the kernel."""
    image = view.inputs[0] if "transpose" in view.op.target else view.output
    return 2.0 * image.numel * view.inputs[1].numel / view.inputs[1].shape[0]


def _rule(target: str, function: str) -> OpRule:
    transposed, position = "transpose" in target, _groups_at(target)

    def render(r: Rendered) -> str:
        """The call with the number of groups that this rank has."""
        if _groups(r.view) == 1:
            return call(function)(r)
        whole = r.local_output if transposed else r.local_inputs[0]  # of which a group has the kernel's
        here = str(whole[1] // r.local_inputs[1][1])
        if position >= len(r.positional):
            return call(function)(replace(r, named=r.named | {"groups": here}))
        positional = (*r.positional[:position], here, *r.positional[position + 1 :])
        return call(function)(replace(r, positional=positional))

    return OpRule(
        target, _transposed if transposed else _convolution, render, linear=((0,), (1,)), addends=(2,),
        saves_inputs=(0, 1), crosswise=True, flops=_flops,
    )  # fmt: skip


RULES = [
    *(_rule(f"aten.conv{n}d.default", f"F.conv{n}d") for n in (1, 2, 3)),
    _rule(GENERAL, "torch.convolution"),
    _rule("aten.conv_transpose1d.default", "F.conv_transpose1d"),
    *(_rule(f"aten.conv_transpose{n}d.input", f"F.conv_transpose{n}d") for n in (2, 3)),
]
