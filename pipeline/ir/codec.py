"""Frozen dataclasses to JSON values and back, with the types checked on the way in.

An artifact may have been edited or damaged: what does not fit the type raises `CodecError` with the path to the
misfit, so that a stage never works on a value that only looks right.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from enum import Enum
from functools import cache
from typing import Any, TypeVar, Union

T = TypeVar("T")
_PLAIN = frozenset((type(None), str, int, float, bool))


class CodecError(ValueError):
    """A JSON value does not fit the type it should become."""


def encode(value: Any) -> Any:
    """A JSON value for anything built of dataclasses, tuples, string-keyed mappings, enums and scalars."""
    if type(value) in _PLAIN:
        return value
    if hasattr(value, "to_json"):
        return value.to_json()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: encode(getattr(value, name)) for name in _names(type(value))}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(k): encode(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return [encode(v) for v in value]
    if isinstance(value, str | int | float):
        return value
    raise TypeError(f"cannot encode {type(value).__name__}")


@cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


def lines_of(data: Any, depth: int = 3) -> str:
    """JSON with a line for each entry so deep; with `indent` every number has one, and it takes ten times as long."""
    if depth and data and isinstance(data, dict):
        return "{\n" + ",\n".join(f"{json.dumps(k)}: {lines_of(v, depth - 1)}" for k, v in data.items()) + "\n}"
    if depth and data and isinstance(data, list):
        return "[\n" + ",\n".join(lines_of(v, depth - 1) for v in data) + "\n]"
    return json.dumps(data, allow_nan=False)


def decode(cls: type[T], data: Any, where: str = "body") -> T:
    """The inverse of `encode` for the type `cls`."""
    return typing.cast(T, _decode(cls, data, where))


def _decode(kind: Any, data: Any, where: str) -> Any:
    if kind is Any:
        return data
    if hasattr(kind, "from_json"):
        try:
            return kind.from_json(data)
        except (ValueError, TypeError, KeyError) as error:
            raise CodecError(f"{where}: {error}") from error
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(typing.cast(type, kind), data, where)
    origin = typing.get_origin(kind)
    if origin in (Union, types.UnionType):
        return _decode_union(typing.get_args(kind), data, where)
    if origin is tuple:
        item = typing.get_args(kind)
        _expect(isinstance(data, list), where, "a list", data)
        if len(item) == 2 and item[1] is Ellipsis:
            return tuple(_decode(item[0], v, f"{where}[{i}]") for i, v in enumerate(data))
        _expect(len(data) == len(item), where, f"{len(item)} items", data)
        return tuple(_decode(t, v, f"{where}[{i}]") for i, (t, v) in enumerate(zip(item, data, strict=True)))
    if origin is list:
        _expect(isinstance(data, list), where, "a list", data)
        return [_decode(typing.get_args(kind)[0], v, f"{where}[{i}]") for i, v in enumerate(data)]
    if origin in (dict, Mapping, types.MappingProxyType):
        _expect(isinstance(data, dict), where, "an object", data)
        value_type = typing.get_args(kind)[1]
        return {k: _decode(value_type, v, f"{where}.{k}") for k, v in data.items()}
    if isinstance(kind, type) and issubclass(kind, Enum):
        try:
            return kind(data)
        except ValueError as error:
            raise CodecError(f"{where}: {error}") from error
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    _expect(isinstance(data, kind) and (kind is bool or not isinstance(data, bool)), where, kind.__name__, data)
    return data


def _decode_dataclass(cls: type, data: Any, where: str) -> Any:
    _expect(isinstance(data, dict), where, "an object", data)
    hints = _hints(cls)
    fields = [f.name for f in dataclasses.fields(cls)]
    unknown, missing = sorted(set(data) - set(fields)), sorted(set(fields) - set(data))
    if unknown or missing:
        raise CodecError(f"{where}: keys of {cls.__name__} differ (unknown {unknown}, missing {missing})")
    try:
        return cls(**{name: _decode(hints[name], data[name], f"{where}.{name}") for name in fields})
    except CodecError:
        raise
    except (ValueError, TypeError) as error:  # the type's own checks
        raise CodecError(f"{where}: {error}") from error


def _decode_union(options: tuple[Any, ...], data: Any, where: str) -> Any:
    if data is None and type(None) in options:
        return None
    problem = f"{where}: nothing fits"
    for option in options:
        try:
            if option is not type(None):
                return _decode(option, data, where)
        except CodecError as error:
            problem = str(error)
    raise CodecError(problem)


def _expect(condition: bool, where: str, wanted: str, data: Any) -> None:
    if not condition:
        raise CodecError(f"{where}: expected {wanted}, found {str(data)[:40]!r}")


_hints = cache(typing.get_type_hints)
