"""`fit`: whether a model trains on a cluster, from its config.json and without weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shardwright.api.arguments import PrecisionName, arguments_named
from shardwright.api.given import ArgumentError
from shardwright.pipeline.base.errors import shown
from shardwright.pipeline.config.schema import Precision
from shardwright.stages.commands import fit_stages
from shardwright.stages.fit.answer import FitAnswer
from shardwright.stages.fit.question import FitQuestion
from shardwright.stages.fit.run import fit as answered


def fit(
    model: str | Path,
    cluster: str | Sequence[str] = "dgx_h100",
    *,
    batch: int | None = None,
    sequence: int | None = None,
    precision: PrecisionName = "amp",
    lora: int = 0,
    devices: int | None = None,
    nodes: int | None = None,
    memory_gb: float | None = None,
) -> FitAnswer:
    """Whether a config.json of transformers, or a file of conf/model, trains there, how fast, and what it holds.

    `cluster` is one or several that are described. The options are those of `shardwright fit` (docs/fit.md). For a
    module that you have, call `plan`.
    """
    with arguments_named("sw.fit"):
        counts = {"batch": batch, "sequence": sequence, "devices": devices, "nodes": nodes}
        for name, count in counts.items():
            if count is not None and (not isinstance(count, int) or count < 1):
                raise ArgumentError(f"got {shown(count)}, expected a number of at least 1", where=name)
        if precision not in tuple(Precision):
            raise ArgumentError(f"got {shown(precision)}, expected {', '.join(Precision)}", where="precision")
        names = (cluster,) if isinstance(cluster, str) else tuple(cluster)
        question = FitQuestion(str(model), names, precision=precision, lora=lora, memory_gb=memory_gb, **counts)
        return answered(question, Path.cwd(), fit_stages())
