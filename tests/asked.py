"""What a test run asks of a file's tests: only those programs are run together in one group of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def asked(request: pytest.FixtureRequest, name: str) -> set[Any]:
    """Values of the parameter `name` of the tests that were not left out (`-m`, `-k`), in the file that asks."""
    path = request.node.path
    calls = [getattr(item, "callspec", None) for item in request.session.items if item.path == path]
    return {call.params[name] for call in calls if call is not None and name in call.params}


def mostly_long(cases: Iterable[T], short: Callable[[T], bool]) -> list[Any]:
    """The cases, of which `make test` runs only the short ones."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if short(case) else (pytest.mark.long,))
        for case in cases
    ]
