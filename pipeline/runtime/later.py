"""Collectives whose results nobody reads before the gradients are there, as the sum of the loss over the ranks.

Inside a step (from `Gradients.start` to `Gradients.wait`) they are under way while backward runs; outside of one they
are waited for at once.
"""

from __future__ import annotations

from typing import Any

_under_way: list[Any] | None = None  # of this step


def start() -> None:
    global _under_way
    _under_way = []


def in_step() -> bool:
    return _under_way is not None


def add(work: Any) -> None:
    assert _under_way is not None, "no step has begun"
    _under_way.append(work)


def settle() -> None:
    """Waits for what is under way; the step goes on."""
    while _under_way:
        _under_way.pop().wait()


def finish() -> None:
    global _under_way
    settle()
    _under_way = None
