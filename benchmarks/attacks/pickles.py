"""A pickle that makes a folder when it is read, in place of and beside every file that the project reads.

Digests are made right where that can be done: they are no signature. Held is an attack that was refused in one line, or
had no effect; with `code_run` the folder was there afterwards. Where the trust ends: docs/security.md.
"""

from __future__ import annotations

import io
import json
import logging
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import torch

from benchmarks import small_project
from benchmarks.attacks.outcome import TRACEBACK, Outcome, refusal
from benchmarks.forged_snapshots import FILES, read_all, sign, snapshot
from benchmarks.stage_runs import run
from shardwright.pipeline.base import artifacts
from shardwright.pipeline.base.errors import ShardwrightError
from shardwright.pipeline.config import load_config
from shardwright.pipeline.ops.discovery import discover
from shardwright.pipeline.tracking.spool import SendState, Spool
from shardwright.pipeline.user.weights import open_weights
from shardwright.stages.train.snapshots.manifest import Damaged, Unreadable, snapshots_in


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def attacks(folder: Path, sample: bool) -> Iterator[Outcome]:
    mark = folder / "code was run"
    forms = evil_forms(mark)
    pickle.loads(forms["a pickle"])
    yield Outcome("the pickle does what it says", mark.is_dir())
    mark.rmdir()
    for attack, act in {**in_snapshots(folder, forms), **in_weights(folder, forms), **in_others(folder, forms)}.items():
        yield _tried(attack, act, mark)
    if not sample:
        yield from by_command(folder, forms, mark)


def evil_forms(mark: Path) -> dict[str, bytes]:
    """As files begin that readers of tensors look into."""
    zipped, legacy = io.BytesIO(), io.BytesIO()
    torch.save({"weights/a": torch.zeros(3), "evil": Evil(mark)}, zipped)
    torch.save({"weights/a": Evil(mark)}, legacy, _use_new_zipfile_serialization=False)
    plain = pickle.dumps(Evil(mark))
    header = json.dumps({"__metadata__": {"format": "pt"}, "a": plain.hex()}).encode()
    return {
        "a pickle": plain,
        "a pickle of protocol 0": pickle.dumps(Evil(mark), protocol=0),
        "a file of torch.save": zipped.getvalue(),
        "a file of an old torch.save": legacy.getvalue(),
        "a safetensors header around a pickle": len(header).to_bytes(8, "little") + header + plain,
    }


def _tried(attack: str, act: Callable[[], Any], mark: Path) -> Outcome:
    found, held, traceback = "it had no effect", True, False
    try:
        act()
    except (ShardwrightError, Damaged, Unreadable) as error:
        found, held = str(error), "\n" not in str(error)
    except Exception as error:
        found, held, traceback = repr(error), False, True
    ran = mark.exists()
    if ran:
        mark.rmdir()
    return Outcome(attack, held and not ran, found, traceback, code_run=ran)


# ---- in this process, by what the commands call


def in_snapshots(folder: Path, forms: dict[str, bytes]) -> dict[str, Callable[[], Any]]:
    whole = snapshot(folder / "snapshots", 4)

    def put(file: str, content: bytes) -> None:
        path = Path(shutil.copytree(whole, folder / "copy" / whole.name))
        try:
            (path / file).write_bytes(content)
            if file in FILES:
                sign(path, file)
            read_all(path)
        finally:
            shutil.rmtree(path.parent)

    files = ("manifest.json", *FILES, ".metadata", "__0_0.distcp")
    return {
        f"{what} as {file} of a snapshot": lambda f=file, c=content: put(f, c)  # type: ignore[misc]
        for file in files
        for what, content in forms.items()
    }


def in_weights(folder: Path, forms: dict[str, bytes]) -> dict[str, Callable[[], Any]]:
    found: dict[str, Callable[[], Any]] = {}
    for number, (what, content) in enumerate(forms.items()):
        for ending in ("pt", "bin", "ckpt", "safetensors", "npy", "index.json"):
            path = folder / f"{number}.{ending}"
            path.write_bytes(content)
            found[f"{what} as weights called .{ending}"] = lambda path=path: open_weights(path, "init_from")  # type: ignore[misc]
    for place in ("0.pt", "../0.pt", str(folder / "2.pt")):
        index = folder / f"{len(found)}.index.json"
        index.write_text(json.dumps({"weight_map": {"a": place}}))
        found[f"an index of weights that names {place}"] = lambda path=index: open_weights(path, "init_from")  # type: ignore[misc]
    return found


def in_others(folder: Path, forms: dict[str, bytes]) -> dict[str, Callable[[], Any]]:
    """Artifacts, files of conf/, discovered rules, what waits for the tracking store."""
    content = forms["a pickle"]
    found: dict[str, Callable[[], Any]] = {}
    for kind, known in artifacts.KINDS.items():
        root = folder / f"project {kind}"
        path = known.path(root)
        path.parent.mkdir(parents=True)
        found[f"a pickle as {known.file}"] = lambda k=kind, r=root, p=path: _loaded(k, r, p, content)  # type: ignore[misc]
        called = {"_target_": "os.mkdir", "path": str(folder / "code was run")}
        header = {"kind": kind, "version": known.version, "inputs": {}, "config": {}}
        text = json.dumps({**header, "digest": artifacts._digest(header, called), "body": called}).encode()
        found[f"a _target_ in {known.file}"] = lambda k=kind, r=root, p=path, t=text: _loaded(k, r, p, t)  # type: ignore[misc]
    conf = folder / "project conf"
    (conf / "conf").mkdir(parents=True)
    for number, tag in enumerate(
        ("python/object/apply:os.mkdir", "python/object/new:os.mkdir", "python/name:os.mkdir")
    ):
        text = f"model: !!{tag} [{json.dumps(str(folder / 'code was run'))}]\n".encode()
        found[f"a tag {tag} in conf/config.yaml ({number})"] = lambda t=text: _configured(conf, t)  # type: ignore[misc]
    rule = folder / "rule.json"
    rule.write_bytes(content)
    found["a pickle as a discovered rule"] = lambda: discover._read(rule, "key")
    found["a pickle as the state of the spool"] = lambda: _spooled(folder / "spool", content)
    return found


def _loaded(kind: str, root: Path, path: Path, content: bytes) -> None:
    path.write_bytes(content)
    artifacts.load(kind, root)


def _configured(root: Path, text: bytes) -> None:
    (root / "conf/config.yaml").write_bytes(text)
    load_config(root)


def _spooled(root: Path, content: bytes) -> None:
    log = logging.getLogger("attacks.pickles")
    log.disabled = True  # it says that they are damaged
    spool = Spool(root, "execution", log)
    for name in ("sent.json", "records.jsonl", "points.jsonl"):
        path = spool.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    assert (spool.first_run(), spool.state(), any(spool.records().values())) == ({}, SendState(), False)


# ---- by the commands


READERS = {"graph": "profile", "profile": "solve", "cluster": "solve", "frontier": "checkpoint", "plan": "codegen"}
READERS |= {"module": "train", "report": "report"}


def by_command(folder: Path, forms: dict[str, bytes], mark: Path) -> Iterator[Outcome]:
    base = folder / "base"
    small_project.make(base, {"steps": 2, "snapshots": {"every": 2}})
    run(base, "train").check_returncode()
    for kind, command in READERS.items():
        path = artifacts.KINDS[kind].path(base)
        before = path.read_bytes()
        path.write_bytes(forms["a pickle"])
        told = _warning if command == "report" else refusal
        yield _marked(told(f"{command} with a pickle as {path.name}", run(base, command), path.name), mark)
        path.write_bytes(before)
    for number, (what, content) in enumerate(forms.items()):
        root = folder / f"init {number}"
        small_project.copy(base, root, init_from="weights.pt")
        (root / "weights.pt").write_bytes(content)
        yield _marked(refusal(f"train from {what} as weights", run(root, "train"), "weights.pt", "init_from"), mark)
    yield _marked(_old_snapshot(base, folder / "old", forms["a pickle"]), mark)


def _warning(attack: str, ended: CompletedProcess[str], name: str) -> Outcome:
    """The page is of what can be read, and one line says what cannot."""
    lines = [line for line in ended.stderr.splitlines() if "warning: " in line and name in line]
    traceback = TRACEBACK in ended.stderr
    held = ended.returncode == 0 and len(lines) == 1 and not traceback
    return Outcome(attack, held, "".join(lines) or ended.stderr[-400:], traceback)


def _old_snapshot(base: Path, root: Path, content: bytes) -> Outcome:
    """As torch.distributed.checkpoint writes them: the manifest of before, a pickle beside it."""
    small_project.copy(base, root)
    for path in (root / "runs/train/snapshots").glob("*/finished"):
        path.unlink()
    for run_folder in (root / "runs/train/snapshots").iterdir():
        for path in snapshots_in(run_folder):
            manifest = json.loads((path / "manifest.json").read_text())
            (path / "manifest.json").write_text(json.dumps({**manifest, "version": 1}))
            (path / ".metadata").write_bytes(content)
    return refusal("train from a snapshot with a pickle", run(root, "train"), "version 1")


def _marked(outcome: Outcome, mark: Path) -> Outcome:
    if not mark.exists():
        return outcome
    mark.rmdir()
    return Outcome(outcome.attack, False, outcome.found, outcome.traceback, code_run=True)
