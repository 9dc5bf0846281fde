"""Qualified names of parameters, patterns that stand for many of them, and letters that can be shown."""

from __future__ import annotations

import keyword
from collections.abc import Mapping
from itertools import pairwise
from typing import TypeVar

T = TypeVar("T")


def printable(text: str, keep: str = "") -> str:
    """No end of line, no code of a terminal, no letter that turns the direction of reading; but for those to keep."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter in keep else _escaped(letter) for letter in text)


def _escaped(letter: str) -> str:
    number = ord(letter)
    return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}" if number < 65536 else f"\\U{number:08x}"


def is_name(text: str) -> bool:
    """Whether Python takes it for a variable; in ASCII alone, as Python holds other letters for equal that are not."""
    return text.isascii() and text.isidentifier() and not keyword.iskeyword(text)


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
    if any(_is_range(part) for name in table for part in name.split(".")):  # a name that reads as a range is one
        return dict(table)
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
    def matches(mine: str, part: str) -> bool:
        first, _, last = mine.partition("-")
        ranged = _is_range(mine) and part.isdecimal()
        return int(first) <= int(part) <= int(last) if ranged else mine == part

    parts, own = written.split("."), name.split(".")
    return len(parts) == len(own) and all(map(matches, parts, own))


def _is_range(part: str) -> bool:
    first, dash, last = part.partition("-")
    return bool(dash) and first.isdecimal() and last.isdecimal()
