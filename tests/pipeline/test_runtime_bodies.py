"""Local forms of ops on real processes, where the simulated ranks of test_ops.py have proved their strategies."""

from __future__ import annotations

import pytest

from tests import body_cases
from tests.ranks import run_ranks


@pytest.mark.parametrize("ranks", [2, 3])
def test_local_forms_on_ranks(ranks: int) -> None:
    run_ranks(ranks, body_cases.run_all)
