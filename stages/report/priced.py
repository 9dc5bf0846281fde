"""Each partition's program with its price: what an op or a conversion takes, as the plan was priced."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

from pipeline.cost.step import Priced, StepPrice
from pipeline.ir.cluster import Cluster, Mesh
from pipeline.ir.graph import OpGraph
from pipeline.ir.plan import Partition
from pipeline.ir.profile import Profile, as_run
from pipeline.ir.program import Call, Convert, Program, Step
from pipeline.rates.compute import Seconds
from pipeline.sharding.conversions import conversion_of
from pipeline.sharding.partitions import sharded_parts
from pipeline.sharding.sharded import Sharded
from pipeline.sharding.slices import sliced
from stages.report.sources import Sources

VIEWS = "views"
CLASSES = (
    ("attention", ("attention",)),
    ("products", ("linear", "mm", "matmul", "conv", "einsum", "bilinear")),
    ("norms", ("norm",)),
    ("softmax and losses", ("softmax", "loss", "nll")),
    ("lookups", ("embedding", "gather", "index", "scatter", "topk", "one_hot")),
)
ELEMENTWISE = "elementwise and other"


def class_of(target: str, free: bool = False) -> str:
    """The class of an op by the name of its target: `aten.linear.default` is a product."""
    if free:
        return VIEWS
    name = target.split(".")[1] if target.count(".") > 1 else target
    return next((kind for kind, words in CLASSES if any(word in name for word in words)), ELEMENTWISE)


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
                yield _named(move), seconds


def _named(move: str) -> str:
    return move.replace("_", "-") if "_" in move else f"local {move or 'move'}"


def priced_partitions(sources: Sources) -> tuple[PricedPartition, ...]:
    """Nothing where there is no graph: without it a plan says little of the model."""
    if sources.graph is None:
        return ()
    plan, profile = sources.plan, sources.profile
    graph = as_run(sources.graph, profile.types if profile else {})
    if profile is not None:
        graph, profile = sliced(graph, profile, plan.slices)
    return tuple(
        PricedPartition(number, plan.partitions[number], own, _priced(sources, own, profile, plan.partitions[number]))
        for number, own in enumerate(sharded_parts(plan, graph))
    )


def _priced(sources: Sources, own: Sharded, profile: Profile | None, partition: Partition) -> Priced | None:
    cluster, frontier = _cluster(sources, partition), sources.frontier
    if cluster is None or profile is None or frontier is None:
        return None
    return Priced(own, profile, cluster, frontier.optimizer_copies)


def _cluster(sources: Sources, partition: Partition) -> Cluster | None:
    """The devices of a partition with the curves of its axes."""
    if sources.cluster is None:
        return None
    known = [*_meshes(sources.cluster), *(sources.frontier.meshes if sources.frontier else ())]
    mesh = next((mesh for mesh in reversed(known) if _axes(mesh) == partition.axes), None)
    return sources.cluster.part(mesh) if mesh else None


def _meshes(cluster: Cluster) -> Iterator[Mesh]:
    for split in cluster.splits:
        for own in split.meshes.values():
            yield from own
    yield from cluster.mesh_candidates()


def _axes(mesh: Mesh) -> tuple[tuple[str, int], ...]:
    return tuple((axis.name, axis.size) for axis in mesh.axes)
