"""The most bytes that tensors held during a piece of work, on the device where they lie."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def measure_peak(work: Callable[[], None], resident: Iterable[Tensor], device: torch.device) -> int:
    """Bytes of the resident tensors plus the most that `work` had allocated at any moment."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        work()
        return int(torch.cuda.max_memory_allocated(device))
    before = storage_bytes(resident)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return before + peak


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory behind the tensors, each piece counted once however many views it has."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
