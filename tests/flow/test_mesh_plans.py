"""Any sharding on a mesh of two or three axes is the same step: loss and gradients equal those of the module."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest

from tests import mesh_plans, plans
from tests.asked import asked, mostly_long
from tests.ranks import run_ranks

pytestmark = pytest.mark.flow

SEEDS = {
    (2, 2): {"gpt": 3, "tied": 2, "mlp": 2, "odd": 2, "names": 2, "uneven": 2},
    (2, 3): {"gpt": 1, "tied": 1, "mlp": 1, "odd": 1, "names": 1, "uneven": 1},
    (2, 1, 2): {"gpt": 1},
    (2, 2, 2): {"gpt8": 1, "tied8": 1, "mlp8": 1},
}
CASES = [(sizes, f"{m}-{seed}") for sizes, counts in SEEDS.items() for m, n in counts.items() for seed in range(n)]


def short(case: tuple[tuple[int, ...], str]) -> bool:
    kept = {(2, 2): ("gpt-0", "mlp-0"), (2, 3): ("odd-0", "uneven-0"), (2, 1, 2): ("gpt-0",)}
    return case[1] in kept.get(case[0], ())


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory, request):
    """Writes all programs for a mesh and runs them in one group of processes."""
    found: dict[tuple[int, ...], list[dict[str, str]]] = {}
    names = asked(request, "name")

    def of(sizes: tuple[int, ...]) -> list[dict[str, str]]:
        if sizes not in found:
            folder: Path = tmp_path_factory.mktemp("mesh_plans")
            for model in SEEDS[sizes]:
                plans.save_truth(model, folder / f"{model}.truth")
            for mesh, name in CASES:
                if mesh == sizes and name in names:
                    model, _, seed = name.partition("-")
                    _, source = plans.lowered(model, mesh_plans.random_plan(model, sizes, int(seed)))
                    (folder / f"{name}.py").write_text(source)
            found[sizes] = run_ranks(prod(sizes), plans.run_programs, str(folder))
        return found[sizes]

    return of


@pytest.mark.parametrize(("sizes", "name"), mostly_long(CASES, short), ids=str)
def test_a_plan_on_a_mesh_trains_as_the_module_does(outcomes, sizes: tuple[int, ...], name: str) -> None:
    for rank, errors in enumerate(outcomes(sizes)):
        assert not errors[name], f"rank {rank}:\n{errors[name]}"
