"""Errors a user can cause, each one line: what was wrong, where, and what to do. And how such lines show values."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import extract_tb
from typing import Any

from shardwright.pipeline.base.secrets import without_secrets
from shardwright.pipeline.ir.names import printable

MOST_LINES = 40
LONGEST = 4000  # letters of a line


class ShardwrightError(Exception):
    """A mistake or a limit the user can act on: printed as one line, exit status 2, never a traceback."""

    def __init__(self, what: str, *, where: str | None = None, remedy: str | None = None) -> None:
        self.what = what
        self.where = where
        self.remedy = remedy
        self.also: tuple[ShardwrightError, ...] = ()  # further mistakes that were found with it
        super().__init__(what)

    def __str__(self) -> str:
        """Written when it is read: a search that tries what is refused raises thousands that nobody reads."""
        return self.line()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.line()!r})"

    def line(self) -> str:
        head = f"{self.where}: {self.what}" if self.where else self.what
        text = f"{head}; {self.remedy}" if self.remedy else head
        line = printable(" ".join(without_secrets(text).split()))
        return line if len(line) <= LONGEST else f"{line[: LONGEST - 1000]} ... {line[-1000:]}"

    def every(self) -> tuple[ShardwrightError, ...]:
        """This mistake and those that were found with it, each once."""
        return (self, *self.also)

    def lines(self) -> list[str]:
        """As the user reads them; of very many the first."""
        lines = list(dict.fromkeys(error.line() for error in self.every()))
        left = len(lines) - MOST_LINES
        return [*lines[:MOST_LINES], f"and {left} more mistakes"] if left > 0 else lines


class Mistakes:
    """Gathers mistakes that do not depend on one another, so that the user is told all of them at once."""

    def __init__(self) -> None:
        self.found: list[ShardwrightError] = []

    @contextmanager
    def gather(self) -> Iterator[None]:
        """What is raised inside is kept, and the program goes on after it."""
        try:
            yield
        except ShardwrightError as error:
            self.add([error])

    def add(self, errors: Iterable[ShardwrightError]) -> None:
        for error in errors:
            self.found += [one for one in error.every() if one not in self.found]

    def refuse(self) -> None:
        """Raises the first, with the others beside it, where there are any."""
        if self.found:
            first, *others = self.found
            for one in others:
                one.also = ()
            first.also = tuple(others)
            raise first


def refuse(errors: Iterable[ShardwrightError]) -> None:
    """Raises all of them at once, where there are any."""
    mistakes = Mistakes()
    mistakes.add(errors)
    mistakes.refuse()


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


class Unforeseen(ShardwrightError):
    """An exception that nobody expected: a fault of ours, or an artifact that fits its type and no more."""

    def __init__(self, error: BaseException, command: str) -> None:
        outside = f"{os.sep}site-packages{os.sep}"
        trace = [frame for frame in extract_tb(error.__traceback__) if outside not in frame.filename]
        place = f" at {Path(trace[-1].filename).name}:{trace[-1].lineno}" if trace else ""
        told = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        super().__init__(
            f"{command} failed unexpectedly ({told}{place})",
            remedy="what is under runs/ may not be what its stages wrote: run `dvc repro -f`; where that does not help,"
            f" `shardwright {command} -v` shows where it happened, for a report",
        )


class ConfigError(ShardwrightError):
    """The configuration under conf/ is not what the schemas allow."""


class ArtifactError(ShardwrightError):
    """A file under runs/ is missing, damaged, of another version, or made from other inputs."""


class TraceError(ShardwrightError):
    """The user's model cannot be built or exported."""


class ClusterError(ShardwrightError):
    """The devices cannot be used as configured."""


class SolveError(ShardwrightError):
    """No plan satisfies the constraints, or the solver could not be run."""


class BudgetError(SolveError):
    """No plan is small enough for the memory; `least` is what the smallest needs, `budget` what there is."""

    def __init__(self, what: str, *, least: int, budget: int, where: str | None = None, remedy: str | None = None):
        self.least, self.budget = least, budget
        super().__init__(what, where=where, remedy=remedy)


class CodegenError(ShardwrightError):
    """The program of a plan cannot be written."""


class TrainError(ShardwrightError):
    """The training run failed."""
