"""The peak of some work, with nothing held for it that the work itself lets go of."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref

import pytest
import torch
from torch import nn

from shardwright.pipeline.runtime.step.memory import measure_peak


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_old_gradients_are_gone_while_new_ones_are_made(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step lets go of them first, and they must not be there because their peak is measured."""
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 0)
    layer = nn.Linear(64, 64, bias=False)
    layer.weight.grad = torch.zeros(64, 64)
    old = weakref.ref(layer.weight.grad)

    def step() -> None:
        layer.weight.grad = None
        assert old() is None
        layer.weight.grad = torch.ones(64, 64)

    def resident() -> list[torch.Tensor]:
        return [layer.weight, *([] if layer.weight.grad is None else [layer.weight.grad])]

    peak = measure_peak(step, resident, torch.device(device))
    assert device == "cuda" or peak == 2 * 64 * 64 * 4


FAULTS = """
import resource, torch
from shardwright.pipeline.runtime.step.memory import keep_freed_memory
keep_freed_memory()
def step():
    kept = [torch.ones(1 << 23) for _ in range(4)]  # of 32 MiB each
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
found = []
for _ in range(8):
    before = faults()
    step()
    found.append(faults() - before)
print(min(found))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the C library is glibc")
@pytest.mark.parametrize(("given", "kept"), [({}, True), ({"MALLOC_MMAP_MAX_": "65536"}, False)])
def test_pages_of_a_step_are_there_in_the_next(given: dict[str, str], kept: bool, monkeypatch) -> None:
    """Unless the user has set it otherwise."""
    for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_TUNABLES"))]:
        monkeypatch.delenv(name)
    found = subprocess.run(
        [sys.executable, "-c", FAULTS], env={**os.environ, **given}, capture_output=True, text=True, check=True
    )
    assert (int(found.stdout) < 1000) is kept, "128 MiB are 32768 pages of 4 KiB"
