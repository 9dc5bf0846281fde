"""Signals to the stage, to torchrun and to ranks, at random steps: no more than the step that runs is lost.

| signal | what must come of it |
|---|---|
| SIGTERM, SIGINT, SIGHUP to any of them | a snapshot of the step that ran, the status of the signal, nothing left |
| SIGKILL | the next start goes on from the newest snapshot |
| SIGSTOP | whoever is stopped is named, with rank and host |
"""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks import small_project
from benchmarks.attacks.outcome import TRACEBACK, Outcome, refusal
from benchmarks.small_project import Training

ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
TARGETS = ("stage", "torchrun", "rank 0", "rank 1", "all")
SLOW_MODEL = "import time\nfrom pathlib import Path\n\ndef build():\n    Path('begun').touch()\n    time.sleep(600)\n"
STEPS = 100_000


def attacks(folder: Path, sample: bool) -> Iterator[Outcome]:
    yield planning_ended(folder / "slow")
    if sample:
        return
    root = folder / "project"
    small_project.make(root, {"steps": STEPS, "hang_s": 300})
    draw = random.Random(0)
    told = [("stage", number) for number in ASKING] + [(target, signal.SIGTERM) for target in TARGETS[1:]]
    for number, (target, sign) in enumerate(told):
        every = draw.choice([1, 3, STEPS])  # often one is being written
        own = copy(root, folder / f"told-{number}", snapshots={"every": every})
        yield asked_to_end(own, target, sign, draw.randrange(3, 25), f"snapshots.every: {every}")
    yield goes_on(folder / "told-0")
    own = copy(root, folder / "none", snapshots={"every": 0})
    yield asked_to_end(own, "stage", signal.SIGTERM, 4, "no snapshots", kept=False)
    yield twice(copy(root, folder / "twice", snapshots={"every": STEPS}))
    for target in ("stage", "torchrun", "rank 1"):
        yield killed(copy(root, folder / f"killed-{target}", snapshots={"every": 1}), target, draw.randrange(3, 25))
    for target in TARGETS[1:4]:
        yield stopped(copy(root, folder / f"stopped-{target}", hang_s=5), target)


def copy(root: Path, to: Path, **train: Any) -> Path:
    small_project.copy(root, to, **train)
    return to


def planning_ended(root: Path) -> Outcome:
    """A stage that trains nothing: it ends where it is."""
    small_project.configure(root, {"steps": 1})
    (root / "slow_model.py").write_text(SLOW_MODEL)
    path = root / "conf/model/small.yaml"
    path.write_text(json.dumps({**json.loads(path.read_text()), "module": {"_target_": "slow_model.build"}}))
    stage = Training(root, "-m", "stages", "trace")
    stage.wait_for((root / "begun").exists)
    stage.stage.send_signal(signal.SIGTERM)
    ended = stage.ended(60)
    held = ended.returncode == 143 and "interrupted by SIGTERM" in ended.stderr and not (root / "runs/.lock").exists()
    return Outcome("SIGTERM to trace", held, ended.stderr[-300:], TRACEBACK in ended.stderr)


def asked_to_end(root: Path, target: str, number: signal.Signals, step: int, what: str, kept: bool = True) -> Outcome:
    run = Training(root)
    run.until(step)
    for process in victims(run, target):
        process.send_signal(number)
    steps: list[dict[str, Any]] = []
    while run.stage.poll() is None:
        steps = run.steps() or steps
        time.sleep(0.005)
    ended = run.ended()
    left, last = run.left(), max(line.get("step", 0) for line in steps) + 1
    found = small_project.snapshots(root)[-1:]
    saved = (found and found[0] >= last) or not kept
    attack = f"{number.name} to {target} after step {step}, {what}"
    told = "stopped after" in ended.stderr and TRACEBACK not in ended.stderr
    held = ended.returncode == 128 + number and not left and told and saved
    text = f"status {ended.returncode}, left {left}, step {last}, snapshot {found}: {ended.stderr[-300:]}"
    return Outcome(attack, bool(held), text, TRACEBACK in ended.stderr, lost=not saved)


def victims(run: Training, target: str) -> list[psutil.Process]:
    launcher, ranks = run.processes()
    stage = psutil.Process(run.stage.pid)
    named = {"stage": [stage], "torchrun": [launcher], "all": [*ranks, launcher, stage]}
    return named.get(target) or [ranks[int(target.split()[1])]]


def goes_on(root: Path) -> Outcome:
    """After the first of the attacks."""
    done = small_project.snapshots(root)[-1]
    path = root / "conf/train/small.yaml"
    path.write_text(json.dumps({**json.loads(path.read_text()), "steps": done + 2}))
    ended = Training(root).ended(300)
    held = ended.returncode == 0 and f"going on after {done} steps" in ended.stderr
    return Outcome("the next start after SIGTERM", held, ended.stderr[-400:], TRACEBACK in ended.stderr, lost=not held)


def twice(root: Path) -> Outcome:
    """A second signal ends it, though a rank does not come to the end of its step."""
    run = Training(root)
    run.until(3)
    rank = run.processes()[1][1]
    run.stage.send_signal(signal.SIGTERM)
    try:
        while run.stage.poll() is None:
            rank.suspend()  # it is sent SIGCONT when it is told
            time.sleep(0.5)
            if rank.status() == psutil.STATUS_STOPPED:
                break
        time.sleep(2)
        run.stage.send_signal(signal.SIGTERM)
    except psutil.Error:
        pass  # it was faster
    ended = run.ended(60)
    held = ended.returncode == 143 and not run.left()
    return Outcome("SIGTERM twice, with a rank that hangs", held, ended.stderr[-300:], TRACEBACK in ended.stderr)


def killed(root: Path, target: str, step: int) -> Outcome:
    run = Training(root)
    run.until(step)
    before = small_project.snapshots(root)[-1]
    for process in victims(run, target):
        process.kill()
    run.ended()
    run.left(30)
    shutil.rmtree(root / "tmp")  # with the steps of the killed run, which nobody removed
    again = Training(root)
    again.until(before + 1)
    again.stage.send_signal(signal.SIGTERM)
    again.ended()
    told = re.search(r"going on after (\d+) steps", again.log.read_text())
    held = bool(told) and int(told[1]) >= before
    return Outcome(f"SIGKILL to {target} after step {step}", held, f"{before}: {again.log.read_text()}", lost=not held)


def stopped(root: Path, target: str) -> Outcome:
    run = Training(root)
    run.until(3)
    (victim,) = victims(run, target)
    victim.suspend()
    ended = run.ended(180)
    found = refusal(f"SIGSTOP to {target}", ended, target, socket.gethostname(), "is stopped")
    left = run.left()
    return Outcome(found.attack, found.held and not left, f"{found.found} {left}", found.traceback)
