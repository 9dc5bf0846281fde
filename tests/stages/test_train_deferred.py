"""Micro-batches without a pipeline on real ranks, with running statistics of batch norms that change once a step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shardwright.pipeline.runtime.programs.parameters import shard_of
from shardwright.stages.train.engines.planned import PlannedEngine
from tests.piped_training import Case, job_of, truth_of
from tests.plans import FORCED, STEPS, graph_of
from tests.programs import SCHEDULES, write
from tests.ranks import run_ranks

NAMES = ("exact", "deferred")


def case_of(batch_norm: str) -> Case:
    return Case("unet", "", (2,), micro_batches=3, batch_norm=batch_norm)


def train(folder: str) -> list[str]:
    """On a rank: what the batch norms have kept differs between the settings, and each is right."""
    kept = []
    for name in NAMES:
        case, path = case_of(name), Path(folder) / "program.py"
        truth, engine = torch.load(Path(folder) / name), PlannedEngine(job_of(case, path))
        for step in range(STEPS):
            first, *later = engine.batches(step)
            loss = engine.step(engine.on_device(first), later)
            assert loss == pytest.approx(truth["losses"][step], rel=1e-8)
        assert engine.evaluate() == pytest.approx(truth["evaluated"], rel=1e-8)
        for key, tensor in engine.own.tensors.items():
            expected = shard_of(truth["weights"][key], engine.stored.layout(key, tensor), engine.axes)
            torch.testing.assert_close(
                tensor.detach(), expected, rtol=1e-8, atol=1e-9, msg=lambda m, key=key: f"{key}: {m}"
            )
        kept.append({key: t for key, t in engine.own.tensors.items() if key.endswith(("running_var", "_tracked"))})
    return [key for key, tensor in kept[0].items() if torch.equal(tensor, kept[1][key])]


def test_several_passes_train_as_the_unsplit_module(tmp_path: Path) -> None:
    graph = graph_of("unet")
    plan = FORCED["data_parallel"](graph, 2)
    regions = SCHEDULES["everything"](graph)
    plan = replace(plan, partitions=(replace(plan.partitions[0], regions=regions),), micro_batches=3)
    text = write(graph, plan)
    assert "batch_norm(" in text and "axis=" in text and "recompute(" in text and "MICRO_BATCHES = 3" in text
    (tmp_path / "program.py").write_text(text)
    for name in NAMES:
        truth = truth_of(case_of(name))
        torch.save({key: truth[key] for key in ("losses", "evaluated", "weights")}, tmp_path / name)
    assert run_ranks(2, train, str(tmp_path)) == [[], []]
