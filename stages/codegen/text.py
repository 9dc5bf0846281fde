"""How lines are laid out, and how names that are not ours stand in them: as literals or in comments, never as code."""

from __future__ import annotations

import re

from shardwright.pipeline.ir.names import printable

LINE = 120  # the longest that the text has
_LITERAL = re.compile(r'"(?:[^"\\]|\\.)*"')


def quoted(text: str) -> str:
    """A literal in double quotes, as it is where every letter can be seen."""
    return '"' + printable(text.replace("\\", r"\\").replace('"', r"\"")) + '"'


def without_literals(text: str) -> str:
    """As long as the text, with nothing in its literals that looks like code."""
    return _LITERAL.sub(lambda found: "_" * len(found[0]), text)


def one_or_many(start: str, items: list[str], end: str, within: int = 0) -> str:
    """The items behind one another, or each on a line of its own where that is too long in so many columns."""
    line = f"{start}{', '.join(items)}{end}"
    rows = "".join(f"    {item},\n" for item in items)
    return line if len(line) + within <= LINE else f"{start}\n{rows}{end}"
