"""The commands that the docs show, and whether the programs know their words, which is found without running them."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import re
import shlex
import shutil
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import yaml

from shardwright.pipeline.base.errors import ShardwrightError
from shardwright.pipeline.config import load_config
from shardwright.stages.command_line import STAGES
from shardwright.stages.command_line import _parser as stages_parser
from shardwright.stages.commands import COMMANDS

PAGES = ("README.md", "CONTRIBUTING.md", "docs/*.md", "stages/*/README.md")
SHELL = ("sh", "bash", "shell", "console")
PROGRAMS = (
    *("python", "shardwright", "dvc", "make", "git", "source", "mlflow", "pre-commit", "pip", "apt-get"),
    *("torchrun", "srun", "sbatch", "cp", "mv", "rm", "mkdir", "echo", "cat", "export"),
)
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"(?<!`)`([^`]+)`(?!`)")


@dataclass(frozen=True)
class Shown:
    """A command as a page shows it: without its comment, options in brackets without these."""

    page: str
    text: str


def shown_commands(root: Path) -> list[Shown]:
    """Of all pages, in their order; a command that stands on several pages once for each."""
    found = []
    for pattern in PAGES:
        for path in sorted(root.glob(pattern)):
            page = str(path.relative_to(root))
            found += [Shown(page, text) for text in dict.fromkeys(commands_of(path.read_text()))]
    return found


def commands_of(text: str) -> list[str]:
    """Every line of a fence that is a shell's; what looks like a command in other fences, indented lines and prose."""
    found = []
    for _, language, block in FENCE.findall(text):
        lines = _lines(block)
        found += [line for line in lines if language in SHELL or _is_command(line)]
    rest = FENCE.sub("", text)
    indented = "\n".join(line[4:] for line in rest.splitlines() if line.startswith("    "))
    found += [line for line in _lines(indented) if _is_command(line)]
    prose = "\n".join(line for line in rest.splitlines() if not line.startswith("    "))
    found += [_whole(inline) for inline in map(_tidy, INLINE.findall(prose)) if _is_command(_whole(inline))]
    return [one for one in map(_tidy, found) if one]


def _lines(block: str) -> list[str]:
    """A line that ends in a backslash goes on in the next; a prompt is not part of it."""
    return [line.strip().removeprefix("$ ") for line in re.sub(r"\\\n\s*", "", block).splitlines()]


def _tidy(command: str) -> str:
    """Without comment, brackets of optional words, path of the environment and line breaks."""
    command = re.sub(r"(^|\s)#.*", "", command.replace("\n", " "))
    command = re.sub(r"\[(--[^\]]+|\w+\.\.\.)\]", r"\1", command)
    return " ".join(command.replace(".venv/bin/python", "python").replace(".venv/bin/pre", "pre").split())


def _is_command(line: str) -> bool:
    words = line.split()
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words = words[1:]
    return len(words) > 1 and words[0] in PROGRAMS


def _whole(inline: str) -> str:
    """In prose `explain NAME` is short for `shardwright explain NAME`."""
    first, _, rest = inline.partition(" ")
    return f"shardwright {inline}" if rest and first in COMMANDS else inline


# -- words that the programs know -------------------------------------------------------------------------------------


def complaint(command: str, root: Path, scratch: Path) -> str | None:
    """What is wrong with its words: an option, a file, a key, a stage or a target that does not exist."""
    for part in re.split(r"\s*(?:&&|\|)\s*", command):
        words = [word for word in shlex.split(part) if not re.fullmatch(r"[A-Z_]+=\S*", word)]
        why = _complaint(words, root, scratch)
        if why:
            return why
    return None


def _complaint(words: list[str], root: Path, scratch: Path) -> str | None:
    match words:
        case ["python", "-m", module, *rest]:
            return _of_module(module, rest, root)
        case ["shardwright", *rest]:
            return _refusal(stages_parser(), rest)
        case ["torchrun", *rest]:
            return _of_module("torch.distributed.run", rest, root)
        case ["srun", *rest]:
            return _complaint(rest[rest.index("shardwright") :], root, scratch)
        case ["sbatch", script]:
            default = stages_parser().parse_args(["sbatch"]).out
            return None if script == str(default) else f"`shardwright sbatch` writes {default}"
        case ["make", target, *_]:
            known = re.findall(r"(?m)^([\w-]+):", (root / "Makefile").read_text())
            return None if target in known else f"the Makefile has no {target}"
        case ["dvc", "exp", "run", *rest]:
            return _of_experiment(rest, root, scratch)
        case ["dvc", "repro" | "commit" | "status", *rest]:
            return _unknown_stages([word for word in rest if not word.startswith("-")], root)
        case _:
            return None


def _of_module(module: str, words: list[str], root: Path) -> str | None:
    if module in ("stages", "shardwright"):
        return _refusal(stages_parser(), words)
    if module == "torch.distributed.run":
        from torch.distributed.run import get_args_parser

        why = _refusal(get_args_parser(), words)
        given = get_args_parser().parse_args(words) if why is None else None
        return why if given is None else _of_module(given.training_script, given.training_script_args, root)
    if module.endswith(".py"):
        return None if (root / module).is_file() else f"no file {module}"
    if module == "pytest":
        return next((f"no file {word}" for word in words if word.endswith(".py") and not (root / word).is_file()), None)
    file = module.removeprefix("shardwright.").replace(".", "/")
    places = [root / f"{file}{end}" for end in (".py", "/__main__.py")]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        return f"no module {module}"
    if file.startswith("stages/"):
        parser = getattr(importlib.import_module(module), "_parser", None)
        return _refusal(parser(), words) if parser else None
    source = path.read_text()
    return next((f"{module} has no {word}" for word in words if word[:2] == "--" and f'"{word}"' not in source), None)


def _refusal(parser: argparse.ArgumentParser, words: list[str]) -> str | None:
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told), contextlib.redirect_stdout(io.StringIO()):
            parser.parse_args(words)
    except SystemExit as end:
        return told.getvalue().splitlines()[-1] if end.code else None
    return None


def _of_experiment(words: list[str], root: Path, scratch: Path) -> str | None:
    settings = [value for option, value in pairwise(words) if option == "-S"]
    stages = [word for word in words if word != "-S" and word not in settings]
    return _unknown_stages(stages, root) or next(
        filter(None, (_refused_setting(one, root, scratch) for one in settings)), None
    )


def _refused_setting(setting: str, root: Path, scratch: Path) -> str | None:
    """`conf/train/adamw.yaml:steps=50` as DVC would write it, the file chosen, and checked as every stage does."""
    file, _, rest = setting.partition(":")
    key, _, value = rest.partition("=")
    shutil.rmtree(scratch / "conf", ignore_errors=True)
    shutil.copytree(root / "conf", scratch / "conf")
    if not (scratch / file).is_file():
        return f"no file {file}"
    if file != "conf/config.yaml":
        _set(scratch / "conf/config.yaml", Path(file).parent.name, Path(file).stem)
    _set(scratch / file, key.removeprefix("+"), yaml.safe_load(value))
    try:
        load_config(scratch)
    except ShardwrightError as error:
        return error.line()
    return None


def _set(path: Path, key: str, value: object) -> None:
    content = yaml.safe_load(path.read_text())
    *outer, last = key.split(".")
    inner = content
    for name in outer:
        inner = inner.setdefault(name, {})
    inner[last] = value
    path.write_text(yaml.safe_dump(content, sort_keys=False))


def _unknown_stages(names: list[str], root: Path) -> str | None:
    known = yaml.safe_load((root / "dvc.yaml").read_text())["stages"]
    assert tuple(name for name in known if name != "train-settings") == STAGES
    return next((f"no stage {name}" for name in names if name not in STAGES), None)
