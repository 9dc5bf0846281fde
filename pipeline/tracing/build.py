"""The module and one batch, from the configuration, without memory for weights: both are fake tensors.

The module is built on the meta device, so a model of a hundred billion parameters costs nothing. Where its constructor
needs values (and so fails on meta), it is built for real; in both cases its tensors are then replaced by fake CPU ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwright.pipeline.base.errors import TraceError
from shardwright.pipeline.base.instantiate import TargetError, instantiate
from shardwright.pipeline.config import Config, Precision, TensorSpec
from shardwright.pipeline.user.precision import in_precision, type_of


def fake_mode() -> FakeTensorMode:
    return FakeTensorMode(allow_non_fake_inputs=True)


def build_model(config: Config, mode: FakeTensorMode) -> nn.Module:
    where = f"conf/model/{config.choices['model']}.yaml: module"
    model = build_module(config.model.module, where)
    return to_fake(in_precision(model, config.model.precision), mode).train()


def build_module(settings: Mapping[str, Any], where: str) -> nn.Module:
    """On the meta device; for real where that fails, so that a user's own mistake is told as it is."""
    for device in (torch.device("meta"), nullcontext()):
        try:
            with device:
                model = instantiate(settings, where)
            break
        except TargetError:
            if isinstance(device, nullcontext):
                raise
    if not isinstance(model, nn.Module):
        raise TraceError(
            f"{settings['_target_']} returned a {type(model).__name__}, not a torch.nn.Module",
            where=where,
            remedy="name a module class or a function that returns a module",
        )
    return model


def to_fake(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """The same module with a fake CPU tensor in place of each of its own; tied ones stay tied."""
    fakes: dict[int, Tensor] = {}
    originals = []  # kept alive: an id is unique only as long as its object lives
    with mode:
        for module in model.modules():
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is None:
                        continue
                    if id(tensor) not in fakes:
                        originals.append(tensor)
                        fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                        trained = isinstance(tensor, nn.Parameter)
                        fakes[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if trained else fake
                    tensors[name] = fakes[id(tensor)]  # type: ignore[assignment]
    return model


def sample_batch(
    specs: Mapping[str, TensorSpec], mode: FakeTensorMode, precision: Precision = Precision.fp32
) -> dict[str, Tensor]:
    """Fake tensors of the right types, floating ones cast as before a step; no two inputs share memory."""
    with mode:
        batch = {n: torch.empty(tuple(spec.shape), dtype=getattr(torch, spec.dtype.value)) for n, spec in specs.items()}
        return {name: t.to(type_of(t, precision)) for name, t in batch.items()}
