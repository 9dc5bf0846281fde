"""Regions whose activations are dropped after the forward pass and computed again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

from torch.utils.checkpoint import checkpoint

from pipeline.runtime.regather import keep_shards, keeping_shards

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
    """Around the two runs of a region, each inside the region's own hooks on what autograd keeps."""
    keeping = keeping_shards()
    return keep_shards() if keeping else nullcontext(), _replay(keeping)


@contextmanager
def _replay(keeping: bool) -> Iterator[None]:
    global _replaying
    before, _replaying = _replaying, True
    try:
        with keep_shards() if keeping else nullcontext():
            yield
    finally:
        _replaying = before
