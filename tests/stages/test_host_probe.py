"""The host of a GPU: what it takes to issue work, measured beside a known one."""

from __future__ import annotations

from dataclasses import astuple

import pytest
import torch.distributed as dist

from shardwright.pipeline.ir.cluster import HostPace
from shardwright.stages.cluster.fit import KNOWN_HOST, host_pace
from shardwright.stages.cluster.host_probe import measure_host
from shardwright.stages.cluster.timing import Clock


@pytest.mark.parametrize("slower", [1.0, 0.8, 3.0])
def test_a_host_that_is_slower_at_the_probe_is_slower_at_all(slower: float) -> None:
    expected = [slower * pace for pace in astuple(HostPace())]
    assert astuple(host_pace(slower * KNOWN_HOST)) == pytest.approx(expected)


def test_the_work_is_measured(tmp_path) -> None:
    """On a CPU, whose seconds say nothing of a GPU: that the passes run, and are timed several times and reduced."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        clock = Clock("cpu", 3)
        assert measure_host(clock) > 0
    finally:
        dist.destroy_process_group()
    assert len(clock.spreads) == 1
