"""`shardwright upgrade`: a project of an older version, brought forward; the difference is shown.

A file that the user has not edited becomes what a new project has. In others below conf/, keys and classes that have
other names now get these; in dvc.yaml our stages and plots are those of today, and the user's stay. Before 0.2.0 a
project was a copy of the whole repository: of that, conf/ and dvc.yaml are brought forward.
"""

from __future__ import annotations

import difflib
import io
import re
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from shardwright import __version__
from shardwright.pipeline.base.log import say
from shardwright.pipeline.config.made_by import FILE, MadeBy, made_by, made_today
from shardwright.stages.project.files import needed_files, new_files
from shardwright.stages.project.init import ProjectError, write
from shardwright.stages.project.renamed import brought_forward

COPIED = re.compile(r"cmd: python -m stages ")  # dvc.yaml of a copy of the repository
OLD_IMPORT = re.compile(r"(?m)^\s*(?:from|import) (?:pipeline|stages)\b")


def run(folder: Path, only_show: bool) -> int:
    made = made_by(folder) or _copy(folder)
    today = new_files()
    texts = _texts(folder, today)
    changed = {path: new for path, old in texts.items() if (new := _new(path, old, made, today)) != old}
    wanted = today if made.digests else needed_files()
    added = {path: text for path, text in wanted.items() if path not in texts and path not in made.digests}
    for path, text in {**changed, **added}.items():
        say("".join(_difference(path, texts.get(path, ""), text)).rstrip("\n"))
    if not changed and not added and made.version == __version__:
        say(f"the project is of shardwright {__version__}: nothing to do")
        return 0
    for line in _by_hand(folder):
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
    if not (folder / "conf/config.yaml").is_file() or not path.is_file() or not COPIED.search(path.read_text()):
        raise ProjectError("is no project", where=str(folder), remedy="`shardwright init` makes one")
    return MadeBy("0.1.0", {})


def _texts(folder: Path, today: dict[str, str]) -> dict[str, str]:
    """What is there of ours, and the user's own files below conf/."""
    conf = [path.relative_to(folder).as_posix() for path in sorted(folder.glob("conf/**/*.yaml"))]
    paths = dict.fromkeys([*conf, *(path for path in today if (folder / path).is_file())])
    return {path: (folder / path).read_text() for path in paths if path != FILE}


def _new(path: str, text: str, made: MadeBy, today: dict[str, str]) -> str:
    if path in today and path in made.digests and not made.edited(path, text):
        return today[path]
    if path == "dvc.yaml":
        return _with_our_stages(text, today[path])
    return brought_forward(path, text) if path.startswith("conf/") and path.endswith(".yaml") else text


def _with_our_stages(text: str, today: str) -> str:
    yaml = YAML()
    yaml.width = 10_000
    yaml.indent(mapping=2, sequence=4, offset=2)
    theirs, ours = yaml.load(text), YAML().load(today)
    own = {name: stage for name, stage in theirs["stages"].items() if name not in ours["stages"]}
    names = [_name(plot) for plot in ours["plots"]]
    plots = [plot for plot in theirs.get("plots", ()) if _name(plot) not in names]
    if not own and not plots and theirs.get("vars") == ours.get("vars"):
        return today
    theirs["stages"] = {**ours["stages"], **own}
    theirs["plots"] = [*ours["plots"], *plots]
    out = io.StringIO()
    yaml.dump(theirs, out)
    return out.getvalue()


def _name(plot: str | dict[str, Any]) -> str:
    """Of a row of `plots`: a file, or a name with what it draws."""
    return plot if isinstance(plot, str) else next(iter(plot))


def _difference(path: str, old: str, new: str) -> list[str]:
    return list(difflib.unified_diff(old.splitlines(True), new.splitlines(True), path, path))


def _by_hand(folder: Path) -> list[str]:
    """What is not ours to change: the user's source, and what a copy of the repository has beside it."""
    left = [name for name in ("pipeline", "stages", "benchmarks") if (folder / name / "__init__.py").is_file()]
    code = [path for path in sorted(folder.rglob("*.py")) if path.relative_to(folder).parts[0] not in (*left, "tests")]
    hidden = [path for path in code if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    old = [path for path in hidden if OLD_IMPORT.search(path.read_text(errors="replace"))] if left else []
    told = [f"{path.relative_to(folder)}: import shardwright.pipeline and shardwright.stages" for path in old]
    if left:
        told.append(f"no longer read, unless your model lies there: {', '.join(f'{name}/' for name in left)}")
    return told
