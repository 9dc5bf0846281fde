"""What the page is made from: the artifacts under runs/ that belong to the plan."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipeline.base import artifacts
from pipeline.base.artifacts import KINDS, Artifact
from pipeline.base.errors import ArtifactError
from pipeline.base.soundness import check_sound
from pipeline.config import Config
from pipeline.ir.cluster import Cluster
from pipeline.ir.graph import OpGraph
from pipeline.ir.plan import Frontier, Plan
from pipeline.ir.profile import Profile
from pipeline.ir.report import Report
from pipeline.user.own_ops import know_own_ops

ABOVE = ("graph", "profile", "cluster", "frontier")


@dataclass(frozen=True)
class Sources:
    """The plan, and of the other artifacts those that are there; `notes` say why one is not."""

    title: str
    plan: Plan
    graph: OpGraph | None = None
    profile: Profile | None = None
    cluster: Cluster | None = None
    frontier: Frontier | None = None
    report: Report | None = None
    digest: str = ""  # of the plan
    notes: tuple[str, ...] = ()


def read_sources(root: Path, config: Config, kinds: tuple[str, ...] = (*ABOVE, "report")) -> Sources:
    """An artifact of another run is left out; without a plan there is nothing to show, which is an error."""
    plan = artifacts.load("plan", root)
    found: dict[str, Artifact] = {}
    notes = []
    for kind in kinds:
        try:
            own = artifacts.load(kind, root)
        except ArtifactError as error:
            if KINDS[kind].path(root).exists():
                notes.append(f"{error.line()}")
            continue
        if _belongs(own, plan):
            found[kind] = own
        else:
            notes.append(f"{KINDS[kind].file} is of another run and left out")
    know_own_ops(config, found["graph"].body if "graph" in found else None)
    check_sound(found | {"plan": plan})
    title = f"{config.choices['model']} on {config.choices['cluster']}"
    bodies = {kind: own.body for kind, own in found.items()}
    return Sources(title, plan.body, **bodies, digest=plan.digest, notes=tuple(notes))


def _belongs(own: Artifact, plan: Artifact) -> bool:
    if own.kind == "report":
        return own.inputs.get("plan") == plan.digest
    return plan.inputs.get(own.kind) == own.digest
