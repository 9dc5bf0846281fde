"""Every folder of the source says in its README what it is for, and has a row for each of its files and folders."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("pipeline", "stages", "shardwright/api")
FOLDERS = sorted({path.parent.relative_to(ROOT) for room in ROOMS for path in (ROOT / room).rglob("*.py")})


def rows(text: str) -> list[str]:
    """What the first column of the README's tables names: `file.py` and `folder/`, several in a row too."""
    cells = re.findall(r"(?m)^\| (`[^|]+) \|", text)
    return [name for cell in cells for name in re.findall(r"`(\w+(?:\.py|/))`", cell)]


@pytest.mark.parametrize("folder", FOLDERS, ids=str)
def test_the_table_of_a_folder_is_the_folder(folder: Path) -> None:
    here = ROOT / folder
    files = [path.name for path in here.glob("*.py") if path.name != "__init__.py"]
    folders = [f"{path.name}/" for path in here.iterdir() if path.is_dir() and any(path.rglob("*.py"))]
    told = rows((here / "README.md").read_text())
    assert sorted(told) == sorted([*files, *folders])
