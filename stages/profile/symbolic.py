"""A step on tensors without memory: every kernel that eager PyTorch would run, and every byte it would hold.

A link of the chain is run forwards and backwards on meta tensors, with autograd as it is, on the ops that the planned
device would use (`device.py`) in the planned precision (`autocast.py`). A dispatch mode sees each kernel of both
passes, and weighs the storages that are alive after it, rounded as the caching allocator rounds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

ALLOCATION = 512  # bytes; the caching allocator rounds every tensor up to a multiple


def rounded(nbytes: int) -> int:
    return -(-nbytes // ALLOCATION) * ALLOCATION


@dataclass(frozen=True)
class Kernel:
    name: str
    flops: float
    nbytes: int  # read and written
    dtype: str  # of its largest tensor


class Watch(TorchDispatchMode):
    """Records kernels and the bytes alive; tensors made before it are known only if they are given to it."""

    def __init__(self, present: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.total = 0
        self.peak = 0
        self.kernels: list[Kernel] = []
        self.foreign = {StorageWeakRef(t.untyped_storage()).cdata for t in present}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        fresh = [t for t in outputs if self._add(t)]
        if fresh or _writes(func):
            self._record(func, args, kwargs or {}, result, outputs)
        self.weigh()
        return result

    def _add(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)
        known = self.alive.get(reference.cdata)
        if reference.cdata in self.foreign or (known is not None and not known[0].expired()):
            return False
        if known is not None:
            self.total -= known[1]
        size = rounded(storage.nbytes())
        self.alive[reference.cdata] = (reference, size)
        self.total += size
        return True

    def ignore(self, tensor: Tensor) -> None:
        """From now on the tensor's memory does not count."""
        key = StorageWeakRef(tensor.untyped_storage()).cdata
        self.foreign.add(key)
        if key in self.alive:
            self.total -= self.alive.pop(key)[1]

    def weigh(self) -> int:
        dead = [key for key, (reference, _) in self.alive.items() if reference.expired()]
        self.peak = max(self.peak, self.total - sum(self.alive[key][1] for key in dead))
        for key in dead:
            self.total -= self.alive.pop(key)[1]
        return self.total

    def _record(self, func: Any, args: Any, kwargs: Any, result: Any, outputs: list[Tensor]) -> None:
        tensors = [*(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), *outputs]
        moved = sum(t.numel() * t.element_size() for t in tensors)
        counter: Callable[..., Any] | None = flop_registry.get(func.overloadpacket)
        flops = float(counter(*args, **kwargs, out_val=result)) if counter else 0.0
        largest = max(tensors, key=Tensor.numel)
        self.kernels.append(Kernel(str(func.overloadpacket), flops, moved, str(largest.dtype).removeprefix("torch.")))


def _writes(func: Any) -> bool:
    return bool(func._schema.is_mutable)
