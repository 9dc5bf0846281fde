"""`torch.export` of the module's loss, in train mode, with the user's mistakes turned into one line."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

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

from pipeline.base.errors import TraceError
from pipeline.tracing.autocast import device_autocast
from pipeline.tracing.certain import CertainBranches
from pipeline.tracing.source import Stack, origin
from pipeline.user.loss import pick_loss


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
    """As the module runs on the device; `amp` is for autocast to bfloat16."""
    # Torch writes and compiles the code of its graph after each pass over it, and reads no more than the last of that.
    with _quiet(), CertainBranches(), _lstm_states(), _short_stacks(), _use_lazy_graph_module(True):
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
REMEDIES = {
    BRANCH: "compute both ways and choose with `torch.where`",
    SIZE: "take sizes from shapes or from settings",
    SHAPE: "use an op of fixed size, or make it an op of your own that tells its shapes (docs/how-to-add-an-op.md)",
    NUMBERS: "make it an op of your own that tells its shapes (docs/how-to-add-an-op.md)",
    "": "check the batch's names and shapes",
}


def refused(error: Exception) -> TraceError:
    """By the kind of failure that torch.export reports, and by whose code it is in."""
    kind, arose = _kind(error), origin(error)
    told = f"{kind}: {_first_line(error)}" if kind else _first_line(error)
    remedy = REMEDIES[kind]
    if arose.package:
        told += f", inside the package {arose.package} ({arose.inside})"
        remedy = f"it is not in your code: look for a setting of {arose.package} that avoids it" if kind else remedy
    return TraceError(f"the model cannot be exported: {told}", where=arose.line or "conf/model: module", remedy=remedy)


def _kind(error: Exception) -> str:
    if isinstance(error, GuardOnDataDependentSymNode):
        return SIZE if "specialized integer" in str(error) else BRANCH
    if isinstance(error, DataDependentOutputException):
        return BRANCH
    if isinstance(error, DynamicOutputShapeException):
        return SHAPE
    return NUMBERS if isinstance(error, UnsupportedOperatorException | NotImplementedError) else ""


@contextmanager
def _lstm_states() -> Iterator[None]:
    """Torch before 2.13 exports the last states of an LSTM with one dim too many (its pull request 185716)."""
    plain = decompositions.one_layer_lstm

    def mended(
        given: Tensor, states: tuple[Tensor, Tensor], *more: Any, **named: Any
    ) -> tuple[Tensor, tuple[Any, ...]]:
        made, last = plain(given, states, *more, **named)
        return made, tuple(state.reshape(first.shape) for state, first in zip(last, states, strict=True))

    decompositions.one_layer_lstm = mended
    try:
        yield
    finally:
        decompositions.one_layer_lstm = plain


@contextmanager
def _short_stacks() -> Iterator[None]:
    """For each op torch takes down a hundred frames and reads the line of each; those of others' code are enough."""
    plain, proxy.CapturedTraceback = proxy.CapturedTraceback, Stack
    try:
        yield
    finally:
        proxy.CapturedTraceback = plain


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


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__
