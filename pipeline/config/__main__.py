"""The configuration reference, from the schemas: `python -m shardwright.pipeline.config > docs/configuration.md`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from enum import Enum
from typing import Any

from shardwright.pipeline.config.check import FieldType, fields_of, mandatory, span
from shardwright.pipeline.config.schema import GROUPS, Experiment, KeyRule, Root, SweepSettings, ValueForm, rule_of

_HEAD = """\
# Configuration

Every key of `conf/`: its type, what it may be, its default. What is written there is checked by

    shardwright check

This page is made from `pipeline/config/schema.py` by
`python -m shardwright.pipeline.config > docs/configuration.md`. Do not edit it.

`conf/config.yaml` names one file of each group, without its ending: `solve: glpk` chooses `conf/solve/glpk.yaml`. To
try another file, edit that line and run `dvc repro`, or leave it and run
`dvc exp run -S conf/config.yaml:solve=highs`.

Files are YAML as DVC reads it (1.2): `true` and `false` are the only booleans, `1e-3` is a number. Keys are checked
before anything runs, and a mistake is reported in one line with its file, line and column. A value may refer to
another key of the same file as `${other.key}`. In `conf/config.yaml` that is possible under `tracking` only, and there
alone the environment can be asked, as in `${oc.env:MLFLOW_URI}`: DVC would not notice such a value changing elsewhere.

GB is 10^9 bytes, MB is 10^6 bytes.
"""


_ALLOWED = {
    ValueForm.CHOICE: "a file's name without `.yaml`",
    ValueForm.COUNT: "at least 1, or `solve`",
    ValueForm.SWITCH: "`true`, `false`, `auto`",
    ValueForm.SAVED: "a file's name without `.json`",
}


def reference() -> str:
    """The page: one table per file kind."""
    parts = [_HEAD, _part("conf/config.yaml", Root, "The choices, and what holds for all of them.")]
    parts += [_part(f"conf/{group}/*.yaml", schema, None) for group, schema in GROUPS.items()]
    parts.append(_part("conf/experiment/*.yaml", Experiment, "Named changes to the files above."))
    parts.append(_part("conf/sweep/*.yaml", SweepSettings, "Points to compare: `shardwright sweep NAME`."))
    return "\n".join(parts)


def _part(title: str, schema: type, lead: str | None) -> str:
    table = ["| key | type | default | allowed | meaning |", "|---|---|---|---|---|"]
    table += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in _rows(schema, "")]
    return "\n".join([f"## `{title}`", "", *([lead, ""] if lead else []), *table, ""])


def _rows(schema: type, prefix: str) -> Iterator[tuple[str, str, str, str, str]]:
    for name, (kind, item) in fields_of(schema).items():
        rule, key = rule_of(item), f"{prefix}{name}"
        nested = dataclasses.is_dataclass(kind.type)
        default = "required" if mandatory(item) else "" if nested else _default(item.default)
        yield f"`{key}`", _type(kind, rule), default, _allowed(kind, rule), rule.help
        if nested:
            yield from _rows(kind.type, f"{key}.")
        elif rule.form is ValueForm.BY_NAME:
            yield from _rows(kind.item, f"{key}.NAME.")
        elif rule.form is ValueForm.DIMS:
            yield f"`{key}.OP`", "text", "", "a line of dims", "The line of the op `library.op.overload`."
        elif rule.form is ValueForm.SIZES:
            yield f"`{key}.NAME`", "integer", "", "at least 1", "Devices along the axis of that name."
        elif rule.form is ValueForm.LAYOUTS:
            layouts = "`R`, `S(dim)`, `zero1`, `zero2` or `zero3`, with ` on AXIS`."
            yield f"`{key}.NAME`", "text", "", "a layout", layouts
        elif rule.form is ValueForm.TARGET:
            yield f"`{key}._target_`", "text", "required", "a dotted importable name", "What is called."
            yield f"`{key}.ARGUMENT`", "any", "", "", "A keyword argument of it."


def _type(kind: FieldType, rule: KeyRule) -> str:
    if rule.form is ValueForm.SWITCH:
        return "boolean or text"
    if kind.type is Any:
        return "integer, text or null"
    if dataclasses.is_dataclass(kind.type) or kind.type is dict:
        text = "mapping"
    elif kind.type is list:
        text = "list of " + ("texts" if kind.item is str else "integers")
    elif issubclass(kind.type, Enum):
        text = "choice"
    else:
        text = {bool: "boolean", int: "integer", float: "number", str: "text"}[kind.type]
    return f"{text} or null" if kind.optional else text


def _allowed(kind: FieldType, rule: KeyRule) -> str:
    if rule.form in _ALLOWED:
        return _ALLOWED[rule.form]
    if kind.type in (dict, list):
        bounds = span(rule, int)
        return f"not empty; each {bounds}" if bounds else "not empty"
    if isinstance(kind.type, type) and issubclass(kind.type, Enum):
        return ", ".join(f"`{name}`" for name in kind.type.__members__)
    return span(rule, kind.type)


def _default(value: Any) -> str:
    spelled = {None: "null", True: "true", False: "false"} if value is None or isinstance(value, bool) else {}
    return f"`{spelled.get(value, f'{value:g}' if isinstance(value, float) else value)}`"


if __name__ == "__main__":
    print(reference(), end="")
