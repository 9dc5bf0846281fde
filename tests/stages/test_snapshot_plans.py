"""A run that goes on under one kind of plan after another: the losses of a run that never stopped.

With tied weights, which partitions of a pipeline hold twice; and, of another model, with buffers of batch norms.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwright.stages.codegen.partitions import write_partitions
from tests import plans, snapshot_runs
from tests.piped_training import Case, job_of, plan_of
from tests.ranks import run_ranks
from tests.storage_plans import plan_named

TIED, NORMS = "tied8", "unet"
EACH, NEAR = 2, 1e-5  # steps under each plan; losses
PIPELINES = {
    "interleaved": Case(TIED, "interleaved", (1, 1), chunks=2, micro_batches=1),
    "pp_zero1": Case(TIED, "1f1b", (2, 2), micro_batches=1, plans="zero1"),
    "pp_tp": Case(TIED, "1f1b", (2, 2), micro_batches=1, plans="megatron"),
    "norms": Case(NORMS, "gpipe", (1, 1), micro_batches=1, seed=1),
}
# In this order; those of plain PyTorch are named as their engine.
ON_TWO, ON_FOUR = ("zero2", "interleaved", "engine fsdp2", "engine ddp"), ("pp_zero1", "pp_tp")
JOURNEY = (*ON_TWO, *ON_FOUR, "one")
STOPS = {name: EACH * number for number, name in enumerate(JOURNEY, start=1)}


def write_programs(folder: Path) -> None:
    for name in JOURNEY:
        plan = plan_of(PIPELINES[name]) if name in PIPELINES else None
        if plan is not None:
            text = write_partitions(plans.graph_of(TIED), plan)
        else:
            text = plans.lowered(TIED, plan_named(TIED, "ddp" if name.startswith("engine ") else name))[1]
        (folder / f"{name}.py").write_text(text)
    graph = plans.graph_of(NORMS)
    (folder / "norms.py").write_text(write_partitions(graph, plan_of(PIPELINES["norms"])))
    for ranks in (1, 2):
        (folder / f"norms{ranks}.py").write_text(plans.lowered(NORMS, plans.FORCED["data_parallel"](graph, ranks))[1])


def travel(folder: str, *names: str) -> dict[str, list[float]]:
    """On a rank: on under each of these plans, from where the one before has stopped."""
    return {name: go_on(Path(folder), name, STOPS[name], every=EACH, compare_every=1) for name in names}


def go_on(here: Path, name: str, steps: int, **safety: Any) -> list[float]:
    given = snapshot_runs.job(here, name, steps, **safety)
    given["model"]["module"]["tie"] = True
    if name.startswith("engine "):
        given["train"]["engine"] = name.removeprefix("engine ")
    return list(snapshot_runs.train(given, here / "journey")["losses"])


def travel_with_norms(folder: str, *names: str) -> dict[str, list[float]]:
    return {name: norms(Path(folder), name, 2 * n, 2) for n, name in enumerate(names, start=1)}


def norms(here: Path, name: str, steps: int, every: int = 0) -> list[float]:
    """Losses, and the one as the model evaluates, which alone reads the statistics."""
    given = job_of(PIPELINES["norms"], here / f"{name}.py")
    given["train"] |= {"steps": steps, "evaluate": {"every": steps, "batches": 1}}
    safety = snapshot_runs.job(here, name, steps, every=every, compare_every=every)["safety"]
    given |= {"device": "cpu", "safety": safety | {"folder": str(here / "norms snapshots")}}
    found = snapshot_runs.train(given, here / "norms")
    return [*found["losses"], found["evaluated"][-1][1]]


def on_two_ranks(folder: str) -> dict[str, Any]:
    plain = go_on(Path(folder), "zero2", STOPS["one"])
    found = {"plain": plain, "plain norms": norms(Path(folder), "norms2", 6)}
    return found | travel(folder, *ON_TWO) | travel_with_norms(folder, "norms2", "norms")


def on_one_rank(folder: str) -> dict[str, Any]:
    return travel(folder, "one") | {"norms1": norms(Path(folder), "norms1", 6, 2)}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    folder = tmp_path_factory.mktemp("plans")
    write_programs(folder)
    return {
        **run_ranks(2, on_two_ranks, str(folder))[0],
        **run_ranks(4, travel, str(folder), *ON_FOUR)[0],
        **run_ranks(1, on_one_rank, str(folder))[0],
    }


@pytest.mark.parametrize("name", JOURNEY)
def test_a_run_goes_on_under_every_kind_of_plan(found: dict[str, list[float]], name: str) -> None:
    assert len(found[name]) == STOPS[name]
    assert found[name] == pytest.approx(found["plain"][: STOPS[name]], abs=NEAR)


def test_statistics_of_batch_norms_go_on(found: dict[str, list[float]]) -> None:
    assert [len(found[name]) for name in ("norms2", "norms", "norms1")] == [3, 5, 7]
    assert found["norms1"] == pytest.approx(found["plain norms"], abs=NEAR)
