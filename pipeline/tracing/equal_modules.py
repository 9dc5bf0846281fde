"""Which layers of a model are equal: nothing that their modules hold tells them apart but their own number."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

LEAST = 4  # layers of a group
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, Enum)


def layers_in_groups(layers: nn.ModuleList, times: Mapping[int, int]) -> list[dict[int, nn.Module]]:
    """Those that are equal, by their numbers; `times` is how often the model has a tensor, by its id."""
    found: list[dict[int, nn.Module]] = []
    for number, layer in enumerate(layers):
        if all(times[id(own)] == 1 for own in (*layer.parameters(), *layer.buffers())):
            same = next((own for own in found if _equals_first(own, number, layer)), None)
            if same is None:
                found.append(same := {})
            same[number] = layer
    return [one for one in found if len(one) >= LEAST]


def tensor_uses(model: nn.Module) -> Mapping[int, int]:
    found: dict[int, int] = {}
    for kind in (model.named_parameters, model.named_buffers):
        for _, own in kind(remove_duplicate=False):  # type: ignore[operator]
            found[id(own)] = found.get(id(own), 0) + 1
    return found


def _equals_first(layers: dict[int, nn.Module], number: int, layer: nn.Module) -> bool:
    first, one = next(iter(layers.items()))
    return _equal(one, layer, (first, number))


def _equal(one: nn.Module, other: nn.Module, numbers: tuple[int, int]) -> bool:
    """Whether nothing but their own numbers tells two modules apart."""
    if type(one) is not type(other) or vars(one).keys() != vars(other).keys():
        return False
    for key, own in vars(one).items():
        same = vars(other)[key]
        if key in ("_modules", "_parameters", "_buffers"):
            if own.keys() != same.keys() or not all(_equal_held(own[name], same[name], numbers) for name in own):
                return False
        elif not same_value(own, same) and not _are_numbers(own, same, numbers):
            return False
    return True


def _equal_held(one: Any, other: Any, numbers: tuple[int, int]) -> bool:
    """Of modules, parameters and buffers."""
    if one is None or other is None:
        return one is other
    if isinstance(one, nn.Module):
        return isinstance(other, nn.Module) and _equal(one, other, numbers)
    return one is not other and type(one) is type(other) and kind_of(one) == kind_of(other)


def kind_of(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def _are_numbers(one: Any, other: Any, numbers: tuple[int, int]) -> bool:
    return type(one) is int and type(other) is int and (one, other) == numbers


def same_value(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, PLAIN):
        return bool(one == other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_value(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same_value(a, b) for a, b in zip(one, other, strict=True))
    return isinstance(one, set) and one == other
