"""`python -m benchmarks.attacks [--groups names,locks] [--sample]`: a table by group, then one line of JSON.

Attacks that did not hold are listed with what happened. `verify_planted` and `verify_caught` are of the group
`planted_faults`: programs with a fault written into them, which `verify` must find.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import benchmarks.attacks
from benchmarks.attacks.outcome import Outcome

NO_GROUPS = ("__main__", "outcome")
PLANTED = "planted_faults"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", default=",".join(groups()), help="which, of %(default)s")
    parser.add_argument("--sample", action="store_true", help="the few attacks of each group that the tests run")
    given = parser.parse_args(arguments)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # commands run in forks with bounds of memory, where no GPU can be used
    # What a shell starts in the background ignores one of these, with nohup both: so would all that is attacked.
    for number, heeded in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, lambda *_: None)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, heeded)
    found: dict[str, list[Outcome]] = {}
    print(f"{'group':20}{'attacks':>8}{'held':>8}{'seconds':>9}", flush=True)
    for group in given.groups.split(","):
        started = time.monotonic()
        found[group] = attack(group, given.sample)
        held = sum(outcome.held for outcome in found[group])
        print(f"{group:20}{len(found[group]):8}{held:8}{time.monotonic() - started:9.0f}", flush=True)
        for outcome in found[group]:
            if not outcome.held:
                print(f"not held: {group}: {outcome.attack}: {outcome.found}", flush=True)
    totals = summary(found)
    print(json.dumps(totals))
    return 0 if totals["held"] == totals["cases"] else 1


def groups() -> list[str]:
    return sorted(m.name for m in pkgutil.iter_modules(benchmarks.attacks.__path__) if m.name not in NO_GROUPS)


def attack(group: str, sample: bool) -> list[Outcome]:
    module = importlib.import_module(f"benchmarks.attacks.{group}")
    with tempfile.TemporaryDirectory() as folder:
        return list(module.attacks(Path(folder), sample))


def summary(found: dict[str, list[Outcome]]) -> dict[str, int]:
    every = [outcome for outcomes in found.values() for outcome in outcomes]
    planted = found.get(PLANTED, [])
    return {
        "cases": len(every),
        "held": sum(outcome.held for outcome in every),
        "tracebacks": sum(outcome.traceback for outcome in every),
        "lost": sum(outcome.lost for outcome in every),
        "code_run": sum(outcome.code_run for outcome in every),
        "verify_planted": len(planted),
        "verify_caught": sum(outcome.held for outcome in planted),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
