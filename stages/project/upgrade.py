"""`shardwright upgrade`: a project of an older version, brought forward; the difference is shown.

A file that the user has not edited becomes what a new project has. In others below conf/, keys and classes that have
other names now get these; in dvc.yaml our stages and plots are those of today, and the user's stay. Before 0.2.0 a
project was a copy of the whole repository: of that, conf/, dvc.yaml and the Makefile's commands are brought forward.
"""

from __future__ import annotations

import difflib
import io
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError

from shardwright import __version__
from shardwright.pipeline.base.log import say
from shardwright.pipeline.config.made_by import FILE, MadeBy, check_version, made_by, made_today
from shardwright.pipeline.config.source import read_text
from shardwright.stages.project.files import needed_files, new_files
from shardwright.stages.project.init import ProjectError, write
from shardwright.stages.project.renamed import brought_forward

COPIED = re.compile(r"cmd: python -m stages ")  # dvc.yaml of a copy of the repository
MAKEFILE = "Makefile"  # of such a copy; a project of today has none
OLD_COMMAND = re.compile(r"(?:\$\(BIN\)/)?python -m stages (?=\w)")
OLD_MODULE = re.compile(r"-m (?=(?:pipeline|stages)\.)")
INSTALLS_COPY = re.compile(r"pip install[^\n]* -e [\"']?\.")
OLD_SCRIPT = re.compile(r"-m (?:pipeline|stages)\b")
OLD_IMPORT = re.compile(r"(?m)^\s*(?:from|import) (?:pipeline|stages)\b")


def run(folder: Path, only_show: bool) -> int:
    made = made_by(folder) or _copy(folder)
    if made.newer:
        check_version(folder)
    today = new_files()
    texts = _texts(folder, [*today, MAKEFILE] if made.copied else today)
    changed = {path: new for path, old in texts.items() if (new := _new(path, old, made, today)) != old}
    wanted = needed_files() if made.copied else today
    removed = made.digests.keys() - needed_files().keys()
    added = {path: text for path, text in wanted.items() if path not in texts and path not in removed}
    for path, text in {**changed, **added}.items():
        say("".join(_difference(path, texts.get(path, ""), text)).rstrip("\n"))
    if not changed and not added and made.version == __version__:
        say(f"the project is of shardwright {__version__}: nothing to do")
        return 0
    for line in _by_hand(folder, {**texts, **changed}) if made.copied else ():
        say(line)
    if only_show:
        say(f"nothing was written: `shardwright upgrade` brings the project from {made.version} to {__version__}")
        return 0
    write(folder, {**changed, **added}, made_today(today))
    counts = f"{len(changed)} files changed, {len(added)} new"
    say(f"the project was of shardwright {made.version} and is of {__version__}: {counts}")
    return 0


def _copy(folder: Path) -> MadeBy:
    """Of the repository, before there was `init`."""
    path = folder / "dvc.yaml"
    if (folder / "shardwright/__init__.py").is_file():
        raise ProjectError("is the repository of shardwright itself", where=str(folder), remedy="`git pull` renews it")
    found = (folder / "conf/config.yaml").is_file() and path.is_file()
    if not found or not COPIED.search(read_text(folder, path.name)):
        raise ProjectError("is no project", where=str(folder), remedy="`shardwright init` makes one")
    return MadeBy("0.1.0", {})


def _texts(folder: Path, ours: Iterable[str]) -> dict[str, str]:
    """What is there of ours, and the user's own files below conf/."""
    conf = [path.relative_to(folder).as_posix() for path in sorted(folder.glob("conf/**/*.yaml"))]
    paths = dict.fromkeys([*conf, *(path for path in ours if (folder / path).is_file())])
    return {path: read_text(folder, path) for path in paths if path != FILE}


def _new(path: str, text: str, made: MadeBy, today: dict[str, str]) -> str:
    if path in today and path in made.digests and not made.edited(path, text):
        return today[path]
    if path == "dvc.yaml":
        return _with_our_stages(text, today[path])
    if path == MAKEFILE:
        return OLD_MODULE.sub("-m shardwright.", OLD_COMMAND.sub("shardwright ", text))
    return brought_forward(path, text, made.copied) if path.startswith("conf/") and path.endswith(".yaml") else text


def _with_our_stages(text: str, today: str) -> str:
    yaml = YAML()
    yaml.width = 10_000
    yaml.indent(mapping=2, sequence=4, offset=2)
    theirs, ours = _loaded(yaml, text), YAML().load(today)
    own = {name: stage for name, stage in theirs["stages"].items() if name not in ours["stages"]}
    names = [_name(plot) for plot in ours["plots"]]
    plots = [plot for plot in _plots(theirs.get("plots")) if _name(plot) not in names]
    left = {key: value for key, value in theirs.items() if key not in ("stages", "plots")}
    if not own and not plots and all(value == ours.get(key) for key, value in left.items()):
        return today
    theirs["stages"] = {**ours["stages"], **own}
    theirs["plots"] = [*ours["plots"], *plots]
    out = io.StringIO()
    yaml.dump(theirs, out)
    return out.getvalue()


def _loaded(yaml: YAML, text: str) -> Any:
    try:
        found = yaml.load(text)
    except MarkedYAMLError as error:
        where = f"dvc.yaml:{error.problem_mark.line + 1}" if error.problem_mark else "dvc.yaml"
        raise ProjectError(f"bad YAML: {error.problem}", where=where, remedy="mend it") from error
    if not isinstance(found, dict) or not isinstance(found.get("stages"), dict):
        raise ProjectError("holds no stages", where="dvc.yaml", remedy="restore it from git")
    return found


def _plots(found: Any) -> list[str | dict[str, Any]]:
    """As a list, which they may also be by name."""
    return [{name: what} for name, what in found.items()] if isinstance(found, dict) else list(found or ())


def _name(plot: str | dict[str, Any]) -> str:
    """Of a row of `plots`: a file, or a name with what it draws."""
    return plot if isinstance(plot, str) else next(iter(plot))


def _difference(path: str, old: str, new: str) -> list[str]:
    return list(difflib.unified_diff(old.splitlines(True), new.splitlines(True), path, path))


def _by_hand(folder: Path, texts: Mapping[str, str]) -> list[str]:
    """Of a copy of our repository, what is not ours to change: the user's source and stages, and what lies beside."""
    left = [name for name in ("pipeline", "stages", "benchmarks") if (folder / name / "__init__.py").is_file()]
    old = list(_that_say(OLD_IMPORT, folder, ("*.py",), left))
    scripts = list(_that_say(OLD_SCRIPT, folder, ("*.sh", "*.sbatch"), left))
    told = [f"{path}: import shardwright.pipeline and shardwright.stages" for path in old]
    told += [
        f"{path}: `python -m stages` is `shardwright` now (`shardwright sbatch` writes its own)" for path in scripts
    ]
    if COPIED.search(texts["dvc.yaml"]):
        told.append("dvc.yaml: `python -m stages` in your stages is `shardwright` now")
    if INSTALLS_COPY.search(texts.get(MAKEFILE, "")):
        told.append(
            f"{MAKEFILE}: it installs this copy, of the older version: let it install shardwright {__version__}"
        )
    if left:
        told.append(f"no longer read, unless your model lies there: {', '.join(f'{name}/' for name in left)}")
    return told


def _that_say(words: re.Pattern[str], folder: Path, kinds: Iterable[str], left: Iterable[str]) -> Iterator[Path]:
    """Files of the user's own: not what lies in the folders of ours, in tests or where other programs keep theirs."""
    paths = sorted(path for kind in kinds for path in folder.rglob(kind) if path.is_file())
    for path in (path.relative_to(folder) for path in paths):
        hidden = any(part.startswith(".") for part in path.parts)
        theirs = not hidden and path.parts[0] not in (*left, "tests")
        if theirs and words.search((folder / path).read_text(errors="replace")):
            yield path
