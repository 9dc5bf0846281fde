"""A step on tensors without memory: every kernel that eager PyTorch would run, and every byte it would hold.

A link of the chain is run forwards and backwards on meta tensors, with autograd as it is, on the ops that the planned
device would use (`device.py`) in the planned precision (`autocast.py`). A dispatch mode sees each kernel of both
passes, and when each storage appears and goes, sized as the caching allocator rounds them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from math import gcd, prod
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from shardwright.pipeline.ir.profile import Kernel
from shardwright.pipeline.rates.kernels import ATTENTION, PRODUCTS

aten = torch.ops.aten
PICKS = ("embedding", "index_select", "index", "gather", "take")  # read what they write, not the whole table
BAGS = ("_embedding_bag", "_embedding_bag_forward_only")  # read the rows that they add up
ON_CPU = {  # torch counts the FLOPs of the GPU's kernels only
    "_scaled_dot_product_flash_attention_for_cpu": "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "_scaled_dot_product_flash_attention_backward",
}
ALLOCATIONS = ("aten.empty", "aten.new_empty")  # ops that run no kernel
ALLOCATION = 512  # bytes; the caching allocator rounds every tensor up to a multiple


def rounded(nbytes: int) -> int:
    return -(-nbytes // ALLOCATION) * ALLOCATION


@dataclass
class Storage:
    """Alive from the kernel of number `born` until just before that of number `died` (None: to the end)."""

    size: int
    born: int
    op: str  # of the graph, whose kernel made it
    died: int | None = None
    value: str = ""  # the first value of the graph that lies in it
    gradient: str = ""  # the value of the graph of which it is the gradient, or what one op adds to that


def storage_key(tensor: Tensor) -> int:
    return int(StorageWeakRef(tensor.untyped_storage()).cdata)


class Watch(TorchDispatchMode):
    """Records kernels and storages. Memory that was there before is known only if it is given to it."""

    def __init__(
        self,
        present: Iterable[Tensor] = (),
        known: Container[int] = (),
        workspace: Callable[[Kernel], int] | None = None,
    ) -> None:
        """`known` are the keys of further memory that is present; `workspace` is what a kernel takes while it runs."""
        super().__init__()
        self.kernels: list[Kernel] = []
        self.storages: list[Storage] = []
        self.op = ""  # of the graph: what runs now belongs to it
        self.present = {storage_key(t) for t in present}
        self.known = known
        self.workspace = workspace
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.sweep()
        fresh = [t for t in outputs if self.add(t)]
        if (fresh or func._schema.is_mutable) and not str(func.overloadpacket).startswith(ALLOCATIONS):
            kernel = _kernel(func, args, kwargs or {}, result, outputs, self.op)
            if nbytes := self.workspace(kernel) if self.workspace else 0:
                number = len(self.kernels)
                self.storages.append(Storage(rounded(nbytes), number, self.op, died=number + 1))
            self.kernels.append(kernel)
        return result

    def add(self, tensor: Tensor) -> bool:
        """Whether the tensor's memory is new."""
        reference = StorageWeakRef(tensor.untyped_storage())
        key = reference.cdata
        if key in self._alive or key in self.present or key in self.known:
            return False
        self._alive[key] = (reference, len(self.storages))
        self.storages.append(Storage(rounded(tensor.untyped_storage().nbytes()), len(self.kernels), self.op))
        return True

    def find(self, tensor: Tensor) -> int | None:
        """The number of the storage behind a tensor; None for what was present before."""
        found = self._alive.get(storage_key(tensor))
        return found[1] if found else None

    def number(self, tensor: Tensor) -> int | None:
        """That of its storage, which may be new."""
        self.add(tensor)
        return self.find(tensor)

    def sweep(self) -> None:
        """Notes which storages have gone."""
        for key in [key for key, (reference, _) in self._alive.items() if reference.expired()]:
            self.storages[self._alive.pop(key)[1]].died = len(self.kernels)


def _with_equal_heads(args: Sequence[Any]) -> list[Any]:
    """Shapes for the counter of attention, with as many heads of keys and values as of queries: torch 2.11 asks for it.

    Every head of a query meets one of them, so that is as much work.
    """
    whole = [value.shape if isinstance(value, Tensor) and value.dim() == 4 else None for value in args]
    heads = max(shape[1] for shape in whole if shape)
    rows = zip(args, whole, strict=True)
    return [torch.Size((shape[0], heads, *shape[2:])) if shape else value for value, shape in rows]


def _kernel(func: Any, args: Any, kwargs: Any, result: Any, outputs: list[Tensor], op: str) -> Kernel:
    name = str(func.overloadpacket).removeprefix("aten.")
    inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    counted = getattr(aten, ON_CPU[name]) if name in ON_CPU else func.overloadpacket
    counter: Callable[..., Any] | None = flop_registry.get(counted)
    largest = max((*inputs, *outputs), key=Tensor.numel)
    changed = [] if outputs else _mutated(func, args)
    seen = _with_equal_heads(args) if name in ATTENTION or name in ON_CPU else args
    plain = Kernel(
        name=name,
        flops=float(counter(*seen, **kwargs, out_val=result)) if counter else 0.0,
        read=sum(_touched(t) for t in {id(t): t for t in inputs}.values()),  # of `x * x` once
        written=sum(_touched(t) for t in (*outputs, *changed)),
        dtype=str(largest.dtype).removeprefix("torch."),
        shapes=tuple(tuple(t.shape) for t in (*inputs, *outputs)),
        op=op,
        scattered=not all(t.is_contiguous() or 0 in t.stride() for t in inputs),  # in order, or repeated
    )
    details: dict[str, Any] = {}
    if name in PRODUCTS:
        matrices = [t for t in (*inputs, *outputs) if t.dim() >= 2]
        details["leading"] = reduce(gcd, (max(t.stride()[-2:]) for t in matrices), 0)
        details["transposed"] = "".join("n" if t.stride(-1) == 1 else "t" for t in matrices[:2])
        if not plain.flops and len(inputs) > 1:  # a grouped product: every row meets one of the matrices
            rows, columns = outputs[0].shape[-2:]
            details["flops"] = 2.0 * rows * columns * inputs[0].shape[-1]
    if name in ATTENTION or name in ON_CPU:
        given = {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)} | kwargs
        details["causal"], details["dropout"] = bool(given.get("is_causal")), bool(given.get("dropout_p"))
        details["flops"] = plain.flops * (0.5 if details["causal"] else 1.0)  # the counter takes every pair
    if name == "convolution_backward":  # the counter takes every channel with every other, also of a grouped one
        gradient, _, weight = inputs[:3]
        details["flops"] = 2.0 * gradient.numel() * (weight.numel() // weight.shape[0]) * sum(args[-1][:2])
    if name in BAGS:
        rows = args[1].numel() * args[0].shape[1] * args[0].element_size()
        details["read"] = rows + sum(_touched(t) for t in inputs if not t.is_floating_point())
    if name in PICKS:
        indices = (t for t in inputs if not (t.is_floating_point() or t.is_complex()))
        details["read"] = plain.written + sum(map(_touched, indices))
    return Kernel(**(vars(plain) | details)) if details else plain


def _mutated(func: Any, args: Any) -> list[Tensor]:
    """What an op that returns nothing writes; a fused optimizer would write gradients only to unscale them."""
    places = zip(func._schema.arguments, args, strict=False)
    changes = ((a, value) for a, value in places if a.alias_info is not None and a.alias_info.is_write)
    written = [value for argument, value in changes if argument.name != "grads"]
    return [leaf for leaf in tree_leaves(written) if isinstance(leaf, Tensor)]


def _touched(tensor: Tensor) -> int:
    """The bytes of memory behind a tensor: a dim that is only repeated is there once."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return int(prod(size for size, stride in sizes if stride) * tensor.element_size())
