"""Settings of a training run as its ranks are given them, with the defaults of the schema."""

from __future__ import annotations

from typing import Any

from shardwright.pipeline.config.schema import Train
from shardwright.pipeline.ir.codec import encode


def train_settings(**given: Any) -> dict[str, Any]:
    required = {"steps": 1, "gradient_accumulation": 1, "seed": 0, "optimizer": {}}
    return {**encode(Train(**required)), **given}
