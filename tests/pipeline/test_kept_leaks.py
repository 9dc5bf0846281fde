"""A region that keeps results leaves nothing behind, whether its backward is run or not."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F

from pipeline.runtime.recompute import _Arguments, _Call, _Frame, _Holder, kept, recompute

OWN = (_Frame, _Call, _Arguments, _Holder)


def alive() -> int:
    """Autograd's nodes are not seen by the collector: what they hold in a ring is never freed."""
    gc.collect()
    return sum(type(thing) in OWN for thing in gc.get_objects())


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_nothing_stays(nested: bool, backward: bool) -> None:
    weight = torch.randn(4, 4, requires_grad=True)

    def link(x):
        return F.gelu(kept(F.linear, F.gelu(x), weight))

    def step() -> None:
        x = torch.randn(3, 4, requires_grad=True)
        y = recompute(lambda x: recompute(link, recompute(link, x)), x) if nested else recompute(link, x)
        if backward:
            y.sum().backward()

    step()
    before = alive()
    for _ in range(5):
        step()
    assert alive() <= before
