"""Qualified names of parameters, and the patterns that stand for all numbered ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")


def pattern(name: str) -> str:
    """`layers.3.up.weight` -> `layers.*.up.weight`"""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def look_up(table: Mapping[str, T], name: str) -> T | None:
    """The entry of a name itself, or of its pattern."""
    return table.get(name, table.get(pattern(name)))
