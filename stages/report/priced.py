"""What the page is made from: the artifacts under runs/ that belong to the plan, and each partition with its price."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.base import artifacts
from pipeline.base.artifacts import KINDS, Artifact
from pipeline.base.errors import ArtifactError
from pipeline.base.soundness import check_sound
from pipeline.config import Config
from pipeline.cost.op_prices import OpPrices
from pipeline.cost.step import Priced, StepPrice
from pipeline.ir.cluster import Cluster
from pipeline.ir.graph import OpGraph
from pipeline.ir.plan import Frontier, Partition, Plan
from pipeline.ir.profile import Profile, as_run
from pipeline.ir.program import Call, Convert, Program, Step
from pipeline.ir.report import Report
from pipeline.rates.compute import Seconds
from pipeline.sharding.conversions import conversion_of
from pipeline.sharding.partitions import sharded_parts
from pipeline.sharding.sharded import Sharded
from pipeline.sharding.slices import sliced
from pipeline.user.own_ops import know_own_ops

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
    name = target.split(".")[1] if target.count(".") > 1 else target
    return next((kind for kind, words in CLASSES if any(word in name for word in words)), ELEMENTWISE)


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
    return Sources(title, plan.body, **bodies, digest=plan.digest, notes=tuple(notes))


# ---- what an op or a conversion takes, as the plan was priced


@dataclass(frozen=True)
class PricedPartition:
    """A partition as it runs; prices where profile, cluster and frontier are known."""

    number: int
    partition: Partition
    sharded: Sharded  # with the types it runs in
    priced: Priced | None

    @property
    def graph(self) -> OpGraph:
        return self.sharded.graph

    @property
    def program(self) -> Program:
        return self.sharded.program

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.sharded.sizes

    @property
    def price(self) -> StepPrice | None:
        return self.priced.step if self.priced else None

    def seconds(self, step: Step, kept: Container[str]) -> Seconds | None:
        """Of an op without the collectives inside it, or of a conversion."""
        if self.priced is None:
            return None
        if isinstance(step, Convert):
            return self.priced.conversion(step, step.source.value in kept)
        return self.priced.op(step.op)

    def kept(self, steps: Sequence[Step]) -> Container[str]:
        """Values that the ops among these steps keep for backward."""
        return self.priced.kept_by(steps) if self.priced else ()

    def collectives(self, step: Step, kept: Container[str]) -> Iterator[tuple[str, float]]:
        """The seconds of a conversion by what it does, and those of collectives inside an op."""
        if self.priced is None:
            return
        if isinstance(step, Call):
            if inside := self.priced.collectives_inside(step.op).total:
                yield "inside ops", inside
            return
        entry = conversion_of(step.source.layout, step.target.layout, self.sizes)
        whole = self.priced.conversion(step, step.source.value in kept)
        once = self.priced.conversion(step, False)
        parts = (
            (entry.forward, whole.forward),
            (entry.backward, once.backward),
            (entry.forward, whole.backward - once.backward),
        )
        for move, seconds in parts:
            if seconds:
                yield move.replace("_", "-") if "_" in move else f"local {move or 'move'}", seconds


def priced_partitions(sources: Sources) -> tuple[PricedPartition, ...]:
    """Nothing where there is no graph: without it a plan says little of the model."""
    if sources.graph is None:
        return ()
    plan, profile = sources.plan, sources.profile
    graph = as_run(sources.graph, profile.types if profile else {})
    if profile is not None:
        graph, profile = sliced(graph, profile, plan.slices)
    return tuple(
        PricedPartition(
            number, plan.partitions[number], own, _priced(sources, graph, own, profile, plan.partitions[number])
        )
        for number, own in enumerate(sharded_parts(plan, graph))
    )


def _priced(
    sources: Sources, graph: OpGraph, own: Sharded, profile: Profile | None, partition: Partition
) -> Priced | None:
    cluster, frontier = _cluster(sources, partition), sources.frontier
    if cluster is None or profile is None or frontier is None:
        return None
    return Priced(own, OpPrices(graph, profile, cluster), frontier.optimizer_copies)


def _cluster(sources: Sources, partition: Partition) -> Cluster | None:
    """The devices of a partition with the curves of its axes."""
    if sources.cluster is None:
        return None
    known = [mesh for split in sources.cluster.splits for meshes in split.meshes.values() for mesh in meshes]
    known += [*sources.cluster.mesh_candidates(), *(sources.frontier.meshes if sources.frontier else ())]
    for mesh in reversed(known):
        if tuple((axis.name, axis.size) for axis in mesh.axes) == partition.axes:
            return sources.cluster.part(mesh)
    return None
