"""`shardwright whatif QUESTION`: largest batch or sequence, fewest devices, budgets, slower links, clusters.

A question about the project's own model is answered by the planner; settings such as `solve.memory_budget_gb=2` change
the configuration for it. One about a transformer by name or by sizes, in the words of `price`, is
answered by the prices of its layouts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

from shardwright.pipeline.base.log import QUIET, VERBOSE, Log, get_log, say
from shardwright.pipeline.config import GROUPS, try_settings
from shardwright.pipeline.layouts.planner_stages import PlannerStages
from shardwright.pipeline.layouts.sizes import KNOWN
from shardwright.pipeline.layouts.words import UNPLANNED, WORDS
from shardwright.stages.whatif.answer import Question, SlowerLinks, WhatIfError
from shardwright.stages.whatif.layouts import ByLayouts
from shardwright.stages.whatif.planned import ByPlanner
from shardwright.stages.whatif.planner import RunOf, planning

FACTORS = ("bandwidth", "latency")


def run(
    root: Path, arguments: argparse.Namespace, run_of: RunOf, of_planner: Callable[[], PlannerStages], log: Log
) -> int:
    question = read_question(arguments)
    if of_layouts(question.words):
        found = getattr(ByLayouts.of(root, question, of_planner()), question.name)()
    else:
        config = try_settings(root, question.words)
        stages = get_log("plan", arguments.verbosity if arguments.verbosity == VERBOSE else QUIET)
        with planning(root, run_of, stages) as planner:
            found = getattr(ByPlanner(root, question, planner, config, log), question.name)()
    say(found.json() if arguments.json else found.text())
    return 0


def read_question(arguments: argparse.Namespace) -> Question:
    words, where = list(arguments.words), f"whatif {arguments.question}"
    factors = _factors([word for word in words if word.partition("=")[0] in FACTORS], arguments.question)
    names: tuple[str, ...] = ()
    if arguments.question == "clusters":
        listed = [word for word in words if "=" not in word]
        names = tuple(name for word in listed for name in word.split(",") if name)
        if not names:
            raise WhatIfError("no cluster is named", where=where, remedy="add them: a100_80,h100")
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
        raise WhatIfError("nothing is slower", where="whatif link", remedy="add bandwidth=0.5 or latency=2")
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
