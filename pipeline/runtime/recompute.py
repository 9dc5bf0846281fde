"""Regions whose activations are dropped after the forward pass and computed again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

from torch.utils.checkpoint import checkpoint

_replaying = False
Result = TypeVar("Result")  # a tensor, or several


def recompute(region: Callable[..., Result], *arguments: Any) -> Result:
    """Runs the region; regions may be nested."""
    result: Result = checkpoint(region, *arguments, use_reentrant=False, context_fn=_contexts)
    return result


def replaying() -> bool:
    """Whether this is the second run of a region: what changes state (batch-norm statistics) must not do so again."""
    return _replaying


def _contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), _replay()


@contextmanager
def _replay() -> Iterator[None]:
    global _replaying
    before, _replaying = _replaying, True
    try:
        yield
    finally:
        _replaying = before
