"""`shardwright init [FOLDER]`: a project in the user's own repository. What is there already stays as it is."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from shardwright import __version__
from shardwright.pipeline.base.errors import ShardwrightError
from shardwright.pipeline.base.files import write_atomic
from shardwright.pipeline.base.log import say
from shardwright.pipeline.config.made_by import FILE, MadeBy, check_version, made_by, made_today
from shardwright.stages.project.files import needed_files, new_files

NO_GIT = "[core]\n    no_scm = true\n"  # DVC refuses to work outside git unless it is told to
MARKS = ("conf/config.yaml", "dvc.yaml")  # a folder that has one, and not of ours, has a use for the name


class ProjectError(ShardwrightError):
    """A project cannot be made, or brought forward."""


def run(folder: Path) -> int:
    made = made_by(folder)
    found = new_files()
    if made is None:
        refuse_taken(folder, found)
    else:
        check_version(folder)
    wanted = found if in_git(folder) else found | {".dvc/config": found[".dvc/config"].replace("[core]\n", NO_GIT)}
    missing = {path: text for path, text in wanted.items() if not (folder / path).exists()}
    deleted = sorted(path for path in missing if made and path in made.digests and path not in needed_files())
    written = {path: text for path, text in missing.items() if path not in deleted}
    refuse_in_the_way(folder, written)
    write(folder, written, made or made_today(found))
    if made and written:
        say(f"wrote again what the project needs: {', '.join(written)}")
    else:
        tell(folder, written, kept=[path for path in found if path not in missing], deleted=deleted)
    return 0


def refuse_taken(folder: Path, today: Mapping[str, str]) -> None:
    for mark in MARKS:
        place = folder / mark
        if place.is_dir() or (place.exists() and place.read_bytes() != today[mark].encode()):
            what = f"there is a {mark} that `shardwright init` has not written"
            remedy = "name a folder for the project, such as `shardwright init training`; or, if a version without"
            raise ProjectError(what, where=str(place), remedy=f"{remedy} `init` made it, `shardwright upgrade`")


def refuse_in_the_way(folder: Path, paths: Iterable[str]) -> None:
    """Before anything is written."""
    for path in paths:
        for place in ((folder / path), *(folder / path).parents):
            if os.path.lexists(place) and not place.is_dir():
                raise ProjectError("is in the way of the project", where=str(place), remedy="move it, or name a folder")


def in_git(folder: Path) -> bool:
    folder = folder.resolve()
    return any((place / ".git").exists() for place in (folder, *folder.parents))


def write(folder: Path, files: Mapping[str, str], made: MadeBy) -> None:
    """The file that says that it is a project comes last: what was cut off before is done again where it is asked."""
    try:
        for path, text in {**files, FILE: made.text()}.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            write_atomic(folder / path, text.encode())
    except OSError as error:
        what = f"cannot be written: {error.strerror or error}"
        remedy = "make room, or name a folder that you may write to"
        raise ProjectError(what, where=str(error.filename or folder), remedy=remedy) from error


def tell(folder: Path, written: Mapping[str, str], kept: list[str], deleted: list[str]) -> None:
    if not written:
        say(f"the project in {folder} is there already, nothing was changed (shardwright {__version__})")
    else:
        say(f"wrote {len(written)} files into {folder} (shardwright {__version__}):")
        say("  my_model.py                 a small model and its data: put yours here")
        say("  conf/config.yaml            what is chosen; every choice is a file below conf/, with comments")
        say("  dvc.yaml                    the seven stages")
    if written and kept:
        say(f"left as they are: {', '.join(kept)}")
    if deleted:
        say(f"left out, since you removed them (git has them): {', '.join(deleted)}")
    if not in_git(folder):
        say("in no git repository: `dvc exp` and `sweep` need one (`git init`, and no_scm out of .dvc/config)")
    say("next:")
    if folder.resolve() != Path.cwd():
        say(f"  cd {os.path.relpath(folder)}")
    say("  shardwright check           files, classes, one item of the data, devices")
    say("  dvc repro                   plans and trains; again: what has changed since, and nothing else")
    say("  shardwright summary         the plan, predicted and measured; `shardwright ui` for MLflow")
