"""The module and one batch, from the configuration."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from pipeline.config import Config, TensorSpec
from pipeline.errors import TraceError
from pipeline.instantiate import instantiate


def build_model(config: Config) -> nn.Module:
    where = f"conf/model/{config.choices['model']}.yaml: module"
    model = instantiate(config.model.module, where)
    if not isinstance(model, nn.Module):
        raise TraceError(
            f"{config.model.module['_target_']} returned a {type(model).__name__}, not a torch.nn.Module",
            where=where,
            remedy="name a module class or a function that returns a module",
        )
    return model.train()


def sample_batch(specs: Mapping[str, TensorSpec]) -> dict[str, Tensor]:
    """Zeros of the right shapes: export looks at types, not at values. No two inputs share memory."""
    return {
        name: torch.zeros(tuple(spec.shape), dtype=getattr(torch, spec.dtype.value)) for name, spec in specs.items()
    }
