"""The most bytes that tensors held during some work, on the device where they lie."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of glibc's mallopt


def measure_peak(work: Callable[[], None], resident: Callable[[], Iterable[Tensor]], device: torch.device) -> int:
    """Bytes alive at the worst moment of `work`, what was resident before it included.

    `resident` is asked and let go of before the work begins: a tensor that is listed here would outlive it.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        work()
        return int(torch.cuda.max_memory_allocated(device))
    with Tally(resident()) as tally:
        work()
    return int(tally.peak)


def allocate_exactly() -> None:
    """A tensor on a GPU takes its own bytes, in steps of 512.

    As torch sets out, it may take up to 1 MiB more: what would be left over of a free part that small is given with it.
    That depends on all that was freed before, and no plan can know it. A setting of the user's own is left as it is.
    """
    if not os.environ.keys() & {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def keep_freed_memory() -> None:
    """What a step has freed on a CPU stays with the process, for the next step.

    As the C library sets out, large tensors are mapped each time they are made, or what lies free at the end is given
    back: their pages are then made and cleared once more in every step, which takes longer than the work on them. Other
    C libraries than glibc are left as they are, and so are settings of the user's own.
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ) or sys.platform != "linux":
        return
    with suppress(AttributeError):
        adjust = ctypes.CDLL(None).mallopt
        adjust(_MMAP_MAX, 0)
        adjust(_TRIM_THRESHOLD, -1)  # never


class Tally(TorchDispatchMode):
    """Weighs the storages that are alive after each op.

    The profiler's memory events would be cheaper, but they miss what a communication thread frees. What a kernel
    allocates and frees within itself is not seen here.
    """

    def __init__(self, resident: Iterable[Tensor]) -> None:
        super().__init__()
        self.alive: dict[int, StorageWeakRef] = {}
        self.peak = 0
        for tensor in resident:
            self._add(tensor)
        self.weigh()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._add(leaf)
        self.weigh()
        return result

    def _add(self, tensor: Tensor) -> None:
        local: Tensor = getattr(tensor, "_local_tensor", tensor)  # a DTensor has no storage of its own
        reference = StorageWeakRef(local.untyped_storage())
        self.alive.setdefault(reference.cdata, reference)

    def weigh(self) -> int:
        """Asks each storage for its size again: FSDP lets go of gathered parameters by making it zero."""
        found = {key: torch.UntypedStorage._new_with_weak_ptr(key) for key in self.alive}
        self.alive = {key: self.alive[key] for key, storage in found.items() if storage is not None}
        nbytes = sum(storage.nbytes() for storage in found.values() if storage is not None)
        self.peak = max(self.peak, nbytes)
        return int(nbytes)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory behind the tensors, each counted once however many views it has."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
