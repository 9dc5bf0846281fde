"""Branches on random numbers whose outcome is certain: `if torch.rand([]) < 0.0`.

Export cannot follow a branch on a tensor's value. But some are decided beforehand: `torch.rand` lies in [0, 1), so it
is never below 0 (a layer-drop of probability zero) and always below 1. This mode knows the range of such tensors while
the model runs, and answers `bool(...)` for comparisons that the range decides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

_BELOW: dict[Any, str] = {}
for _symbol, _names in {
    "<": ("lt", "less", "__lt__"),
    ">=": ("ge", "greater_equal", "__ge__"),
    "<=": ("le", "less_equal", "__le__"),
    ">": ("gt", "greater", "__gt__"),
}.items():
    for _name in _names:
        for _holder in (torch, Tensor):
            if hasattr(_holder, _name):
                _BELOW[getattr(_holder, _name)] = _symbol


def _decide(symbol: str, low: float, high: float, bound: float) -> bool | None:
    """Whether x compares so with the bound for every x in [low, high), or for none; None where it depends."""
    if symbol in ("<", ">="):
        below = True if high <= bound else False if low >= bound else None
        return below if symbol == "<" or below is None else not below
    above = True if low > bound else False if high <= bound else None
    return above if symbol == ">" or above is None else not above


class CertainBranches(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.ranges: WeakIdKeyDictionary = WeakIdKeyDictionary()  # tensor -> range
        self.truths: WeakIdKeyDictionary = WeakIdKeyDictionary()  # tensor -> truth

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__bool__ and args[0] in self.truths:
            return self.truths[args[0]]
        result = func(*args, **(kwargs or {}))
        if func is torch.rand:
            self.ranges[result] = (0.0, 1.0)
        elif func in _BELOW and self._is_compared(args):
            low, high = self.ranges[args[0]]
            truth = _decide(_BELOW[func], low, high, float(args[1]))
            if truth is not None:
                self.truths[result] = truth
        return result

    def _is_compared(self, args: Any) -> bool:
        """A tensor of known range against a number."""
        known = len(args) == 2 and isinstance(args[0], Tensor) and args[0] in self.ranges
        return known and isinstance(args[1], int | float)
