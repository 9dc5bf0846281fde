"""conf/experiment/*.yaml: named lists of settings, applied to the files under conf/ by one command.

An overlay that only our loader knew would be invisible to DVC, which decides from the files what to run again. So an
experiment edits the files themselves: comments stay, everything is checked first, and git shows or undoes the edit.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from shardwright.pipeline.base.errors import ConfigError, Mistakes, ShardwrightError, refuse, shown, suggestion
from shardwright.pipeline.config.load import ROOT_FILE, build, choices_remedy, choose, group_file, load_config
from shardwright.pipeline.config.schema import GROUPS, Config, Experiment, Root, SweepSettings
from shardwright.pipeline.config.source import Key, Source, listing, parse, parse_value, read, read_bytes

ROOT_KEYS = ("code", "tracking")


def experiments(root: Path) -> dict[str, str]:
    """The experiments of a project and what each one shows."""
    found: dict[str, str] = {}
    for name in listing(root, "experiment"):
        loaded: Experiment = build(Experiment, read(root, group_file("experiment", name), ("experiment",)))
        found[name] = loaded.description
    return found


def apply_experiment(root: Path, name: str) -> list[str]:
    """Make an experiment's settings in the files under conf/; the changes made, one line each.

    The result is loaded and checked before the first file is written.
    """
    source = _find(root, "experiment", name)
    experiment: Experiment = build(Experiment, source)
    edit = _Edit(root, source)
    edit.apply_all(experiment.settings)
    _write(root, edit.changed)
    return edit.lines


def set_keys(root: Path, group: str, name: str, settings: Mapping[str, Any]) -> list[str]:
    """Set keys of a file of a group, chosen or not, with all else in it as it is; the changes made, one line each."""
    file = group_file(group, name)
    edit = _Edit(root, read(root, file, (group,)))
    for path, value in settings.items():
        edit._set(file, path.split("."), value, ())
    build(GROUPS[group], read(root, file, (group,), edit.changed))
    _write(root, edit.changed)
    return edit.lines


def try_settings(root: Path, settings: Sequence[str]) -> Config:
    """The configuration as these settings, such as `solve.memory_budget_gb=2`, would make it; nothing is written."""
    return _Edit(root, _GivenSettings.of(settings)).apply_all(settings)


def overrides(root: Path, settings: Sequence[str]) -> list[tuple[str, str, Any]]:
    """File, key and value of each setting, for DVC's `-S`; checked as `apply` would."""
    edit = _Edit(root, _GivenSettings.of(settings))
    edit.apply_all(settings)
    return edit.placed


@dataclass(frozen=True)
class _GivenSettings(Source):
    """Settings that stand in no file: each is named by its own text."""

    @classmethod
    def of(cls, settings: Sequence[str]) -> _GivenSettings:
        return cls("settings", (), {"settings": list(settings)}, {(): (1, 1)})

    def where(self, key: Key = ()) -> str:
        return f"'{self.data['settings'][key[1]]}'" if len(key) > 1 else "the settings"

    def error(self, key: Key, what: str, remedy: str | None = None) -> ConfigError:
        return ConfigError(what, where=self.where(key), remedy=remedy)


def find_sweep(root: Path, name: str) -> SweepSettings:
    """A file of conf/sweep."""
    found: SweepSettings = build(SweepSettings, _find(root, "sweep", name))
    return found


def _find(root: Path, folder: str, name: str) -> Source:
    names = listing(root, folder)
    if name not in names:
        missing = "there is no experiment" if folder == "experiment" else "there is no sweep"
        raise ConfigError(f"{missing} {shown(name)}", where=f"conf/{folder}", remedy=choices_remedy(name, names))
    return read(root, group_file(folder, name), (folder,))


@dataclass
class _Edit:
    """The files as they would be after the settings so far."""

    root: Path
    source: Source
    changed: dict[str, bytes] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    made: dict[str, Key] = field(default_factory=dict)  # dotted key of a setting -> where the experiment says it
    placed: list[tuple[str, str, Any]] = field(default_factory=list)  # file, key and value of each setting

    def apply_all(self, settings: Sequence[str]) -> Config:
        mistakes = Mistakes()
        for index, text in enumerate(settings):
            with mistakes.gather():
                self.apply(text, ("settings", index))
        mistakes.refuse()
        return self.check()

    def apply(self, text: str, at: Key) -> None:
        left, equals, right = text.partition("=")
        path = left.strip()
        parts = path.split(".")
        if not equals or "" in parts:
            raise self.source.error(at, f"got {shown(text)}, expected `group=file` or `group.key=value`")
        if parts[0] not in (*GROUPS, *ROOT_KEYS):
            remedy = suggestion(parts[0], [*GROUPS, *ROOT_KEYS], "allowed: ")
            raise self.source.error(at, f"{shown(parts[0])} is not a group", remedy)
        try:
            value = parse_value(right)
        except ValueError as error:
            raise self.source.error(at, str(error)) from error
        self.made[path] = at
        if parts[0] in ROOT_KEYS:
            self._set(ROOT_FILE, parts, value, at)
        elif len(parts) == 1:
            choose(self.root, parts[0], value if isinstance(value, str) else right.strip(), self.source, at)
            self._set(ROOT_FILE, parts, value, at)
        else:  # in the file that conf/config.yaml names after the settings so far
            main: Root = build(Root, read(self.root, ROOT_FILE, (), self.changed))
            file = choose(self.root, parts[0], getattr(main, parts[0]), self.source, at)
            self._set(file, parts[1:], value, at)

    def _set(self, name: str, path: list[str], value: Any, at: Key) -> None:
        self.placed.append((name, ".".join(path), value))
        raw = self.changed[name] if name in self.changed else read_bytes(self.root, name)
        refuse(parse(name, (), raw).broken)  # our own errors, with line and column, before ruamel's
        try:
            document = place = _yaml().load(raw.decode("utf-8"))
        except (YAMLError, ValueError) as error:
            raise ConfigError("the file cannot be edited: " + str(error).splitlines()[0], where=name) from error
        for part in path[:-1]:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise self.source.error(at, f"{shown(part)} in {name} is not a mapping", "set it as a whole")
        before = place.get(path[-1], "default")
        if path[-1] in place and _same(before, value):
            return
        place[path[-1]] = value
        written = io.BytesIO()
        _yaml().dump(document, written)
        self.changed[name] = written.getvalue()
        old, new = (each if isinstance(each, str) else shown(each) for each in (before, value))
        self.lines.append(f"{name}: {'.'.join(path)}: {old} -> {new}")

    def check(self) -> Config:
        """Load the result; a mistake in a file we edited is reported at the setting that made it."""
        try:
            return load_config(self.root, changed=self.changed)
        except ConfigError as error:
            refuse(map(self._blamed, error.every()))
            raise

    def _blamed(self, error: ShardwrightError) -> ShardwrightError:
        what = error.what
        if (error.where or "").partition(":")[0] not in self.changed:
            return error
        made = (at for path, at in reversed(self.made.items()) if re.match(rf"{re.escape(path)}[:.\[]", what))
        return ConfigError(what, where=self.source.where(next(made, ("settings",))), remedy=error.remedy)


def _same(before: Any, value: Any) -> bool:
    """Equal and of one type (ruamel's numbers and texts are subclasses of Python's)."""
    return bool(before == value) and all(isinstance(before, t) == isinstance(value, t) for t in (bool, int, float))


def _yaml() -> Any:
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 120
    yaml.indent(mapping=2, sequence=4, offset=2)
    yaml.representer.add_representer(
        type(None), lambda writer, _: writer.represent_scalar("tag:yaml.org,2002:null", "null")
    )
    return yaml


def _write(root: Path, changed: dict[str, bytes]) -> None:
    """Write every file beside its place first, then move them all: a full disk changes nothing."""
    ready: list[tuple[str, Path]] = []
    name = "conf"
    try:
        for name, content in changed.items():
            place = (root / name).resolve()
            handle, temporary = tempfile.mkstemp(prefix=f".{place.name}.", suffix=".tmp", dir=place.parent)
            ready.append((temporary, place))
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            shutil.copymode(place, temporary)
        for temporary, place in ready:
            os.replace(temporary, place)
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror}", where=name) from error
    finally:
        for temporary, _ in ready:
            with suppress(FileNotFoundError):
                os.unlink(temporary)
