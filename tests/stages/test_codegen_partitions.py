"""Pipelines as programs: partitions run one after another are the unsplit module, and the text says how they follow."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from pipeline.runtime.source import load_program
from tests.piped_programs import compare, cut, random_cuts, run_piped, write
from tests.plans import graph_of, random_plan, save_truth
from tests.ranks import run_ranks

# ---------------------------------------------------------------------------------------------------- equal, run


def written(model: str, ranks: int, seed: int, folder: Path, micro_batches: int = 2) -> Path:
    """A random pipeline of a model, of which every partition has a random plan of its own."""
    graph, draw = graph_of(model), random.Random(seed)
    count = min(draw.choice([2, 3, 4]), len(graph.chain))
    plans = [random_plan(graph, ranks, 100 * seed + n) for n in range(count)]
    plan = cut(graph, random_cuts(graph, count, draw), plans, draw, micro_batches)
    path = folder / f"{model}-{ranks}-{seed}.py"
    path.write_text(write(graph, plan))
    if not (folder / f"{model}.truth").exists():
        save_truth(model, folder / f"{model}.truth", micro_batches)
    return path


@pytest.mark.parametrize("model", ["gpt", "tied", "ladder", "shared", "unet", "names", "odd", "mlp"])
def test_partitions_on_one_rank_are_the_unsplit_module(model: str, tmp_path: Path) -> None:
    for seed in range(3):
        compare(written(model, 1, seed, tmp_path), torch.load(tmp_path / f"{model}.truth"))


def test_an_encoders_output_crosses_cuts(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    path = written("t5", 1, 0, tmp_path)
    compare(path, torch.load(tmp_path / "t5.truth"))
    sent = load_program(str(path)).SENT
    print([list(s) for s in sent])


TRIED = [(model, seed) for model in ("gpt", "tied", "ladder", "shared") for seed in range(4)]


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory) -> dict[str, str]:
    """All programs on the same two ranks; what is wrong with each."""
    folder = tmp_path_factory.mktemp("piped")
    for model, seed in TRIED:
        written(model, 2, seed, folder)
    found = run_ranks(2, run_piped, str(folder))
    return {name: error or found[1][name] for name, error in found[0].items()}


@pytest.mark.parametrize(("model", "seed"), TRIED)
def test_partitions_on_two_ranks_are_the_unsplit_module(model: str, seed: int, on_two_ranks: dict[str, str]) -> None:
    assert on_two_ranks[f"{model}-2-{seed}"] == ""
