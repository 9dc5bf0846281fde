"""One YAML file read so that every value remembers its line and column.

Values are read as DVC reads them (YAML 1.2: `off` is text, `1e-3` is a number), because DVC chooses files and decides
what to run again from the same text. Aliases, merge keys and tags are refused: a value stands where it is used.
"""

from __future__ import annotations

from collections.abc import Hashable
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.nodes import MappingNode, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from shardwright.pipeline.base.errors import ConfigError, refuse, shown

Key = tuple[str | int, ...]
Mark = tuple[int, int]

LARGEST_FILE = 2**18  # bytes; a configuration is read by people
DEEPEST = 40
PLACE = "run from the project's folder; `shardwright init` makes one"
_TAG = "tag:yaml.org,2002:"


class _Unread:
    """Stands for a value that could not be read; it has been told, and nothing more is asked of it."""


UNREAD = _Unread()


_TEXTS = tuple(f"{_TAG}{kind}" for kind in ("str", "timestamp", "merge", "value"))
_SCALARS = (*_TEXTS, *(f"{_TAG}{kind}" for kind in ("int", "float", "bool", "null")))


def dotted(key: Key) -> str:
    """A key as users write it: `batch.inputs.shape[0]`."""
    text = ""
    for part in key:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            plain = part.isprintable() and part.strip() == part != "" and len(part) <= 60
            text += ("." if text else "") + (part if plain else shown(part))
    return text


def _error(key: Key, what: str, where: str, remedy: str | None) -> ConfigError:
    return ConfigError(f"{dotted(key)}: {what}" if key else what, where=where, remedy=remedy)


@dataclass(frozen=True, eq=False)
class Source:
    """A file's values and where each of them stands; never changed, as what is made of one is remembered (load.py)."""

    name: str
    prefix: Key
    data: dict[str, Any]
    marks: dict[Key, Mark]
    broken: tuple[ConfigError, ...] = ()  # what cannot be read in it; the values in question are UNREAD

    def where(self, key: Key = ()) -> str:
        """File, line and column of a key, or of the nearest one around it."""
        while key not in self.marks:
            key = key[:-1]
        line, column = self.marks[key]
        return f"{self.name}:{line}:{column}"

    def error(self, key: Key, what: str, remedy: str | None = None) -> ConfigError:
        return _error(self.prefix + key, what, self.where(key), remedy)


def listing(root: Path, group: str, ending: str = ".yaml") -> list[str]:
    """The names that may be chosen in a group: its files without their ending."""
    folder = root / "conf" / group
    try:
        names = [item.stem for item in folder.iterdir() if item.suffix == ending and item.is_file()]
    except OSError as error:
        remedy = None if folder.parent.is_dir() else PLACE
        raise ConfigError(f"cannot be listed: {error.strerror}", where=f"conf/{group}", remedy=remedy) from error
    return sorted(name for name in names if not name.startswith("."))


def read(root: Path, name: str, prefix: Key, changed: dict[str, bytes] | None = None) -> Source:
    """Read `name` (relative to root), or its text in `changed` where an edit is tried before it is written."""
    if changed is not None and name in changed:
        return parse(name, prefix, changed[name])
    return parse(name, prefix, read_bytes(root, name))


def read_text(root: Path, name: str) -> str:
    return _decode(name, read_bytes(root, name))


def read_bytes(root: Path, name: str) -> bytes:
    path = root / name
    try:
        if path.exists() and not path.is_file():
            raise ConfigError("is not a file", where=name)
        with path.open("rb") as file:
            raw = file.read(LARGEST_FILE + 1)
    except FileNotFoundError as error:
        raise ConfigError("there is no such file", where=name, remedy=PLACE) from error
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=name) from error
    if len(raw) > LARGEST_FILE:
        raise ConfigError(f"is larger than {LARGEST_FILE // 1024} KiB", where=name)
    return raw


def parse(name: str, prefix: Key, raw: bytes) -> Source:
    """The file's values; a ConfigError with line and column if it is not one mapping of YAML."""
    found = _parsed(name, prefix, raw)  # errors are told with others beside them: everyone gets copies
    return replace(found, broken=tuple(map(copy, found.broken))) if found.broken else found


@lru_cache(maxsize=64)
def _parsed(name: str, prefix: Key, raw: bytes) -> Source:
    node = _compose(name, _decode(name, raw))
    if node is None:
        raise ConfigError("the file is empty", where=f"{name}:1:1", remedy="write `key: value` lines")
    if not isinstance(node, MappingNode):
        raise ConfigError("the top level must be a mapping", where=_at(name, node), remedy="write `key: value` lines")
    builder = _NodeReader(name, prefix)
    return Source(name, prefix, builder.value(node, ()), builder.marks, tuple(builder.broken))


def parse_value(text: str) -> Any:
    """One value as it may stand after `key=`; ValueError with a reason if it is not one."""
    if text.strip() == "" or "\n" in text:
        raise ValueError("one line must follow '='" if text.strip() else "there is no value after '='")
    try:
        source = parse("", (), f"value: {text}".encode())
        refuse(source.broken)
        return source.data["value"]
    except ConfigError as error:
        raise ValueError(error.what) from error


def _decode(name: str, raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        column = error.start - (raw.rfind(b"\n", 0, error.start) + 1) + 1
        raise ConfigError(
            f"byte 0x{raw[error.start]:02x} is not UTF-8", where=f"{name}:{line}:{column}", remedy="save it as UTF-8"
        ) from error


def _compose(name: str, text: str) -> Any:
    try:
        return YAML(typ="safe", pure=True).compose(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        tab = "'\\t'" in str(error.problem)
        remedy = "indent with spaces, not tabs" if tab else None
        raise ConfigError(f"bad YAML: {error.problem or error.context}", where=where, remedy=remedy) from error
    except ReaderError as error:
        before = text[: error.position]
        where = f"{name}:{before.count(chr(10)) + 1}:{error.position - before.rfind(chr(10))}"
        raise ConfigError(f"bad YAML: character {error.character!r} is not allowed", where=where) from error
    except RecursionError as error:
        raise ConfigError("bad YAML: nested too deeply", where=name) from error
    except (ValueError, OverflowError) as error:  # the scanner: a \U escape or a %YAML number out of range
        raise ConfigError(f"bad YAML: {error}", where=name) from error


def _at(name: str, node: Any) -> str:
    return f"{name}:{node.start_mark.line + 1}:{node.start_mark.column + 1}"


class _NodeReader:
    """Turns YAML nodes into values, noting the mark of every key and item."""

    def __init__(self, name: str, prefix: Key) -> None:
        self.name = name
        self.prefix = prefix
        self.marks: dict[Key, Mark] = {}
        self.seen: set[Hashable] = set()
        self.broken: list[ConfigError] = []
        self.constructor = YAML(typ="safe", pure=True).constructor

    def fail(self, node: Any, key: Key, what: str, remedy: str | None = None) -> Any:
        """Keeps the mistake, and gives what stands in the value's place."""
        self.broken.append(_error(self.prefix + key, what, _at(self.name, node), remedy))
        return UNREAD

    def value(self, node: Any, key: Key) -> Any:
        if id(node) in self.seen:
            return self.fail(node, key, "YAML aliases are not allowed", "write the value out")
        self.seen.add(id(node))
        if len(key) > DEEPEST:
            return self.fail(node, key[:1], f"nested deeper than {DEEPEST} levels")
        self.marks.setdefault(key, (node.start_mark.line + 1, node.start_mark.column + 1))
        if isinstance(node, MappingNode) and node.tag == f"{_TAG}map":
            return self.mapping(node, key)
        if isinstance(node, SequenceNode) and node.tag == f"{_TAG}seq":
            return [self.value(item, (*key, index)) for index, item in enumerate(node.value)]
        if isinstance(node, ScalarNode) and node.tag in _SCALARS:
            return self.scalar(node, key)
        return self.fail(node, key, f"YAML tag {shown(node.tag)} is not allowed", "remove the tag")

    def mapping(self, node: Any, key: Key) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for name_node, value_node in node.value:
            if not isinstance(name_node, ScalarNode) or name_node.tag != f"{_TAG}str":
                text = shown(name_node.value) if isinstance(name_node, ScalarNode) else "a list or mapping"
                self.fail(name_node, key, f"key {text} is not text", "put it in quotes")
                continue
            name = self.scalar(name_node, key)
            if name is UNREAD:
                continue
            inner = (*key, name)
            if name in result:
                first = self.marks[inner][0]
                self.fail(name_node, inner, f"duplicate key, first on line {first}", "keep one of them")
                continue
            self.marks[inner] = (name_node.start_mark.line + 1, name_node.start_mark.column + 1)
            result[name] = self.value(value_node, inner)
        return result

    def scalar(self, node: Any, key: Key) -> Any:
        text = node.value
        if "\0" in text or any(0xD800 <= ord(letter) < 0xE000 for letter in text):
            return self.fail(node, key, "the text has a character that is not allowed")
        if node.tag in _TEXTS:
            return text
        try:
            return self.constructor.construct_object(node)
        except (ValueError, LookupError):
            return self.fail(node, key, f"{shown(text)} cannot be read as {node.tag.removeprefix(_TAG)}")
