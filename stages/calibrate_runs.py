"""`shardwright calibrate [RUN ...]`: what runs of this project measured, for the predictions to come.

A run is its report.json, or its folder; its plan and all that this was made of lie beside it. What it measured is kept
in conf/measured, by the digests of the machine, of its figures and of the model; solve reads it (pipeline/ir/
correction.py says what follows from it). Of a described cluster the shares of `preset.reached` are fitted first:

    products, memory      one number: the plan's computation, priced anew, takes what was measured
    links, network        the same of its collectives, where most of their price is bytes
    collective_us         else: where most of it is latency

One total cannot tell more, and where no part of the step was measured, both rest on the whole step.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwright.pipeline.base import artifacts
from shardwright.pipeline.base.artifacts import KINDS, Artifact
from shardwright.pipeline.base.errors import ShardwrightError
from shardwright.pipeline.base.instantiate import add_code_path
from shardwright.pipeline.base.log import Log, say
from shardwright.pipeline.base.measured_runs import file_of, known, read_runs, write_runs
from shardwright.pipeline.config import (
    ClusterSettings,
    ClusterSource,
    Config,
    listing,
    load_config,
    load_part,
    set_keys,
)
from shardwright.pipeline.cost.corrected import decisions_of, uncorrected_parts
from shardwright.pipeline.cost.parts import priced_parts
from shardwright.pipeline.ir.cluster import Cluster
from shardwright.pipeline.ir.correction import Correction, MeasuredPlan, MeasuredRun, StepParts, correction_of, with_run
from shardwright.pipeline.ir.plan import Plan
from shardwright.pipeline.ir.profile import as_run
from shardwright.pipeline.ir.report import Report
from shardwright.pipeline.ops.discovery.remembered import remember_in
from shardwright.pipeline.sharding.slices import sliced
from shardwright.pipeline.user.own_ops import know_own_ops

READ = ("graph", "profile", "cluster", "frontier", "plan", "report")
LEAST_SHARE, MOST_US = 0.01, 1e6
ROUNDS = 40  # of halving
FEW = 10  # steps of which a median says little
Describe = Callable[[ClusterSettings], Cluster]
Found = dict[str, Artifact]


class RunsError(ShardwrightError):
    """A run that nothing can be learnt from."""


def run(root: Path, arguments: argparse.Namespace, describe: Describe, log: Log) -> int:
    config = config_with(root, arguments.cluster)
    name = config.choices["cluster"]
    add_code_path(root, config.code)
    remember_in(root / "runs" / "ops")
    files = arguments.files or [KINDS["report"].path(Path())]
    found = [read_run(root, file, config, log) for file in files]
    runs = [measured_run(one, config) for one in found]
    kept = read_runs(root, name)
    own = known(config, found[0]["cluster"])
    correction = correction_of(runs, own.machine, own.figures, own.model)
    assert correction is not None
    for one in runs:
        say(in_words(one))
    if config.cluster.source is not ClusterSource.probe:
        runs = reach(root, config, found, runs, correction, describe, log)
    for one in runs:
        kept = with_run(kept, one)
    write_runs(root, name, kept)
    say(f"the next prediction for this model on {name} rests on it: {file_of(name)}; now `shardwright run`")
    return 0


def config_with(root: Path, cluster: str | None) -> Config:
    config = load_config(root)
    if cluster is None:
        return config
    if cluster not in (names := listing(root, "cluster")):
        raise RunsError(f"there is no cluster '{cluster}'", remedy=f"choose one of: {', '.join(names)}")
    return replace(config, cluster=load_part(root, "cluster", cluster), root=replace(config.root, cluster=cluster))


# ---- a run


def read_run(root: Path, file: Path, config: Config, log: Log) -> Found:
    """With all that its plan was made of; refused where it says nothing of what conf/ has now."""
    place = file / "runs" if (root / file / "runs").is_dir() else file
    place = file.parent.parent if file.suffix == ".json" else place
    found: Found = {
        kind: artifacts.load_saved(str(place / KINDS[kind].path(Path()).relative_to("runs")), root, (kind,))
        for kind in READ
    }
    artifacts.check_together(found.values(), {})
    know_own_ops(config, found["graph"].body)
    where = str(place / "train" / "report.json")
    report: Report = found["report"].body
    for group in ("cluster", "model"):
        if found["report"].config.get(group) != config.digest(group):
            what = f"it was measured with other settings than conf/{group}/{config.choices[group]}.yaml has now"
            named = ", or name its cluster with --cluster" if group == "cluster" else ""
            raise RunsError(what, where=where, remedy=f"run `shardwright run` and calibrate again{named}")
    if report.engine != "planned" or report.module_edited:
        what = "the module was edited" if report.module_edited else f"its steps were taken by `engine: {report.engine}`"
        raise RunsError(f"{what}: it says nothing of the plan", where=where, remedy="train the plan as it is written")
    if report.steps < FEW:
        log.warning("%s has %d steps: the step that it measured is the median of few", where, report.steps)
    return found


def measured_run(found: Found, config: Config) -> MeasuredRun:
    report, plan, own = found["report"].body, found["plan"].body, known(config, found["cluster"])
    seen = MeasuredPlan(decisions_of(plan), found["profile"].digest, report.date, parts_of(report))
    return MeasuredRun(own.machine, own.figures, own.model, uncorrected_parts(plan), seen)


def parts_of(report: Report) -> StepParts:
    step = report.median_step_seconds
    rows = {row.what: row.measured / 1e3 for row in report.compared}
    if report.breakdown is None or "compute_ms" not in rows:
        return StepParts(step)
    hidden = report.breakdown.hidden_seconds * step / report.breakdown.step_seconds
    bubble = rows.get("bubble_ms", 0.0)
    return StepParts(step, rows["compute_ms"], rows["communication_ms"], hidden, bubble, rows["other_ms"])


def in_words(one: MeasuredRun) -> str:
    seen, priced = one.found.seconds, one.priced
    head = f"the run of {one.found.date}: {seen.step * 1e3:.2f} ms a step, priced at {priced.step * 1e3:.2f} ms"
    if not seen.parted:
        return f"{head}; no part of it was measured, so computing and collectives are not told apart"
    pairs = {
        "computing": (seen.compute, priced.compute),
        "collectives that nothing hides": (seen.communication, priced.communication),
        "beside": (seen.other, priced.other),
    }
    told = (f"{what} {left * 1e3:.2f} ms (priced at {right * 1e3:.2f})" for what, (left, right) in pairs.items())
    return f"{head}: {', '.join(told)}"


# ---- what a described cluster reaches


@dataclass(frozen=True)
class PlanPrice:
    """Of the plans, without what is computed again."""

    compute: float
    communication: float


def price_of(found: Sequence[Found], cluster: Cluster) -> PlanPrice:
    compute = communication = 0.0
    for one in found:
        plan: Plan = one["plan"].body
        profile = one["profile"].body
        # points and meshes have the links of then
        frontier = replace(one["frontier"].body, points=(), submesh_points=(), meshes=())
        graph, profile = sliced(as_run(one["graph"].body, profile.types), profile, plan.slices)
        for part in priced_parts(plan, graph, profile, cluster, frontier):
            assert part is not None  # planned for this very cluster
            compute += part.step.compute + part.step.optimizer
            communication += part.step.communication
    return PlanPrice(compute, communication)


def reach(
    root: Path,
    config: Config,
    found: Sequence[Found],
    runs: Sequence[MeasuredRun],
    correction: Correction,
    describe: Describe,
    log: Log,
) -> list[MeasuredRun]:
    """Writes the shares; the runs as they are priced with these."""
    settings, name = config.cluster, config.choices["cluster"]

    def priced(shares: dict[str, float]) -> PlanPrice:
        return price_of(found, describe(_with_shares(settings, shares)))

    shares, before = _shares_now(settings), priced({})
    shares |= _fit_compute(priced, shares, correction.compute * before.compute)
    shares |= _fit_links(priced, shares, correction.links * before.communication)
    shares = {key: float(f"{value:.3g}") for key, value in shares.items()}
    for line in set_keys(root, "cluster", name, {f"preset.reached.{key}": value for key, value in shares.items()}):
        log.info(line)
    after = priced(shares)
    told = "" if correction.parted else ", all by the ratio of whole steps"
    say(f"conf/cluster/{name}.yaml, preset.reached{told}: {', '.join(f'{k} {v:g}' for k, v in shares.items())}")
    compute = after.compute / before.compute if before.compute else 1.0
    links = after.communication / before.communication if before.communication else 1.0
    figures = replace(config, cluster=load_part(root, "cluster", name)).digest("cluster")
    return [replace(one, figures=figures, priced=_times(one.priced, compute, links)) for one in runs]


def _times(parts: StepParts, compute: float, links: float) -> StepParts:
    own, sent, behind = parts.compute * compute, parts.communication * links, parts.hidden * links
    bubble = parts.bubble * compute
    return StepParts(own + sent + bubble + parts.other, own, sent, behind, bubble, parts.other)


def _shares_now(settings: ClusterSettings) -> dict[str, float]:
    reached, usual = settings.preset.reached, settings.preset.efficiency
    return {"products": reached.products or usual, "memory": reached.memory or usual}


def _with_shares(settings: ClusterSettings, shares: dict[str, float]) -> ClusterSettings:
    preset = settings.preset
    known_shares: dict[str, Any] = shares
    return replace(settings, preset=replace(preset, reached=replace(preset.reached, **known_shares)))


def _fit_compute(
    priced: Callable[[dict[str, float]], PlanPrice], now: dict[str, float], wanted: float
) -> dict[str, float]:
    """Products and memory by one factor, which leaves neither above the whole."""

    def at(factor: float) -> dict[str, float]:
        return {name: share * factor for name, share in now.items()}

    return at(_where(lambda factor: priced(at(factor)).compute, LEAST_SHARE, 1 / max(now.values()), wanted))


def _fit_links(
    priced: Callable[[dict[str, float]], PlanPrice], shares: dict[str, float], wanted: float
) -> dict[str, float]:
    """By bytes or by latency: what makes most of the price."""

    def seconds(links: float, more: dict[str, float] | None = None) -> float:
        return priced({**shares, "links": links, "network": links, **(more or {})}).communication

    whole = seconds(1.0)
    if not whole:
        return {}
    sent = seconds(0.5) - whole  # what half of the bandwidth adds is what the bytes take
    if sent >= whole / 2:
        share = _where(seconds, LEAST_SHARE, 1.0, wanted)
        return {"links": share, "network": share}
    # falls with 1 / time, as it does with a share
    pause = 1 / _where(lambda one: seconds(1.0, {"collective_us": 1 / one}), 1 / MOST_US, 1e3, wanted)
    return {"links": 1.0, "network": 1.0, "collective_us": pause}


def _where(seconds: Callable[[float], float], least: float, most: float, wanted: float) -> float:
    """Where seconds that fall are as wanted, or the nearer end."""
    if seconds(most) >= wanted:
        return most
    if seconds(least) <= wanted:
        return least
    for _ in range(ROUNDS):
        middle = math.sqrt(least * most)
        least, most = (middle, most) if seconds(middle) > wanted else (least, middle)
    return math.sqrt(least * most)
