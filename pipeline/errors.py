"""Errors a user can cause, each one line: what was wrong, where, and what to do."""

from __future__ import annotations


class ShardwrightError(Exception):
    """A mistake or a limit the user can act on: printed as one line, exit status 2, never a traceback."""

    def __init__(self, what: str, *, where: str | None = None, remedy: str | None = None) -> None:
        self.what = what
        self.where = where
        self.remedy = remedy
        super().__init__(self.line())

    def line(self) -> str:
        head = f"{self.where}: {self.what}" if self.where else self.what
        text = f"{head}; {self.remedy}" if self.remedy else head
        return " ".join(text.split())


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
    """No plan is small enough for the memory."""


class TrainError(ShardwrightError):
    """The training run failed."""
