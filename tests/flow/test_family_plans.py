"""Ten families of models on two ranks: data parallel, and plans drawn at random, give the module's own gradients.

The grouped product of Mixtral has no float64: it is judged as `shardwright verify` does, which has one for it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the extra `hf` is not installed")

from benchmarks.equality_plans import Case, cases, graph_of
from benchmarks.equality_ranks import Group
from shardwright.pipeline.ir.verify import verify_sharding
from shardwright.stages.codegen.module import write_module
from tests import plans
from tests.asked import asked, mostly_long
from tests.ranks import run_ranks

pytestmark = pytest.mark.flow

SEEDS = (0, 1)
# T5 has a test of its own.
NAMES = [name for name in plans.OPTIONAL if name not in ("t5", "mixtral")]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory, request) -> list[dict[str, str]]:
    folder: Path = tmp_path_factory.mktemp("families_")
    for name in NAMES:
        plans.save_truth(name, folder / f"{name}.truth")
        graph = plans.graph_of(name)
        made = {"data_parallel": plans.data_parallel(graph, 2)}
        made |= {str(seed): plans.random_plan(graph, 2, seed) for seed in SEEDS}
        for label, plan in made.items():
            if f"{name}-{label}" in asked(request, "case"):
                (folder / f"{name}-{label}.py").write_text(plans.lowered(name, plan)[1])
    return run_ranks(2, plans.run_programs, str(folder))


CASES = [f"{name}-{label}" for name in NAMES for label in ("data_parallel", *SEEDS)]


@pytest.mark.parametrize("case", mostly_long(CASES, lambda case: case.endswith("-0")))
def test_a_family_trains_as_its_module_does(outcomes, case: str) -> None:
    for rank, errors in enumerate(outcomes):
        assert not errors[case], f"rank {rank}:\n{errors[case]}"


def mixtral_cases() -> list[Case]:
    graph = graph_of("mixtral")
    named = cases("mixtral", 2, ("ddp", "sequence"))
    plan = plans.random_plan(graph, 2, seed=0)
    verify_sharding(graph, plan.sharding, plan.sizes)
    text = write_module(graph, plan)
    drawn = Case("mixtral", "random", (2,), graph, plan, text)
    return [*(case for case in named if isinstance(case, Case) and "recompute" not in case.name), drawn]


def test_mixtral_trains_as_its_module_does() -> None:
    """Experts and router under data parallelism, tensor parallelism with a split sequence, and a random plan."""
    with Group(2) as group:
        found = {case.name: answer for case, answer in group.judge(iter(mixtral_cases()))}
    assert list(found) == ["ddp", "sequence", "random"]
    for name, answer in found.items():
        assert "error" not in answer, f"{name}: {answer}"
        assert answer["worst"] <= 1.0 and answer["tolerance"] <= 1e-5, f"{name}: {answer}"
