"""Where what was discovered of ops without a rule is kept for later runs. Known without torch: few plans discover."""

from __future__ import annotations

from pathlib import Path

_folder: Path | None = None


def remember_in(folder: Path | None) -> None:
    """None keeps it in memory only."""
    global _folder
    _folder = folder


def folder() -> Path | None:
    return _folder
