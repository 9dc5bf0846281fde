"""Each partition's program with its price: what an op or a conversion takes, as the plan was priced."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pipeline.cost.step import StepPrice, convert_seconds, price_step
from pipeline.ir.cluster import Cluster, Mesh
from pipeline.ir.graph import OpGraph
from pipeline.ir.plan import Partition
from pipeline.ir.profile import Profile, as_run
from pipeline.ir.program import Call, Convert, Program, Step
from pipeline.rates.compute import Seconds, op_seconds
from pipeline.rates.inner_collectives import talk_seconds
from pipeline.sharding.conversions import conversion_of
from pipeline.sharding.lowering import lower
from pipeline.sharding.partitions import part_of
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
class Priced:
    """A partition as it runs; prices where profile, cluster and frontier are known."""

    number: int
    partition: Partition
    graph: OpGraph  # of the partition, with the types it runs in
    program: Program
    cluster: Cluster | None
    profile: Profile | None
    price: StepPrice | None

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.partition.sizes

    def seconds(self, step: Step, kept: frozenset[str]) -> Seconds | None:
        """Of an op without the collectives inside it, or of a conversion."""
        if self.cluster is None or self.profile is None:
            return None
        if isinstance(step, Convert):
            return convert_seconds(self.graph, self.cluster, step, step.source.value in kept)
        strategy = self.partition.sharding.strategies[step.op]
        cost = self.profile.ops[step.op]
        return op_seconds(self.graph, step.op, cost, strategy, self.cluster.compute, self.sizes)

    def kept(self, steps: Iterable[Step]) -> frozenset[str]:
        """Values that the ops among these steps keep for backward."""
        profile = self.profile
        if profile is None:
            return frozenset()
        calls = (step for step in steps if isinstance(step, Call))
        return frozenset(profile.storage.get(name, name) for call in calls for name in profile.ops[call.op].saves)

    def collectives(self, step: Step, kept: frozenset[str]) -> Iterator[tuple[str, float]]:
        """The seconds of a conversion by what it does, and those of collectives inside an op."""
        if self.cluster is None:
            return
        if isinstance(step, Call):
            inside = talk_seconds(
                self.graph, step.op, self.partition.sharding.strategies[step.op], self.cluster.axes
            ).total
            if inside:
                yield "inside ops", inside
            return
        entry = conversion_of(step.source.layout, step.target.layout, self.sizes)
        whole = self.seconds(step, kept)
        once = convert_seconds(self.graph, self.cluster, step, False)
        assert whole is not None
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


def priced_partitions(sources: Sources) -> tuple[Priced, ...]:
    """Nothing where there is no graph: without it a plan says little of the model."""
    if sources.graph is None:
        return ()
    types = sources.profile.types if sources.profile else {}
    graph, profile = as_run(sources.graph, types), sources.profile
    if profile is not None:
        graph, profile = sliced(graph, profile, sources.plan.slices)
    return tuple(_priced(sources, graph, profile, number) for number in range(len(sources.plan.partitions)))


def _priced(sources: Sources, graph: OpGraph, profile: Profile | None, number: int) -> Priced:
    plan, partition = sources.plan, sources.plan.partitions[number]
    own = part_of(graph, partition.first, partition.last) if plan.pipelined else graph
    to_loss = number == len(plan.partitions) - 1
    program = lower(own, partition.sharding, plan.micro_batches, to_loss=to_loss)
    cluster = _cluster(sources, partition)
    price = None
    if cluster is not None and profile is not None and sources.frontier is not None:
        copies = sources.frontier.optimizer_copies
        price = price_step(own, profile, cluster, partition.sharding, program, copies)
    return Priced(number, partition, own, program, cluster if price else None, profile if price else None, price)


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
