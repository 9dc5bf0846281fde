"""The training stage's worker with parameters stored in every way: losses of the plain loop, memory as predicted."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest
import torch

from pipeline.cost.step import StepPrice, price_step
from pipeline.models import gpt
from pipeline.models.data import TokenSequences
from stages.checkpoint import schedule
from stages.checkpoint.linearize import linearize
from stages.checkpoint.simulate import simulate
from stages.train.worker import Trainer
from tests import plans, storage_plans
from tests.ranks import run_ranks
from tests.storage_plans import NAMED, plan_named

pytestmark = pytest.mark.flow

MODEL, STEPS, BATCH = "gpt8", 4, 8
NAMES = ("ddp", "zero1", "zero2", "zero3", "ddp_tp", "zero1_tp", "zero3_tp", "ddp_zero1", "zero1_also_on_tp")


def job(module: Path) -> dict:
    sizes = plans.GPT8
    shape = {"shape": [BATCH, sizes["context"]], "dtype": "int64"}
    data = {"vocab_size": sizes["vocab_size"], "length": sizes["context"], "samples": 64}
    return {
        "module_path": str(module),
        "model": {
            "precision": "fp32",
            "module": {"_target_": "pipeline.models.gpt.build", **sizes},
            "batch": {"input_ids": shape, "labels": shape},
        },
        "data": {"dataset": {"_target_": "pipeline.models.data.TokenSequences", **data}, "shuffle": False, "seed": 0},
        "train": {
            "steps": STEPS,
            "seed": 3,
            "optimizer": {"_target_": "torch.optim.AdamW", "lr": 0.01, "weight_decay": 0.1},
        },
        "where": {"model": "model", "data": "data", "train": "train"},
    }


def train(folder: str) -> dict[str, dict]:
    """On a rank: what every program of the folder reports, and how many bytes stay between steps."""
    found = {}
    for path in sorted(Path(folder).glob("*.py")):
        work = Path(folder) / path.stem
        work.mkdir(exist_ok=True)
        trainer = Trainer(job(path), work)
        found[path.stem] = {**trainer.train(), "resident": trainer._resident()}
    return found


def plain_losses() -> list[float]:
    torch.manual_seed(3)
    model = gpt.build(**plans.GPT8).train()
    data = TokenSequences(plans.GPT8["vocab_size"], plans.GPT8["context"], 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    losses = []
    for step in range(STEPS):
        rows = [data[step * BATCH + i] for i in range(BATCH)]
        optimizer.zero_grad()
        loss = model(**{name: torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels")})
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict[str, list[dict]]:
    found = {}
    for sizes in {NAMED[name].sizes for name in NAMES}:
        folder = tmp_path_factory.mktemp("training")
        for name in NAMES:
            if NAMED[name].sizes == sizes:
                (folder / f"{name}.py").write_text(plans.lowered(MODEL, plan_named(MODEL, name))[1])
        by_rank = run_ranks(prod(sizes), train, str(folder))
        found |= {name: [rank[name] for rank in by_rank] for name in by_rank[0]}
    return found


def price(name: str) -> StepPrice:
    graph, plan = plans.graph_of(MODEL), plan_named(MODEL, name)
    program, _ = plans.lowered(MODEL, plan)
    cluster = storage_plans.cluster(NAMED[name].sizes)
    return price_step(graph, storage_plans.profile_of(MODEL), cluster, plan.sharding, program, 2.0)


@pytest.mark.parametrize("name", NAMES)
def test_the_losses_are_those_of_the_plain_loop(reports, name: str) -> None:
    for report in reports[name]:
        assert report["losses"] == pytest.approx(plain_losses(), rel=2e-5)


@pytest.mark.parametrize("name", NAMES)
def test_what_stays_between_steps_is_what_is_priced(reports, name: str) -> None:
    """The graph is of float64, the training in float32; AdamW counts its steps for each parameter."""
    expected = price(name).resident_bytes // 2 + 4 * len(plan_named(MODEL, name).sharding.storage)
    assert {report["resident"] for report in reports[name]} == {expected}


@pytest.mark.parametrize("name", NAMES)
def test_the_peak_is_the_predicted_one(reports, name: str) -> None:
    """Buffers of collectives are not predicted, nor what an op lets go of early."""
    found = price(name)
    chain = linearize(found)
    assert chain is not None
    peak = found.fixed_bytes + simulate(chain, schedule.no_recompute(chain.length).sequence).peak
    assert max(reports[name][0]["peak_bytes"]) == pytest.approx(peak / 2, rel=0.06)
