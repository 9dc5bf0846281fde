"""The real stages, from trace to checkpoint, on configurations that nobody wrote down.

Nothing under runs/ is read but the measured cluster, and nothing is written there: stages work in a folder of their
own, and what one of them made is kept in memory for every configuration that asks it for the same.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwright.pipeline.base import artifacts
from shardwright.pipeline.base.artifacts import Artifact
from shardwright.pipeline.base.errors import ArtifactError, ConfigError, ShardwrightError
from shardwright.pipeline.base.instantiate import add_code_path
from shardwright.pipeline.base.log import Log
from shardwright.pipeline.base.measured_runs import as_measured_here
from shardwright.pipeline.base.stage import STAGES, Inputs, Result
from shardwright.pipeline.config import Config, Tracking
from shardwright.pipeline.cost.corrected import scaled_links
from shardwright.pipeline.ir.cluster import Cluster
from shardwright.pipeline.ir.plan import Frontier, Plan
from shardwright.pipeline.ops.discovery.remembered import remember_in
from shardwright.pipeline.tracking.tracker import Tracker
from shardwright.pipeline.user.own_ops import know_own_ops
from shardwright.stages.whatif.answer import SlowerLinks

Run = Callable[[Inputs, Config], Result]
RunOf = Callable[[str], Run]  # by name of the stage


@dataclass(frozen=True)
class PlanOutcome:
    """A plan, or why there is none."""

    plan: Plan | None
    refused: str
    error: ShardwrightError | None = None

    @property
    def fits(self) -> bool:
        return self.plan is not None


class Planner:
    def __init__(self, root: Path, run_of: RunOf, scratch: Path, log: Log) -> None:
        self.root, self.run_of, self.scratch, self.log = root, run_of, scratch, log
        self._made: dict[tuple[str, ...], Artifact | ShardwrightError] = {}
        self._tracker = Tracker(scratch, Tracking(enabled=False), log, execution="whatif")

    def plan(self, config: Config, changed: Mapping[str, Any] | None = None) -> PlanOutcome:
        """`changed` holds bodies to take in place of what the stages make, by kind of artifact."""
        try:
            return PlanOutcome(self.made("plan", config, changed).body, "")
        except ConfigError:
            raise
        except ShardwrightError as error:
            return PlanOutcome(None, error.what, error)

    def made(self, kind: str, config: Config, changed: Mapping[str, Any] | None = None) -> Artifact:
        """The artifact of a kind as the stages make it."""
        (stage,) = (stage for stage in STAGES.values() if stage.writes == kind)
        settings = {key: config.digest(key) for key in stage.config}
        if changed and kind in changed:
            return artifacts.make(kind, changed[kind], (), settings)
        reads = {above: self.made(above, config, changed) for above in stage.reads}
        key = (stage.name, *settings.values(), *(artifact.digest for artifact in reads.values()))
        if key not in self._made:
            try:
                found = self._measured(settings) if kind == "cluster" else None
                if found is None:
                    add_code_path(self.root, config.code)
                    know_own_ops(config, reads["graph"].body if "graph" in reads else None)
                    result = self.run_of(stage.name)(Inputs(self.scratch, reads, self.log, self._tracker), config)
                    found = artifacts.make(kind, result.body, reads.values(), settings)
                if kind == "cluster":
                    found = as_measured_here(found, config, self.root)
                self._made[key] = found
            except ShardwrightError as error:
                self._made[key] = error
        made = self._made[key]
        if isinstance(made, ShardwrightError):
            raise made
        return made

    def _measured(self, settings: Mapping[str, str]) -> Artifact | None:
        """The cluster under runs/, where it was made with these settings."""
        try:
            found = artifacts.load("cluster", self.root)
        except ArtifactError:
            return None
        return found if found.config == dict(settings) else None

    def cluster(self, config: Config) -> Cluster:
        body: Cluster = self.made("cluster", config).body
        return body

    def frontier(self, config: Config) -> Frontier:
        body: Frontier = self.made("frontier", config).body
        return body


@contextmanager
def planning(root: Path, run_of: RunOf, log: Log, *, keeps: bool = True) -> Iterator[Planner]:
    """A planner with a folder of its own, in which the project's conf/ and what is known of ops can be read.

    `keeps`: what is learnt of ops stays in the project; else nothing is left on the disk.
    """
    with tempfile.TemporaryDirectory(prefix="whatif-") as folder:
        scratch, known = Path(folder), root / "runs" / "ops"
        (scratch / "runs").mkdir()
        (scratch / "conf").symlink_to((root / "conf").resolve())
        if keeps:
            known.mkdir(parents=True, exist_ok=True)
            (scratch / "runs" / "ops").symlink_to(known.resolve())
        try:
            yield Planner(root, run_of, scratch, log)
        finally:
            if not keeps:
                remember_in(None)  # the folder goes


def with_budget(config: Config, nbytes: int | None) -> Config:
    gigabytes = None if nbytes is None else nbytes / 1e9
    return replace(config, solve=replace(config.solve, memory_budget_gb=gigabytes))


def slower(value: Any, factor: SlowerLinks) -> Any:
    """A cluster, or a mesh, with every link inside scaled. What runs took, they took on the links as they are."""
    found = scaled_links(value, factor.bandwidth, factor.latency)
    if isinstance(found, Cluster) and found.correction is not None:
        return replace(found, correction=replace(found.correction, plans=()))
    return found
