"""Ops whose rule prints no call, or that have none: programs have the public one, and it is the same function."""

from __future__ import annotations

import pytest
import torch

from shardwright.pipeline.ir.graph import Torch
from shardwright.pipeline.ops import register
from shardwright.pipeline.ops.dims import strategies
from shardwright.pipeline.ops.table import forget, rule_of
from tests.one_op import check_rule, example, printed, t

CPU, STRIDED = Torch("device", "cpu"), Torch("layout", "strided")
FLAGS = {"positive": True, "grad": False}

# op, arguments, the call
CALLS = [
    ("aten.celu.default", (t(4, 6), 1.3), "F.celu(in0, 1.3)"),
    ("aten.hardtanh.default", (t(4, 6), -1.0, 1.0), "F.hardtanh(in0, -1.0, 1.0)"),
    ("aten.glu.default", (t(4, 6),), "F.glu(in0)"),
    ("aten.prelu.default", (t(4, 6), t(6)), "F.prelu(in0, in1)"),
    ("aten.max_pool3d.default", (t(2, 2, 4, 4, 4), (2, 2, 2)), "F.max_pool3d(in0, (2, 2, 2))"),
    ("aten.pixel_shuffle.default", (t(2, 4, 3, 3), 2), "F.pixel_shuffle(in0, 2)"),
    ("aten.cosine_similarity.default", (t(4, 6), t(4, 6), 1), "F.cosine_similarity(in0, in1, 1)"),
    ("aten.one_hot.default", (t(4, high=6), 6), "F.one_hot(in0, 6)"),
    ("aten.im2col.default", (t(2, 2, 4, 4), (2, 2), (1, 1), (0, 0), (2, 2)),
     "F.unfold(in0, (2, 2), (1, 1), (0, 0), (2, 2))"),
    ("aten.erfc.default", (t(4, 6),), "torch.erfc(in0)"),
    ("aten.logaddexp.default", (t(4, 6), t(4, 6)), "torch.logaddexp(in0, in1)"),
    ("aten.nan_to_num.default", (t(4, 6), 0.0, float("inf")), 'torch.nan_to_num(in0, 0.0, float("inf"))'),
    ("aten.scatter_reduce.two", (t(4, 6), 0, t(2, 6, high=4), t(2, 6), "sum"),
     'torch.scatter_reduce(in0, 0, in1, in2, "sum")'),
    ("aten.instance_norm.default", (t(4, 3, 6), t(3), t(3), None, None, True, 0.1, 1e-5, False),
     "torch.instance_norm(in0, in1, in2, None, None, True, 0.1, 1e-05, False)"),  # F has another order
    ("aten.linalg_inv.default", (t(4, 4),), "torch.linalg.inv(in0)"),
    ("aten.special_erfcx.default", (t(4, 6, grad=False),), "torch.special.erfcx(in0)"),
    ("aten.eye.default", (6, {"device": CPU, "pin_memory": False}), "torch.eye(6, device=DEVICE)"),
    ("aten.tensor_split.sections", (t(4, 6), 2), "torch.tensor_split(in0, 2)"),
    ("aten.meshgrid.indexing", ((t(4), t(6)), {"indexing": "ij"}), 'torch.meshgrid((in0, in1), indexing="ij")'),
    ("aten.broadcast_tensors.default", ((t(4, 6), t(1, 6)),), "torch.broadcast_tensors(in0, in1)"),
    ("aten.unfold.default", (t(4, 6), 1, 2, 2), "in0.unfold(1, 2, 2)"),
    ("aten.view_as.default", (t(4, 6), t(6, 4, grad=False)), "in0.view_as(in1)"),
    ("aten.mT.default", (t(4, 6),), "in0.mT"),
    ("aten.numpy_T.default", (t(4, 6),), "in0.T"),
    ("aten.__and__.Tensor", (t(4, 6, dtype="bool"), t(4, 6, dtype="bool")), "in0 & in1"),
    ("aten.__lshift__.Scalar", (t(4, 6, high=3), 1), "in0 << 1"),
    ("aten.hinge_embedding_loss.default", (t(4, 6), t(4, 6), 1.0, 2),
     'F.hinge_embedding_loss(in0, in1, 1.0, reduction="sum")'),
    ("aten.kl_div.default", (t(4, 6), t(4, 6, positive=True), 2, {"log_target": True}),
     'F.kl_div(in0, in1, reduction="sum", log_target=True)'),
    ("aten.triplet_margin_loss.default", (t(4, 6), t(4, 6), t(4, 6)), "F.triplet_margin_loss(in0, in1, in2)"),
]  # fmt: skip
RANDOM_CALLS = [
    ("aten.rrelu.default", (t(4, 6), 0.1, 0.3, True), "F.rrelu(in0, 0.1, 0.3, True)"),
    ("aten.feature_dropout.default", (t(4, 6, 3), 0.5, True), "torch.feature_dropout(in0, 0.5, True)"),
    ("aten.alpha_dropout.default", (t(4, 6), 0.5, True), "F.alpha_dropout(in0, 0.5, True)"),
    ("aten.multinomial.default", (t(4, 6, **FLAGS), 2), "torch.multinomial(in0, 2)"),
    ("aten.normal.Tensor_float", (t(4, 6, grad=False), 0.4), "torch.normal(in0, 0.4)"),
    ("aten.poisson.default", (t(4, 6, **FLAGS),), "torch.poisson(in0)"),
    ("aten.randint.low", (2, 9, (4, 6), {"layout": STRIDED, "device": CPU}),
     "torch.randint(2, 9, (4, 6), layout=torch.strided, device=DEVICE)"),
    ("aten.randint_like.default", (t(4, 6, grad=False), 9), "torch.randint_like(in0, 9)"),
    ("aten.randperm.default", (6, {"device": CPU}), "torch.randperm(6, device=DEVICE)"),
]  # fmt: skip
NONE = [
    ("aten.uniform.default", (t(4, 6, grad=False),)),
    ("aten.lift_fresh_copy.default", (t(4, 6),)),
    ("aten._unsafe_index.Tensor", (t(4, 6), (t(3, high=4),))),
]
WITH_RULES = [
    ("aten.slice.Tensor", (t(2, 3, 8), 2, 4, 2**63 - 1), "in0[..., 4:]"),
    ("aten.slice.Tensor", (t(2, 3, 8), 1, 0, 2), "in0[:, :2]"),
    ("aten.slice.Tensor", (t(2, 8), -1, -3, None), "in0[:, -3:]"),
    ("aten.slice.Tensor", (t(8), 0, 0, 2**63 - 1, 2), "in0[::2]"),
    ("aten.slice.Tensor", (t(8, 2), 0, 0, 8), "in0[:]"),
    ("aten.to.device", (t(4), CPU, Torch("dtype", "float32")), "in0.to(DEVICE, torch.float32)"),
    ("aten.to.dtype_layout", (t(4), {"dtype": Torch("dtype", "float32"), "layout": STRIDED, "device": CPU}),
     "in0.to(dtype=torch.float32, device=DEVICE)"),
    ("aten.upsample_nearest2d.vec", (t(1, 2, 3, 3), None, (2.0, 2.0)),
     'F.interpolate(in0, scale_factor=(2.0, 2.0), mode="nearest")'),
    ("aten.upsample_bilinear2d.vec", (t(1, 2, 3, 3), (4, 5), True, None),
     'F.interpolate(in0, size=(4, 5), mode="bilinear", align_corners=True)'),
]  # fmt: skip


def made(target: str, args: tuple):
    named = args[-1] if isinstance(args[-1], dict) else {}
    return example(target, *(args[:-1] if named else args), **named)


def text_of(it) -> str:
    """What is on the right of the line."""
    whole = next(s for s in strategies(rule_of(it.op), it.view, 2) if s.name == "R")
    text = "".join(line.strip() for line in printed(it, whole, 2).text.splitlines() if not line.startswith("#"))
    return text.partition("  #")[0].partition(" = ")[2]


@pytest.mark.parametrize(("target", "args", "text"), [*CALLS, *RANDOM_CALLS])
def test_a_public_call_is_printed_and_is_the_op(target: str, args: tuple, text: str) -> None:
    """Its results and gradients are those of the op, with the same random numbers, also where it is split."""
    it = made(target, args)
    assert rule_of(it.op) is None and text_of(it) == text
    check_rule(None, it, 2)


@pytest.mark.parametrize(("target", "args"), NONE)
def test_an_op_without_a_public_call_has_its_own_name(target: str, args: tuple) -> None:
    it = made(target, args)
    assert text_of(it).startswith(f"torch.ops.{target}(in0")
    check_rule(None, it, 2)


@pytest.mark.parametrize(("target", "args", "text"), WITH_RULES)
def test_rules_print_what_one_would_write(target: str, args: tuple, text: str) -> None:
    it = made(target, args)
    assert text_of(it) == text
    check_rule(rule_of(it.op), it, 2)


def test_a_rule_of_ones_own_prints_it_too() -> None:
    register("aten.erfc.default", "a b -> a b")
    try:
        it = made("aten.erfc.default", (t(4, 6),))
        assert text_of(it) == "torch.erfc(in0)"
    finally:
        forget("aten.erfc.default")


@torch.library.custom_op("shardwright_public::celu", mutates_args=())
def celu(x: torch.Tensor) -> torch.Tensor:
    return x + 1.0


def test_an_op_of_another_library_is_not_torch_s() -> None:
    it = made("shardwright_public.celu.default", (t(4, 6, grad=False),))
    assert text_of(it) == "torch.ops.shardwright_public.celu.default(in0)"


def test_what_python_takes_for_equal_is_asked_twice() -> None:
    """One form is found for each: a function may take a number and no truth value in the same place."""
    for number, text in ((1, "1"), (1.0, "1.0"), (True, "True"), (1, "1")):
        assert text_of(made("aten.celu.default", (t(4, 6), number))) == f"F.celu(in0, {text})"
