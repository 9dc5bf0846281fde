"""The user's optimizer from configuration: one that a training step can use, or one line that says why not."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipeline.instantiate import TargetError, instantiate

if TYPE_CHECKING:
    from torch.nn import Parameter
    from torch.optim import Optimizer

ANOTHER = "name an optimizer whose step needs no closure, such as torch.optim.AdamW"


def build_optimizer(settings: Mapping[str, Any], where: str, parameters: Sequence[Parameter]) -> Optimizer:
    import torch  # slow to import

    optimizer = instantiate(settings, where, list(parameters))
    target, place = settings["_target_"], f"{where}._target_"
    if not isinstance(optimizer, torch.optim.Optimizer):
        kind = type(optimizer).__name__
        raise TargetError(f"{target} gives a {kind}, which is no torch.optim.Optimizer", where=place, remedy=ANOTHER)
    if _demands(optimizer.step):
        raise TargetError(
            f"the step of {target} needs a closure that evaluates the loss again, and a plan evaluates it once",
            where=place,
            remedy=ANOTHER,
        )
    return optimizer


def try_optimizer(settings: Mapping[str, Any], where: str) -> tuple[Optimizer, Parameter]:
    """The optimizer after a first step on a small parameter, and that parameter."""
    import torch

    parameter = torch.nn.Parameter(torch.ones(8, 8))
    optimizer = build_optimizer(settings, where, [parameter])
    parameter.grad = torch.ones_like(parameter)
    try:
        optimizer.step()
    except Exception as error:  # theirs: one line, not our traceback
        raise TargetError(
            f"{settings['_target_']} cannot take a step: {type(error).__name__}: {error}",
            where=where,
            remedy="check the keys beside `_target_`, or name another optimizer",
        ) from error
    return optimizer, parameter


def _demands(step: Any) -> bool:
    """Whether a step must be given something: a closure that evaluates the loss."""
    given = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(step).parameters.values()
    return any(p.default is p.empty and p.kind not in given for p in parameters)
