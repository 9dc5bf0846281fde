"""Disks that are full when a snapshot, the weights or the report is to be written.

By the command a small file system of its own is mounted where that is allowed, and else files are limited in size.
Held is an attack that ended in one line, after which what was there before is there still, the run does not count as
ended, and the same command goes on from it once there is room.
"""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks import small_project
from benchmarks.attacks.outcome import Outcome, refusal
from benchmarks.stage_runs import run
from shardwright.pipeline.base.files import NotWritten, write_atomic
from shardwright.pipeline.user.weights import write_weights

LIMIT = 16_384  # bytes that a file may have: less than a rank's tensors, more than any other file of a run
STEPS = 4
WEIGHTS = "runs/train/weights/model.safetensors"


def attacks(folder: Path, sample: bool) -> Iterator[Outcome]:
    yield from files(folder)
    if not sample:
        yield from training(folder)


# ---- in this process


def files(folder: Path) -> Iterator[Outcome]:
    """A file that does not fit leaves the one before as it was, and nothing beside it."""
    many = torch.ones(LIMIT)
    weights = {"a": (many.dtype, tuple(many.shape))}
    acts: dict[str, Callable[[Path], None]] = {
        "weights that do not fit": lambda path: write_weights(path, weights, [many], {}),
        "a report that does not fit": lambda path: write_atomic(path, bytes(2 * LIMIT)),
    }
    for attack, act in acts.items():
        path = folder / "files" / "model.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"before")
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, before[1]))
        told = ""
        try:
            act(path)
        except NotWritten as error:
            told = str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        kept = path.read_bytes() == b"before"
        left = [other.name for other in path.parent.iterdir() if other != path]
        yield Outcome(
            attack, kept and not left and path.name in told, told or f"nothing was told; {left}", lost=not kept
        )


# ---- by the command


def training(folder: Path) -> Iterator[Outcome]:
    base = folder / "base"
    small_project.make(base, {"steps": STEPS, "snapshots": {"every": 2}})
    for number, (attack, act) in enumerate(BY_COMMAND.items()):
        root = folder / f"project{number}"
        small_project.copy(base, root)
        yield act(root, attack)
        shutil.rmtree(root)


def _settings(root: Path, **train: object) -> None:
    path = root / "conf/train/small.yaml"
    path.write_text(json.dumps({**json.loads(path.read_text()), **train}))


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@contextmanager
def _small_disk(folder: Path, size: int) -> Iterator[bool]:
    """Whether a file system of that size could be mounted there."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", str(folder)], check=False)


def _goes_on(outcome: Outcome, root: Path, *wanted: str) -> Outcome:
    """The mark of a run that has ended is not there; with room again the same command goes on."""
    marks = list((root / "runs/train/snapshots").glob("*/finished"))
    again = run(root, "train")
    good = again.returncode == 0 and all(text in again.stderr for text in wanted)
    ended = list((root / "runs/train/snapshots").glob(f"*/step-{STEPS:06d}/manifest.json"))
    held = outcome.held and not marks and good and bool(ended)
    told = outcome.found if outcome.held else f"{outcome.found}; again: {again.stderr[-400:]}"
    return Outcome(outcome.attack, held, told, outcome.traceback, lost=bool(marks) or not ended)


def _last_snapshot(root: Path, attack: str) -> Outcome:
    """Those before it were written."""
    _settings(root, steps=2)
    run(root, "train").check_returncode()
    for path in (root / "runs/train/snapshots").glob("*/finished"):
        path.unlink()
    _settings(root, steps=STEPS)
    outcome = refusal(
        attack, run(root, "train", before=_limit), "runs/train/snapshots", "File too large", "step-000002"
    )
    return _goes_on(outcome, root, "after 2 steps")


def _every_snapshot(root: Path, attack: str) -> Outcome:
    with _small_disk(root / "runs/train/snapshots", LIMIT) as mounted:
        ended = run(root, "train", before=None if mounted else _limit)
        outcome = refusal(attack, ended, "runs/train/snapshots", "could not be saved", "from the start")
    return _goes_on(outcome, root)


def _export_instead(root: Path, attack: str) -> Outcome:
    """The weights are asked for as well, and fit: the run has come to its end, with a warning."""
    _settings(root, export=True)
    with _small_disk(root / "runs/train/snapshots", LIMIT) as mounted:
        if not mounted:
            return Outcome(attack, True, "not tried: no file system can be mounted here")
        ended = run(root, "train")
        there = (root / WEIGHTS).exists()
    return Outcome(
        attack, ended.returncode == 0 and there and "could not be written" in ended.stderr, ended.stderr[-400:]
    )


def _export(root: Path, attack: str) -> Outcome:
    """Snapshots fit and weights do not; those of an earlier run are there afterwards."""
    _settings(root, export=True)
    with _small_disk(root / "runs/train/weights", LIMIT) as mounted:
        if not mounted:
            return Outcome(attack, True, "not tried: no file system can be mounted here")
        (root / WEIGHTS).write_bytes(b"before")
        outcome = refusal(attack, run(root, "train"), WEIGHTS, "No space left")
        kept = (root / WEIGHTS).read_bytes() == b"before"
    found = _goes_on(outcome, root, f"after {STEPS} steps")
    return Outcome(attack, found.held and kept, found.found, found.traceback, lost=found.lost or not kept)


def _report(root: Path, attack: str) -> Outcome:
    """All steps are taken; what cannot be written is the report."""
    in_the_way = root / "runs/train/report.json"
    (in_the_way / "folder").mkdir(parents=True)
    outcome = refusal(attack, run(root, "train"), "runs/train/report.json")
    shutil.rmtree(in_the_way)
    return _goes_on(outcome, root, f"after {STEPS} steps")


BY_COMMAND = {
    "no room for the last snapshot": _last_snapshot,
    "no room for any snapshot": _every_snapshot,
    "no room for snapshots, but for the exported weights": _export_instead,
    "no room for the exported weights": _export,
    "a report that cannot be written": _report,
}
