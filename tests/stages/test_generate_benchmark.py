"""What benchmarks.generate plans: the shapes of Llama's largest model, in a configuration that loads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="the extra `hf` is not installed")

from benchmarks import generate
from benchmarks.generate_plans import deepened, in_pairs
from shardwright.pipeline.base.instantiate import instantiate
from shardwright.pipeline.config import load_config
from shardwright.pipeline.ir.graph import Role
from shardwright.pipeline.ir.layout import Layout, S
from tests.graphs import gpt_graph
from tests.programs import uniform


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


def test_further_layers_are_stored_and_computed_as_the_last_one() -> None:
    shallow, deep = gpt_graph(2), gpt_graph(5)
    known = uniform(shallow, 2)
    known = replace(known, state={name: Layout((S(0),)) for name in known.storage if name.startswith("layers.1.")})
    found = deepened(known, shallow, deep, last=1)
    assert found.strategies == uniform(deep, 2).strategies and found.inputs == known.inputs
    assert {name.split(".")[1] for name in found.state} == {"1", "2", "3", "4"}
    assert set(found.storage) == {value.origin for value in deep.of_role(Role.PARAMETER)}


def test_links_are_recomputed_in_pairs_but_for_the_last() -> None:
    for links in range(2, 8):
        regions = in_pairs(links)
        covered = [i for region in regions for i in range(region.first, region.last + 1)]
        assert covered == list(range(links)) and not regions[-1].recompute
        assert sum(region.recompute for region in regions) == (links - 1) // 2
