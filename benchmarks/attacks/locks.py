"""Two commands at once in one project, and what a killed one leaves: no snapshot is adopted, pruned or removed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks import small_project
from benchmarks.attacks.outcome import Outcome, refusal
from benchmarks.small_project import Training

HOLD = "import sys, time\nfrom pathlib import Path\nfrom shardwright.pipeline.base.lock import locked\n"
HOLD += "with locked(Path('runs'), 'a holder'):\n    print('held', flush=True)\n    time.sleep(600)\n"
HOLDER = ("a holder", "since")
WRITERS = ("trace", "profile", "cluster", "solve", "checkpoint", "codegen", "train", "run")
READERS = (("check",), ("summary",))
STEPS = 100_000  # more than are waited for


def attacks(folder: Path, sample: bool) -> Iterator[Outcome]:
    root = folder / "project"
    small_project.configure(root, {"steps": 30, "snapshots": {"every": 5}})
    yield from while_held(root, WRITERS[:1] if sample else WRITERS)
    if not sample:
        yield after_a_kill(root)
        yield of_another_host(root, grows=False)
        yield of_another_host(root, grows=True)
        yield damaged(root)
        yield from trained_twice(folder / "trained")


def holding(root: Path) -> subprocess.Popen[str]:
    held = subprocess.Popen(
        [sys.executable, "-c", HOLD], cwd=root, env=small_project.environment(root), stdout=subprocess.PIPE, text=True
    )
    assert held.stdout and held.stdout.readline() == "held\n"
    return held


def command(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stages", *words],
        cwd=root,
        env=small_project.environment(root),
        text=True,
        capture_output=True,
        timeout=600,
    )


def while_held(root: Path, writers: tuple[str, ...]) -> Iterator[Outcome]:
    with holding(root) as held:
        try:
            for name in writers:
                ended = command(root, name)
                yield refusal(f"{name} while another command works", ended, f"process {held.pid}", *HOLDER)
            for words in READERS if len(writers) > 1 else ():
                ended = command(root, *words)
                told = ended.stderr.strip().splitlines()[-1:] or [""]
                yield Outcome(f"{words[0]} while another command works", "at work" not in ended.stderr, told[0])
        finally:
            held.kill()


def after_a_kill(root: Path) -> Outcome:
    """SIGKILL: the lock goes with its holder."""
    with holding(root) as held:
        held.kill()
    return succeeds(root, "a command after the holder was killed")


def succeeds(root: Path, attack: str) -> Outcome:
    ended = command(root, "cluster", "-q")
    left = (root / "runs/.lock").exists()
    return Outcome(attack, ended.returncode == 0 and not left, ended.stderr[-300:] or f"a lock is left: {left}")


def of_another_host(root: Path, *, grows: bool) -> Outcome:
    """As where the kernel's locks do not reach other hosts: what the file says counts while it grows."""
    about = {"user": "ana", "pid": 1, "command": "a holder", "host": "elsewhere", "system": "elsewhere", "since": "now"}
    path = root / "runs/.lock"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({**about, "beats": 1}))
    if not grows:
        return succeeds(root, "what a dead process of another host left")
    beating = subprocess.Popen(
        [sys.executable, "-c", f"import json, time\nfor beat in range(999):\n time.sleep(3)\n"
         f" open({str(path)!r}, 'r+').write(json.dumps({{**{about!r}, 'beats': 1000 + beat}}))"]
    )  # fmt: skip
    try:
        return refusal("a process of another host works", command(root, "cluster"), "on elsewhere", *HOLDER)
    finally:
        beating.kill()
        beating.wait()
        path.unlink(missing_ok=True)


def damaged(root: Path) -> Outcome:
    (root / "runs/.lock").write_bytes(os.urandom(200))
    return succeeds(root, "a lock file that is no JSON")


def trained_twice(root: Path) -> Iterator[Outcome]:
    """The same command twice: the first goes on as if alone, until it is asked to end."""
    small_project.make(root, {"steps": STEPS, "snapshots": {"every": 10}})
    for resume in ("auto", "never"):
        path = root / "conf/train/small.yaml"
        path.write_text(json.dumps({**json.loads(path.read_text()), "resume": resume}))
        shutil.rmtree(root / "runs/train", ignore_errors=True)
        first = Training(root)
        first.until(12)
        second = command(root, "train")
        yield refusal(f"train twice, resume: {resume}", second, f"process {first.stage.pid}", "since")
        yield unharmed(f"the first of two, resume: {resume}", first)
    first = Training(root)
    first.until(12)
    first.stage.kill()
    first.stage.wait()
    yield unharmed("train at once after a kill", Training(root))  # while ranks of the first still end


def unharmed(attack: str, run: Training) -> Outcome:
    """It comes further, and what it has done is on the disk when it ends."""
    reached = max((line.get("step", 0) for line in run.steps()), default=0) + 20
    run.until(reached)
    run.stage.send_signal(signal.SIGTERM)
    ended = run.ended(300)
    found = small_project.snapshots(run.root)
    held = ended.returncode == 143 and found[-1:] > [reached]
    return Outcome(attack, held, f"snapshots {found} after step {reached}: {ended.stderr[-300:]}", lost=not held)
