"""docs/troubleshooting.md tells messages that the program really has."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
LEAST = 30  # messages, so that a change of the page's form does not leave nothing to look for


def told() -> list[str]:
    """Every part of a message in the first column of the tables."""
    rows = [line for line in (ROOT / "docs/troubleshooting.md").read_text().splitlines() if line.startswith("| `")]
    return [shard for row in rows for shard in re.findall(r"`([^`]+)`", row.split(" | ")[0])]


def texts() -> str:
    """All text of the program, with a mark where a value goes."""
    found = []
    for folder in ("pipeline", "stages"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    parts = [str(p.value) if isinstance(p, ast.Constant) else "\0" for p in node.values]
                    found.append("".join(parts))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return "\n".join(found)


def test_every_message_of_the_page_is_one_of_the_program():
    shards, known = told(), texts()
    assert len(shards) > LEAST
    assert [shard for shard in shards if shard not in known] == []
