"""Values and names as they stand in one-line messages."""

from __future__ import annotations

import difflib
from typing import Any


def shown(value: Any) -> str:
    """A value as it may stand in a one-line message."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def suggestion(name: str, allowed: list[str], otherwise: str) -> str:
    near = nearest(name, allowed)
    return f"did you mean '{near}'?" if near else otherwise + ", ".join(allowed)


def nearest(name: str, allowed: list[str]) -> str | None:
    """What was probably meant: a longer name that begins so, or one with nearly the same letters."""
    longer = [item for item in allowed if len(name) >= 3 and item.startswith(name)]
    return next(iter(longer or difflib.get_close_matches(name, allowed, 1)), None)
