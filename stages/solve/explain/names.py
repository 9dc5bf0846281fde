"""What a name means: a parameter, an input, an op or the tensor that it writes, a module, or a pattern of modules."""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from fnmatch import fnmatchcase

from pipeline.ir.graph import OpGraph, Role
from stages.solve.explain.part import ExplainError

OP = "op:"  # before the name of an op that is a module's name as well
NEAR = 3  # names that a message offers


class What(StrEnum):
    parameter = "parameter"
    buffer = "buffer"
    input = "input"
    op = "op"
    module = "module"


@dataclass(frozen=True)
class Subject:
    what: What
    name: str  # of the value, of the op, or the pattern


def find_subject(graph: OpGraph, name: str) -> Subject:
    by_origin = {value.origin: value for value in graph.values.values() if value.role is not Role.RESULT}
    value = by_origin.get(name) or graph.values.get(name)
    if value is not None and value.role is not Role.RESULT:
        return Subject(What(value.role.value), value.name)
    ops = {op.name for op in graph.ops}
    if any(inside(name, known) for known in (*_modules(graph), *by_origin)):
        return Subject(What.module, name)
    plain = name.removeprefix(OP)
    if plain in ops:
        return Subject(What.op, plain)
    if value is not None:
        return Subject(What.op, value.origin)
    raise _unknown(name, [*by_origin, *_modules(graph), *ops, *graph.values])


def inside(pattern: str, name: str) -> bool:
    """Whether a module or a parameter is what is named, or lies in it."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:count]), pattern) for count in range(1, len(parts) + 1))


def starred(name: str) -> str:
    """The name with a star for each number between dots: equal layers have equal ones."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def _modules(graph: OpGraph) -> dict[str, None]:
    names = (op.module.split(".") for op in graph.ops)
    return dict.fromkeys(".".join(parts[:count]) for parts in names for count in range(1, len(parts) + 1) if parts[0])


def _unknown(name: str, known: list[str]) -> ExplainError:
    near = get_close_matches(name, list(dict.fromkeys(known)), n=NEAR)
    remedy = f"did you mean {', '.join(near)}?" if near else "names are those of named_modules(), named_parameters()"
    return ExplainError(f"nothing is called {name!r}", where="explain", remedy=remedy)
