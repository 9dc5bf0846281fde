"""Keys and classes of older versions by their names of today, in the text of a file: comments and lines stay.

A key's older name stands in its schema (`formerly`). Before 0.2.0 our packages were called `pipeline` and `stages`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from shardwright.pipeline.config.check import fields_of
from shardwright.pipeline.config.schema import GROUPS, Root, rule_of
from shardwright.pipeline.config.source import Key, parse

TARGET = re.compile(r"(_target_:\s*[\"']?)((?:pipeline|stages)(?:\.\w+)+)")


def brought_forward(path: str, text: str, copied: bool) -> str:
    """Of a file below conf/; `copied`: of a copy of our repository, where `pipeline` and `stages` are ours."""
    return _keys(path, TARGET.sub(lambda found: found[1] + _target(found[2]), text) if copied else text)


def _target(name: str) -> str:
    """What it is now, where it is ours: a user may have written a class of their own into the copy."""
    module, _, own = f"shardwright.{name}".rpartition(".")
    try:
        return f"shardwright.{name}" if hasattr(import_module(module), own) else name
    except ImportError:
        return name


def _keys(path: str, text: str) -> str:
    group = path.split("/")[1]
    schema = Root if path == "conf/config.yaml" else GROUPS.get(group)
    if schema is None:
        return text
    source = parse(path, (), text.encode())
    lines = text.splitlines(keepends=True)
    for key, name in _renamed(schema, source.data, ()):
        line, column = source.marks[key]
        row = lines[line - 1]
        lines[line - 1] = row[: column - 1] + row[column - 1 :].replace(str(key[-1]), name, 1)
    return "".join(lines)


def _renamed(schema: type, data: dict[str, Any], key: Key) -> Iterator[tuple[Key, str]]:
    """Keys that are there under an older name, with that of today; inner ones of a line before the outer one."""
    for name, (kind, item) in fields_of(schema).items():
        former = rule_of(item).formerly
        for own in (name, former):
            if dataclasses.is_dataclass(kind.type) and isinstance(data.get(own), dict):
                yield from _renamed(kind.type, data[own], (*key, own))  # type: ignore[arg-type]
        if former in data and name not in data:
            yield (*key, former), name
