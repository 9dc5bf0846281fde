"""Complex numbers where tensors are described, kept, sent and saved."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from shardwright.pipeline.ir.graph import Args, TensorType
from shardwright.pipeline.ops.discovery.discover import find
from shardwright.pipeline.runtime.pipelining.deferred_weight_grads import PRODUCTS, _of_weight, _of_x
from shardwright.pipeline.runtime.programs.collectives import in_memory
from shardwright.pipeline.runtime.recompute.regather import StridedView
from shardwright.pipeline.runtime.step.gradients import Clipping
from shardwright.pipeline.user.precision import in_precision
from shardwright.pipeline.user.weights import write_weights
from shardwright.stages.train.ranks.safety import checksum
from shardwright.stages.train.snapshots.writer import _Staging
from shardwright.stages.verify.compare import whole_gap
from tests.one_op import example, t


def test_bytes_and_gradients() -> None:
    sizes = {name: TensorType((3,), name).nbytes for name in ("complex32", "complex64", "complex128")}
    assert sizes == {"complex32": 12, "complex64": 24, "complex128": 48}
    assert TensorType((), "complex64").is_inexact and not TensorType((), "int64").is_inexact


@pytest.mark.parametrize("number", [2j, complex(0.1, float("inf")), complex(float("-inf"), -0.0)])
def test_a_complex_argument_is_written_and_read(number: complex) -> None:
    args = Args((number, (number,)), (("value", number),))
    assert repr(Args.from_json(json.loads(json.dumps(args.to_json())))) == repr(args)


def test_a_view_is_seen_again_in_other_memory() -> None:
    """Real memory as complex numbers, conjugated and negated where they are read."""
    memory = torch.randn(6, 2)
    views = [memory.t(), torch.view_as_complex(memory), torch.view_as_complex(memory).conj()[2:]]
    views += [views[-1].imag, views[-1].conj()]
    for view in views:
        again = StridedView.of(view).on(memory.clone())
        assert (again.dtype, again.is_conj(), again.is_neg()) == (view.dtype, view.is_conj(), view.is_neg())
        assert torch.equal(again, view)
        assert torch.equal(in_memory(view), view) and not in_memory(view).is_conj() and not in_memory(view).is_neg()


@pytest.mark.parametrize("name", PRODUCTS)
def test_the_gradients_of_a_product_that_is_put_off(name: str) -> None:
    product = PRODUCTS[name]
    x, weight, gradient = (torch.randn(s, dtype=torch.complex128) for s in ((5, 3), (3, 3), (5, 3)))
    x.requires_grad_()
    weight.requires_grad_()
    (x @ (weight.mT if product.transposed else weight)).backward(gradient)
    torch.testing.assert_close(_of_x(product, weight.detach(), gradient), x.grad)
    torch.testing.assert_close(_of_weight(product, x.detach(), gradient, 2), weight.grad)


def test_snapshots_replicas_and_weights(tmp_path) -> None:
    tensor = torch.randn(3, 4, dtype=torch.complex64)
    staging = _Staging()
    staging.buffers = {"model/w": tensor}
    assert staging.not_finite() == ""
    staging.buffers = {"model/w": torch.complex(torch.zeros(2), torch.tensor([0.0, float("nan")]))}
    assert staging.not_finite() == "model/w is not a number"
    staging.buffers, staging.trained = {"model/w": torch.tensor([complex(0, float("inf"))])}, {"w"}
    assert staging.not_finite() == "model/w is infinite"
    assert checksum(tensor) == checksum(tensor.clone()) != checksum(tensor + 1j)
    assert checksum(tensor.to(torch.complex128)) == checksum(tensor.to(torch.complex128).clone())
    write_weights(tmp_path / "w.safetensors", {"w": (torch.complex64, (3, 4))}, [tensor], {})
    assert torch.equal(load_file(tmp_path / "w.safetensors")["w"], tensor)


def test_clipping_counts_both_parts() -> None:
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    parameter.grad = torch.tensor([3 + 4j, 0j])
    assert float(Clipping([parameter], [("", "", "")], [], 1.0).clip()) == pytest.approx(5.0)
    assert abs(complex(parameter.grad[0])) == pytest.approx(1.0, rel=1e-5)


def test_a_difference_of_imaginary_parts_is_one() -> None:
    found = whole_gap(torch.tensor([1 + 1j]), torch.tensor([1 - 1j]))
    assert (found.difference, found.size) == pytest.approx((2.0, 2**0.5))


def test_an_op_without_a_rule_is_tried_on_complex_numbers() -> None:
    """Of the trace, other dims may be split; summands add up."""
    found = find(example("aten.linalg_vecdot.default", t(6, 6, dtype="complex128"), t(6, 6, dtype="complex128")).view)
    assert any(str(one.outputs[0]) == "S(0)" for one in found) and any(str(one.outputs[0]) == "P" for one in found)


def test_complex_buffers_keep_both_parts_where_weights_are_converted() -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("turns", torch.tensor([1 + 2j]))
    in_precision(module, "fp32")
    assert module.weight.dtype is torch.float32
    in_precision(module, "bf16")
    assert module.weight.dtype is torch.bfloat16 and module.turns.item() == 1 + 2j
