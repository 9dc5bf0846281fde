"""Snapshots that are damaged, forged, of another version or taken away, and runs that are told to begin anew.

Held is an attack after which training went on from the newest that is whole, or ended in one line; with no snapshot
lost that was the only one to have come so far.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess

from benchmarks import small_project
from benchmarks.attacks.outcome import TRACEBACK, Outcome, refusal
from benchmarks.forged_snapshots import FILES, FORGERIES, forge, read_all, sign, snapshot
from benchmarks.stage_runs import run
from shardwright.stages.train.snapshots.manifest import Damaged, Unreadable, snapshots_in

STEPS, EVERY = 4, 2
Harm = Callable[[Path], None]  # to one snapshot


def attacks(folder: Path, sample: bool) -> Iterator[Outcome]:
    yield from forged(folder / "forged")
    if not sample:
        yield from trained(folder)


# ---- read as a run reads it


def forged(folder: Path) -> Iterator[Outcome]:
    """What is wrong with them is told in one line, and they stay where they are."""
    whole = snapshot(folder, STEPS)
    for what, (file, change, told) in FORGERIES.items():
        yield _read(whole, f"a snapshot with {what}", lambda path, f=file, c=change: forge(path, f, c), told)  # type: ignore[misc]
    for name, harm in HARMS.items():
        for file in ("manifest.json", *FILES):
            yield _read(whole, f"{file} {name}", lambda path, f=file, h=harm: h(path / f), file)  # type: ignore[misc]


def _read(whole: Path, attack: str, harm: Harm, told: str) -> Outcome:
    path = Path(shutil.copytree(whole, whole.parent / "copy" / whole.name, symlinks=True))
    try:
        harm(path)
        read_all(path)
    except (Damaged, Unreadable) as error:
        return Outcome(attack, told in str(error) and "\n" not in str(error), str(error), lost=not path.is_dir())
    except Exception as error:
        return Outcome(attack, False, repr(error), traceback=True)
    finally:
        shutil.rmtree(path.parent)
    return Outcome(attack, False, "it was read")


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _link(path: Path) -> None:
    shutil.move(path, path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


HARMS: dict[str, Harm] = {
    "cut short": _cut,
    "with a bit turned": _flip,
    "taken away": Path.unlink,
    "that is a link": _link,
    "that is a pipe": _pipe,
    "that is a folder": _folder,
}


# ---- by the command


def trained(folder: Path) -> Iterator[Outcome]:
    base = folder / "base"
    small_project.make(base, {"steps": STEPS, "snapshots": {"every": EVERY}})
    run(base, "train").check_returncode()
    (_run_of(base) / "finished").unlink()  # as if it had been killed before its report
    for number, (attack, act) in enumerate(BY_COMMAND.items()):
        root = folder / f"project{number}"
        small_project.copy(base, root)
        yield act(root, attack)
        shutil.rmtree(root)


def _run_of(root: Path) -> Path:
    (found,) = (path for path in (root / "runs/train/snapshots").iterdir() if "." not in path.name)
    return found


def _settings(root: Path, **train: object) -> None:
    path = root / "conf/train/small.yaml"
    path.write_text(json.dumps({**json.loads(path.read_text()), **train}))


def _goes_on(attack: str, ended: CompletedProcess[str], *wanted: str) -> Outcome:
    """Held where it came to its end, and the log has all these texts."""
    good = ended.returncode == 0 and all(text in ended.stderr for text in wanted)
    return Outcome(
        attack, good, ended.stderr[-400:], TRACEBACK in ended.stderr, lost=ended.returncode == 0 and not good
    )


def _all_damaged(root: Path, attack: str) -> Outcome:
    steps = snapshots_in(_run_of(root))
    for path in steps:
        _cut(path / FILES[0])
    outcome = refusal(attack, run(root, "train"), "step-000002", "step-000004", "resume: never")
    return _kept(outcome, steps)


def _kept(outcome: Outcome, paths: list[Path]) -> Outcome:
    lost = [path.name for path in paths if not path.is_dir()]
    return Outcome(outcome.attack, outcome.held and not lost, outcome.found, outcome.traceback, lost=bool(lost))


def _anew_twice(root: Path, attack: str) -> Outcome:
    """Each time with fewer steps than the run before had come to: all of them are there afterwards."""
    for path in snapshots_in(_run_of(root)):
        _cut(path / FILES[0])
    for steps in (2, 1):
        _settings(root, steps=steps, resume="never", snapshots={"every": 1})
        ended = run(root, "train")
        if ended.returncode:
            return Outcome(attack, False, ended.stderr[-400:], TRACEBACK in ended.stderr)
    found = sorted(path.name for path in (root / "runs/train/snapshots").glob("*.earlier*/step-*"))
    held = found == ["step-000001", "step-000002", "step-000002", "step-000004"]
    return Outcome(attack, held, f"there are {found}", lost=not held)


def _newest_damaged(root: Path, attack: str) -> Outcome:
    (snapshots_in(_run_of(root))[0] / FILES[1]).unlink()
    return _goes_on(attack, run(root, "train"), f"{FILES[1]} is missing", "after 2 steps")


def _user_s_files(root: Path, attack: str) -> Outcome:
    """A snapshot that somebody has given a name of their own."""
    folder = _run_of(root)
    snapshots_in(folder)[0].rename(folder / "best")
    _settings(root, resume="never")
    ended = run(root, "train")
    found = list((root / "runs/train/snapshots").glob("*/best/manifest.json"))
    return Outcome(attack, ended.returncode == 0 and len(found) == 1, ended.stderr[-400:], lost=not found)


def _old_format(root: Path, attack: str) -> Outcome:
    found = snapshots_in(_run_of(root))
    for path in found:
        manifest = json.loads((path / "manifest.json").read_text())
        (path / "manifest.json").write_text(json.dumps({**manifest, "version": 1}))
    return _kept(refusal(attack, run(root, "train"), "version 1", "version 2"), found)


def _named_from_elsewhere(root: Path, attack: str) -> Outcome:
    path = snapshots_in(_run_of(root))[0]
    forge(path, "manifest.json", lambda found: found["files"].update({"../x.json": found["files"][FILES[0]]}))
    _settings(root, resume=str(path.relative_to(root)))
    return refusal(attack, run(root, "train"), "'../x.json' is no file of a snapshot", "resume")


def _other_model(root: Path, attack: str) -> Outcome:
    """Whole by itself, and of tensors that the model has not."""
    for path in snapshots_in(_run_of(root)):
        forge(path, "tensors.json", lambda found: {f"{name}x": row for name, row in found.items() if not row["boxes"]})
    return refusal(attack, run(root, "train"), "does not fit the model")


def _random_numbers(root: Path, attack: str) -> Outcome:
    """The stream of a rank is of bytes that are no state of it."""
    for path in snapshots_in(_run_of(root)):
        data = bytearray((path / FILES[0]).read_bytes())
        header = int.from_bytes(data[:8], "little")
        row = json.loads(data[8 : 8 + header])["random/0/cpu@0"]
        start, end = (8 + header + offset for offset in row["data_offsets"])
        data[start:end] = b"\xff" * (end - start)
        (path / FILES[0]).write_bytes(data)
        sign(path, FILES[0])
    return refusal(attack, run(root, "train"), "random/0/cpu is no state of random numbers")


BY_COMMAND = {
    "all snapshots damaged": _all_damaged,
    "all snapshots damaged, and `resume: never` twice": _anew_twice,
    "a file of the newest taken away": _newest_damaged,
    "a snapshot that the user has renamed, and `resume: never`": _user_s_files,
    "snapshots of the form that had a pickle": _old_format,
    "a named snapshot whose manifest leads out of it": _named_from_elsewhere,
    "snapshots of another model": _other_model,
    "random numbers that are none": _random_numbers,
}
