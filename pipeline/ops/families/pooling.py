"""Pooling and resizing of images: batch and channels are separate, the image's dims stay whole."""

from __future__ import annotations

from shardwright.pipeline.ops.rule import OpRule, Rendered, call
from shardwright.pipeline.ops.shapes import along_last


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

    return OpRule(f"aten.{name}.vec", along_last(count), render, linear=((0,),))


RULES = [
    *(OpRule(f"aten.max_pool{n}d.default", along_last(n), call(f"F.max_pool{n}d"), saves_inputs=(0,)) for n in (1, 2)),
    *(
        OpRule(f"aten.{name}{n}d.default", along_last(n), call(f"F.{name}{n}d"), linear=((0,),))
        for name in ("avg_pool", "adaptive_avg_pool")
        for n in (1, 2)
    ),
    *(_resized(f"upsample_nearest{n}d", n, "nearest", corners=False) for n in (1, 2, 3)),
    *(_resized(f"_upsample_nearest_exact{n}d", n, "nearest-exact", corners=False) for n in (1, 2, 3)),
    _resized("upsample_linear1d", 1, "linear"),
    _resized("upsample_bilinear2d", 2, "bilinear"),
    _resized("upsample_trilinear3d", 3, "trilinear"),
    _resized("upsample_bicubic2d", 2, "bicubic"),
    _resized("_upsample_bilinear2d_aa", 2, "bilinear", antialias=True),
    _resized("_upsample_bicubic2d_aa", 2, "bicubic", antialias=True),
]
