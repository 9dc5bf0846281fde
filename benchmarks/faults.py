"""Training that is killed again and again: `python -m benchmarks.faults [--kills 50] [--steps 200]`.

A small GPT on two ranks, with a snapshot every few steps. It is trained undisturbed, and then under kills (SIGKILL):

| what is killed | who brings it back |
|---|---|
| a rank, between two random steps | torchrun starts all ranks again |
| a rank, while a snapshot is being written | the same |
| torchrun | the next `shardwright train` |
| the stage itself | the same |

`lost` counts snapshots that were acknowledged (a line of steps.jsonl) and were not there when training went on;
`max_diff` is the largest difference of a loss or a parameter from the undisturbed run. Bars: 0 and 1e-6. A table says
what was killed after which steps, how often training went on from there, and what that lost. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks import small_project

KINDS = {  # and what brings training back
    "rank": "torchrun",
    "snapshot": "torchrun",
    "launcher": "the next start",
    "stage": "the next start",
}
EVERY, BAR, PATIENCE_S = 4, 1e-6, 120.0


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        kills, apart = compare(Path(folder), given.kills, given.steps, given.seed)
    lost = sum(kill.lost for kill in kills)
    print(table(kills))
    print(f"largest difference from the undisturbed run: {apart:.1e}")
    by_kind = {kind: sum(kill.kind == kind for kill in kills) for kind in KINDS}
    print(json.dumps({"kills": len(kills), "lost": lost, "max_diff": apart, "kinds": by_kind}))
    return 0 if lost == 0 and apart <= BAR else 1


@dataclass(frozen=True)
class Kill:
    kind: str
    step: int  # the last that was seen before it
    went_on: int | None = None  # after so many steps; None: another kill came first
    lost: int = 0  # acknowledged snapshots that were not there when training went on


def table(kills: Sequence[Kill]) -> str:
    lines = [f"{'killed':10}{'kills':>6}  {'brought back by':16}{'restarts':>9}{'lost':>6}   after step"]
    for kind, by in KINDS.items():
        own = [kill for kill in kills if kill.kind == kind]
        restarts, lost = sum(kill.went_on is not None for kill in own), sum(kill.lost for kill in own)
        steps = textwrap.wrap(", ".join(str(kill.step) for kill in own), 60) or ["-"]
        lines.append(f"{kind:10}{len(own):6}  {by:16}{restarts:9}{lost:6}   {steps[0]}")
        lines += [f"{'':52}{more}" for more in steps[1:]]
    return "\n".join(lines)


def compare(folder: Path, kills: int, steps: int, seed: int) -> tuple[list[Kill], float]:
    """What was killed, and how far the run under kills is from the undisturbed one."""
    plain, disturbed = folder / "plain", folder / "disturbed"
    small_project.make(plain, {"steps": steps, "export": True})
    small_project.copy(plain, disturbed, snapshots={"every": EVERY}, max_restarts=kills)
    small_project.run(plain, "train").check_returncode()
    run = Disturbed(disturbed, kills, steps, random.Random(seed))
    run.to_the_end()
    return run.kills, difference(plain, disturbed)


class Disturbed:
    """A run that is killed at random steps, and started again where nothing else does that."""

    def __init__(self, root: Path, kills: int, steps: int, draw: random.Random) -> None:
        self.root, self.draw = root, draw
        self.due = sorted(draw.randrange(1, steps) for _ in range(kills))  # a kill at each of these steps, or after it
        self.kills: list[Kill] = []
        self.acknowledged = 0  # the step of the newest snapshot
        self.step = 0
        self.read: dict[Path, int] = {}  # how far each file of steps has been read

    def to_the_end(self) -> None:
        killed = True
        while killed:
            stage = self._start()
            try:
                killed = self._disturb(stage)
            except BaseException:
                stage.kill()  # its ranks follow it
                raise
            self._gone(stage)
        if stage.returncode:
            raise SystemExit(f"training failed by itself: {self._log()}")

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "stages", "train"]
        with open(self.root / "log.txt", "ab") as log:
            return subprocess.Popen(
                command, cwd=self.root, env=small_project.environment(self.root), stdout=log, stderr=log
            )

    def _disturb(self, stage: subprocess.Popen[bytes]) -> bool:
        """Until the stage has ended: whether it had to, because it or torchrun was killed."""
        kind, last = self.draw.choice(list(KINDS)), time.monotonic()
        while stage.poll() is None:
            before = self.step
            self._look()
            last = time.monotonic() if self.step != before else last
            if time.monotonic() - last > PATIENCE_S:
                raise SystemExit(f"no step within {PATIENCE_S:g} s: {self._log()}")
            if self.due and self.step >= self.due[0] and self._kill(kind, stage):
                self.due.pop(0)
                self.kills.append(Kill(kind, self.step))
                if kind in ("launcher", "stage"):
                    return True
                kind = self.draw.choice(list(KINDS))
            time.sleep(0.002)
        return False

    def _kill(self, kind: str, stage: subprocess.Popen[bytes]) -> bool:
        if kind == "snapshot" and not list((self.root / "runs/train/snapshots").glob("*/.step-*")):
            return False
        launcher, ranks = self._processes(stage)
        victims = {"launcher": launcher, "stage": [psutil.Process(stage.pid)]}.get(kind, ranks)
        if not victims:
            return False
        try:
            self.draw.choice(victims).kill()
        except psutil.NoSuchProcess:
            return False
        return True

    def _processes(self, stage: subprocess.Popen[bytes]) -> tuple[list[psutil.Process], list[psutil.Process]]:
        """torchrun, and its ranks."""
        try:
            launcher = psutil.Process(stage.pid).children()
            return launcher, [rank for process in launcher for rank in process.children()]
        except psutil.NoSuchProcess:
            return [], []

    def _log(self) -> str:
        return (self.root / "log.txt").read_text()[-2000:]

    def _look(self) -> None:
        """Reads on in the files of steps."""
        for path in (self.root / "tmp").glob("shardwright-*/steps.jsonl"):
            try:
                with open(path, "rb") as file:
                    file.seek(self.read.get(path, 0))
                    for line in file:
                        if not line.endswith(b"\n"):
                            break
                        self.read[path] = self.read.get(path, 0) + len(line)
                        self._take(json.loads(line))
            except FileNotFoundError:
                continue

    def _take(self, line: dict[str, Any]) -> None:
        self.step = line.get("step", self.step)
        if "snapshot" in line and "problem" not in line:
            self.acknowledged = max(self.acknowledged, line["snapshot"])
        begins = 0 if line.get("step") == 0 else None  # a start that finds no snapshot does not say so
        went_on = line.get("resumed", begins)
        lost = (went_on is not None and went_on < self.acknowledged) + ("damaged" in line)
        if self.kills:
            last = self.kills[-1]
            self.kills[-1] = replace(
                last, went_on=last.went_on if went_on is None else went_on, lost=last.lost + int(lost)
            )

    def _gone(self, stage: subprocess.Popen[bytes]) -> None:
        """No process of the project is left, within seconds."""
        stage.wait()
        self._look()
        deadline = time.monotonic() + 30
        while left := [process for process in psutil.process_iter() if self._ours(process)]:
            if time.monotonic() > deadline:
                raise SystemExit(f"still running: {left}")
            time.sleep(0.05)

    def _ours(self, process: psutil.Process) -> bool:
        try:
            return process.cwd() == str(self.root) and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False


def difference(plain: Path, disturbed: Path) -> float:
    """The largest of a loss or a parameter."""
    from safetensors.torch import load_file

    losses = [
        json.loads((root / "runs/train/report.json").read_text())["body"]["losses"] for root in (plain, disturbed)
    ]
    if len(losses[0]) != len(losses[1]):
        return float("inf")
    weights = [load_file(root / "runs/train/weights/model.safetensors") for root in (plain, disturbed)]
    apart = [float((weights[0][name] - weights[1][name]).abs().max()) for name in weights[0]]
    return max(*apart, *(abs(a - b) for a, b in zip(*losses, strict=True)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
