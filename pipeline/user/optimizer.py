"""The user's optimizer from configuration: one that a training step can use, or one line that says why not."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Parameter
from torch.optim import Optimizer

from shardwright.pipeline.base.instantiate import TargetError, instantiate

ANOTHER = "name an optimizer whose step needs no closure, such as torch.optim.AdamW"


def build_optimizer(settings: Mapping[str, Any], where: str, parameters: Sequence[Parameter]) -> Optimizer:
    optimizer = instantiate(settings, where, list(parameters))
    target, place = settings["_target_"], f"{where}._target_"
    if not isinstance(optimizer, Optimizer):
        kind = type(optimizer).__name__
        raise TargetError(f"{target} gives a {kind}, which is no torch.optim.Optimizer", where=place, remedy=ANOTHER)
    given = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters_of_step = inspect.signature(optimizer.step).parameters.values()
    if any(p.default is p.empty and p.kind not in given for p in parameters_of_step):
        raise TargetError(
            f"the step of {target} needs a closure that evaluates the loss again, and a plan evaluates it once",
            where=place,
            remedy=ANOTHER,
        )
    return optimizer


def try_optimizer(settings: Mapping[str, Any], where: str, device: str = "cpu") -> tuple[Optimizer, Parameter]:
    """The optimizer after a first step on a small parameter, and that parameter.

    On a CPU, or where it must be a GPU there (`capturable`), or on fake tensors of one.
    """

    def first_step(place: str) -> tuple[Optimizer, Parameter]:
        parameter = Parameter(torch.ones(8, 8, device=place))
        return _stepped(settings, where, [parameter], [[torch.ones_like(parameter)]]), parameter

    try:
        return first_step("cpu")
    except TargetError as refused:
        if device == "cpu":
            raise
        try:
            with nullcontext() if torch.cuda.is_available() else FakeTensorMode():
                return first_step(device)
        except Exception:  # also of a GPU that has no room
            raise refused from None


def _stepped(
    settings: Mapping[str, Any], where: str, parameters: list[Parameter], steps: Iterable[Sequence[Tensor]]
) -> Optimizer:
    """The optimizer after a step with each of these gradients of the parameters."""
    optimizer = build_optimizer(settings, where, parameters)
    for gradients in steps:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        try:
            optimizer.step()
        except Exception as error:  # theirs: one line, not our traceback
            raise TargetError(
                f"{settings['_target_']} cannot take a step: {type(error).__name__}: {error}",
                where=where,
                remedy="check the keys beside `_target_`, or name another optimizer",
            ) from error
    return optimizer


def refuse_mixing(settings: Mapping[str, Any], where: str, split: str, device: str = "cpu") -> None:
    """An optimizer that does not update every element by itself is not right on this rank's shard of `split`.

    Adafactor (means of rows and columns), Muon (products of the whole) and all that look at norms are of that kind.
    """
    if not updates_elements(settings, where, device):
        raise TargetError(
            f"{settings['_target_']} looks at whole tensors, and the plan splits that of {split} over ranks",
            where=f"{where}._target_",
            remedy="name one that updates every element by itself, such as torch.optim.AdamW, or plan with `only: data`"
            " in your conf/solve file, which keeps parameters whole",
        )


def refuse_moving_zeros(settings: Mapping[str, Any], where: str, padded: str, device: str = "cpu") -> None:
    """The padding of uneven shards is zeros without a gradient: what an optimizer makes of it would be read."""
    parameter = Parameter(torch.zeros(8, 6, device=device))
    _stepped(settings, where, [parameter], ([torch.zeros_like(parameter)] for _ in range(2)))
    if not bool((parameter == 0).all()):
        raise TargetError(
            f"{settings['_target_']} changes zeros that have no gradient, and the plan pads {padded} with such",
            where=where,
            remedy="set its `eps` above zero, or use a number of devices by which the parameter's sizes divide",
        )


def updates_elements(settings: Mapping[str, Any], where: str, device: str = "cpu") -> bool:
    """Whether steps on the halves of two tensors, cut either way, are those on the whole ones: by trying."""
    with torch.random.fork_rng(devices=[]):
        whole = _tried(settings, where, device, lambda tensor: tensor)
        for dim in (0, 1):
            halves = [
                _tried(settings, where, device, lambda t, n=n, d=dim: t.chunk(2, d)[n])  # type: ignore[misc]
                for n in (0, 1)
            ]
            joined = [torch.cat(pair, dim) for pair in zip(*halves, strict=True)]
            if not all(torch.allclose(*pair, rtol=1e-5, atol=1e-6) for pair in zip(whole, joined, strict=True)):
                return False
    return True


def _tried(settings: Mapping[str, Any], where: str, device: str, cut: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """What a part of two tensors has become after some steps of very different gradients."""
    draw = torch.Generator().manual_seed(0)

    def drawn(scale: float) -> Tensor:
        return cut(torch.randn(8, 6, generator=draw) * scale).clone().to(device)

    parameters = [Parameter(drawn(1.0)) for _ in range(2)]
    _stepped(settings, where, parameters, ([drawn(scale) for _ in parameters] for scale in (0.1, 1.0, 30.0)))
    return [parameter.detach() for parameter in parameters]
