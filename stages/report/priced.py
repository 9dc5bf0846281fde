"""What the page is made from: the artifacts under runs/ that belong to the plan, and each partition with its price."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shardwright.pipeline.base import artifacts
from shardwright.pipeline.base.artifacts import KINDS, Artifact
from shardwright.pipeline.base.errors import ArtifactError
from shardwright.pipeline.base.soundness import check_sound
from shardwright.pipeline.config import Config
from shardwright.pipeline.cost.corrected import corrected
from shardwright.pipeline.cost.parts import priced_parts
from shardwright.pipeline.cost.step import Priced
from shardwright.pipeline.ir.cluster import Cluster
from shardwright.pipeline.ir.graph import OpGraph
from shardwright.pipeline.ir.plan import Frontier, Partition, Plan
from shardwright.pipeline.ir.profile import Profile, as_run
from shardwright.pipeline.ir.report import Report
from shardwright.pipeline.sharding.partitions import sharded_parts
from shardwright.pipeline.sharding.sharded import Sharded
from shardwright.pipeline.sharding.slices import sliced
from shardwright.pipeline.user.own_ops import know_own_ops

VIEWS = "views"
CLASSES = (
    ("attention", ("attention",)),
    ("products", ("linear", "mm", "matmul", "conv", "einsum", "bilinear")),
    ("norms", ("norm",)),
    ("softmax and losses", ("softmax", "loss", "nll")),
    ("lookups", ("embedding", "gather", "index", "scatter", "topk", "one_hot")),
)
ELEMENTWISE = "elementwise and other"
ABOVE = ("graph", "profile", "cluster", "frontier")


def class_of(target: str, free: bool = False) -> str:
    """The class of an op by the name of its target: `aten.linear.default` is a product."""
    if free:
        return VIEWS
    name = short_name(target)
    return next((kind for kind, words in CLASSES if any(word in name for word in words)), ELEMENTWISE)


def short_name(target: str) -> str:
    """`aten.linear.default` -> `linear`"""
    return target.split(".")[1] if target.count(".") > 1 else target


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
                notes.append(error.line())
            continue
        of_plan = own.inputs.get("plan") == plan.digest if kind == "report" else plan.inputs.get(kind) == own.digest
        if of_plan:
            found[kind] = own
        else:
            notes.append(f"{KINDS[kind].file} is of another run and left out")
    know_own_ops(config, found["graph"].body if "graph" in found else None)
    check_sound(found | {"plan": plan})
    title = f"{config.choices['model']} on {config.choices['cluster']}"
    bodies = {kind: own.body for kind, own in found.items()}
    if "cluster" in bodies:
        bodies["cluster"] = corrected(bodies["cluster"], plan.body.correction)
    return Sources(title, plan.body, **bodies, digest=plan.digest, notes=tuple(notes))


@dataclass(frozen=True)
class PricedPartition:
    """A partition as it runs, in the types it runs in; with prices where profile, cluster and frontier are known."""

    number: int
    partition: Partition
    sharded: Sharded
    priced: Priced | None


def priced_partitions(sources: Sources) -> tuple[PricedPartition, ...]:
    """Nothing where there is no graph: without it a plan says little of the model."""
    if sources.graph is None:
        return ()
    plan, profile, cluster, frontier = sources.plan, sources.profile, sources.cluster, sources.frontier
    graph = as_run(sources.graph, profile.types if profile else {})
    priced: tuple[Priced | None, ...] = (None,) * len(plan.partitions)
    if profile is not None:
        graph, profile = sliced(graph, profile, plan.slices)
        if cluster is not None and frontier is not None:
            priced = priced_parts(plan, graph, profile, cluster, frontier)
    parts = zip(plan.partitions, sharded_parts(plan, graph), priced, strict=True)
    return tuple(PricedPartition(number, *part) for number, part in enumerate(parts))
