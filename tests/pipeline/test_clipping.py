"""The global norm over shards is that of the unsplit gradients, whatever is replicated, split, tied or accumulated."""

from __future__ import annotations

import math
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch
from torch import nn

from shardwright.pipeline.runtime.programs.mesh import set_mesh
from shardwright.pipeline.runtime.step.gradients import Clipping
from shardwright.pipeline.runtime.step.passes import run_passes
from tests import plans
from tests.ranks import run_ranks
from tests.storage_plans import NAMED, plan_named

ON_TWO = ("ddp", "zero1", "zero2", "zero3", "tp")
ON_FOUR = ("ddp_tp", "zero1_tp", "zero3_tp", "zero1_also_on_tp", "ddp_zero1", "zero3_on_both")
CASES = [f"{model}-{name}" for model in ("gpt8", "tied8", "tied8x3") for name in (*ON_TWO, *ON_FOUR)]
LIMITS = (0.1, 1e6)  # it clips, it does not


def clip_all(folder: str) -> dict[str, list[tuple[float, float]]]:
    """On a rank: of every program, the norm and the norm of this rank's clipped shards beside what they should be."""
    found = {}
    for path in sorted(Path(folder).glob("*.py")):
        truth = plans.load_truth(Path(folder) / f"{path.stem.partition('-')[0]}.truth")
        run = plans.prepare(path, truth)
        found[path.stem] = [clip(run, truth["gradients"][0], limit) for limit in LIMITS]
    return found


def clip(run: plans.Run, truth: dict[str, torch.Tensor], limit: float) -> tuple[float, float]:
    unsplit = {name: nn.Parameter(torch.zeros_like(gradient)) for name, gradient in truth.items()}
    for name, parameter in unsplit.items():
        parameter.grad = truth[name].clone()
    expected = torch.nn.utils.clip_grad_norm_(unsplit.values(), limit)
    run_passes(run.step, run.gradients, run.batches, len(run.batches))
    norm = Clipping(run.gradients.updated, run.rows.values(), run.axes, limit).clip()
    updated = dict(zip(run.held, run.gradients.updated, strict=True))
    plans._compare_gradients(run, updated, {n: p.grad for n, p in unsplit.items()}, plans.NEAR)
    return float(norm), float(expected)


@pytest.fixture(scope="module")
def norms(tmp_path_factory) -> dict[str, list]:
    found = {}
    for sizes in ((2,), (2, 2)):
        folder = tmp_path_factory.mktemp("clipping")
        for model in ("gpt8", "tied8"):
            plans.save_truth(model, folder / f"{model}.truth")
        plans.save_truth("tied8", folder / "tied8x3.truth", micro_batches=3)
        for case in CASES:
            counted, name = case.split("-")
            model, _, passes = counted.partition("x")
            if NAMED[name].sizes == sizes:
                plan = replace(plan_named(model, name), micro_batches=int(passes or 1))
                (folder / f"{case}.py").write_text(plans.lowered(model, plan)[1])
        by_rank = run_ranks(prod(sizes), clip_all, str(folder))
        found |= {case: [rank[case] for rank in by_rank] for case in by_rank[0]}
    return found


@pytest.mark.parametrize("case", CASES)
def test_norm_and_clipped_gradients_are_those_of_the_unsplit_model(norms, case: str) -> None:
    for rank in norms[case]:
        for norm, expected in rank:
            assert norm == pytest.approx(expected, rel=1e-12)
    assert len({tuple(rank) for rank in norms[case]}) == 1, "ranks clip alike"


def test_in_one_process_and_in_half_precision() -> None:
    set_mesh({"d0": 1})
    whole = [
        nn.Parameter(torch.zeros(300)),
        nn.Parameter(torch.zeros(4, dtype=torch.bfloat16)),
        nn.Parameter(torch.ones(2)),
    ]
    whole[0].grad, whole[1].grad = torch.full((300,), 0.1), torch.full((4,), 2.0, dtype=torch.bfloat16)
    norm = Clipping(whole, [("R", "", "R"), ("", "", ""), ("R", "", "R")], ["d0"], 1.0).clip()
    assert float(norm) == pytest.approx(math.sqrt(300 * 0.01 + 16), rel=1e-6)
    assert float(whole[0].grad[0]) == pytest.approx(0.1 / float(norm), rel=1e-5) and whole[2].grad is None
    assert whole[1].grad.dtype == torch.bfloat16 and float(whole[1].grad[0]) == pytest.approx(2 / float(norm), rel=4e-3)


def test_without_gradients_the_norm_is_zero() -> None:
    set_mesh({"d0": 1})
    assert float(Clipping([nn.Parameter(torch.ones(2))], [("R", "", "R")], ["d0"], 1.0).clip()) == 0.0
