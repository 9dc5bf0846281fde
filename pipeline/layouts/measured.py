"""Steps of GPTs that somebody measured, from a CSV with a line for each."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from shardwright.pipeline.base.errors import ShardwrightError
from shardwright.pipeline.config import Config
from shardwright.pipeline.config.schema import OverlapMode
from shardwright.pipeline.layouts.calibrate import MeasuredStep
from shardwright.pipeline.layouts.planner_stages import PlannerStages
from shardwright.pipeline.layouts.sizes import AttentionKernel, ParallelLayout, Transformer
from shardwright.pipeline.layouts.traced import TransformerTrace, Works
from shardwright.pipeline.layouts.work import RecomputeMode

COLUMNS = {
    "# GPUs": "devices",
    "global batch": "batch",
    "micro batch": "micro_batch",
    "hidden size": "hidden",
    "attention heads": "heads",
    "# layers": "layers",
    "sequence length": "sequence",
    "tensor parallelism": "tp",
    "data parallelism": "dp",
    "pipeline parallelism": "pp",
    "iteration time (ms)": "milliseconds",
}


class StepsError(ShardwrightError):
    """Measured steps that cannot be read."""


def read_rows(file: Path) -> list[dict[str, float]]:
    remedy = f"give a CSV with the columns {', '.join(COLUMNS)}"
    try:
        with file.open(encoding="utf-8-sig", newline="") as text:
            table = csv.DictReader(text)
            missing = [name for name in COLUMNS if name not in (table.fieldnames or [])]
            if missing:
                raise StepsError(f"has no column {missing[0]!r}", where=str(file), remedy=remedy)
            return [{key: float(row[name]) for name, key in COLUMNS.items()} for row in table]
    except OSError as error:
        raise StepsError(error.strerror or str(error), where=str(file), remedy="name a file of steps") from error
    except (ValueError, TypeError) as error:
        raise StepsError(f"a cell is no number: {error}", where=str(file), remedy=remedy) from error


def step_of(
    row: Mapping[str, float], recompute: RecomputeMode, vocabulary: int, overlap: OverlapMode = OverlapMode.none
) -> MeasuredStep:
    """Of a GPT with plain attention and dropout."""
    whole = {key: round(value) for key, value in row.items()}
    model = Transformer(whole["hidden"], whole["layers"], whole["heads"], whole["sequence"], vocabulary)
    dp, tp, pp, micro_batch, batch = (whole[key] for key in ("dp", "tp", "pp", "micro_batch", "batch"))
    layout = ParallelLayout(
        dp, tp, pp, micro_batch, batch, recompute=recompute, attention=AttentionKernel.plain, overlap=overlap
    )
    return MeasuredStep(model, layout, row["milliseconds"] / 1e3)


@dataclass(frozen=True, eq=False)
class AllWorks:
    """The works of every model: those that differ in the number of layers alone share them."""

    config: Config
    stages: PlannerStages
    _made: dict[Transformer, Works] = field(default_factory=dict)

    def __call__(self, model: Transformer) -> Works:
        layer = replace(model, layers=1, batch=0)
        if layer not in self._made:
            self._made[layer] = Works(TransformerTrace(layer, self.config), self.stages)
        return self._made[layer]


_last: list[AllWorks] = []


def works_known(config: Config, stages: PlannerStages) -> AllWorks:
    """Those that prices before left in this process: by its sizes a model is traced alike under any configuration."""
    if not _last or _last[0].stages != stages:
        _last[:] = [AllWorks(config, stages)]
    return _last[0]
