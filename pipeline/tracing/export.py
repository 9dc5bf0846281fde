"""`torch.export` of the module's loss, in train mode, with the user's mistakes turned into one line."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from pipeline.errors import TraceError
from pipeline.loss import pick_loss
from pipeline.tracing.certain import CertainBranches
from pipeline.tracing.source import user_line


class LossOnly(nn.Module):
    """Calls the user's module and returns its loss alone, so that outputs the loss does not need fall away."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Tensor) -> Tensor:
        return pick_loss(self.model(**batch))


def export_loss(model: nn.Module, batch: dict[str, Tensor]) -> ExportedProgram:
    with _quiet(), CertainBranches():
        try:
            return torch.export.export(LossOnly(model), (), batch, strict=False)
        except TraceError:
            raise
        except Exception as error:  # the user's forward runs inside export and may raise anything
            raise TraceError(
                f"the model cannot be exported: {_first_line(error)}",
                where=user_line(error) or "conf/model: module",
                remedy="make forward() free of branches on tensor values and check the batch's names and shapes",
            ) from error


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
