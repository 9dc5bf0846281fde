"""A question, and its answer: one sentence, the rows that it rests on, and by which means it was found."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwright.pipeline.base.errors import ShardwrightError
from shardwright.stages.whatif.search import FitLimit

PLANNER, LAYOUTS = "the planner", "layouts"
STOPPED = "stopped here: with more `--seconds` it goes on"
LONGEST = 100  # characters of a cell
Row = Mapping[str, Any]  # by column; None: not known


class WhatIfError(ShardwrightError):
    """A question that cannot be answered."""


@dataclass(frozen=True)
class SlowerLinks:
    bandwidth: float = 1.0  # times that of now
    latency: float = 1.0

    def __str__(self) -> str:
        parts = {"bandwidth": self.bandwidth, "latency": self.latency}
        return ", ".join(f"{factor:g} of the {name}" for name, factor in parts.items() if factor != 1) or "as they are"


@dataclass(frozen=True)
class Question:
    name: str
    words: tuple[str, ...]  # settings, or words of `price`
    factors: tuple[SlowerLinks, ...]
    clusters: tuple[str, ...]
    step: int | None
    most: int | None


@dataclass(frozen=True)
class Answer:
    question: str
    by: str  # PLANNER or LAYOUTS
    about: str  # model, devices, budget
    answer: str
    rows: tuple[Row, ...]
    found: Mapping[str, Any]  # the answer's own figures
    complete: bool = True  # else it was stopped, and more could be found

    @classmethod
    def of_devices(cls, by: str, about: str, limit: FitLimit, most: int, rows: Sequence[Row]) -> Answer:
        said = f"{limit.fits} devices are the fewest that fit" if limit.fits != 1 else "one device is enough"
        if not limit.fits:
            tried = most if limit.fails is None else limit.fails
            said = f"up to {tried} devices do not fit" + (" (--most)" if tried == most else "")
        return cls("devices", by, about, said, tuple(rows), vars(limit))

    @classmethod
    def of_links(cls, by: str, about: str, rows: Sequence[Row]) -> Answer:
        """The first row is of the links as they are."""
        now, last = rows[0]["step_ms"], rows[-1]
        takes = f"a step takes {shown(last['step_ms'])} ms" if last["step_ms"] is not None else "there is no plan"
        said = f"with {last['links']} {takes} instead of {shown(now)} ms"
        return cls("link", by, about, said, tuple(rows), {"now_ms": now})

    @classmethod
    def of_clusters(cls, by: str, about: str, rows: Sequence[Row]) -> Answer:
        fitting = [row for row in rows if row["step_ms"] is not None]
        best = min(fitting, key=lambda row: row["step_ms"], default=None)
        said, fastest = "it fits none of them", None
        if best is not None:
            said, fastest = f"{best['cluster']} is the fastest, {shown(best['step_ms'])} ms a step", best["cluster"]
        return cls("clusters", by, about, said, tuple(rows), {"fastest": fastest})

    def json(self) -> str:
        content = {**vars(self), "rows": [dict(row) for row in self.rows], "found": dict(self.found)}
        return json.dumps(content, indent=1)

    def text(self) -> str:
        said = self.answer if self.complete else f"{self.answer}; {STOPPED}"
        return "\n".join([f"{self.about} (by {self.by})", *(table(self.rows) if self.rows else ()), said])


def largest_in_words(name: str, limit: FitLimit, step: int) -> str:
    if limit.fits is None:
        return f"a {name} of {limit.fails} does not fit, and no smaller one was tried yet"
    if limit.fails is None:
        return f"a {name} of {limit.fits} fits, and no larger one was tried (--most)"
    if limit.fails - limit.fits > step:
        return f"a {name} of {limit.fits} fits and one of {limit.fails} does not; what is between was not tried"
    return f"the largest {name} that fits is {limit.fits}; {limit.fails} does not (in steps of {step})"


def table(rows: Sequence[Row]) -> list[str]:
    """Figures to the right under their names, words to the left; what is too long to align comes last."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = []
    for name in names:
        values = [row.get(name) for row in rows]
        cells = [name, *map(shown, values)]
        width, left = max(map(len, cells)), any(isinstance(value, str) for value in values)
        columns.append([cell.ljust(width) if left else cell.rjust(width) for cell in cells])
    return ["  ".join(line).rstrip() for line in zip(*columns, strict=True)]


def shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else short(str(value))


def short(text: str) -> str:
    """What stands in a line of a table; JSON has all of it."""
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
