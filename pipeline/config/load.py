"""conf/ as one checked `Config`: read, resolve `${...}`, check, choose the groups' files, build typed objects.

A `${...}` refers to a key of the same file. It may not ask the environment (nor any other resolver) except under
`tracking` in conf/config.yaml: DVC compares the text of the files, and a stage would not run again when such a value
changes. For the same reason the keys of conf/config.yaml that dvc.yaml reads must stand there as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from shardwright.pipeline.base.errors import ConfigError, Mistakes, ShardwrightError, nearest, refuse, shown
from shardwright.pipeline.config.check import check, check_key, fields_of, mandatory
from shardwright.pipeline.config.consistency import CHECKS, check_checkpoint, check_cluster
from shardwright.pipeline.config.made_by import check_version
from shardwright.pipeline.config.schema import GROUPS, Checkpoint, ClusterSettings, Config, Root, Solve, Train
from shardwright.pipeline.config.source import UNREAD, Key, Source, listing, read

ROOT_FILE = "conf/config.yaml"
WEIGHT_FILES = (".safetensors", ".safetensors.index.json", ".pt", ".pth", ".bin")
_RESOLVER = re.compile(r"(?<!\\)\$\{\s*[A-Za-z_][\w.]*\s*:")
_NAMED = re.compile(r"(?!\?\?\?$)(?!.*\$\{)\s*\S.*", re.DOTALL)  # what is no text of a name is told as such
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def load_config(root: Path, *, changed: dict[str, bytes] | None = None) -> Config:
    """The configuration of the project at `root`; its mistakes are told all at once, a ConfigError of one line each.

    `changed` holds new contents of files by their name relative to root: what would be loaded if they were written.
    """
    draft = read_draft(root, changed=changed)
    draft.mistakes.refuse()
    return draft.config


@dataclass(frozen=True)
class Draft:
    """A configuration with its mistakes."""

    config: Config  # None in the place of groups whose files have any
    sound: Config  # of these files the keys that have none, where these are enough
    mistakes: Mistakes

    def has(self, *groups: str) -> bool:
        return all(getattr(self.config, group) is not None for group in groups)


def read_draft(root: Path, *, changed: dict[str, bytes] | None = None) -> Draft:
    """What is there, for who tells mistakes of other kinds with those of the files."""
    check_version(root)
    mistakes = Mistakes()
    source = read(root, ROOT_FILE, (), changed)
    main: Root | None = None
    with mistakes.gather():
        main = build(Root, source)
    parts: dict[str, Any] = dict.fromkeys(GROUPS)
    sound = dict(parts)
    for group, name in _chosen(main, source).items():
        with mistakes.gather():
            own = read(root, choose(root, group, name, source, (group,)), (group,), changed)
            try:
                parts[group] = sound[group] = _load_group(root, own, GROUPS[group], mistakes)
            except ShardwrightError:
                sound[group] = _repaired(GROUPS[group], own)
                raise
    config = Config(root=main or _choices(source), **parts)

    def source_of(group: str) -> Source:
        return read(root, group_file(group, config.choices[group]), (group,), changed)

    for together, groups in CHECKS:
        if all(parts[group] is not None for group in groups):
            mistakes.add(together(config, source_of))
    return Draft(config, Config(root=config.root, **sound), mistakes)


def _chosen(main: Root | None, source: Source) -> dict[str, str]:
    """The file named in each group; as it stands where conf/config.yaml has a mistake elsewhere."""
    given = {group: getattr(main, group) if main else source.data.get(group) for group in GROUPS}
    return {group: name for group, name in given.items() if isinstance(name, str) and _NAMED.fullmatch(name)}


def _choices(source: Source) -> Root:
    named: dict[str, Any] = {group: str(source.data.get(group)) for group in GROUPS}
    code = source.data.get("code")
    if isinstance(code, str) and code.strip():
        named["code"] = code
    return Root(**named)


def group_file(group: str, name: str) -> str:
    return f"conf/{group}/{name}.yaml"


def choose(root: Path, group: str, name: str, source: Source, key: Key) -> str:
    """The file a choice names; `source` and `key` tell where the choice was written."""
    label = "" if key[-1:] == (group,) else f"{group} "
    if not _NAME.fullmatch(name):
        raise source.error(key, f"got {label}{shown(name)}, expected a name without folders or '.yaml'")
    names = listing(root, group)
    if name not in names:
        raise source.error(key, f"there is no {group_file(group, name)}", choices_remedy(name, names))
    return group_file(group, name)


def choices_remedy(name: str, names: list[str]) -> str:
    near = nearest(name, names)
    listed = "choose one of: " + ", ".join(names) if names else "add one"
    return f"did you mean '{near}'? {listed}" if near else listed


def load_part(root: Path, group: str, name: str, **changed: Any) -> Any:
    """A file of a group that exists, whether it is chosen or not, with some of its keys changed."""
    source = read(root, group_file(group, name), (group,), None)
    part = replace(build(GROUPS[group], source), **changed)
    refuse(check_cluster(part, source) if isinstance(part, ClusterSettings) else ())
    return part


def _load_group(root: Path, source: Source, schema: type, mistakes: Mistakes) -> Any:
    part = build(schema, source)
    if isinstance(part, ClusterSettings):
        refuse(check_cluster(part, source))
    if isinstance(part, Checkpoint):
        refuse(check_checkpoint(part, source))
    with mistakes.gather():  # a file that is not there says nothing against the others
        if isinstance(part, Solve) and part.plan is not None:
            _check_saved(root, part.plan, source)
        if isinstance(part, Train) and part.init_from is not None:
            _check_weights(root, part.init_from, source)
    return part


def _repaired(schema: type, source: Source) -> Any:
    """What the file would be without the keys that have a mistake; None where one of them is mandatory."""
    known, fields = _known(source.data), fields_of(schema)
    kept = {name: known[name] for name in fields if name in known and not list(check_key(schema, name, known, source))}
    if any(mandatory(item) and name not in kept for name, (_, item) in fields.items()):
        return None
    with suppress(ShardwrightError):
        return build(schema, replace(source, data={name: source.data[name] for name in kept}, broken=()))
    return None


def _check_weights(root: Path, file: str, source: Source) -> None:
    if not file.endswith(WEIGHT_FILES):
        raise source.error(("init_from",), f"got {shown(file)}, expected a file ending in {', '.join(WEIGHT_FILES)}")
    if not (root / file).is_file():
        raise source.error(("init_from",), f"there is no file {file}", "give a path from the project's folder, or null")


def _check_saved(root: Path, name: str, source: Source) -> None:
    """A saved plan lies in one folder, so that DVC sees it change."""
    if not _NAME.fullmatch(name):
        raise source.error(("plan",), f"got {shown(name)}, expected a name without folders or '.json'")
    names = listing(root, "plan", ".json")
    if name not in names:
        save = f"save it: `cp runs/checkpoint/plan.json {saved_file(name)}`"
        remedy = f"{choices_remedy(name, names)}, or {save}" if names else save
        raise source.error(("plan",), f"there is no {saved_file(name)}", remedy)


def saved_file(name: str) -> str:
    return f"conf/plan/{name}.json"


def build(schema: type, source: Source) -> Any:
    """The file as an instance of the schema: resolved, checked, defaults filled in. Everyone gets a copy."""
    if type(source) is not Source or "${" in str(source.data):  # no file; the environment may have changed
        return _built(schema, source)
    return deepcopy(_remembered(schema, source))


@lru_cache(maxsize=64)
def _remembered(schema: type, source: Source) -> Any:
    return _built(schema, source)


def _built(schema: type, source: Source) -> Any:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    mistakes = Mistakes()
    mistakes.add(source.broken)
    mistakes.add(_check_interpolations(source.data, source, ()))
    resolved: Any = None
    unresolved: list[ConfigError] = []
    try:
        if not mistakes.found:
            written = OmegaConf.create(source.data)
            resolved = OmegaConf.to_container(written, resolve=True)
    except (OmegaConfBaseException, RecursionError) as error:
        unresolved.append(_unresolved(error, source))
    mistakes.add(check(schema, _known(source.data) if resolved is None else resolved, source))
    mistakes.add([] if mistakes.found else unresolved)  # what it asks for may be what is wrong
    mistakes.refuse()
    try:
        return OmegaConf.to_object(OmegaConf.merge(_defaults(schema), written))
    except (OmegaConfBaseException, RecursionError) as error:
        raise _unresolved(error, source) from error


def _known(value: Any) -> Any:
    """What stands there in so many words, where `${...}` cannot be resolved."""
    if isinstance(value, str) and "${" in value:
        return UNREAD
    if isinstance(value, dict):
        return {key: _known(item) for key, item in value.items()}
    return [_known(item) for item in value] if isinstance(value, list) else value


def _unresolved(error: Any, source: Source) -> ConfigError:
    """OmegaConf's error, of which the first line says what was wrong, at the key it names."""
    if _too_deep(error):
        return ConfigError("'${...}' is nested too deeply", where=source.where(), remedy="write the value out")
    parts = re.findall(r"[^.\[\]]+", error.full_key or "")
    key = tuple(int(part) if part.isdigit() else part for part in parts)
    first = (str(error).splitlines() or ["cannot be resolved"])[0]
    reason = "".join(letter if letter.isprintable() else "?" for letter in first)
    remedy = "an interpolation is ${key.in.this.file}" if "$" in str(_at(source, key)) else None
    return source.error(key, reason if len(reason) <= 120 else f"{reason[:117]}...", remedy)


def _too_deep(error: BaseException | None) -> bool:
    """Where the stack ends, OmegaConf may be just where it makes another error of any; errors may lead in a circle."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen and not isinstance(error, RecursionError):
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return isinstance(error, RecursionError)


@cache
def _defaults(schema: type) -> Any:
    """A third of the time of `load_config` where it is made each time; `merge` copies it."""
    from omegaconf import OmegaConf

    return OmegaConf.structured(schema)


def _at(source: Source, key: Key) -> Any:
    value: Any = source.data
    for part in key:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def _check_interpolations(value: Any, source: Source, key: Key) -> Iterator[ConfigError]:
    if isinstance(value, str) and "${" in value:
        free = source.name == ROOT_FILE and key[0] == "tracking"
        if source.name == ROOT_FILE and not free:
            yield source.error(key, "'${...}' is not allowed here", "DVC reads this value as it stands: write it out")
        elif _RESOLVER.search(value) and not free:
            yield source.error(key, f"resolver in {shown(value)} is not allowed", "DVC cannot see its value change")
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for part, item in items:
        yield from _check_interpolations(item, source, (*key, part))
