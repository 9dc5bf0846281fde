"""Qualified names of parameters, and the patterns that stand for all numbered ones, or for a range of them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TypeVar

T = TypeVar("T")


def pattern(name: str) -> str:
    """`layers.3.up.weight` -> `layers.*.up.weight`"""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def look_up(table: Mapping[str, T], name: str) -> T | None:
    """The entry of a name itself, of its pattern, or of a range that it lies in."""
    if name in table or pattern(name) in table:
        return table.get(name, table.get(pattern(name)))
    return next((entry for written, entry in table.items() if _covers(written, name)), None)


def ranges(table: Mapping[str, T]) -> dict[str, T]:
    """Equal entries of names that differ in their first number alone are written once: `layers.0-3.up.weight`."""
    alike: dict[tuple[str, str, T], list[int]] = {}
    for name, entry in table.items():
        head, number, tail = _at_number(name)
        alike.setdefault((head, tail, entry), []).extend([] if number is None else [number])
    found: dict[str, T] = {}
    for (head, tail, entry), numbers in alike.items():
        runs = [f"{first}-{last}" if last > first else f"{first}" for first, last in _runs(sorted(numbers))]
        found |= {f"{head}{run}{tail}": entry for run in runs or [""]}
    return found


def _at_number(name: str) -> tuple[str, int | None, str]:
    """`layers.3.up.weight` -> `layers.`, 3, `.up.weight`"""
    parts = name.split(".")
    for place, part in enumerate(parts):
        if part.isdecimal() and str(int(part)) == part:
            head = "".join(f"{before}." for before in parts[:place])
            return head, int(part), "".join(f".{after}" for after in parts[place + 1 :])
    return name, None, ""


def _runs(numbers: list[int]) -> list[tuple[int, int]]:
    """(first, last) of each run without a gap."""
    breaks = [place for place, (a, b) in enumerate(pairwise(numbers), 1) if b != a + 1]
    ends = pairwise([0, *breaks, len(numbers)])
    return [(numbers[start], numbers[end - 1]) for start, end in ends if end > start]


def _covers(written: str, name: str) -> bool:
    mine, parts = written.split("."), name.split(".")
    return len(mine) == len(parts) and all(map(_matches, mine, parts))


def _matches(written: str, part: str) -> bool:
    first, dash, last = written.partition("-")
    if dash and first.isdecimal() and last.isdecimal() and part.isdecimal():
        return int(first) <= int(part) <= int(last)
    return written == part
