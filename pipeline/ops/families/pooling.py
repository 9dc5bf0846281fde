"""Pooling and resizing of images: batch and channels are separate, the image's dims stay whole."""

from __future__ import annotations

from collections.abc import Callable

from pipeline.ops.rule import OpRule, OpView, Rendered, call
from pipeline.ops.shapes import kept


def _image(count: int) -> Callable[[OpView], str]:
    """The last dims, as many as the image has, are whole."""

    def line(view: OpView) -> str:
        rank = len(view.output.shape)
        return kept(view, range(rank - count, rank))

    return line


def _rule(target: str, count: int, function: str, *, linear: bool, saves: tuple[int, ...] = ()) -> OpRule:
    return OpRule(
        target, _image(count), call(function), linear=((0,),) if linear else (), saves_inputs=saves,
    )  # fmt: skip


def _resized(name: str, count: int, mode: str, *, corners: bool = True, antialias: bool = False) -> OpRule:
    """`aten.name.vec(input, output_size, align_corners, scale_factors)`, some without corners, as `F.interpolate`."""
    names = ("input", "output_size", *(["align_corners"] if corners else []), "scale_factors")

    def render(r: Rendered) -> str:
        given = r.given(names)
        options = {
            "size": given["output_size"],
            "scale_factor": given.get("scale_factors", "None"),
            "mode": f'"{mode}"',
            "align_corners": given.get("align_corners", "False"),
            "antialias": str(antialias),
        }
        told = [f"{option}={text}" for option, text in options.items() if text not in ("None", "False")]
        return f"F.interpolate({', '.join([given['input'], *told])})"

    return OpRule(f"aten.{name}.vec", _image(count), render, linear=((0,),))


RULES = [
    _rule("aten.max_pool1d.default", 1, "F.max_pool1d", linear=False, saves=(0,)),
    _rule("aten.max_pool2d.default", 2, "F.max_pool2d", linear=False, saves=(0,)),
    _rule("aten.avg_pool1d.default", 1, "F.avg_pool1d", linear=True),
    _rule("aten.avg_pool2d.default", 2, "F.avg_pool2d", linear=True),
    _rule("aten.adaptive_avg_pool1d.default", 1, "F.adaptive_avg_pool1d", linear=True),
    _rule("aten.adaptive_avg_pool2d.default", 2, "F.adaptive_avg_pool2d", linear=True),
    *(_resized(f"upsample_nearest{n}d", n, "nearest", corners=False) for n in (1, 2, 3)),
    *(_resized(f"_upsample_nearest_exact{n}d", n, "nearest-exact", corners=False) for n in (1, 2, 3)),
    _resized("upsample_linear1d", 1, "linear"),
    _resized("upsample_bilinear2d", 2, "bilinear"),
    _resized("upsample_trilinear3d", 3, "trilinear"),
    _resized("upsample_bicubic2d", 2, "bicubic"),
    _resized("_upsample_bilinear2d_aa", 2, "bilinear", antialias=True),
    _resized("_upsample_bicubic2d_aa", 2, "bicubic", antialias=True),
]
