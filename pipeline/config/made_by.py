"""Which version made a project, and of what: conf/shardwright.yaml, written by `shardwright init` and `upgrade`.

A project in a checkout of this repository has none: its version is that of the source.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from packaging.version import InvalidVersion, Version

from shardwright import __version__
from shardwright.pipeline.base.errors import ConfigError
from shardwright.pipeline.config.source import read

FILE = "conf/shardwright.yaml"
HEAD = """\
# Written by `shardwright init` and `shardwright upgrade`, with the digests of the files as they were made.
# Stages run anew when this file changes: leave it as it is.
"""


@dataclass(frozen=True)
class MadeBy:
    version: str
    digests: Mapping[str, str]  # by path

    @property
    def copied(self) -> bool:
        """Before there was `init`, a project was a copy of our repository."""
        return not self.digests

    @property
    def newer(self) -> bool:
        """Than what is installed: its files may say what we cannot read."""
        return Version(self.version) > Version(__version__)

    def edited(self, path: str, text: str) -> bool:
        return self.digests.get(path) != digest(text)

    def text(self) -> str:
        rows = [f"  {path}: {own}\n" for path, own in sorted(self.digests.items())]
        return f'{HEAD}\nversion: "{self.version}"\nfiles:\n{"".join(rows)}'


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def made_today(files: Mapping[str, str]) -> MadeBy:
    return MadeBy(__version__, {path: digest(text) for path, text in files.items()})


def made_by(root: Path) -> MadeBy | None:
    if not (root / FILE).exists():
        return None
    source = read(root, FILE, ())
    version, files = source.data.get("version"), source.data.get("files")
    if not _is_version(version) or not isinstance(files, dict):
        raise source.error((), "is not what `shardwright init` writes", "restore it from git")
    return MadeBy(version, {path: str(own) for path, own in files.items()})


def _is_version(value: Any) -> TypeGuard[str]:
    try:
        Version(value)
    except (InvalidVersion, TypeError):
        return False
    return True


def check_version(root: Path) -> None:
    """Settings of one version may mean something else, or nothing, in another."""
    made = made_by(root)
    if made and made.version != __version__:
        what = f"the project was made by shardwright {made.version}, and {__version__} is installed"
        install = f"`pip install shardwright=={made.version}`"
        remedy = install if made.newer else f"run `shardwright upgrade`, or {install}"
        raise ConfigError(what, where=FILE, remedy=remedy)
