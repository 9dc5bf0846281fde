"""The points of a sweep: every combination of the values that its settings list."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from pipeline.base.errors import ShardwrightError

MOST = 500


class SweepError(ShardwrightError):
    """A sweep that cannot be."""


def points_of(settings: Sequence[str]) -> list[tuple[str, ...]]:
    """`a=1,2 b=x` -> (`a=1`, `b=x`), (`a=2`, `b=x`): the last setting changes fastest."""
    listed = [_values(setting) for setting in settings]
    keys = [values[0].partition("=")[0] for values in listed]
    twice = next((key for number, key in enumerate(keys) if key in keys[:number]), None)
    if twice is not None:
        raise SweepError(f"'{twice}' is given twice", remedy=f"combine its values: {twice}=1,2")
    found = list(product(*listed))
    if not listed or len(found) > MOST:
        what = f"{len(found)} points are more than {MOST}" if listed else "nothing is varied"
        raise SweepError(what, remedy="give settings such as cluster=a100_80,h100 solve.memory_budget_gb=8,16")
    return found


def _values(setting: str) -> list[str]:
    key, equals, text = setting.partition("=")
    values = [value.strip() for value in _split(text)]
    if not equals or not key.strip() or "" in values:
        raise SweepError(f"'{setting}' is no setting", remedy="write key=value or key=value,value")
    return [f"{key.strip()}={value}" for value in values]


def _split(text: str) -> list[str]:
    """At commas outside of brackets and braces."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[{(") - (letter in "]})")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts
