"""Ten families of models on two ranks: data parallel, and plans drawn at random, give the module's own gradients."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the extra `hf` is not installed")

from tests import plans
from tests.ranks import run_ranks

pytestmark = pytest.mark.flow

SEEDS = (0, 1)
# T5 has a test of its own; the grouped product of Mixtral has no float64.
NAMES = [name for name in plans.OPTIONAL if name not in ("t5", "mixtral")]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> list[dict[str, str]]:
    folder: Path = tmp_path_factory.mktemp("families_")
    for name in NAMES:
        plans.save_truth(name, folder / f"{name}.truth")
        graph = plans.graph_of(name)
        made = {"data_parallel": plans.data_parallel(graph, 2)}
        made |= {str(seed): plans.random_plan(graph, 2, seed) for seed in SEEDS}
        for label, plan in made.items():
            (folder / f"{name}-{label}.py").write_text(plans.lowered(name, plan)[1])
    return run_ranks(2, plans.run_programs, str(folder))


@pytest.mark.parametrize("case", [f"{name}-{label}" for name in NAMES for label in ("data_parallel", *SEEDS)])
def test_a_family_trains_as_its_module_does(outcomes, case: str) -> None:
    for rank, errors in enumerate(outcomes):
        assert not errors[case], f"rank {rank}:\n{errors[case]}"
