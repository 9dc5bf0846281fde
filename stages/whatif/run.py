"""`shardwright whatif QUESTION`: largest batch or sequence, fewest devices, budgets, slower links, clusters.

A question about the project's own model is answered by the planner; settings such as `solve.memory_budget_gb=2` change
the configuration for it. One about a transformer by name or by sizes, in the words of `price`, is
answered by the prices of its layouts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import cast

from shardwright.pipeline.base.log import QUIET, VERBOSE, Log, get_log, say
from shardwright.pipeline.config import GROUPS, try_settings
from shardwright.pipeline.layouts.planner_stages import PlannerStages
from shardwright.pipeline.layouts.sizes import KNOWN
from shardwright.pipeline.layouts.words import UNPLANNED, WORDS
from shardwright.stages.whatif.answer import Answer, Question, SlowerLinks, WhatIfError
from shardwright.stages.whatif.layouts import ByLayouts
from shardwright.stages.whatif.planned import ByPlanner
from shardwright.stages.whatif.planner import RunOf, planning

FACTORS = ("bandwidth", "latency")
SLOWER = (SlowerLinks(bandwidth=0.5), SlowerLinks(bandwidth=0.25), SlowerLinks(latency=2.0))  # where none is named


def run(
    root: Path, arguments: argparse.Namespace, run_of: RunOf, of_planner: Callable[[], PlannerStages], log: Log
) -> int:
    question, patience = read_question(arguments), Patience(arguments.seconds, log)
    shown = LastAnswer(as_json=arguments.json)
    with shown:
        if of_layouts(question.words):
            shown.follow(getattr(ByLayouts.of(root, question, of_planner()), question.name)(), patience)
            return 0
        config = try_settings(root, question.words)
        stages = get_log("plan", arguments.verbosity if arguments.verbosity == VERBOSE else QUIET)
        log.info("planning %s on %s", config.choices["model"], config.choices["cluster"])
        with planning(root, run_of, stages) as planner:
            shown.follow(getattr(ByPlanner(root, question, planner, config, log), question.name)(), patience)
    return 0


class Patience:
    """Whether there is time for one more try: as long as the longest but the first, which also makes what all need."""

    def __init__(self, seconds: float, log: Log) -> None:
        self.seconds, self.log = seconds, log
        self.times = [time.monotonic()]

    def is_over(self) -> bool:
        self.times.append(time.monotonic())
        took = [later - before for before, later in pairwise(self.times)]
        gone, one = self.times[-1] - self.times[0], max(took[1:], default=took[0])
        if len(took) == 1:
            left = "better ones until %g s (--seconds) or Ctrl-C"
            self.log.info(f"after %.1f s a first answer; {left}", gone, self.seconds)
        return gone + one > self.seconds


class LastAnswer:
    """Printed at the end: also when it is stopped by Ctrl-C, but not for an error."""

    def __init__(self, as_json: bool) -> None:
        self.as_json, self.answer = as_json, cast("Answer | None", None)

    def __enter__(self) -> None:
        pass

    def follow(self, answers: Iterable[Answer], patience: Patience) -> None:
        """The last of them, or the last for which there is time."""
        for answer in answers:
            self.answer = replace(answer, complete=False)
            if patience.is_over():
                return
        if self.answer is not None:
            self.answer = replace(self.answer, complete=True)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.answer is not None and (kind is None or issubclass(kind, KeyboardInterrupt)):
            say(self.answer.json() if self.as_json else self.answer.text())


def read_question(arguments: argparse.Namespace) -> Question:
    words, where = list(arguments.words), f"whatif {arguments.question}"
    factors = _factors([word for word in words if word.partition("=")[0] in FACTORS], arguments.question)
    names: tuple[str, ...] = ()
    if arguments.question == "clusters":
        listed = [word for word in words if "=" not in word]
        names = tuple(name for word in listed for name in word.split(",") if name)
    rest = [w for w in words if w.partition("=")[0] not in FACTORS and not (names and "=" not in w)]
    for name in ("step", "most"):
        if getattr(arguments, name) is not None and arguments.question in ("budget", "link", "clusters"):
            raise WhatIfError(f"--{name} says nothing here", where=where, remedy="leave it out")
    return Question(arguments.question, tuple(rest), factors, names, arguments.step, arguments.most)


def _factors(words: Sequence[str], question: str) -> tuple[SlowerLinks, ...]:
    if question != "link":
        if words:
            raise WhatIfError(f"'{words[0]}' is for `whatif link`", where=f"whatif {question}", remedy="leave it out")
        return ()
    given = {name: _numbers(name, text) for name, _, text in (word.partition("=") for word in words)}
    if not given:
        return SLOWER
    return tuple(SlowerLinks(**dict(zip(given, values, strict=True))) for values in product(*given.values()))


def _numbers(name: str, text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(one) for one in text.split(","))
        if all(1e-6 <= one <= 1e6 for one in found):
            return found
    except ValueError:
        pass
    what = f"'{name}={text}' is not possible"
    raise WhatIfError(what, where="whatif link", remedy="give factors above 0, such as 0.5")


def of_layouts(words: Sequence[str]) -> bool:
    """Whether the words are of a transformer by name or by sizes; words of both kinds are refused."""
    priced, plain = [], []
    for word in words:
        name, _, value = word.partition("=")
        if (name in {**WORDS, **UNPLANNED} and name not in GROUPS) or (name == "model" and value in KNOWN):
            priced.append(word)
        elif name.split(".")[0] in GROUPS and name not in WORDS:
            plain.append(word)
    if priced and plain:
        what = f"'{priced[0]}' asks for layouts by words and '{plain[0]}' for a plan"
        raise WhatIfError(what, remedy="keep words of one kind")
    return bool(priced)
