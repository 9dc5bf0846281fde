"""Pooling and resizing of images: batch and channels are separate, the image's dims stay whole."""

from __future__ import annotations

from collections.abc import Callable

from pipeline.ops.rule import OpRule, OpView, call
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


RULES = [
    _rule("aten.max_pool1d.default", 1, "F.max_pool1d", linear=False, saves=(0,)),
    _rule("aten.max_pool2d.default", 2, "F.max_pool2d", linear=False, saves=(0,)),
    _rule("aten.avg_pool1d.default", 1, "F.avg_pool1d", linear=True),
    _rule("aten.avg_pool2d.default", 2, "F.avg_pool2d", linear=True),
    _rule("aten.adaptive_avg_pool1d.default", 1, "F.adaptive_avg_pool1d", linear=True),
    _rule("aten.adaptive_avg_pool2d.default", 2, "F.adaptive_avg_pool2d", linear=True),
    _rule("aten.upsample_nearest2d.vec", 2, "torch.ops.aten.upsample_nearest2d.vec", linear=True),
    _rule("aten.upsample_bilinear2d.vec", 2, "torch.ops.aten.upsample_bilinear2d.vec", linear=True),
]
