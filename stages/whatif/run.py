"""`python -m stages whatif QUESTION`: largest batch or sequence, fewest devices, budgets, slower links, clusters.

A question about the project's own model is answered by the planner; settings such as `solve.memory_budget_gb=2` change
the configuration for it. One about a transformer by name or by sizes, in the words of `price`, is answered by formula.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from pipeline.base.log import QUIET, VERBOSE, Log, get_log, say
from pipeline.cluster_model import KNOWN
from pipeline.cluster_model.words import WORDS, find_machine, find_model, read_words
from pipeline.config import GROUPS, load_config, try_settings
from stages.whatif import formula, planned
from stages.whatif.answer import Answer, WhatIfError
from stages.whatif.links import Slower
from stages.whatif.planner import RunOf, planning

FACTORS = ("bandwidth", "latency")


@dataclass(frozen=True)
class Question:
    name: str
    words: tuple[str, ...]  # settings, or words of `price`
    factors: tuple[Slower, ...]
    clusters: tuple[str, ...]
    step: int | None
    most: int | None


def run(root: Path, arguments: argparse.Namespace, run_of: RunOf, log: Log) -> int:
    question = read_question(arguments)
    if of_formula(question.words):
        found = _by_formula(root, question)
    else:
        found = _by_planner(root, question, run_of, arguments, log)
    say(found.json() if arguments.json else found.text())
    return 0


# ---- the question


def read_question(arguments: argparse.Namespace) -> Question:
    words = list(arguments.words)
    factors = _factors([word for word in words if word.partition("=")[0] in FACTORS], arguments.question)
    names: tuple[str, ...] = ()
    if arguments.question == "clusters":
        listed = [word for word in words if "=" not in word]
        names = tuple(name for word in listed for name in word.split(",") if name)
        if not names:
            raise WhatIfError("no cluster is named", where="whatif clusters", remedy="add them: a100_80,h100")
    rest = [w for w in words if w.partition("=")[0] not in FACTORS and not (names and "=" not in w)]
    for name in ("step", "most"):
        if getattr(arguments, name) is not None and arguments.question in ("budget", "link", "clusters"):
            raise WhatIfError(
                f"--{name} says nothing here", where=f"whatif {arguments.question}", remedy="leave it out"
            )
    return Question(arguments.question, tuple(rest), factors, names, arguments.step, arguments.most)


def _factors(words: Sequence[str], question: str) -> tuple[Slower, ...]:
    if question != "link":
        if words:
            raise WhatIfError(f"'{words[0]}' is for `whatif link`", where=f"whatif {question}", remedy="leave it out")
        return ()
    given = {name: _numbers(name, text) for name, _, text in (word.partition("=") for word in words)}
    if not given:
        raise WhatIfError("nothing is slower", where="whatif link", remedy="add bandwidth=0.5 or latency=2")
    return tuple(Slower(**dict(zip(given, values, strict=True))) for values in product(*given.values()))


def _numbers(name: str, text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(one) for one in text.split(","))
        if all(1e-6 <= one <= 1e6 for one in found):
            return found
    except ValueError:
        pass
    raise WhatIfError(
        f"'{name}={text}' is not possible", where="whatif link", remedy="give factors above 0, such as 0.5"
    )


def of_formula(words: Sequence[str]) -> bool:
    """Whether the words are of a transformer by name or by sizes; words of both kinds are refused."""
    priced = [w for w in words if _is_priced(*w.partition("=")[::2])]
    settings = [w for w in words if w.partition("=")[0].split(".")[0] in GROUPS and w not in priced]
    plain = [w for w in settings if w.partition("=")[0] not in WORDS]
    if priced and plain:
        raise WhatIfError(
            f"'{priced[0]}' asks for a formula and '{plain[0]}' for the planner", remedy="keep words of one kind"
        )
    return bool(priced)


def _is_priced(name: str, value: str) -> bool:
    return (name in WORDS and name not in GROUPS) or (name == "model" and value in KNOWN)


# ---- the answers


def _by_formula(root: Path, question: Question) -> Answer:
    asked, config = read_words(question.words), load_config(root)
    model = find_model(root, asked, config)
    cluster, machine = find_machine(root, asked, config, None)
    asking = formula.Asking(root, config, asked, model, cluster, machine)
    return _answered(formula, asking, question)


def _by_planner(root: Path, question: Question, run_of: RunOf, arguments: argparse.Namespace, log: Log) -> Answer:
    config = try_settings(root, question.words)
    stages = get_log("plan", arguments.verbosity if arguments.verbosity == VERBOSE else QUIET)
    with planning(root, run_of, stages) as planner:
        asking = planned.Asking(root, planner, config, log)
        return _answered(planned, asking, question)


def _answered(by: Any, asking: object, question: Question) -> Answer:
    """By the module `formula` or `planned`, which have a function for each question."""
    given: dict[str, tuple[object, ...]] = {
        "batch": (question.step, question.most),
        "sequence": (question.step, question.most),
        "devices": (question.most,),
        "link": (question.factors,),
        "clusters": (question.clusters,),
    }
    answer: Answer = getattr(by, question.name)(asking, *given.get(question.name, ()))
    return answer
