"""The searches that a pipeline takes: one for each division, number of micro-batches and schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from stages.checkpoint.pipelines.cuts import Field
from stages.checkpoint.pipelines.cuts_kernels import Costs
from stages.checkpoint.pipelines.partition_times import PartitionTimes
from stages.checkpoint.pipelines.schedules import Pipeline, StepWeights, in_flight, orders, refusal, weights_of
from stages.checkpoint.pipelines.search_inputs import Division, Given, PartitionError, Reshard, Wishes
from stages.checkpoint.pipelines.submesh_plans import Piece, Sent, Terms

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

    @property
    def family(self) -> tuple[int, int, str]:
        """Tasks of one are alike but for the numbers of partitions."""
        return self.division, self.micro_batches, self.pipeline.value

    @property
    def weights(self) -> StepWeights:
        return weights_of(self.pipeline, self.micro_batches, self.chunks)

    def field(self, slowest: float = math.inf, roughly: bool = False) -> Field:
        """With the seconds of all partitions that are no slower."""
        distinct = tuple(sorted(set(self.flights)))
        seconds = [own.seconds(distinct, slowest, roughly) for own in self.times]
        return replace(self.plain, costs=self.plain.costs._replace(seconds=np.ascontiguousarray(seconds)))


def tasks(given: Given, refused: list[str]) -> Iterator[SearchTask]:
    """Every search there is to make; what cannot be is added to `refused`."""
    wishes = given.wishes
    for number, division in enumerate(given.divisions):
        for micro_batches, pieces in sorted(division.pieces.items()):
            if wishes.micro_batches and micro_batches not in wishes.micro_batches:
                continue
            _check(pieces, wishes)
            times_of = cache(
                lambda piece, chunks, sent, micro=micro_batches: PartitionTimes(
                    piece, _terms(given, micro, chunks, sent)
                )
            )
            sends = cache(lambda chosen, link=division.link: _sends(chosen, link, given.reshard))
            for pipeline in wishes.pipelines:
                for shape in _shapes(given, division, pieces, pipeline, micro_batches, refused):
                    sent = _sent(wishes, pipeline)
                    times = tuple(times_of(piece, shape.chunks, sent) for piece in shape.pieces)
                    what = _field(given, shape, sends(shape.pieces), weights_of(pipeline, micro_batches))
                    yield SearchTask(number, pipeline, micro_batches, shape.chunks, times, what, shape.flights)


def _sent(wishes: Wishes, pipeline: Pipeline) -> Sent:
    """As torch's schedules go: those that are run action by action wait for what they sent when the step ends."""
    if not wishes.buffers:
        return Sent.UNCOUNTED
    by_action = pipeline in (Pipeline.INTERLEAVED, Pipeline.ZERO_BUBBLE)
    return Sent.TO_THE_END if by_action else Sent.UNTIL_THE_NEXT


def _terms(given: Given, micro_batches: int, chunks: int, sent: Sent) -> Terms:
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


def _check(pieces: tuple[Piece, ...], wishes: Wishes) -> None:
    links = {piece.links for piece in pieces}
    if len(links) != 1:
        raise PartitionError(f"the pieces have {sorted(links)} links: all are plans of one model", where="pieces")
    cuts = wishes.boundaries or ()
    if list(cuts) != sorted(set(cuts)) or any(not 0 < cut < max(links) for cut in cuts):
        remedy = f"give ascending links from 1 to {max(links) - 1}"
        raise PartitionError(f"partitions cannot begin with the links {list(cuts)}", where="boundaries", remedy=remedy)


@dataclass(frozen=True)
class Shape:
    """What a search ranges over: plans, devices as it counts them, numbers of partitions, flights from the end."""

    pieces: tuple[Piece, ...]
    sizes: tuple[int, ...]  # devices of each plan
    total: int
    counts: tuple[int, ...]
    flights: tuple[int, ...]
    fixed: tuple[int, ...] = ()  # sizes from the first partition to the last, if they are given
    chunks: int = 1


def _shapes(
    given: Given,
    division: Division,
    pieces: tuple[Piece, ...],
    pipeline: Pipeline,
    micro_batches: int,
    refused: list[str],
) -> Iterator[Shape]:
    if pipeline is Pipeline.INTERLEAVED:
        yield from _interleaved(given, division, pieces, micro_batches, refused)
        return
    pieces = tuple(piece for piece in pieces if piece.devices in (division.sizes or (piece.devices,)))
    most = min(division.devices // min(p.devices for p in pieces), given.effort.most_partitions) if pieces else 0
    counts = _counts(given.wishes, pieces, (len(division.sizes),) if division.sizes else range(1, most + 1))
    sizes = tuple(piece.devices for piece in pieces)
    plain = Shape(pieces, sizes, division.devices, counts, (), division.sizes)
    if pipeline is Pipeline.ZERO_BUBBLE:
        for n in counts:
            why = refusal(pipeline, n, 1, micro_batches)
            if why:
                refused.append(why)
            else:
                flights = in_flight(orders(pipeline, n, micro_batches))[::-1]
                yield replace(plain, pieces=tuple(p.putting_off() for p in pieces), counts=(n,), flights=flights)
    elif counts:
        everything = pipeline is Pipeline.GPIPE
        flights = tuple(micro_batches if everything else min(s + 1, micro_batches) for s in range(max(counts)))
        yield replace(plain, flights=flights)


def _interleaved(
    given: Given, division: Division, pieces: tuple[Piece, ...], micro_batches: int, refused: list[str]
) -> Iterator[Shape]:
    """All on pieces of one size and one mesh; the search counts partitions where it else counts devices."""
    for size, mesh in sorted({(piece.devices, piece.mesh) for piece in pieces}):
        if division.devices % size or (division.sizes and set(division.sizes) != {size}):
            continue
        mine = tuple(piece for piece in pieces if (piece.devices, piece.mesh) == (size, mesh))
        devices = division.devices // size
        for chunks in given.wishes.chunks:
            why = refusal(Pipeline.INTERLEAVED, devices, chunks, micro_batches)
            if why:
                refused.append(why)
            elif counts := _counts(given.wishes, mine, (devices * chunks,)):
                flights = in_flight(orders(Pipeline.INTERLEAVED, devices, micro_batches, chunks))[::-1]
                yield Shape(mine, (1,) * len(mine), devices * chunks, counts, flights, (), chunks)


def _counts(wishes: Wishes, pieces: tuple[Piece, ...], possible: tuple[int, ...] | range) -> tuple[int, ...]:
    """The numbers of partitions that are possible and wanted."""
    links = pieces[0].links if pieces else 0
    asked = None if wishes.boundaries is None else len(wishes.boundaries) + 1
    return tuple(
        n
        for n in possible
        if n <= links and (not wishes.partitions or n in wishes.partitions) and (asked is None or n == asked)
    )


def _field(given: Given, shape: Shape, send: Floats, weights: StepWeights) -> Field:
    links = shape.pieces[0].links
    distinct = tuple(sorted(set(shape.flights)))
    starts = np.ones(links, dtype=bool)
    if given.wishes.boundaries is not None:
        starts[:] = False
        starts[[0, *given.wishes.boundaries]] = True
    allowed = np.ones((len(shape.flights), len(shape.pieces)), dtype=bool)
    for s, size in enumerate(reversed(shape.fixed)):
        allowed[s] = np.array(shape.sizes) == size
    costs = Costs(
        seconds=np.empty((len(shape.pieces), 0, links, links)),
        send=send,
        send_in_peak=weights.send_in_peak,
        once=_sums([piece.once for piece in shape.pieces]),
        credit=weights.credit * _sums([piece.weight for piece in shape.pieces]),
        devices=np.array(shape.sizes, dtype=np.int64),
        flight=np.array([distinct.index(k) for k in shape.flights], dtype=np.int64),
        allowed=allowed,
        starts=starts,
    )
    return Field(costs, shape.total, shape.counts)


def _sums(rows: list[tuple[float, ...]]) -> Floats:
    return np.array([[0.0, *np.cumsum(row)] for row in rows])


def _sends(pieces: tuple[Piece, ...], link: Callable[[float], float], reshard: Reshard | None) -> Floats:
    """[cut, plan before, plan after]: the activation forwards and its gradient back."""
    links, plans = pieces[0].links, len(pieces)
    send = np.zeros((links, plans, plans))
    for cut in range(1, links):
        for p, before in enumerate(pieces):
            for q, after in enumerate(pieces):
                send[cut, p, q] = 2 * one_way(cut, before, after, link, reshard)
    return send


def one_way(cut: int, before: Piece, after: Piece, link: Callable[[float], float], reshard: Reshard | None) -> float:
    """Seconds of one transfer: the larger of what a device of either side has of the activation, and what joins it."""
    nbytes = max(piece.chain.a[cut] + piece.crosses[cut] for piece in (before, after))
    return link(nbytes) + (reshard(cut, before, after) if reshard else 0.0)
