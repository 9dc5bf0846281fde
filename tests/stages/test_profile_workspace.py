"""What cuDNN takes beside its tensors: the formula against what was measured, and where it is used."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from shardwright.pipeline.ir.profile import Kernel
from shardwright.stages.profile.device import workspace_bytes
from shardwright.stages.profile.run import make_profile
from tests.graphs import trace

BATCH = 256
# Of convolutions of a ResNet-50 in bf16 on an H200: the input's channels and side, the weight's shape, the stride, and
# the megabytes that forward and backward took beside their tensors.
MEASURED = [
    (3, 224, (64, 3, 7, 7), 2, 1027.7, 699.9),
    (64, 56, (64, 64, 1, 1), 1, 102.8, 107.0),
    (64, 56, (64, 64, 3, 3), 1, 308.4, 310.5),
    (64, 56, (256, 64, 1, 1), 1, 411.0, 119.6),
    (256, 56, (64, 256, 1, 1), 1, 102.8, 427.9),
    (128, 56, (128, 128, 3, 3), 2, 309.3, 470.7),
    (256, 56, (512, 256, 1, 1), 2, 822.1, 1032.1),
    (512, 28, (256, 512, 1, 1), 1, 102.8, 340.0),
    (1024, 14, (512, 1024, 1, 1), 1, 206.6, 265.3),
    (512, 7, (2048, 512, 1, 1), 1, 115.6, 79.2),
    (512, 14, (512, 512, 3, 3), 2, 81.8, 132.9),
]


def convolution(
    channels: int, side: int, weight: tuple[int, ...], stride: int, backward: bool = False, dtype: str = "bfloat16"
) -> Kernel:
    given, result = (BATCH, channels, side, side), (BATCH, weight[0], side // stride, side // stride)
    if backward:
        return Kernel("convolution_backward", 0.0, 0, 0, dtype, (result, given, weight, given, weight))
    return Kernel("convolution", 0.0, 0, 0, dtype, (given, weight, result))


@pytest.mark.parametrize(("channels", "side", "weight", "stride", "forward", "backward"), MEASURED)
def test_as_measured(channels, side, weight, stride, forward, backward):
    assert workspace_bytes(convolution(channels, side, weight, stride)) == pytest.approx(1e6 * forward, rel=0.15)
    back = workspace_bytes(convolution(channels, side, weight, stride, backward=True))
    assert back == pytest.approx(1e6 * backward, rel=0.15)


def test_only_convolutions_of_images_in_half_precision_need_any():
    assert workspace_bytes(convolution(*MEASURED[0][:4], dtype="float16")) > 0
    assert workspace_bytes(convolution(*MEASURED[0][:4], dtype="float32")) == 0
    shapes = ((8, 16, 32), (16, 16, 3), (8, 16, 30))
    assert workspace_bytes(Kernel("convolution", 0.0, 0, 0, "bfloat16", shapes)) == 0
    assert workspace_bytes(Kernel("addmm", 0.0, 0, 0, "bfloat16", ((16, 16), (16, 16), (16, 16)))) == 0


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 32, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x))).square().mean()


def test_a_gpu_in_half_precision_has_it_at_its_peak_and_no_other_device():
    graph = trace(Images(), {"x": torch.randn(4, 3, 32, 32)})
    found = {}
    for device, precision in (("cuda", "amp"), ("cuda", "fp32"), ("cpu", "amp")):
        profile, _ = make_profile(graph, device, precision, torch.optim.AdamW, logging.getLogger())
        convolutions = [op.name for op in graph.ops if "conv" in op.target]
        found[device, precision] = [profile.ops[name] for name in convolutions]
        assert len(convolutions) == 2
    given, middle, made = (2 * 4 * 32 * 32 * channels for channels in (8, 16, 32))  # three channels are padded to eight
    first, second = found["cuda", "amp"]
    plain = found["cpu", "amp"]
    assert first.temporary_forward - plain[0].temporary_forward == pytest.approx(given + 2 * middle, rel=0.01)
    assert second.temporary_forward - plain[1].temporary_forward == pytest.approx(middle + 2 * made, rel=0.01)
    assert all(c.temporary_forward < middle for c in found["cuda", "fp32"])


@pytest.mark.parametrize(
    ("shape", "nbytes"),
    [
        ((12608, 1024), 103_284_736),
        ((12608, 4096), 138_412_032),
        ((4096, 768), 25_165_824),
        ((1024, 1000), 8_192_000),
        ((300, 64), 0),
        ((12544, 1002), 16_929_792),
        ((16, 197, 1024), 26_214_400),
        ((64, 1024, 50), 1_638_400),
        ((200_000, 256), 138_412_032),
    ],
)
def test_sums_over_rows_take_what_an_h200_was_seen_to_take(shape: tuple[int, ...], nbytes: int) -> None:
    result = (*(1 for _ in shape[1:]), shape[-1])
    assert workspace_bytes(Kernel("sum", 0.0, 0, 0, "bfloat16", (shape, result))) == nbytes
    assert workspace_bytes(Kernel("sum", 0.0, 0, 0, "bfloat16", (shape, (*shape[:-1], 1)))) == 0


@pytest.mark.parametrize(
    ("query", "heads", "nbytes"),
    [
        ((64, 16, 197, 64), 16, 52_449_280),
        ((16, 16, 1024, 64), 16, 68_157_440),
        ((8, 16, 1024, 128), 8, 134_742_016),
        ((3, 4, 300, 80), 2, 2_318_400),
    ],
)
def test_the_backward_of_attention_takes_what_an_h200_was_seen_to_take(query, heads: int, nbytes: int) -> None:
    key = (query[0], heads, *query[2:])
    shapes = (query, query, key, key, query)
    kernel = Kernel("_scaled_dot_product_flash_attention_backward", 0.0, 0, 0, "bfloat16", shapes)
    assert workspace_bytes(kernel) == nbytes
