"""Conversion paths: proved by running them, priced by hand, and compared with every path there is."""

from __future__ import annotations

import itertools
from math import inf, prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.cost.compute import Seconds
from pipeline.cost.conversions import conversion_seconds, step_arguments, step_axis
from pipeline.cost.paths import Path, Paths, cheapest_path
from pipeline.ir.layout import B, Layout, P, R, S
from tests.graphs import preset
from tests.meshes import all_layouts, check_path, layouts_on, mesh, placed

COMPUTE = preset().compute


def path(source: str, target: str, shape: tuple[int, ...], *sizes: int, grad: bool = True) -> Path:
    nbytes = 4 * prod(shape)
    return cheapest_path(Layout.parse(source), Layout.parse(target), shape, nbytes, grad, mesh(*sizes), COMPUTE)


def texts(found: Path) -> list[str]:
    return [str(layout) for layout in found.layouts]


@settings(max_examples=400, deadline=None)
@given(placed(2), st.sampled_from([1e-9, 1e-3]))
def test_a_path_brings_every_piece_and_every_gradient_to_its_place(case, latency: float) -> None:
    shape, sizes, source, target = case
    torch.manual_seed(0)
    axes = mesh(*sizes, latency=latency)
    found = cheapest_path(source, target, shape, 8 * prod(shape), True, axes, COMPUTE)
    assert (found.layouts[0], found.layouts[-1]) == (source, target)
    check_path(shape, found.layouts, axes)
