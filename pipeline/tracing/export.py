"""`torch.export` of the module's loss, in train mode, with the user's mistakes turned into one line.

Export cannot follow a branch on a tensor's value. But some are decided beforehand, such as `if torch.rand([]) < 0.0`:
`torch.rand` lies in [0, 1), so it is never below 0 (a layer-drop of probability zero) and always below 1.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._decomp import decompositions
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.export import ExportedProgram
from torch.fx import proxy
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from shardwright.pipeline.base.errors import TraceError
from shardwright.pipeline.tracing.autocast import device_autocast
from shardwright.pipeline.tracing.equal_layers import NotEqual, marked, numbered, write_out
from shardwright.pipeline.tracing.source import Stack, origin
from shardwright.pipeline.user.loss import pick_loss


class LossOnly(nn.Module):
    """Calls the user's module and returns its loss alone, so that outputs the loss does not need fall away."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Tensor) -> Tensor:
        return pick_loss(self.model(**batch))


def export_loss(
    model: nn.Module, batch: dict[str, Tensor], device: str = "cpu", *, amp: bool = False
) -> ExportedProgram:
    """As the module runs on the device; `amp` is for autocast to bfloat16. Equal layers are exported once."""
    with marked(model) as found, suppress(NotEqual, TraceError):
        program = _exported(model, batch, device, amp)
        write_out(program, found)
        return numbered(program)
    return numbered(_exported(model, batch, device, amp))


def _exported(model: nn.Module, batch: dict[str, Tensor], device: str, amp: bool) -> ExportedProgram:
    # Torch writes and compiles the code of its graph after each pass over it, and reads no more than the last of that.
    # For each op it takes down a hundred frames and reads the line of each: those of others' code are enough.
    stacks = patch.object(proxy, "CapturedTraceback", Stack)
    with _quiet(), CertainBranches(), _lstm_states(), stacks, _use_lazy_graph_module(True):
        try:
            with device_autocast(device, amp):
                return torch.export.export(LossOnly(model), (), batch, strict=False)
        except TraceError:
            raise
        except Exception as error:  # the user's forward runs inside export and may raise anything
            raise refused(error) from error


BRANCH = "a branch on a tensor's value"
SIZE = "a tensor's value is used as a size"
SHAPE = "an op whose result has a size that depends on values"
NUMBERS = "an op that cannot run without numbers"
KINDS: dict[type[Exception], str] = {
    GuardOnDataDependentSymNode: BRANCH,
    DataDependentOutputException: BRANCH,
    DynamicOutputShapeException: SHAPE,
    UnsupportedOperatorException: NUMBERS,
    NotImplementedError: NUMBERS,
}
REMEDIES = {
    BRANCH: "compute both ways and choose with `torch.where`",
    SIZE: "take sizes from shapes or from settings",
    SHAPE: "use an op of fixed size, or an op of your own that tells its shapes (`shardwright docs how-to-add-an-op`)",
    NUMBERS: "make it an op of your own that tells its shapes (`shardwright docs how-to-add-an-op`)",
    "": "check the batch's names and shapes",
}


def refused(error: Exception) -> TraceError:
    """By the kind of failure that torch.export reports, and by whose code it is in."""
    kind = next((kind for type_, kind in KINDS.items() if isinstance(error, type_)), "")
    if kind == BRANCH and "specialized integer" in str(error):
        kind = SIZE
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = ": ".join([*([kind] if kind else []), type(error).__name__, *lines[:1]])
    remedy = REMEDIES[kind]
    line, package, inside = origin(error)
    if package:
        told += f", inside the package {package} ({inside})"
        remedy = f"it is not in your code: look for a setting of {package} that avoids it" if kind else remedy
    return TraceError(f"the model cannot be exported: {told}", where=line or "conf/model: module", remedy=remedy)


def _lstm_states() -> AbstractContextManager[Any]:
    """Torch before 2.13 exports the last states of an LSTM with one dim too many (its pull request 185716)."""
    plain = decompositions.one_layer_lstm

    def mended(
        given: Tensor, states: tuple[Tensor, Tensor], *more: Any, **named: Any
    ) -> tuple[Tensor, tuple[Any, ...]]:
        made, last = plain(given, states, *more, **named)
        return made, tuple(state.reshape(first.shape) for state, first in zip(last, states, strict=True))

    return patch.object(decompositions, "one_layer_lstm", mended)


@contextmanager
def _quiet() -> Iterator[None]:
    """Export warns of its own internals, and prints the graph so far when it fails: the user gets our one line."""
    torch_log = logging.getLogger("torch")
    level = torch_log.level
    torch_log.setLevel(logging.CRITICAL)
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            torch_log.setLevel(level)


_SYMBOLS = {
    "<": ("lt", "less", "__lt__"),
    ">=": ("ge", "greater_equal", "__ge__"),
    "<=": ("le", "less_equal", "__le__"),
    ">": ("gt", "greater", "__gt__"),
}
_COMPARISONS = {
    getattr(holder, name): symbol
    for symbol, names in _SYMBOLS.items()
    for name in names
    for holder in (torch, Tensor)
    if hasattr(holder, name)
}


class CertainBranches(TorchFunctionMode):
    """Knows which tensors are random numbers in [0, 1) while the model runs, and answers `bool(...)` of comparisons."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.truths: WeakIdKeyDictionary = WeakIdKeyDictionary()  # tensor -> truth

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__bool__ and args[0] in self.truths:
            return self.truths[args[0]]
        result = func(*args, **(kwargs or {}))
        if func is torch.rand:
            self.drawn[result] = True
        elif func in _COMPARISONS and len(args) == 2 and isinstance(args[0], Tensor) and args[0] in self.drawn:
            truth = _decide(_COMPARISONS[func], args[1]) if isinstance(args[1], int | float) else None
            if truth is not None:
                self.truths[result] = truth
        return result


def _decide(symbol: str, bound: float) -> bool | None:
    """Whether x compares so with the bound for every x in [0, 1), or for none; None where it depends."""
    below = True if bound >= 1 else False if bound <= 0 else None
    above = True if bound < 0 else False if bound >= 1 else None
    truth = below if symbol in ("<", ">=") else above
    return truth if truth is None or symbol in ("<", ">") else not truth
