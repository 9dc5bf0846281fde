"""How long commands take that answer a question: `python -m benchmarks.answers [NAME ...]`.

Each is the real command, in a copy of this project that has been run once (so a cluster that is measured is not
measured again, and the solver's inner loops are compiled, which takes the first command of an installation half a
minute). Of each the seconds to its first line and to its end. What counts is the wall's clock, or the seconds
of CPU that it took where these are less: on a machine that is shared the wall's clock is that of others, too. Bars: the
first line of `check`, `summary`, `price` and `explain` within 1 s, `whatif` of any kind within 20 s, `fit` of an 8B
model on 8 devices within 30 s and of a 70B model on 64 within 90 s.

`sweep` is one of three budgets in a project that `init` has just made, up to train, by the wall's clock against the
seconds that its train stages took, which are made as long as `--training` says: at most a tenth more. The last line is
one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import BinaryIO

import psutil

from benchmarks.house import copy_project
from benchmarks.small_project import environment
from shardwright.stages.sweep.experiments import metrics_of

STAGES = ("trace", "profile", "cluster", "solve", "checkpoint", "codegen", "train")
FIRST, ANSWER = 1.0, 20.0
PRICE = "price dp=4 tp=8 pp=2 zero=1 cluster=dgx_h100 nodes=8 model=llama2_70b"
ALONE = {"check", "price"}  # need no run
SWEEP, OVER_TRAININGS = "sweep", 1.1
KINDS = ("batch", "sequence", "devices", "budget", "link", "clusters")


@dataclass(frozen=True)
class Asked:
    words: str
    first: float | None  # bars, in seconds
    whole: float | None


@dataclass(frozen=True)
class Took:
    """In seconds, as the wall's clock has it and of CPU."""

    first: tuple[float, float]
    whole: tuple[float, float]
    status: int

    def counts(self) -> tuple[float, float]:
        return min(self.first), min(self.whole)


ASKED = {
    "check": Asked("check", FIRST, None),
    "summary": Asked("summary", FIRST, None),
    "explain": Asked("explain", FIRST, None),
    "price": Asked(PRICE, FIRST, None),
    **{f"whatif {kind}": Asked(f"whatif {kind}", None, ANSWER) for kind in KINDS},
    "fit 8B": Asked("fit examples/fit/llama_8b.json --cluster dgx_h100 --sequence 4096", FIRST, 30.0),
    "fit 70B": Asked(
        "fit examples/fit/llama_70b.json --cluster dgx_h100_infiniband --nodes 8 --sequence 4096", FIRST, 90.0
    ),
}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = [*ASKED, SWEEP]
    parser.add_argument("names", nargs="*", choices=[*every, []], metavar="NAME", help=", ".join(every))
    parser.add_argument("--training", type=float, default=120.0, help="seconds of each training of the sweep (120)")
    asked = parser.parse_args(arguments)
    names = asked.names or every
    with tempfile.TemporaryDirectory(prefix="shardwright-") as folder:
        root = copy_project(Path(folder) / "project")
        for stage in STAGES if set(names) - ALONE - {SWEEP} else ():
            command(root, stage)
        print(f"{'':20}{'first line':>18}{'whole':>18}   seconds of the wall's clock, (of CPU)")
        rows = {name: _row(name, command(root, *ASKED[name].words.split())) for name in names if name != SWEEP}
        if SWEEP in names:
            rows[SWEEP] = _sweep(Path(folder) / SWEEP, asked.training)
    print(json.dumps({"seconds": rows, "met": all(row["met"] for row in rows.values())}))
    return 0 if all(row["met"] for row in rows.values()) else 1


def _row(name: str, took: Took) -> dict[str, float | bool]:
    asked, (first, whole) = ASKED[name], took.counts()
    met = took.status == 0 and first <= (asked.first or first) and whole <= (asked.whole or whole)
    cells = (f"{wall:9.1f} ({cpu:5.1f})" for wall, cpu in (took.first, took.whole))
    print(f"{name:20}{''.join(f'{cell:>18}' for cell in cells)}   {'' if met else 'missed'}", flush=True)
    return {"first": round(first, 2), "whole": round(whole, 2), "met": met}


def _sweep(root: Path, training: float) -> dict[str, float | bool]:
    """The first run tells how many steps a training of so many seconds has, and what memory there is to save."""
    root.mkdir()
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@x"]
    subprocess.run([*git, "init", "-q"], cwd=root, check=True)
    for words in (("init", "."), ("run",)):
        assert command(root, *words).status == 0, words
    for words in (("add", "-A"), ("commit", "-q", "-m", "begun")):
        subprocess.run([*git, *words], cwd=root, check=True)
    report = json.loads((root / "runs/train/report.json").read_text())["body"]
    steps = max(1, round(training / statistics.median(report["step_seconds"])))
    peak = json.loads((root / "runs/checkpoint/summary.json").read_text())["peak_mb"] / 1e3
    budgets = ",".join(f"{share * peak:.4g}" for share in (1.2, 0.95, 0.9))
    settings = (f"solve.memory_budget_gb={budgets}", f"train.steps={steps}")
    took = command(root, "sweep", *settings, "--until", "train")
    (points,) = root.glob("runs/sweep/*/points.json")
    kept = [row["experiment"] for row in json.loads(points.read_text()) if "experiment" in row]
    trained = sum(metrics_of(root, name, ["train"])["train"]["seconds"] for name in kept)
    over = took.whole[0] / trained if trained else math.inf
    met = took.status == 0 and len(kept) == 3 and over <= OVER_TRAININGS
    print(
        f"{SWEEP:20}{took.whole[0]:9.1f} of which {trained:.1f} in train: {over:.3f} times   {'' if met else 'missed'}"
    )
    return {"whole": round(took.whole[0], 1), "trainings": round(trained, 1), "over": round(over, 3), "met": met}


def command(root: Path, *words: str) -> Took:
    """`shardwright WORDS`, from the moment it is started."""
    start, seen = time.perf_counter(), []
    process = subprocess.Popen(
        [sys.executable, "-m", "stages", *words],
        cwd=root,
        env={**environment(root), "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout is not None

    def listen(output: BinaryIO) -> None:
        for _ in output:
            if not seen:
                seen.append((time.perf_counter() - start, sum(psutil.Process(process.pid).cpu_times()[:4])))

    listener = Thread(target=listen, args=(process.stdout,))
    listener.start()
    _, status, used = os.wait4(process.pid, 0)
    listener.join()
    whole = time.perf_counter() - start, used.ru_utime + used.ru_stime
    return Took(seen[0] if seen else whole, whole, os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
