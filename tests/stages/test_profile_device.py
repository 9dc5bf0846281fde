"""What a device runs in place of a composite op: chosen as torch chooses, and with torch's results."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from shardwright.stages.profile.autocast import Autocast
from shardwright.stages.profile.device import LOWERED, AttentionCall, plain_attention
from shardwright.stages.profile.symbolic import Watch

ATTENTION = "aten.scaled_dot_product_attention.default"
B, H, T, D = 2, 4, 8, 16
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without units for bfloat16


def heads(dtype: torch.dtype, number: int = H, device: str = "meta") -> Tensor:
    return torch.randn(B, number, T, D, device=device).to(dtype).requires_grad_()


def kernels(device: str, op: str, *args, **named) -> list:
    with Watch() as watch:
        result = LOWERED[device][op](*args, **named)
    assert result.requires_grad
    return watch.kernels


def attention(device: str, dtype: torch.dtype, mask: Tensor | None = None, groups: int = 1, **named) -> str:
    """The kernel that attention is, or `plain` for products and a softmax."""
    q, k, v = heads(dtype), heads(dtype, H // groups), heads(dtype, H // groups)
    names = [k.name for k in kernels(device, ATTENTION, q, k, v, mask, enable_gqa=groups > 1, **named)]
    fused = [name for name in names if name.startswith("_scaled_dot_product")]
    if not fused:
        assert "bmm" in names and any("softmax" in name for name in names)
        return "plain"
    (name,) = fused
    return name.removeprefix("_scaled_dot_product_").partition("_attention")[0]


half, single = torch.bfloat16, torch.float32
full_mask = torch.zeros(B, 1, T, T, dtype=torch.bool, device="meta")
bias = torch.zeros(1, H, T, T, device="meta")
permuted = torch.zeros(1, T, T, H, device="meta").permute(0, 3, 1, 2)


@pytest.mark.parametrize(
    ("dtype", "mask", "groups", "wanted"),
    [
        (half, None, 1, "flash"),
        (torch.float16, None, 1, "flash"),
        (half, None, 2, "flash"),
        (single, None, 1, "efficient"),
        (single, full_mask, 1, "efficient"),
        (single, bias, 1, "efficient"),
        (half, full_mask, 1, "efficient"),
        (half, bias.to(half), 1, "efficient"),
        (single, None, 2, "plain"),
        (half, full_mask, 2, "plain"),
        (single, permuted, 1, "plain"),
        (half, permuted.to(half), 1, "plain"),
    ],
)
def test_attention_on_a_gpu(dtype, mask, groups, wanted):
    for causal in (False, True) if mask is None else (False,):
        assert attention("cuda", dtype, mask, groups, dropout_p=0.1, is_causal=causal) == wanted


@pytest.mark.parametrize(
    ("named", "groups", "wanted"),
    [({}, 1, "flash"), ({"is_causal": True}, 1, "flash"), ({"dropout_p": 0.1}, 1, "plain"), ({}, 2, "flash")],
)
def test_attention_on_a_cpu(named, groups, wanted):
    assert attention("cpu", single, None, groups, **named) == wanted


def test_plain_attention_in_half_precision_is_computed_in_float32():
    q, k, v = (heads(half) for _ in range(3))
    found = kernels("cuda", ATTENTION, q, k, v, permuted.to(half))
    assert {kernel.dtype for kernel in found if kernel.name in ("bmm", "_safe_softmax")} == {"float32"}
    assert LOWERED["cuda"][ATTENTION](q, k, v, permuted.to(half)).dtype is half


MASKS = {
    "none": None,
    "bool": torch.rand(B, 1, T, T, generator=torch.Generator().manual_seed(0)) > 0.3,
    "bias": torch.randn(1, H, T, T, generator=torch.Generator().manual_seed(1)),
    "causal": None,
}


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dtype", [single, half], ids=["float32", "bfloat16"])
def test_plain_attention_is_torchs(dtype, name, scale, groups):
    torch.manual_seed(2)
    q = heads(dtype, device="cpu")
    k, v = (heads(dtype, H // groups, device="cpu") for _ in range(2))
    mask = MASKS[name] if MASKS[name] is None or MASKS[name].dtype == torch.bool else MASKS[name].to(dtype)
    causal = name == "causal"
    ours = plain_attention(AttentionCall(q, k, v, mask, 0.0, causal, scale=scale))
    with sdpa_kernel(SDPBackend.MATH):
        theirs = scaled_dot_product_attention(q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=groups > 1)
    # Torch computes half precision in float32 on a GPU; on a CPU in double or in half, as its build has it.
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype is single else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(ours, theirs, **tolerance)
    weight = torch.randn_like(ours)
    for mine, other in zip(
        torch.autograd.grad(ours, (q, k, v), weight), torch.autograd.grad(theirs, (q, k, v), weight), strict=True
    ):
        torch.testing.assert_close(mine, other, **tolerance)


def test_attention_on_a_cpu_is_torchs():
    torch.manual_seed(2)
    q, k, v = (heads(single, device="cpu") for _ in range(3))
    for mask in (None, MASKS["bool"], MASKS["bias"]):
        for dropout in (0.0, 0.5):
            torch.manual_seed(3)
            ours = LOWERED["cpu"][ATTENTION](q, k, v, mask, dropout)
            torch.manual_seed(3)
            torch.testing.assert_close(ours, scaled_dot_product_attention(q, k, v, mask, dropout))


@pytest.mark.parametrize(
    ("dtype", "training", "wanted"),
    [
        (single, True, "cudnn_batch_norm"),
        (torch.float16, True, "cudnn_batch_norm"),
        (half, True, "native_batch_norm"),
        (single, False, "native_batch_norm"),
    ],
)
def test_batch_norm_on_a_gpu(dtype, training, wanted):
    x = torch.empty(4, 6, 5, 5, dtype=dtype, device="meta", requires_grad=True)
    weight, mean, var = (torch.empty(6, device="meta") for _ in range(3))
    found = kernels("cuda", "aten.batch_norm.default", x, weight, weight, mean, var, training, 0.1, 1e-5)
    assert [kernel.name for kernel in found] == [wanted]


def test_autocast_keeps_the_copy_of_a_parameter_only():
    """As torch has it: of a leaf that wants a gradient, and only into the low precision."""
    x, frozen = torch.empty(8, 8, device="meta"), torch.empty(8, 8, device="meta")
    weight = torch.empty(8, 8, device="meta", requires_grad=True)
    autocast = Autocast()
    (once, *_), (again, *_) = (autocast.arguments("aten.mm.default", (weight, x)) for _ in range(2))
    assert once is again and once.dtype is half
    for other in (frozen, weight * 2):
        first, second = (autocast.arguments("aten.mm.default", (other, x))[0] for _ in range(2))
        assert first is not second and first.dtype is half


def test_dropout_on_a_gpu_keeps_a_mask_of_one_byte():
    x = torch.empty(64, 64, device="meta", requires_grad=True)
    with Watch([x]) as watch:
        y = LOWERED["cuda"]["aten.dropout.default"](x, 0.1, True)
        assert [s.size for s in watch.storages] == [4 * 64 * 64, 64 * 64]
    assert y.shape == x.shape
    assert LOWERED["cuda"]["aten.dropout.default"](x, 0.1, False) is x
    assert LOWERED["cuda"]["aten.dropout.default"](x, 0.0, True) is x


def test_a_grouped_product_costs_one_product_and_its_weights_get_whole_gradients():
    x = torch.empty(32, 8, device="meta", requires_grad=True)
    weight = torch.empty(4, 8, 16, device="meta", requires_grad=True)
    with Watch([x, weight]) as watch:
        y = LOWERED["cuda"]["transformers.grouped_mm_fallback.default"](x, weight, torch.empty(4, device="meta"))
        forward = sum(kernel.flops for kernel in watch.kernels)
        of_x, of_weight = torch.autograd.grad(y, (x, weight), torch.empty_like(y))
    assert forward == 2 * 32 * 8 * 16
    assert sum(kernel.flops for kernel in watch.kernels) == 3 * forward
    assert (y.shape, of_x.shape, of_weight.shape) == ((32, 16), (32, 8), (4, 8, 16))


def test_a_grouped_product_is_one_product_for_each_group():
    """With rows shared out evenly it is what it stands for, gradients included."""
    x = torch.randn(12, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 5, 4, dtype=torch.float64, requires_grad=True)
    found = LOWERED["cuda"]["transformers.grouped_mm_fallback.default"](x, weight, torch.tensor([4, 8, 12]))
    expected = torch.cat([x[4 * i : 4 * i + 4] @ weight[i] for i in range(3)])
    gradient = torch.randn_like(expected)
    torch.testing.assert_close(found, expected)
    pairs = (torch.autograd.grad(y, (x, weight), gradient) for y in (found, expected))
    torch.testing.assert_close(*pairs)


def test_a_tensor_that_a_kernel_takes_twice_is_read_once():
    x, y = (torch.empty(64, 64, device="meta") for _ in range(2))
    with Watch([x, y]) as watch:
        assert (x * x + x * y).shape == x.shape
    assert [kernel.read for kernel in watch.kernels] == [4 * 64 * 64, 2 * 4 * 64 * 64, 2 * 4 * 64 * 64]
