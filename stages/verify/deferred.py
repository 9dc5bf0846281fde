"""Batch norms of the user's module whose running statistics change once a step, by the numbers of all its passes.

As `batch_norm: deferred` asks of a program, which sees one pass after another (pipeline/runtime/step/running_stats.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipeline.runtime.step.running_stats import COUNTER

ARGUMENTS: dict[Any, tuple[str, ...]] = {
    F.batch_norm: ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
    torch.batch_norm: ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps"),
}


@contextmanager
def statistics_of_step(module: nn.Module) -> Iterator[None]:
    """Around the passes of a step."""
    counters = [buffer for name, buffer in module.named_buffers() if name.rpartition(".")[2] == COUNTER]
    before = [counter.clone() for counter in counters]
    with _BatchNorms() as norms:
        yield
    with torch.no_grad():
        norms.commit()
        for counter, start in zip(counters, before, strict=True):
            counter.copy_(torch.minimum(counter, start + 1))


class _BatchNorms(TorchFunctionMode):
    """Keeps what batch norms are given in training, and their running statistics as they are until `commit`."""

    def __init__(self) -> None:
        super().__init__()
        self.given: dict[int, tuple[Tensor, Tensor, float, list[Tensor]]] = {}

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        names = ARGUMENTS.get(func, ())
        given = dict(zip(names, args, strict=False)) | kwargs
        mean, variance = given.get("running_mean"), given.get("running_var")
        if not names or not given.get("training", False) or mean is None or variance is None:
            return func(*args, **kwargs)
        norm = self.given.setdefault(mean.data_ptr(), (mean, variance, given.get("momentum", 0.1), []))
        norm[-1].append(given["input"].detach().transpose(0, 1).flatten(1))
        rest = args[len(names) :]  # whether cudnn may be used
        instead = given | {"running_mean": mean.clone(), "running_var": variance.clone()}
        return func(*(instead.pop(name) for name in names[: len(args)]), *rest, **instead)

    def commit(self) -> None:
        for mean, variance, momentum, given in self.given.values():
            numbers = torch.cat(given, dim=1)
            mean.lerp_(numbers.mean(1).to(mean.dtype), momentum)
            variance.lerp_(numbers.var(1).to(variance.dtype), momentum)
