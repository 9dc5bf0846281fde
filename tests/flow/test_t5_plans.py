"""T5 on two ranks: its encoder's output and its position biases are carried past the cuts, under any recompute."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the extra `hf` is not installed")

from tests import plans
from tests.asked import asked, mostly_long
from tests.programs import SCHEDULES
from tests.ranks import run_ranks

pytestmark = pytest.mark.flow

SHARDINGS = ("data_parallel", "zero")
CASES = [f"t5-{sharding}_{schedule}" for sharding in SHARDINGS for schedule in SCHEDULES]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory, request) -> list[dict[str, str]]:
    folder: Path = tmp_path_factory.mktemp("t5_")
    plans.save_truth("t5", folder / "t5.truth")
    graph = plans.graph_of("t5")
    assert len(graph.common) == 2
    for sharding in SHARDINGS:
        plan = plans.FORCED[sharding](graph, 2)
        for schedule, regions in SCHEDULES.items():
            if f"t5-{sharding}_{schedule}" not in asked(request, "case"):
                continue
            _, source = plans.lowered(
                "t5", replace(plan, partitions=(replace(plan.partitions[0], regions=regions(graph)),))
            )
            (folder / f"t5-{sharding}_{schedule}.py").write_text(source)
    return run_ranks(2, plans.run_programs, str(folder))


@pytest.mark.parametrize("case", mostly_long(CASES, lambda case: "zero" in case))
def test_t5_trains_as_the_module_does(outcomes, case: str) -> None:
    for rank, errors in enumerate(outcomes):
        assert not errors[case], f"rank {rank}:\n{errors[case]}"
