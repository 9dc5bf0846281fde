"""How lines are laid out, and how names that are not ours stand in them: as literals or in comments, never as code."""

from __future__ import annotations

import keyword
import re

LINE = 120  # the longest that the text has
_LITERAL = re.compile(r'"(?:[^"\\]|\\.)*"')


def quoted(text: str) -> str:
    """A literal in double quotes, as it is where every letter can be seen."""
    return '"' + printable(text.replace("\\", r"\\").replace('"', r"\"")) + '"'


def printable(text: str) -> str:
    """For a comment: no end of line, no control character, none that turns the direction of reading."""
    return "".join(letter if letter.isprintable() else _escaped(letter) for letter in text)


def _escaped(letter: str) -> str:
    number = ord(letter)
    return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}" if number < 65536 else f"\\U{number:08x}"


def is_name(text: str) -> bool:
    """Whether Python takes it for a variable, by just these letters: others it may hold for equal."""
    return text.isascii() and text.isidentifier() and not keyword.iskeyword(text)


def without_literals(text: str) -> str:
    """As long as the text, with nothing in its literals that looks like code."""
    return _LITERAL.sub(lambda found: "_" * len(found[0]), text)


def one_or_many(start: str, items: list[str], end: str, within: int = 0) -> str:
    """The items behind one another, or each on a line of its own where that is too long in so many columns."""
    line = f"{start}{', '.join(items)}{end}"
    rows = "".join(f"    {item},\n" for item in items)
    return line if len(line) + within <= LINE else f"{start}\n{rows}{end}"


def runtime_import(used: set[str]) -> str:
    line = f"from pipeline.runtime import {', '.join(sorted(used))}"
    return line if len(line) <= LINE else one_or_many("from pipeline.runtime import (", sorted(used), ")")
