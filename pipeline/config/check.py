"""Values against schemas: every key that is not as the schema says becomes a ConfigError naming what is allowed.

OmegaConf would accept `"3"` for 3 and 1 for true, and knows no ranges, lines or suggestions; so this runs first, and
OmegaConf then only fills in defaults and builds the typed objects.
"""

from __future__ import annotations

import dataclasses
import functools
import keyword
import math
import operator
import types
import typing
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

from shardwright.pipeline.base.errors import ConfigError, nearest, shown, suggestion
from shardwright.pipeline.config.schema import AUTO, MISSING, SOLVE, KeyRule, ValueForm, rule_of
from shardwright.pipeline.config.source import UNREAD, Key, Source
from shardwright.pipeline.ops.dims import check_line


@dataclasses.dataclass(frozen=True)
class FieldType:
    """A field's type, taken apart: what one value must be, and whether null stands for no value."""

    type: Any
    optional: bool
    item: Any = None  # of a list or of a dict's values


def kind_of(hint: Any) -> FieldType:
    optional = isinstance(hint, types.UnionType)
    if optional:
        (hint,) = (part for part in typing.get_args(hint) if part is not type(None))
    arguments = typing.get_args(hint)
    return FieldType(typing.get_origin(hint) or hint, optional, arguments[-1] if arguments else None)


@functools.cache
def fields_of(schema: type) -> dict[str, tuple[FieldType, dataclasses.Field[Any]]]:
    hints = typing.get_type_hints(schema)
    return {item.name: (kind_of(hints[item.name]), item) for item in dataclasses.fields(schema)}


def mandatory(item: dataclasses.Field[Any]) -> bool:
    return bool(item.default == MISSING)


def span(rule: KeyRule, kind: Any = float) -> str:
    """The allowed range in words: `from 1 to 64`, `>= 0 and < 1`, or nothing."""

    def show(value: float) -> str:
        whole = kind is int or (value == int(value) and abs(value) < 1e12)
        return str(int(value)) if whole else f"{value:g}"

    if rule.at_least is not None and rule.at_most is not None:
        return f"from {show(rule.at_least)} to {show(rule.at_most)}"
    return " and ".join(f"{sign} {show(bound)}" for sign, (_, bound) in _bounds(rule).items())


def _bounds(rule: KeyRule) -> dict[str, tuple[Callable[[float, float], bool], float]]:
    """Sign -> what it says of a value and the bound."""
    signs = {">=": operator.ge, ">": operator.gt, "<=": operator.le, "<": operator.lt}
    bounds = zip(signs.items(), (rule.at_least, rule.above, rule.at_most, rule.below), strict=True)
    return {sign: (holds, bound) for (sign, holds), bound in bounds if bound is not None}


def expected(kind: FieldType, rule: KeyRule) -> str:
    """What a key takes, in words that follow 'expected'."""
    if rule.form is not None:
        text = rule.form.value
    elif dataclasses.is_dataclass(kind.type):
        text = "a mapping"
    elif kind.type is list:
        text = "a non-empty list of " + ("texts" if kind.item is str else f"integers {span(rule, int)}")
    elif isinstance(kind.type, type) and issubclass(kind.type, Enum):
        text = "one of " + ", ".join(kind.type.__members__)
    else:
        noun = {bool: "true or false", int: "an integer", float: "a number", str: "text"}[kind.type]
        text = f"{noun} {span(rule, kind.type)}".strip()
    return f"{text} or null" if kind.optional else text


def check(schema: type, value: dict[str, Any], source: Source, key: Key = ()) -> Iterator[ConfigError]:
    """What is wrong: keys that are not known, mandatory ones that are missing, values that their fields do not take."""
    fields = fields_of(schema)
    odd = [name for name, item in value.items() if name not in fields and not unread(item)]
    now = {former: name for name, (_, item) in fields.items() if (former := rule_of(item).formerly)}
    for name in odd:
        remedy = f"it is called `{now[name]}` now" if name in now else suggestion(name, list(fields), "allowed: ")
        yield source.error((*key, name), "unknown key", remedy)
    meant = {nearest(name, list(fields)) for name in odd}  # a mandatory key that is misspelt is one mistake
    for name, (kind, item) in fields.items():
        if name in value:
            yield from check_key(schema, name, value, source, key)
        elif mandatory(item) and name not in meant:
            yield source.error((*key, name), "mandatory key is missing", f"give {expected(kind, rule_of(item))}")


def unread(value: Any) -> bool:
    """Whether it, or something in it, could not be read: that has been told."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return value is UNREAD or any(map(unread, inner))


def check_key(schema: type, name: str, value: dict[str, Any], source: Source, key: Key = ()) -> Iterator[ConfigError]:
    """What is wrong with the value of one key."""
    kind, item = fields_of(schema)[name]
    yield from _check_value(value[name], kind, rule_of(item), source, (*key, name))


def _check_value(value: Any, kind: FieldType, rule: KeyRule, source: Source, key: Key) -> Iterator[ConfigError]:
    if value is UNREAD or (value is None and kind.optional):
        return
    if isinstance(value, str) and value == MISSING:
        yield source.error(key, "mandatory value is missing", f"give {expected(kind, rule)}")
    elif not _fits(value, kind, rule):
        yield _mismatch(value, kind, rule, source, key)
    elif dataclasses.is_dataclass(kind.type):
        yield from check(typing.cast(type, kind.type), value, source, key)
    elif rule.form is ValueForm.BY_NAME:
        for name, item in value.items():
            if not _is_name(name):
                yield source.error((*key, name), "is not an argument name", "use letters, digits and '_'")
            yield from _check_value(item, kind_of(kind.item), KeyRule(rule.help), source, (*key, name))
    elif rule.form in _FORMS:
        yield from _FORMS[rule.form](value, source, key)
    elif kind.type is list:
        for index, item in enumerate(value):
            yield from _check_value(item, kind_of(kind.item), rule, source, (*key, index))


def _fits(value: Any, kind: FieldType, rule: KeyRule) -> bool:
    """Whether the value has the field's type and range (of containers: only the container)."""
    if rule.form is ValueForm.COUNT:
        number_given = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        return value is None or value == SOLVE or number_given
    if rule.form is ValueForm.SWITCH:
        return isinstance(value, bool) or value == AUTO
    if dataclasses.is_dataclass(kind.type):
        return isinstance(value, dict)
    if kind.type in (dict, list):
        return isinstance(value, kind.type) and len(value) > 0
    if kind.type in (int, float):
        accepted = (int,) if kind.type is int else (int, float)
        number = isinstance(value, accepted) and not isinstance(value, bool)
        finite = number and (isinstance(value, int) or math.isfinite(value))
        return finite and all(holds(value, bound) for holds, bound in _bounds(rule).values())
    if kind.type is bool:
        return isinstance(value, bool)
    if kind.type is str:
        return isinstance(value, str) and value.strip() != ""
    assert issubclass(kind.type, Enum), kind
    return isinstance(value, str) and value in kind.type.__members__


def _mismatch(value: Any, kind: FieldType, rule: KeyRule, source: Source, key: Key) -> ConfigError:
    what = f"got {shown(value) if value not in ({}, []) else 'nothing in it'}, expected {expected(kind, rule)}"
    remedy = None
    if isinstance(value, str) and isinstance(kind.type, type) and issubclass(kind.type, Enum):
        near = rule.meant.get(value.lower()) or nearest(value, list(kind.type.__members__))
        remedy = f"did you mean '{near}'?" if near else None
    elif kind.type is str and value is not None and not isinstance(value, (dict, list, str)):
        remedy = "put it in quotes"
    return source.error(key, what, remedy)


def _is_name(text: str) -> bool:
    return text.isidentifier() and not keyword.iskeyword(text)


def _check_target(value: dict[str, Any], source: Source, key: Key) -> Iterator[ConfigError]:
    inner = (*key, "_target_")
    target = value.get("_target_")
    parts = target.split(".") if isinstance(target, str) else []
    if "_target_" not in value:
        yield source.error(inner, "mandatory key is missing", "give the dotted name of what is called")
    elif target is not UNREAD and (len(parts) < 2 or not all(_is_name(part) for part in parts)):
        yield source.error(inner, f"got {shown(target)}, expected a dotted importable name such as torch.optim.AdamW")
    for name, item in value.items():
        hydra = name.startswith("_") and name.endswith("_") and name != "_target_"
        if hydra or not _is_name(name):
            yield source.error((*key, name), "unknown key", "allowed: _target_ and keyword arguments")
        elif name != "_target_":
            yield from _check_plain(item, source, (*key, name))


def _check_plain(value: Any, source: Source, key: Key) -> Iterator[ConfigError]:
    """An argument of the user's own callable: anything that JSON can hold."""
    if isinstance(value, float) and not math.isfinite(value):
        yield source.error(key, f"got {shown(value)}, expected a finite number")
    elif isinstance(value, str) and value == MISSING:
        yield source.error(key, "mandatory value is missing", "give it a value")
    elif isinstance(value, dict) and "_target_" in value:
        yield from _check_target(value, source, key)
    else:
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for part, item in items:
            yield from _check_plain(item, source, (*key, part))


def _check_sizes(value: dict[str, Any], source: Source, key: Key) -> Iterator[ConfigError]:
    for name, size in value.items():
        if size is not UNREAD and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            yield source.error((*key, name), f"got {shown(size)}, expected a number of devices", "give 1 or more")


def _check_layouts(value: dict[str, Any], source: Source, key: Key) -> Iterator[ConfigError]:
    for name, layout in value.items():
        if layout is not UNREAD and not isinstance(layout, str):
            what = f"got {shown(layout)}, expected a layout"
            yield source.error((*key, name), what, "write for instance 'S(0) on tp'")


def _check_dims(value: dict[str, Any], source: Source, key: Key) -> Iterator[ConfigError]:
    for target, line in value.items():
        inner = (*key, target)
        parts = target.split(".")
        if len(parts) != 3 or not all(_is_name(part) for part in parts):
            remedy = "use library.op.overload, such as mylib.scale.default"
            yield source.error(inner, "is not the name of an op", remedy)
        elif isinstance(line, str):
            try:
                check_line(line)
            except ValueError as error:
                yield source.error(inner, f"got {shown(line)}: {error}")
        elif line is not UNREAD:
            yield source.error(inner, f"got {shown(line)}, expected a line of dims such as 'b n, n -> b n'")


_FORMS = {
    ValueForm.TARGET: _check_target,
    ValueForm.DIMS: _check_dims,
    ValueForm.LAYOUTS: _check_layouts,
    ValueForm.SIZES: _check_sizes,
}
