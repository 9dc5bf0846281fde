"""The searches that a pipeline takes: one for each division, number of micro-batches and schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from shardwright.pipeline.cost.pipelines.schedules import (
    Pipeline,
    Sending,
    StepWeights,
    forwards_ahead,
    in_flight,
    orders,
    refusal,
    sending_of,
    weights_of,
)
from shardwright.stages.checkpoint.pipelines.cuts import Field
from shardwright.stages.checkpoint.pipelines.cuts_kernels import Costs
from shardwright.stages.checkpoint.pipelines.partition_times import PartitionTimes
from shardwright.stages.checkpoint.pipelines.search_inputs import (
    Division,
    PartitionError,
    Reshard,
    SearchInputs,
    UserChoices,
)
from shardwright.stages.checkpoint.pipelines.submesh_plans import Sent, SubmeshPlan, Terms

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class SearchTask:
    """One search: a division, a number of micro-batches and a schedule; of some only with one number of partitions."""

    division: int
    pipeline: Pipeline
    micro_batches: int
    chunks: int
    times: tuple[PartitionTimes, ...]
    plain: Field  # without seconds
    flights: tuple[int, ...]  # by number from the end
    sending: Sending = Sending.RUNTIME

    @property
    def family(self) -> tuple[int, int, str]:
        """Tasks of one are alike but for the numbers of partitions."""
        return self.division, self.micro_batches, self.pipeline.value

    @property
    def weights(self) -> StepWeights:
        return weights_of(self.pipeline, self.micro_batches, self.chunks, self.sending)

    def send(self, cut: int, before: int, after: int) -> float:
        """Seconds of one transfer between these plans."""
        return float(self.plain.costs.send[cut, before, after]) / self.weights.sends / 2

    def field(self, slowest: float = math.inf, roughly: bool = False) -> Field:
        """With the seconds of all partitions that are no slower."""
        distinct = tuple(sorted(set(self.flights)))
        seconds = [own.seconds(distinct, slowest, roughly) for own in self.times]
        return replace(self.plain, costs=self.plain.costs._replace(seconds=np.ascontiguousarray(seconds)))


def tasks(given: SearchInputs, refused: list[str]) -> Iterator[SearchTask]:
    """Every search there is to make; what cannot be is added to `refused`."""
    wishes = given.wishes
    for number, division in enumerate(given.divisions):
        for micro_batches, submeshes in sorted(division.submeshes.items()):
            if wishes.micro_batches and micro_batches not in wishes.micro_batches:
                continue
            _check(submeshes, wishes)
            times_of = cache(
                lambda submesh, chunks, sent, micro=micro_batches: PartitionTimes(
                    submesh, _terms(given, micro, chunks, sent)
                )
            )
            sends = cache(lambda chosen, link=division.link: _sends(chosen, link, given.reshard))
            for pipeline in wishes.pipelines:
                for shape in _shapes(given, division, submeshes, pipeline, micro_batches, refused):
                    sent = _sent(wishes, pipeline)
                    times = tuple(times_of(submesh, shape.chunks, sent) for submesh in shape.submeshes)
                    sending = sending_of(wishes.overlap, pipeline)
                    weights = weights_of(pipeline, micro_batches, shape.chunks, sending)
                    what = _field(given, shape, sends(shape.submeshes), weights)
                    yield SearchTask(number, pipeline, micro_batches, shape.chunks, times, what, shape.flights, sending)


def _sent(wishes: UserChoices, pipeline: Pipeline) -> Sent:
    """As torch's schedules go: those that are run action by action wait for what they sent when the step ends."""
    if not wishes.buffers:
        return Sent.UNCOUNTED
    by_action = pipeline in (Pipeline.INTERLEAVED, Pipeline.ZERO_BUBBLE)
    return Sent.TO_THE_END if by_action else Sent.UNTIL_THE_NEXT


def _terms(given: SearchInputs, micro_batches: int, chunks: int, sent: Sent) -> Terms:
    wishes, effort = given.wishes, given.effort
    return Terms(
        memory=given.memory,
        micro_batches=micro_batches,
        recompute=wishes.recompute,
        share=1 / chunks,
        sent=sent,
        slots=effort.slots,
        spans=wishes.spans,
    )


def _check(submeshes: tuple[SubmeshPlan, ...], wishes: UserChoices) -> None:
    links = {submesh.links for submesh in submeshes}
    if len(links) != 1:
        raise PartitionError(f"the submeshes have {sorted(links)} links: all are plans of one model", where="submeshes")
    cuts = wishes.boundaries or ()
    if list(cuts) != sorted(set(cuts)) or any(not 0 < cut < max(links) for cut in cuts):
        remedy = f"give ascending links from 1 to {max(links) - 1}"
        raise PartitionError(f"partitions cannot begin with the links {list(cuts)}", where="boundaries", remedy=remedy)


@dataclass(frozen=True)
class Shape:
    """What a search ranges over: plans, devices as it counts them, numbers of partitions, flights from the end."""

    submeshes: tuple[SubmeshPlan, ...]
    sizes: tuple[int, ...]  # devices of each plan
    total: int
    counts: tuple[int, ...]
    flights: tuple[int, ...]
    fixed: tuple[int, ...] = ()  # sizes from the first partition to the last, if they are given
    chunks: int = 1


def _shapes(
    given: SearchInputs,
    division: Division,
    submeshes: tuple[SubmeshPlan, ...],
    pipeline: Pipeline,
    micro_batches: int,
    refused: list[str],
) -> Iterator[Shape]:
    if pipeline is Pipeline.INTERLEAVED:
        yield from _interleaved(given, division, submeshes, micro_batches, refused)
        return
    submeshes = tuple(submesh for submesh in submeshes if submesh.devices in (division.sizes or (submesh.devices,)))
    most = min(division.devices // min(p.devices for p in submeshes), given.effort.most_partitions) if submeshes else 0
    counts = _counts(given.wishes, submeshes, (len(division.sizes),) if division.sizes else range(1, most + 1))
    sizes = tuple(submesh.devices for submesh in submeshes)
    plain = Shape(submeshes, sizes, division.devices, counts, (), division.sizes)
    if pipeline is Pipeline.ZERO_BUBBLE:
        for n in counts:
            why = refusal(pipeline, n, 1, micro_batches)
            if why:
                refused.append(why)
            else:
                flights = in_flight(orders(pipeline, n, micro_batches))[::-1]
                yield replace(plain, submeshes=tuple(p.putting_off() for p in submeshes), counts=(n,), flights=flights)
    elif counts:
        flights = tuple(forwards_ahead(pipeline, left, micro_batches) for left in range(1, max(counts) + 1))
        yield replace(plain, flights=flights)


def _interleaved(
    given: SearchInputs, division: Division, submeshes: tuple[SubmeshPlan, ...], micro_batches: int, refused: list[str]
) -> Iterator[Shape]:
    """All on submeshes of one size and one mesh; the search counts partitions where it else counts devices."""
    for size, mesh in sorted({(submesh.devices, submesh.mesh) for submesh in submeshes}):
        if division.devices % size or (division.sizes and set(division.sizes) != {size}):
            continue
        mine = tuple(submesh for submesh in submeshes if (submesh.devices, submesh.mesh) == (size, mesh))
        devices = division.devices // size
        for chunks in given.wishes.chunks:
            why = refusal(Pipeline.INTERLEAVED, devices, chunks, micro_batches)
            if why:
                refused.append(why)
            elif counts := _counts(given.wishes, mine, (devices * chunks,)):
                flights = in_flight(orders(Pipeline.INTERLEAVED, devices, micro_batches, chunks))[::-1]
                yield Shape(mine, (1,) * len(mine), devices * chunks, counts, flights, (), chunks)


def _counts(
    wishes: UserChoices, submeshes: tuple[SubmeshPlan, ...], possible: tuple[int, ...] | range
) -> tuple[int, ...]:
    """The numbers of partitions that are possible and wanted."""
    links = submeshes[0].links if submeshes else 0
    asked = None if wishes.boundaries is None else len(wishes.boundaries) + 1
    return tuple(
        n
        for n in possible
        if n <= links and (not wishes.partitions or n in wishes.partitions) and (asked is None or n == asked)
    )


def _field(given: SearchInputs, shape: Shape, send: Floats, weights: StepWeights) -> Field:
    links = shape.submeshes[0].links
    distinct = tuple(sorted(set(shape.flights)))
    starts = np.ones(links, dtype=bool)
    if given.wishes.boundaries is not None:
        starts[:] = False
        starts[[0, *given.wishes.boundaries]] = True
    allowed = np.ones((len(shape.flights), len(shape.submeshes)), dtype=bool)
    for s, size in enumerate(reversed(shape.fixed)):
        allowed[s] = np.array(shape.sizes) == size
    costs = Costs(
        seconds=np.empty((len(shape.submeshes), 0, links, links)),
        send=weights.sends * send,
        send_in_peak=weights.send_in_peak,
        once=_sums([submesh.once for submesh in shape.submeshes]),
        credit=weights.credit * _sums([submesh.weight for submesh in shape.submeshes]),
        devices=np.array(shape.sizes, dtype=np.int64),
        flight=np.array([distinct.index(k) for k in shape.flights], dtype=np.int64),
        allowed=allowed,
        starts=starts,
    )
    return Field(costs, shape.total, shape.counts)


def _sums(rows: list[tuple[float, ...]]) -> Floats:
    return np.array([[0.0, *np.cumsum(row)] for row in rows])


def _sends(submeshes: tuple[SubmeshPlan, ...], link: Callable[[float], float], reshard: Reshard | None) -> Floats:
    """[cut, plan before, plan after]: the activation forwards and its gradient back."""
    links, plans = submeshes[0].links, len(submeshes)
    send = np.zeros((links, plans, plans))
    for cut in range(1, links):
        for p, before in enumerate(submeshes):
            for q, after in enumerate(submeshes):
                send[cut, p, q] = 2 * one_way(cut, before, after, link, reshard)
    return send


def one_way(
    cut: int, before: SubmeshPlan, after: SubmeshPlan, link: Callable[[float], float], reshard: Reshard | None
) -> float:
    """Seconds of one transfer: the larger of what a device of either side has of the activation, and what joins it."""
    nbytes = max(submesh.chain.a[cut] + submesh.crosses[cut] for submesh in (before, after))
    return link(nbytes) + (reshard(cut, before, after) if reshard else 0.0)
