"""The runtime on real processes: every conversion of the table, the split losses, and the sums of gradients."""

from __future__ import annotations

import pytest

from shardwright.pipeline import runtime, runtime_names
from shardwright.pipeline.ir.layout import B, P, R, S
from shardwright.pipeline.sharding.conversions import TABLE, conversion
from tests import runtime_cases
from tests.ranks import run_ranks

RANKS = (2, 3)


@pytest.fixture(scope="module")
def outcomes():
    """Runs all cases once for each number of ranks, when the first of its tests asks."""
    found: dict[int, list[dict[str, str]]] = {}

    def of(ranks: int) -> list[dict[str, str]]:
        if ranks not in found:
            found[ranks] = run_ranks(ranks, runtime_cases.run_all)
        return found[ranks]

    return of


@pytest.mark.parametrize("case", [*runtime_cases.conversions(), *runtime_cases.CHECKS])
@pytest.mark.parametrize("ranks", RANKS)
def test_on_ranks(outcomes, ranks: int, case: str) -> None:
    for rank, errors in enumerate(outcomes(ranks)):
        assert not errors[case], f"rank {rank}:\n{errors[case]}"


def test_an_axis_is_not_all_ranks() -> None:
    assert run_ranks(4, runtime_cases.check_axes_of_several) == ["done"] * 4


def test_cases_cover_the_table() -> None:
    pairs = {source.kind + target.kind for _, source, target in runtime_cases.conversions().values()}
    assert pairs == set(TABLE)


def test_a_conversion_does_what_its_entry_is_called() -> None:
    """Each function's docstring names the pair that it stands for in the table."""
    for pair, entry in TABLE.items():
        source, target = (S(0) if kind == "S" else {"R": R, "B": B, "P": P}[kind] for kind in pair)
        assert conversion(source, target) is entry
        documented = getattr(runtime, entry.function).__doc__
        assert "".join(c for c in documented if c in "RBSP") == pair


def test_names_are_those_of_the_runtime() -> None:
    assert sorted(runtime_names.NAMES) == sorted(runtime.__all__)
    assert len(set(runtime_names.NAMES)) == len(runtime_names.NAMES)
    assert all(callable(getattr(runtime, name)) for name in runtime_names.NAMES)


def test_a_failing_rank_is_reported() -> None:
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        run_ranks(2, divide_by_rank)


def divide_by_rank() -> float:
    import torch.distributed as dist

    return 1 / dist.get_rank()
