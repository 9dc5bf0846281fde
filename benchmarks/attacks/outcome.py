"""What came of one attack."""

from __future__ import annotations

from dataclasses import dataclass
from subprocess import CompletedProcess

TRACEBACK = "Traceback (most recent call last)"


@dataclass(frozen=True)
class Outcome:
    """An attack is held when nothing was lost, no code ran, and the user was told in one line what is wrong."""

    attack: str
    held: bool
    found: str = ""  # what happened instead, or the line that the user reads
    traceback: bool = False
    lost: bool = False  # of what was trained, or of the user's files
    code_run: bool = False


def refusal(attack: str, ended: CompletedProcess[str], *names: str) -> Outcome:
    """Held where the command ended with status 2 and one line that has all these names in it."""
    lines = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    traceback = TRACEBACK in ended.stderr
    told = len(lines) == 1 and all(name in lines[0] for name in names)
    found = lines[0] if lines else f"status {ended.returncode}: {ended.stderr[-400:]}"
    return Outcome(attack, ended.returncode == 2 and told and not traceback, found, traceback)
