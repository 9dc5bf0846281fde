"""An answer: one sentence, the rows that it rests on, and by which means it was found; as text or as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.base.errors import ShardwrightError

PLANNER, FORMULA = "the planner", "formula"
QUESTIONS = {
    "batch": "the largest batch (by formula: micro-batch) that fits",
    "sequence": "the longest sequence that fits",
    "devices": "the fewest devices that fit",
    "budget": "the memory budgets at which the plan changes",
    "link": "what links cost that are slower: bandwidth=0.5 latency=2",
    "clusters": "the plan on several clusters: a100_80,h100",
}


LONGEST = 100  # characters of a cell


class WhatIfError(ShardwrightError):
    """A question that cannot be answered."""


Row = Mapping[str, Any]  # by column; None: not known


@dataclass(frozen=True)
class Answer:
    question: str
    by: str  # PLANNER or FORMULA
    about: str  # model, devices, budget
    answer: str
    rows: tuple[Row, ...]
    found: Mapping[str, Any]  # the answer's own figures

    def json(self) -> str:
        content = {**vars(self), "rows": [dict(row) for row in self.rows], "found": dict(self.found)}
        return json.dumps(content, indent=1)

    def text(self) -> str:
        return "\n".join([f"{self.about} (by {self.by})", *(table(self.rows) if self.rows else ()), self.answer])


def table(rows: Sequence[Row]) -> list[str]:
    """Figures to the right under their names, words to the left; what is too long to align comes last."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[shown(row.get(name)) for name in names] for row in rows]
    words = [any(isinstance(row.get(name), str) for row in rows) for name in names]
    widths = [max(len(text) for text in (name, *column)) for name, *column in zip(names, *cells, strict=True)]
    lines = []
    for line in (names, *cells):
        aligned = [
            text.ljust(width) if left else text.rjust(width)
            for text, width, left in zip(line, widths, words, strict=True)
        ]
        lines.append("  ".join(aligned).rstrip())
    return lines


def shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else short(str(value))


def short(text: str) -> str:
    """What stands in a line of a table; JSON has all of it."""
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
