"""The host of a GPU: what it takes to issue work, measured beside a known one."""

from __future__ import annotations

from dataclasses import astuple

import pytest
import torch.distributed as dist

from pipeline.ir.cluster import HostPace
from stages.cluster.fit import KNOWN_HOST, host_pace
from stages.cluster.host_probe import measure_host
from stages.cluster.timing import Clock


def test_the_known_host_is_the_default() -> None:
    assert astuple(host_pace(KNOWN_HOST)) == pytest.approx(astuple(HostPace()))


@pytest.mark.parametrize(
    ("work", "slower"),
    [
        ("forward", {"op", "kernel", "module"}),
        ("backward", {"backward_kernel"}),
        ("optimizer", {"parameter"}),
        ("region", {"region", "saved"}),
        ("kept", {"kept"}),
    ],
)
def test_a_host_that_is_slower_at_one_work_is_slower_at_what_that_stands_for(work: str, slower: set[str]) -> None:
    found, known = vars(host_pace({**KNOWN_HOST, work: 3 * KNOWN_HOST[work]})), vars(HostPace())
    assert {name: found[name] / known[name] for name in known} == pytest.approx(
        {name: 3.0 if name in slower else 1.0 for name in known}
    )


def test_every_work_is_measured(tmp_path) -> None:
    """On a CPU, whose seconds say nothing of a GPU: that the works run, regions run twice and `kept` inside them."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        clock = Clock("cpu", 3)
        found = measure_host(clock)
    finally:
        dist.destroy_process_group()
    assert found.keys() == KNOWN_HOST.keys()
    assert all(found[name] > 0 for name in ("forward", "backward", "region", "optimizer")) and found["kept"] >= 0
    assert len(clock.spreads) == 7  # each pass is timed several times and reduced
