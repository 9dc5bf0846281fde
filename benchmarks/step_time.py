"""What a step of the chosen plan takes beside what people use today: `python -m benchmarks.step_time`.

Two ranks (CPU processes, gloo) and the scenarios of benchmarks.step_time_models: each is planned by the stages for this
machine as the cluster stage measures it. Measured in turn, round by round:

    compared   the chosen plan, torch's DDP, FSDP2 (`fully_shard`) and, where `parallelize_module` can, DTensor's tensor
               parallelism. The figure is the median of the chosen plan's seconds over those of the fastest of the
               others, of the same round. Who needs more memory than the scenario's budget is out. Where the
               cluster stage found that this CPU is faster without oneDNN, our programs run without it; for
               information there is DDP with the same kernels, too.
    predicted  plans forced upon the model (families by name, with and without recompute): what a step takes beside
               what it was predicted to.

Bars: ratios of at most 0.86 in the geometric mean and 1.0 at worst; over all forced plans a Spearman rank correlation
of at least 0.93 and a median error of at most 12%. Batch norms are of a rank's part of the batch, as those of DDP and
FSDP2 are. One scenario has them of the whole batch, which is more than the others do: it counts apart, with a bar of
1.15, and its losses differ, which is told. The machine should do nothing else meanwhile. The last line is one JSON
object.

`--only plan --folder DIR`, then `--only measure --folder DIR` run the two parts alone; `--scenarios a,b` some of them.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import socket
import statistics
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import exp, log
from pathlib import Path
from typing import Any

from benchmarks.step_time_models import SCENARIOS
from benchmarks.step_time_ranks import CHOSEN, DDP_LIKE_US, RANKS
from tests.namespaces import OWN, address, hosts, why_not

MEAN_BAR, WORST_BAR, WHOLE_NORMS_BAR, SPEARMAN_BAR, ERROR_BAR = 0.86, 1.0, 1.15, 0.93, 0.12
FEWEST_PLANS = 20
NEAR = 1e-4  # losses, relative
LIMIT_S = 1800
SOURCE = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Outcome:
    """Of a scenario."""

    ratio: float | None  # chosen over the best of the others that fit; None: no other fits
    best: str
    milliseconds: dict[str, float]
    peak_mb: dict[str, float]
    too_large: tuple[str, ...]  # for the budget
    losses_differ: float  # relative, at most


@dataclass(frozen=True)
class Predicted:
    scenario: str
    plan: str
    predicted_ms: float
    measured_ms: float

    @property
    def error(self) -> float:
        return abs(self.predicted_ms / self.measured_ms - 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("plan", "measure"), help="one part, the other's files from the folder")
    parser.add_argument("--folder", type=Path, default=Path("runs/step_time"), help="where projects and programs lie")
    parser.add_argument("--scenarios", default=",".join(SCENARIOS))
    parser.add_argument("--rounds", type=int, default=30, help="of steps that are measured")
    parser.add_argument("--no-forced", action="store_true", help="compare alone, without forced plans")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    folder: Path = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    outcomes: dict[str, Outcome] = {}
    predictions: list[Predicted] = []
    for name in filter(None, arguments.scenarios.split(",")):
        with placed(name) as spaces:
            if spaces is None:
                continue
            if arguments.only != "measure":
                plan(folder, name, spaces, not arguments.no_forced)
            if arguments.only != "plan":
                outcomes[name], found = measured(folder, name, spaces, arguments.rounds)
                predictions += found
    if arguments.only == "plan":
        return 0
    told, met = verdict(outcomes, predictions)
    print(json.dumps(told))
    return 0 if met else 1


@contextmanager
def placed(name: str) -> Iterator[list[str] | None]:
    """The namespaces in which the ranks of a scenario run; none where this machine is all there is."""
    megabits = SCENARIOS[name].megabits
    if megabits is None:
        yield []
    elif reason := why_not():
        print(f"{name}: left out: {reason}", flush=True)
        yield None
    else:
        with hosts("step", RANKS, lambda a, b: megabits) as made:
            yield made


# ---------------------------------------------------------------------------------------------------------- planning


def plan(folder: Path, name: str, spaces: list[str], with_forced: bool) -> None:
    from benchmarks import step_time_plans as plans  # measuring needs none of what it imports

    root = plans.project(folder, name, plans.apart() if spaces else plans.alone())
    shared = folder / "this_machine"
    if spaces:
        plans.measure_hosts(root, spaces)
    else:
        if not (shared / "runs").exists():
            plans.run(root, "cluster")
            plans.take_cluster(root, shared)
        plans.take_cluster(shared, root)
    written = [plans.chosen(root), *(plans.forced(root) if with_forced else ())]
    (root / "plans.json").write_text(json.dumps([asdict(each) for each in written]))


# --------------------------------------------------------------------------------------------------------- measuring


def measured(folder: Path, name: str, spaces: list[str], rounds: int) -> tuple[Outcome, list[Predicted]]:
    plans = json.loads((folder / name / "plans.json").read_text())
    out = folder / name / "measured.json"
    run_ranks(name, {each["name"]: each["path"] for each in plans}, spaces, rounds, out)
    found = json.loads(out.read_text())
    outcome = judge(found, SCENARIOS[name].budget_mb)
    show(name, outcome)
    forced = [each for each in plans if each["name"] != CHOSEN]
    middle = {who: 1e3 * statistics.median(row["seconds"]) for who, row in found["plans"].items()}
    predictions = [Predicted(name, p["name"], 1e3 * p["predicted"], middle[p["name"]]) for p in forced]
    for predicted, each in zip(predictions, forced, strict=True):
        parts = ", ".join(f"{part} {1e3 * seconds:.1f}" for part, seconds in each["parts"].items() if seconds > 1e-6)
        line = f"  {predicted.plan:22}{predicted.predicted_ms:10.2f} ms predicted{predicted.measured_ms:10.2f} ms"
        print(f"{line} measured{predicted.error:8.0%}   {parts}", flush=True)
    return outcome, predictions


def run_ranks(name: str, programs: dict[str, str], spaces: list[str], rounds: int, out: Path) -> None:
    host = address(0) if spaces else "127.0.0.1"
    told = ["--meet", f"tcp://{host}:{_free_port()}", "--rounds", str(rounds), "--out", str(out)]
    network = {"GLOO_SOCKET_IFNAME": OWN} if spaces else {}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SOURCE), **network}
    ranks = []
    for rank in range(RANKS):
        inside = ["ip", "netns", "exec", spaces[rank]] if spaces else []
        own = ["--rank", str(rank), "--programs", json.dumps(programs), *told]
        command = [*inside, sys.executable, "-m", "benchmarks.step_time_ranks", name, *own]
        ranks.append(subprocess.Popen(command, env=environment))
    try:
        if any([rank.wait(LIMIT_S) for rank in ranks]):
            raise SystemExit(f"{name}: a rank failed")
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


# ----------------------------------------------------------------------------------------------------------- figures


def judge(found: dict[str, Any], budget_mb: float | None) -> Outcome:
    compared: dict[str, dict[str, list[float]]] = found["compared"]
    middle = {who: 1e3 * statistics.median(row["seconds"]) for who, row in compared.items()}
    peaks = {who: peak / 1e6 for who, peak in found["peaks"].items()}
    too_large = tuple(who for who, peak in peaks.items() if budget_mb is not None and peak > budget_mb)
    others = [who for who in compared if who not in (CHOSEN, DDP_LIKE_US, *too_large)]
    best = min(others, key=lambda who: middle[who], default="")
    ratios = zip(compared[CHOSEN]["seconds"], compared[best]["seconds"], strict=True) if best else ()
    ratio = statistics.median(ours / theirs for ours, theirs in ratios) if best else None
    ours = compared[CHOSEN]["losses"]
    differ = max(abs(a - b) / abs(b) for row in compared.values() for a, b in zip(ours, row["losses"], strict=True))
    return Outcome(ratio, best, middle, peaks, too_large, differ)


def verdict(outcomes: dict[str, Outcome], predictions: list[Predicted]) -> tuple[dict[str, Any], bool]:
    found = [(SCENARIOS[name].batch_norm, one.ratio) for name, one in outcomes.items() if one.ratio is not None]
    ratios = [ratio for norm, ratio in found if norm == "per_rank"]
    whole_norms = max((ratio for norm, ratio in found if norm == "whole"), default=None)
    mean = exp(statistics.fmean(map(log, ratios))) if ratios else None
    worst = max(ratios, default=None)
    pairs = [(each.predicted_ms, each.measured_ms) for each in predictions]
    order = spearman(pairs) if len(pairs) > 1 else None
    error = statistics.median(each.error for each in predictions) if predictions else None
    told = {
        "geomean": _short(mean),
        "worst": _short(worst),
        "whole_norms": _short(whole_norms),
        "spearman": _short(order),
        "median_error": _short(error),
        "plans": len(predictions),
        "scenarios": {name: _told(outcome) for name, outcome in outcomes.items()},
    }
    fits = all(CHOSEN not in outcome.too_large for outcome in outcomes.values())
    fast = mean is not None and worst is not None and mean <= MEAN_BAR and worst <= WORST_BAR
    fast = fast and whole_norms is not None and whole_norms <= WHOLE_NORMS_BAR
    right = order is not None and error is not None and order >= SPEARMAN_BAR and error <= ERROR_BAR
    return told, fits and fast and right and len(predictions) >= FEWEST_PLANS and outcomes.keys() == SCENARIOS.keys()


def _told(outcome: Outcome) -> dict[str, Any]:
    milliseconds = {who: _short(each) for who, each in outcome.milliseconds.items()}
    return {"ratio": _short(outcome.ratio), "best": outcome.best, "ms": milliseconds, "too_large": outcome.too_large}


def _short(number: float | None) -> float | None:
    return None if number is None else round(number, 4)


def spearman(pairs: list[tuple[float, float]]) -> float:
    """Of the ranks; those that are equal share theirs."""
    return statistics.correlation(_ranks([a for a, _ in pairs]), _ranks([b for _, b in pairs]))


def _ranks(numbers: list[float]) -> list[float]:
    ordered = sorted(numbers)
    return [ordered.index(number) + (ordered.count(number) - 1) / 2 for number in numbers]


def show(name: str, outcome: Outcome) -> None:
    ratio = "no other fits" if outcome.ratio is None else f"{outcome.ratio:.3f} of {outcome.best}"
    told = "   the chosen plan needs more than its budget" if CHOSEN in outcome.too_large else ""
    told += f"   losses differ by {outcome.losses_differ:.1e}" if outcome.losses_differ > NEAR else ""
    print(f"{name:24}{ratio}{told}")
    for who, milliseconds in outcome.milliseconds.items():
        large = "   over the budget" if who in outcome.too_large else ""
        print(f"  {who:22}{milliseconds:10.2f} ms{outcome.peak_mb[who]:10.1f} MB{large}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
