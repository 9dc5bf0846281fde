"""How lines are laid out."""

from __future__ import annotations

from stages.codegen.block import LINE


def one_or_many(start: str, items: list[str], end: str, within: int = 0) -> str:
    """The items behind one another, or each on a line of its own where that is too long in so many columns."""
    line = f"{start}{', '.join(items)}{end}"
    rows = "".join(f"    {item},\n" for item in items)
    return line if len(line) + within <= LINE else f"{start}\n{rows}{end}"


def runtime_import(used: set[str]) -> str:
    line = f"from pipeline.runtime import {', '.join(sorted(used))}"
    return line if len(line) <= LINE else one_or_many("from pipeline.runtime import (", sorted(used), ")")
