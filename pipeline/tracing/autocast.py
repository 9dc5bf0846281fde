"""Autocast around a module that is traced: `x.to(y.dtype)` casts to the type that y has on the plan's device.

torch.export notes an op as it is called and runs it below, where autocast acts. What autocast casts leaves no op of its
own, but the types of the results are those under autocast, and the module reads them. A module is traced on the CPU,
whose autocast has other ops than that of a GPU: for a GPU's plan it does as the GPU's does.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch.amp.autocast_mode import autocast
from torch.utils._pytree import tree_leaves, tree_map

from shardwright.pipeline.ops.autocast import KEYS, REFUSED, Policy, policy_of

LOW = torch.bfloat16
RECURRENT = tuple(f"aten::{kind}.input" for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu"))
_OFF = DispatchKeySet(DispatchKey.AutocastCPU)


@contextmanager
def device_autocast(device: str, amp: bool) -> Iterator[None]:
    """Around an export: autocast as the device has it, if `amp`; a module's own `torch.autocast` is that of the CPU."""
    if device == "cpu":
        with torch.autocast("cpu", LOW, enabled=amp):
            yield
        return
    with _devices_of_autocast(device), _enabled(device, amp), _gpu_ops(), torch.autocast("cpu", LOW, enabled=amp):
        yield


def _devices_of_autocast(device: str) -> AbstractContextManager[Any]:
    plain = autocast.__init__

    def init(self: Any, device_type: str, *more: Any, **named: Any) -> None:
        plain(self, "cpu" if device_type == device else device_type, *more, **named)

    return patch.object(autocast, "__init__", init)


@contextmanager
def _enabled(device: str, amp: bool) -> Iterator[None]:
    """For modules that ask, such as `nn.LSTM`; nothing is cast by it."""
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    torch.set_autocast_enabled(device, amp)
    torch.set_autocast_dtype(device, LOW)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])


@contextmanager
def _gpu_ops() -> Iterator[None]:
    """Of the ops that autocast knows on either device."""
    library = torch.library.Library("aten", "IMPL")
    known = {name for key in KEYS.values() for name in torch._C._dispatch_get_registrations_for_dispatch_key(key)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the CPU's own are replaced
        for name in sorted(name for name in known.union(RECURRENT) if name.startswith("aten::")):
            library.impl(name.removeprefix("aten::"), _kernel(name), KEYS["cpu"], allow_override=True)
    try:
        yield
    finally:
        library._destroy()


def _kernel(name: str) -> Callable[..., Any]:
    kind, _, overload = name.removeprefix("aten::").partition(".")
    op = getattr(getattr(torch.ops.aten, kind), overload or "default")

    def run(*args: Any, **named: Any) -> Any:
        dtype = _type_of(name, op, (args, named))
        with torch._C._ExcludeDispatchKeyGuard(_OFF):
            args, named = tree_map(lambda a: a.to(dtype) if dtype and _is_float(a) else a, (args, named))
            return op(*args, **named)

    cast = name in RECURRENT or policy_of(str(op)) is not None
    return run if cast else torch.library.fallthrough_kernel


def _type_of(name: str, op: Any, args: Any) -> torch.dtype | None:
    """To which autocast casts what the op is given."""
    leaves = tree_leaves(args)
    if name in RECURRENT:  # cuDNN, whatever the low precision is
        return torch.float16
    policy = policy_of(str(op), typed=any(isinstance(a, torch.dtype) for a in leaves))
    if policy is Policy.REFUSED:
        raise RuntimeError(f"{REFUSED} is unsafe to autocast: use binary_cross_entropy_with_logits")
    if policy is Policy.WIDEST:
        wide = any(a.dtype == torch.float32 for a in leaves if _is_float(a))
        return torch.float32 if wide else LOW
    return {Policy.LOW: LOW, Policy.FULL: torch.float32}.get(policy) if policy else None


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64
