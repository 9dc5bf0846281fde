"""What benchmarks.generate plans: the shapes of Llama's largest model, in a configuration that loads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="the extra `hf` is not installed")

from benchmarks import generate
from pipeline.config import load_config
from pipeline.instantiate import instantiate


def test_the_project_is_valid_and_the_model_is_as_large_as_told(tmp_path: Path) -> None:
    generate.write_project(tmp_path, 80)
    config = load_config(tmp_path)
    assert config.solve.mesh == {"dp": 8, "tp": 8} and config.cluster.nodes * config.cluster.devices == 64
    assert config.model.batch["labels"].shape == [generate.BATCH, generate.LENGTH]

    def size(layers: int) -> int:
        with torch.device("meta"):
            return sum(p.numel() for p in instantiate(generate.settings(layers), "here").parameters())

    none, one = size(0), size(1)
    assert 68e9 < none + 80 * (one - none) < 70e9
