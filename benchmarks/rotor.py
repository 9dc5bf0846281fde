"""Rotor on chains whose optimum is known, and its speed: `python -m benchmarks.rotor --chains FILE [FILE...]`.

FILE is JSON that holds, anywhere, objects with a `chain` and either a `memory` or `results`, a list of points with a
`memory` each. A chain is `fw`, `bw`, `cw`, `cbw`, `ft`, `bt` (entry L of bw and bt is the loss; cbw[i+1] is what link i
keeps, its output included), or with several options a link `ff`, `fft`, `cw`, `options`, `loss`. A point is to reach
its `exact_persistent`, or its `makespan`; null is infeasible. `min_feasible_memory_exact` must be found, where given.

Every schedule runs in the simulator, which shares no formula with Rotor. Timed are random chains of floats and bytes on
one core: from the chain to the sequence, within budgets at 0, 1/4, 1/2 and all of the way from the tightest to keeping
everything; the slowest budget counts, each the best of three. Seconds are the processor's, which on a free core are the
clock's; the last column has the clock's. `tightest` is the search for the least budget in slots, once for each chain.
Bars: every point optimal, none over its budget; 200 links with 2,000 slots under 2 s, 60 links under 0.2 s.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.pipeline.base.errors import ShardwrightError
from shardwright.stages.checkpoint.recompute import rotor
from shardwright.stages.checkpoint.recompute.chain import Chain, Option, discretise
from shardwright.stages.checkpoint.recompute.schedule import no_recompute
from shardwright.stages.checkpoint.recompute.simulate import simulate

EXPECTED = ("exact_persistent", "makespan")
LENGTHS, SLOTS, SHARES, REPEATS = (24, 60, 100, 200), (500, 2000), (0.0, 0.25, 0.5, 1.0), 3
BARS = {"60x500": 0.2, "60x2000": 0.2, "200x2000": 2.0}
CLOSE = 1e-9  # of a time: sums of floats in two orders


class BadFile(Exception):
    """The file does not hold chains in a known form."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chains", type=Path, nargs="+", required=True, metavar="FILE")
    given = parser.parse_args(arguments)
    try:
        groups = [group for path in given.chains for group in read(path)]
    except BadFile as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    verdicts = [verdict for group in groups for verdict in judge_group(group)]
    seconds = measure()
    optimal, over = sum(v.optimal for v in verdicts), sum(v.over_budget for v in verdicts)
    print(json.dumps({"points": len(verdicts), "optimal": optimal, "over_budget": over, "seconds": seconds}))
    fast = all(seconds[name] < bar for name, bar in BARS.items())
    return 0 if verdicts and optimal == len(verdicts) and not over and fast else 1


# ------------------------------------------------------------------------------------------------------------- files


@dataclass(frozen=True)
class Known:
    """A chain with a budget, and the least time within it; None where nothing fits."""

    where: str
    chain: Chain
    memory: int
    time: float | None


@dataclass(frozen=True)
class Group:
    """The points of one section of a file, and the least budgets that it gives."""

    name: str
    points: tuple[Known, ...]
    tightest: tuple[tuple[Chain, int], ...]


def read(path: Path) -> list[Group]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BadFile(f"{path}: {error}") from error
    groups = (
        [_group(f"{path.name} {name}", part) for name, part in content.items()] if isinstance(content, dict) else []
    )
    groups = [group for group in groups if group.points]
    if not groups:
        raise BadFile(f"{path}: no points; a point is an object with `chain` and `memory`, or `chain` and `results`")
    return groups


def _group(name: str, part: object) -> Group:
    cases = list(_cases(part))
    points = [
        _point(f"{name} {case.get('id', number)}", case, point)
        for number, case in enumerate(cases)
        for point in case.get("results", [case])
    ]
    least = [(_chain(name, case), case["min_feasible_memory_exact"]) for case in cases if _has_least(case)]
    return Group(name, tuple(points), tuple(least))


def _cases(part: object) -> Iterator[dict[str, Any]]:
    if isinstance(part, dict) and "chain" in part:
        yield part
    elif isinstance(part, dict | list):
        for inner in part.values() if isinstance(part, dict) else part:
            yield from _cases(inner)


def _has_least(case: dict[str, Any]) -> bool:
    return case.get("min_feasible_memory_exact") is not None


def _point(where: str, case: dict[str, Any], point: dict[str, Any]) -> Known:
    key = next((key for key in EXPECTED if key in point), None)
    if key is None or "memory" not in point:
        raise BadFile(f"{where}: a point needs `memory` and one of {', '.join(EXPECTED)}; it has {', '.join(point)}")
    return Known(f"{where} in {point['memory']}", _chain(where, case), point["memory"], point[key])


def _chain(where: str, case: dict[str, Any]) -> Chain:
    chain = case["chain"]
    try:
        if "options" not in chain:
            sizes = {"a": chain["cw"], "saved": chain["cbw"][1:], "ft": chain["ft"], "bt": chain["bt"]}
            return Chain(**sizes, f=chain["fw"], b=chain["bw"])
        options = [[Option(*numbers) for numbers in link] for link in chain["options"]]
        seconds, temporaries = chain["loss"]
        return Chain(
            a=chain["cw"],
            saved=tuple(link[0].saved for link in options),
            f=tuple(link[0].f for link in options),
            b=(*(link[0].b for link in options), seconds),
            ft=tuple(link[0].ft for link in options),
            bt=(*(link[0].bt for link in options), temporaries),
            f_none=chain["ff"],
            ft_none=chain["fft"],
            more=tuple(tuple(link[1:]) for link in options),
        )
    except (KeyError, TypeError, ValueError, IndexError, ShardwrightError) as error:
        raise BadFile(f"{where}: chain: {error!r}") from error


# ------------------------------------------------------------------------------------------------------------ points


@dataclass(frozen=True)
class Verdict:
    """`optimal`: as fast as is known to be possible, or refused where nothing fits."""

    optimal: bool
    over_budget: bool = False


def judge_group(group: Group) -> list[Verdict]:
    verdicts = []
    for point in group.points:
        verdict, found = judge(point)
        verdicts.append(verdict)
        if verdict != Verdict(True):
            print(f"{point.where}: {found}, {point.time} expected")
    tight = sum(rotor.tightest(chain).memory == memory for chain, memory in group.tightest)
    line = f"{group.name:48}{sum(v.optimal for v in verdicts):4} of {len(verdicts)} points optimal"
    print(f"{line}, {tight} of {len(group.tightest)} least budgets" if group.tightest else line)
    return verdicts + [Verdict(False)] * (len(group.tightest) - tight)


def judge(point: Known) -> tuple[Verdict, str]:
    """How Rotor did, and what it found in words."""
    try:
        found = rotor.schedule(rotor.solve(point.chain, point.memory))
    except rotor.InfeasibleBudget as refusal:
        return Verdict(point.time is None and refusal.tightest > point.memory), "refused"
    outcome = simulate(point.chain, found.sequence)
    assert found.time is not None
    as_said = abs(outcome.time - found.time) <= CLOSE * found.time
    optimal = point.time is not None and outcome.time <= point.time * (1 + CLOSE)
    return Verdict(as_said and optimal, outcome.peak > point.memory), f"{outcome.time} holding {outcome.peak}"


# ------------------------------------------------------------------------------------------------------------- speed


def measure() -> dict[str, float]:
    """Seconds by `LxS`; prints the table."""
    rotor.solve(discretise(random_chain(4), 10**9, 100))  # compiles, or reads what is compiled
    print(f"\n{'links':>6}{'slots':>7}{'table':>10}{'seconds':>10}{'tightest':>10}{'bar':>7}{'by the clock':>14}")
    found = {}
    for length in LENGTHS:
        for slots in SLOTS:
            chain, name = random_chain(length), f"{length}x{slots}"
            floor, tightest, _ = _timed(lambda chain=chain, slots=slots: rotor.tightest(chain, slots).memory)
            top = int(simulate(chain, no_recompute(chain).sequence).peak)
            budgets = [int(floor + share * (top - floor)) for share in SHARES]
            runs = [_best(chain, budget, slots) for budget in budgets]
            seconds, clock = (max(run[k] for run in runs) for k in (0, 1))
            found[name] = round(seconds, 3)
            table = 8 * (slots + 1) * (length + 1) * (length + 2) / 2 / 1e6
            bar = f"{BARS[name]:.1f}s" if name in BARS else "-"
            print(
                f"{length:6}{slots:7}{table:7.0f} MB{seconds:9.3f}s{tightest:9.3f}s{bar:>7}{clock:13.3f}s", flush=True
            )
    return found


def _best(chain: Chain, memory: int, slots: int) -> tuple[float, float]:
    """The least processor and clock seconds of a few runs; what comes out is within the budget."""
    runs = []
    for _ in range(REPEATS):
        found, seconds, clock = _timed(lambda: rotor.schedule(rotor.solve(discretise(chain, memory, slots))))
        runs.append((seconds, clock))
    assert simulate(chain, found.sequence).peak <= memory
    return min(run[0] for run in runs), min(run[1] for run in runs)


def _timed(work: Callable[[], Any]) -> tuple[Any, float, float]:
    processor, clock = time.process_time(), time.perf_counter()
    found = work()
    return found, time.process_time() - processor, time.perf_counter() - clock


def random_chain(length: int) -> Chain:
    """Unlike links: sizes of 1 to 500 MB that no slot divides, times that are no whole numbers."""
    draw = random.Random(length)
    a = [draw.randint(10**6, 10**8) for _ in range(length + 1)]
    return Chain(
        a=tuple(a),
        saved=tuple(size + draw.randint(0, 4 * 10**8) for size in a[1:]),
        f=tuple(draw.uniform(0.1, 5) for _ in range(length)),
        b=tuple(draw.uniform(0.2, 10) for _ in range(length + 1)),
        ft=tuple(draw.randint(0, 5 * 10**7) for _ in range(length)),
        bt=tuple(draw.randint(0, 5 * 10**7) for _ in range(length + 1)),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
