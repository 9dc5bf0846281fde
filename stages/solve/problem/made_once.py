"""What equal layers of a model share: every array is made once, and stays one array through all that is done to it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")
Item = TypeVar("Item")


class Listed(tuple[Item, ...]):
    """A tuple that is equal to itself alone: of many layouts or strategies, which would take long to compare."""

    __slots__ = ()
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other


class MadeOnce:
    """Makes each thing once, by the function that makes it and what that is given.

    Arrays are told apart as objects, as a `Listed` is, and all else by value. What a thing was made of is kept with it:
    no other object can come to stand for it.
    """

    def __init__(self) -> None:
        self._made: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}

    def __call__(self, make: Callable[..., T], *of: Any) -> T:
        key = (make, *map(_key, of))
        found: tuple[T, Any] | None = self._made.get(key)
        if found is None:
            found = self._made[key] = make(*of), of
        return found[0]


def _key(of: Any) -> Hashable:
    if isinstance(of, np.ndarray):
        return id(of)
    return tuple(map(_key, of)) if type(of) is tuple else of
