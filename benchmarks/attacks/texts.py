"""Texts that we write of names that are not ours: the page, scripts for Slurm, tables, lines of a log."""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from benchmarks.attacks.names import MARK, NAMES
from benchmarks.attacks.outcome import Outcome

SAMPLED = ("a dollar", "html", "a newline", "a terminal's code", "markdown")


def attacks(folder: Path, sample: bool) -> Iterator[Outcome]:
    for what, name in NAMES.items():
        if sample and what not in SAMPLED:
            continue
        for text, attack in TEXTS.items():
            folder.mkdir(exist_ok=True)
            try:
                held, found = attack(folder, name)
            except Exception as error:  # any at all is a fault
                held, found = False, f"{type(error).__name__}: {error}"
            ran = any(folder.rglob(MARK))
            yield Outcome(f"{text}: {what}", held and not ran, found, code_run=ran)


def _page(folder: Path, name: str) -> tuple[bool, str]:
    from shardwright.stages.report.page import page_of, page_without_facts

    facts = _Facts(name)
    with mock.patch("shardwright.stages.report.page.encode", lambda facts: {"name": facts.title, name: [name]}):
        tags = _tags(page_of(facts))  # type: ignore[arg-type]
        plain = _tags(page_of(_Facts("x")))  # type: ignore[arg-type]
    without = _tags(page_without_facts(name)) == _tags(page_without_facts("x"))
    return tags == plain and without, "" if tags == plain else f"{set(tags) ^ set(plain)}"


class _Facts(SimpleNamespace):
    def __init__(self, title: str) -> None:
        super().__init__(title=title)


def _tags(page: str) -> list[str]:
    found: list[str] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attributes: found.append(f"{tag} {attributes}")  # type: ignore[method-assign]
    parser.feed(page)
    return found


def _script(folder: Path, name: str) -> tuple[bool, str]:
    """The script parses, and what it does with the name is one word or one folder."""
    from shardwright.stages import sbatch

    root = folder / "script"
    root.mkdir(exist_ok=True)
    train = SimpleNamespace(engine=None, max_restarts=0, snapshots=SimpleNamespace(every=0))
    config = SimpleNamespace(train=train, choices={"model": name})
    cluster = SimpleNamespace(hosts=(), devices=2, device="cpu")
    given = argparse.Namespace(out=Path("x.sbatch"), time="1:00:00", python=name, option=[])
    with (
        mock.patch.object(sbatch, "load_config", return_value=config),
        mock.patch.object(sbatch.artifacts, "load", return_value=SimpleNamespace(body=cluster, digest="0" * 64)),
    ):
        sbatch.sbatch(root, given, logging.getLogger("silent"))
    text = (root / "x.sbatch").read_bytes().replace(b"\x00", b"")
    parsed = subprocess.run(["bash", "-n"], input=text, capture_output=True, check=False)
    stubs = b"set -f; scontrol() { :; }; sed() { :; }; export SLURM_JOB_ID=1 SLURM_JOB_NODELIST=a SLURM_NODEID=0\n"
    stubs += b'srun() { eval "words=(${4#exec })" 2>/dev/null; printf \'%s\' "${words[0]}"; }\ncd() { :; }\n'
    said = subprocess.run(["bash"], input=stubs + text, capture_output=True, cwd=folder, check=False).stdout
    wanted = name.replace("\x00", "").encode()
    return parsed.returncode == 0 and said == wanted, f"{parsed.stderr!r} {said!r}"


def _line(folder: Path, name: str) -> tuple[bool, str]:
    from shardwright.pipeline.base.errors import ShardwrightError
    from shardwright.pipeline.base.log import _Format

    record = logging.LogRecord("x", logging.WARNING, "", 0, "%s is not there", (name,), None)
    shown = (
        _Format("[x] %(message)s").format(record).replace("\n", "").replace("\t", "") + ShardwrightError(name).line()
    )
    return shown.isprintable(), repr(shown)


def _table(folder: Path, name: str) -> tuple[bool, str]:
    from shardwright.stages.profile.picture import _cell

    row = f"| {_cell(name)} | 1 |"
    bars = sum(letter == "|" and row[place - 1] != "\\" for place, letter in enumerate(row))
    return bars == 3 and "\n" not in row and row.isprintable(), row


def _key(folder: Path, name: str) -> tuple[bool, str]:
    """What MLflow takes as the name of a param."""
    from mlflow.utils.validation import _validate_param

    from shardwright.pipeline.tracking.sender import _keys

    keys = _keys("trace.", [name, f"{name}x"])
    for key in keys.values():
        _validate_param(key, "1")
    return len(set(keys.values())) == 2, json.dumps(keys)


TEXTS: dict[str, Callable[[Path, str], tuple[bool, Any]]] = {
    "page": _page,
    "script": _script,
    "line": _line,
    "table": _table,
    "key": _key,
}
