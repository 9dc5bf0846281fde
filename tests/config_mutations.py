"""Broken configurations for property tests: edits of the shipped conf/ files, by hypothesis.

`invalid_mutations` are wrong by construction (each kind below says why), so a caller may demand an error;
`any_mutations` are arbitrary edits, which may leave the configuration valid.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from shardwright.pipeline.config import GROUPS, load_config
from shardwright.pipeline.config.check import FieldType, fields_of, mandatory
from shardwright.pipeline.config.schema import KeyRule, Root, ValueForm, rule_of
from shardwright.pipeline.config.source import parse, read_bytes

Path_ = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Mutation:
    """New contents of one file, relative to the project's folder, and what was done to it."""

    file: str
    content: bytes
    what: str

    def write(self, root: Path) -> None:
        (root / self.file).write_bytes(self.content)


@dataclasses.dataclass(frozen=True)
class Place:
    """One key of one file that the schema knows, whether or not the file has it."""

    file: str
    path: Path_
    kind: FieldType
    rule: KeyRule
    mandatory: bool


@functools.cache
def invalid_mutations(root: Path) -> st.SearchStrategy[Mutation]:
    """Edits after which `load_config(root)` must fail; `root` must hold a valid configuration (read once per root)."""
    files = chosen_files(root)
    raw = {file: read_bytes(root, file) for file in files}
    data = {file: parse(file, (), content).data for file, content in raw.items()}
    places = [place for file, schema in files.items() for place in _places(file, schema, data[file], ())]
    return st.one_of(
        _unknown_keys(places, data),
        _dropped_keys(places, data),
        _wrong_values(places, data),
        _bad_texts(raw),
        _bad_bytes(raw),
    )


@functools.cache
def any_mutations(root: Path) -> st.SearchStrategy[Mutation]:
    """A stretch of a file replaced by random YAML-like text or random bytes."""
    raw = {file: read_bytes(root, file) for file in chosen_files(root)}
    tokens = [
        "a",
        "0",
        "-1",
        "1e9",
        ".nan",
        "null",
        "true",
        ":",
        ": ",
        "- ",
        "\n",
        "  ",
        "\t",
        "[",
        "]",
        "{",
        "}",
        "'",
        '"',
    ]
    tokens += [
        "${",
        "}",
        "#",
        "&a ",
        "*a",
        "!!int ",
        "%",
        "|",
        ">",
        "?",
        ",",
        "\\",
        "<<: ",
        "---\n",
        "\x00",
        "é",
        "\U0001f600",
    ]
    texts = st.lists(st.sampled_from(tokens), max_size=8).map(lambda parts: "".join(parts).encode())

    @st.composite
    def edit(draw: st.DrawFn) -> Mutation:
        file = draw(st.sampled_from(sorted(raw)))
        old = raw[file]
        start = draw(st.integers(0, len(old)))
        end = min(len(old), start + draw(st.integers(0, 12)))
        new = draw(texts | st.binary(max_size=6))
        return Mutation(file, old[:start] + new + old[end:], f"bytes {start}:{end} replaced by {new!r}")

    return edit()


def chosen_files(root: Path) -> dict[str, type]:
    """The files that are read, each with its schema."""
    choices = load_config(root).choices
    files = {f"conf/{group}/{choices[group]}.yaml": schema for group, schema in GROUPS.items()}
    return {"conf/config.yaml": Root, **files}


def _places(file: str, schema: type, data: dict[str, Any], above: Path_) -> Iterator[Place]:
    for name, (kind, item) in fields_of(schema).items():
        path, rule = (*above, name), rule_of(item)
        yield Place(file, path, kind, rule, mandatory(item))
        if dataclasses.is_dataclass(kind.type):
            yield from _places(file, kind.type, data.get(name, {}), path)
        elif rule.form is ValueForm.BY_NAME:
            for entry, inner in data[name].items():
                yield from _places(file, kind.item, inner, (*path, entry))


def _edited(place: Place, data: dict[str, Any], change: Any, what: str) -> Mutation:
    """The file with `change(mapping, key)` done at the place; comments are lost."""
    document = copy.deepcopy(data[place.file])
    mapping = document
    for part in place.path[:-1]:
        mapping = mapping.setdefault(part, {})
    change(mapping, place.path[-1])
    text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
    return Mutation(place.file, text.encode(), f"{'.'.join(place.path)}: {what}")


def _unknown_keys(places: list[Place], data: dict[str, Any]) -> st.SearchStrategy[Mutation]:
    """A key that no schema has ('zz' ends none), beside a known one or in place of one that nobody must give."""

    def add(place: Place, letters: str, rename: bool) -> Mutation:
        def change(mapping: dict[str, Any], key: str) -> None:
            mapping[f"{key}{letters}zz"] = mapping.pop(key, 1) if rename and not place.mandatory else 1

        return _edited(place, data, change, f"unknown key {letters}zz")

    known = [place for place in places if place.rule.form is not ValueForm.BY_NAME]
    letters = st.text("abcdefgh_", max_size=4)
    return st.builds(add, st.sampled_from(known), letters, st.booleans())


def _dropped_keys(places: list[Place], data: dict[str, Any]) -> st.SearchStrategy[Mutation]:
    """A mandatory key is not there."""
    required = [place for place in places if place.mandatory]
    return st.sampled_from(required).map(
        lambda place: _edited(place, data, lambda mapping, key: mapping.pop(key), "dropped")
    )


def _wrong_values(places: list[Place], data: dict[str, Any]) -> st.SearchStrategy[Mutation]:
    """A value of another type, out of range, or an interpolation that leads nowhere."""
    cases = [(place, value) for place in places for value in _wrong(place.kind, place.rule)]

    def edit(case: tuple[Place, Any]) -> Mutation:
        place, value = case
        return _edited(place, data, lambda mapping, key: mapping.update({key: value}), f"set to {value!r}")

    return st.sampled_from(cases).map(edit)


def _wrong(kind: FieldType, rule: KeyRule) -> list[Any]:
    wrong: list[Any] = [] if kind.optional else [None]
    wrong += ["???", "${", "${no.such.key}", "${no_such_resolver:1}"]
    if dataclasses.is_dataclass(kind.type):
        return [*wrong, 3, "text", [1], True]
    if rule.form is ValueForm.TARGET:
        bad_targets = [{"_target_": name} for name in ("plain", "a..b", ".a", "a.", "a.b c", "a.1", "a.class", 3, None)]
        bad_arguments = [
            {"_target_": "a.b", key: value} for key, value in (("a b", 1), ("_args_", []), ("x", float("nan")))
        ]
        return [*wrong, {}, 3, "a.b", ["a.b"], {"lr": 1}, {"_target_": "a.b", 3: 4}, *bad_targets, *bad_arguments]
    if rule.form is ValueForm.BY_NAME:
        tensor = {"shape": [1], "dtype": "int64"}
        return [*wrong, {}, 3, [tensor], {"x": 3}, {"x": {}}, {"x y": tensor}, {"x": {**tensor, "device": "cpu"}}]
    if rule.form is ValueForm.CHOICE:
        return [*wrong, 3, True, ["glpk"], "", "../solve/glpk", "/glpk", "no_such_file", ".", "..", "a\\b", "glpk.yaml"]
    if kind.type is list:
        return [*wrong, [], 3, "text", {"a": 1}, [0], [-1], [True], [1.5], ["1"], [[1]], [None]]
    if rule.form is ValueForm.SWITCH:
        return [*wrong, 0, 1, "true", "on", [True], {}]
    if kind.type is bool:
        return [*wrong, 0, 1, "yes", "true", [True], {}]
    if kind.type is str:
        return [*wrong, 3, 1.5, True, [], {}, "", "  "]
    if issubclass(kind.type, Enum):
        return [*wrong, "no_such_choice", "", 3, True, False, [], {}]
    return [*wrong, *_wrong_numbers(kind, rule)]


def _wrong_numbers(kind: FieldType, rule: KeyRule) -> list[Any]:
    numbers: list[Any] = ["many", "3", True, False, [1], {}, float("nan"), float("inf"), -float("inf")]
    numbers += [1.5, 2.0] if kind.type is int else []
    numbers += [rule.at_least - 1] if rule.at_least is not None else []
    numbers += [rule.above, rule.above - 1] if rule.above is not None else []
    numbers += [rule.at_most + 1, rule.at_most * 10] if rule.at_most is not None else []
    numbers += [rule.below, rule.below + 1] if rule.below is not None else []
    return numbers


def _bad_texts(raw: dict[str, bytes]) -> st.SearchStrategy[Mutation]:
    """Not YAML, or YAML that is not one mapping with distinct text keys."""
    whole = [
        b"",
        b"\n",
        b"# nothing\n",
        b"text\n",
        b"3\n",
        b"- a\n- b\n",
        b"null\n",
        b"{}\n",
        b"---\na: 1\n---\nb: 2\n",
    ]
    appended = [b"\n[open\n", b"\n{open: 1\n", b"\n'open\n", b"\n\tzz: 1\n", b"\nzz: a: b\n", b"\n: 1\n  : 2\n"]
    appended += [b"\n3: 4\n", b"\ntrue: 1\n", b"\n? [a]\n: 1\n", b"\nzz: *nowhere\n", b"\nzz: &a [*a]\n", b"\nzz: @\n"]
    appended += [b"\nzz: !!python/name:os.system\n", b"\nzz: " + b"[" * 1000 + b"\n", b"\x00", b"\n...\nzz"]

    def duplicate(content: bytes) -> bytes:
        return content + next(line for line in content.splitlines() if line[:1].isalpha()).split(b":")[0] + b": 1\n"

    edits = st.sampled_from([(None, text) for text in whole] + [(True, text) for text in appended] + [(False, b"")])

    def edit(file: str, case: tuple[bool | None, bytes]) -> Mutation:
        append, text = case
        content = text if append is None else raw[file] + text if append else duplicate(raw[file])
        return Mutation(file, content, f"text {text[:40]!r} ({'whole' if append is None else 'appended'})")

    return st.builds(edit, st.sampled_from(sorted(raw)), edits)


def _bad_bytes(raw: dict[str, bytes]) -> st.SearchStrategy[Mutation]:
    """0xFF stands in no UTF-8 text."""

    @st.composite
    def edit(draw: st.DrawFn) -> Mutation:
        file = draw(st.sampled_from(sorted(raw)))
        noise = b"\xff" + draw(st.binary(max_size=20))
        at = draw(st.integers(0, len(raw[file])))
        content = noise if draw(st.booleans()) else raw[file][:at] + noise + raw[file][at:]
        return Mutation(file, content, f"bytes {noise!r}")

    return edit()
