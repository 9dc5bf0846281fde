"""A temporary folder that is full, or becomes full while training runs: nothing that was trained is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

from benchmarks import small_project
from benchmarks.attacks.outcome import TRACEBACK, Outcome, refusal
from benchmarks.small_project import Training
from shardwright.stages.train.journal import Journal

# A folder in memory of that size on which TMPDIR lies, seen by the command alone.
MOUNTED = 'mount -t tmpfs -o size="$1" none tmp && shift && exec "$@"'
FILLING = '''
import os, tempfile
import torch

class Filling:
    """It fills the temporary folder when it is asked for its 100th sample."""

    def __init__(self, context):
        self.context = context

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        if index == 100:
            fill(os.environ["TMPDIR"])
        if index == 150 and "BROKEN" in os.environ:
            raise ValueError("broken")
        if index > 100:
            print("a word", flush=True)
        words = torch.arange(self.context) % 64
        return {"input_ids": words, "labels": words}

def fill(folder):
    for size in (65536, 1):
        try:
            with open(os.path.join(folder, f"junk-{os.getpid()}-{size}"), "wb", buffering=0) as file:
                while True:
                    file.write(bytes(size))
        except OSError:
            pass
'''


def attacks(folder: Path, sample: bool) -> Iterator[Outcome]:
    yield steps_without_room()
    if sample or not can_mount(folder):
        return
    root = folder / "project"
    small_project.make(root, {"steps": 30, "snapshots": {"every": 100}})
    (root / "filling.py").write_text(FILLING)
    data = {"dataset": {"_target_": "filling.Filling", "context": 8}, "shuffle": False}
    (root / "conf/data/small.yaml").write_text(json.dumps(data))
    yield full_while_training(root, steps=30)
    found = refusal("a data set fails while TMPDIR is full", mounted(root, "50m", BROKEN="1").ended(300), "sample 150")
    yield found
    yield ended_while_full(root)
    yield refusal("no room for the job", mounted(root, "4k").ended(120), "shardwright-", "TMPDIR")


def steps_without_room() -> Outcome:
    """Lines of steps that no disk takes: a warning, once."""
    said = StringIO()
    with redirect_stderr(said):
        journal = Journal(Path("/dev/full"))
        for step in range(3):
            journal.write([{"step": step}])
    told = [line for line in said.getvalue().splitlines() if line]
    held = len(told) == 1 and "/dev/full" in told[0] and "TMPDIR" in told[0] and len(journal.waiting) == 3
    return Outcome("steps.jsonl without room", held, said.getvalue())


def can_mount(folder: Path) -> bool:
    (folder / "tmp").mkdir()
    return subprocess.run(["unshare", "-rm", "bash", "-c", MOUNTED, "-", "1m", "true"], cwd=folder).returncode == 0


def mounted(root: Path, size: str, **environ: str) -> Training:
    (root / "tmp").mkdir(exist_ok=True)
    words = ["unshare", "-rm", "bash", "-c", MOUNTED, "-", size, sys.executable, "-m", "stages", "train"]
    execute = f"import os; os.execvp('unshare', {words!r})"
    compiled = {"TORCHINDUCTOR_CACHE_DIR": str(root / "compiled")}
    return Training(root, "-c", execute, **compiled, **environ)


def full_while_training(root: Path, steps: int) -> Outcome:
    ended = mounted(root, "50m").ended(300)
    report = root / "runs/train/report.json"
    losses = json.loads(report.read_text())["body"]["losses"] if report.exists() else []
    warned = [line for line in ended.stderr.splitlines() if "steps.jsonl" in line and "TMPDIR" in line]
    held = ended.returncode == 0 and len(losses) == steps and len(warned) == 1
    text = f"{len(losses)} losses: {ended.stderr[-600:]}"
    return Outcome("TMPDIR is full from step 12 on", held, text, TRACEBACK in ended.stderr, lost=len(losses) != steps)


def ended_while_full(root: Path) -> Outcome:
    path = root / "conf/train/small.yaml"
    settings = {**json.loads(path.read_text()), "steps": 100_000, "snapshots": {"every": 100_000}, "seed": 2}
    path.write_text(json.dumps(settings))
    run = mounted(root, "50m")
    run.wait_for(lambda: "steps.jsonl" in run.log.read_text())
    os.kill(run.stage.pid, signal.SIGTERM)
    ended = run.ended()
    kept = small_project.snapshots(root)
    held = ended.returncode == 143 and bool(kept) and kept[-1] > 12
    return Outcome("SIGTERM while TMPDIR is full", held, f"{kept}: {ended.stderr[-400:]}", lost=not kept)
