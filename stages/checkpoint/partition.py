"""Cut a model into partitions for a pipeline: where, on how many devices each, by which plan, with which recompute.

On plain numbers, in four steps; `partition` is the table of contents:

    1. `Division`   the devices cut into pieces: any composition of `devices`, or exactly `sizes`; with the plans that
                    pieces may take (`Piece`), for every number of micro-batches, and the link between neighbours.
    2. `Timer`      (pieces.py) seconds of every run of links as a partition, by plan and number in flight: the best
                    recompute within the memory that is left, from tables over what is held and what runs (hold.py).
    3. `search`     (cuts.py) the best ways to cut, by an estimate of the step (pipelines.py): Alpa's dynamic program.
    4. `plan_of`    the best few in full: recompute in finer slots, then the schedule played (pipelines.simulate). The
                    shortest step wins.

A partition's micro-batches in flight follow from the schedule and its place: `1f1b` from its number from the end alone;
`gpipe` has all; `interleaved` and `zero_bubble` are searched for each number of partitions by itself (the likeliest of
many: `Effort.most_tasks`). Partitions of an interleaved pipeline that lie on the same devices have plans of one mesh,
and each has an equal share of the memory.

How to fill it from artifacts: each plan of `Frontier.pieces`, and of `Frontier.points` for all devices, is priced with
`price_step` on `cluster.part(mesh)` at the size of a micro-batch: `chain` is `linearize(price)`, `resident` the bytes
of the parameters of each link, `once` its gradient sums and optimizer. A `Division` is one of `Cluster.splits`, its
link `split.link.seconds`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import SolveError
from stages.checkpoint.cuts import NEARLY, Cuts, Field, search
from stages.checkpoint.in_flight import keep_all, run_partition, worst_step
from stages.checkpoint.pieces import Piece, Recompute, Terms, Timer
from stages.checkpoint.pipelines import (
    Load,
    Order,
    Pipeline,
    Timeline,
    Weights,
    in_flight,
    orders,
    refusal,
    simulate,
    weights_of,
)
from stages.checkpoint.schedule import Op, Region

Floats = NDArray[np.float64]
Reshard = Callable[[int, Piece, Piece], float]  # seconds to lay out the activation before a link from plan to plan


ROUGH_GAP = 0.02  # of the first search
FAR = 1.1  # times the best rough estimate: not looked at more closely


class PartitionError(SolveError):
    """No pipeline fits, or what was asked for does not exist; if it is the memory, `floor` is what would do."""

    floor: Floor | None = None


@dataclass(frozen=True)
class Floor:
    """The least memory in which a pipeline was found, and the partition of it that needs the most."""

    memory: int
    pipeline: Pipeline
    partition: int
    partitions: int
    first: int
    last: int
    flight: int
    resident_bytes: float  # whatever is recomputed
    waiting_bytes: float  # held by micro-batches that wait
    op: Op  # at whose peak the rest is held


@dataclass(frozen=True)
class Division:
    """The devices as pieces, one after another: `sizes` if given, else any pieces that plans are for."""

    devices: int
    pieces: Mapping[int, tuple[Piece, ...]]  # by number of micro-batches, of which the costs depend
    link: Callable[[float], float]  # seconds for so many bytes between neighbours
    sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.sizes and sum(self.sizes) != self.devices:
            raise PartitionError(f"pieces of {self.sizes} devices are not {self.devices}", where="division")


@dataclass(frozen=True)
class Wishes:
    """What the user fixes; what is not fixed is searched for."""

    pipelines: tuple[Pipeline, ...] = (Pipeline.ONE_F_ONE_B,)
    micro_batches: tuple[int, ...] = ()  # of those that the divisions offer; () is all
    boundaries: tuple[int, ...] | None = None  # first links of all partitions but the first
    partitions: tuple[int, ...] = ()  # how many; () is any number
    recompute: Recompute = Recompute.SOLVED
    spans: tuple[tuple[int, int], ...] = ()  # for Recompute.MARKED: the first and last links of what is recomputed
    chunks: tuple[int, ...] = (2,)  # partitions on a device, for interleaved
    all_buffers: bool = False  # torch's buffers for every micro-batch count (pieces.py)


@dataclass(frozen=True)
class Effort:
    """How finely to search; the defaults lose little."""

    slots: int = 500
    step: int = 4
    gap: float = 1e-4  # of the estimate, within which the search is optimal
    candidates: int = 16  # of each schedule and number of micro-batches that are worked out in full
    most_partitions: int = 64
    most_tasks: int = 8  # zero_bubble and interleaved: numbers of partitions that are searched in full, the likeliest


@dataclass(frozen=True)
class Partition:
    """Links first..last on one piece, and what they are predicted to take."""

    first: int
    last: int
    piece: Piece
    flight: int  # micro-batches whose forward has begun and whose backward has not ended, at most
    region: Region  # its steps are run in order; those that are regions are recomputed
    load: Load
    hold_bytes: float  # of a micro-batch that waits
    peak_bytes: float  # in all
    room_bytes: float  # in all

    @property
    def regions(self) -> str:
        return str(self.region)


@dataclass(frozen=True)
class PipelinePlan:
    pipeline: Pipeline
    chunks: int  # partitions on a device
    micro_batches: int
    partitions: tuple[Partition, ...]
    estimate: float  # of a step, by closed form
    seconds: float  # of a step, as simulated
    division: int  # of those given
    order: Order = field(repr=False)
    timeline: Timeline = field(repr=False)

    @property
    def devices(self) -> tuple[int, ...]:
        return tuple(part.piece.devices for part in self.partitions)

    @property
    def firsts(self) -> tuple[int, ...]:
        return tuple(part.first for part in self.partitions)


def partition(
    divisions: tuple[Division, ...],
    memory: int,
    wishes: Wishes = Wishes(),  # noqa: B008
    effort: Effort = Effort(),  # noqa: B008
    reshard: Reshard | None = None,
) -> list[PipelinePlan]:
    """The best plans found, shortest step first; PartitionError where there is none.

    `memory` is in bytes of a device; `reshard` adds to what the link between two pieces takes.
    """
    given = Given(divisions, memory, wishes, effort, reshard)
    plans: dict[object, PipelinePlan] = {}
    refused: list[str] = []
    every = list(tasks(given, refused))
    for _, family in groupby(every, key=lambda task: task.family):
        known = math.inf
        for task in promising(list(family), effort.most_tasks):
            for cuts in ways_to_cut(task, effort, known):
                known = min(known, cuts.estimate)
                plans.setdefault((task.family, task.chunks, cuts.firsts, cuts.plans), plan_of(task, cuts))
    if not plans:
        raise _nothing(given, bool(every), refused)
    return sorted(plans.values(), key=lambda plan: (plan.seconds, plan.estimate, plan.firsts))


def promising(family: list[Task], most: int) -> list[Task]:
    """Of the tasks of one schedule so many, by what they reach with little recompute to choose from."""
    if len(family) <= most:
        return family
    known, ranks = math.inf, []
    for number, task in enumerate(family):
        found = search(task.field(roughly=True), task.weights, ROUGH_GAP, 1, known)
        estimate = found[0].estimate if found else math.inf
        known = min(known, estimate * FAR)
        ranks.append((estimate, number))
    return [family[number] for _, number in sorted(ranks)[:most]]


def ways_to_cut(task: Task, effort: Effort, known: float = math.inf) -> list[Cuts]:
    """With little recompute to choose from first: no partition of a better plan is slower than that plan allows."""
    weights = task.weights
    known *= 1 + NEARLY
    rough = search(task.field(roughly=True), weights, ROUGH_GAP, 1, known)
    known = rough[0].estimate if rough else known
    slowest = slowest_of(task, weights, known)
    return search(task.field(slowest), weights, effort.gap, effort.candidates, known, slowest)


def slowest_of(task: Task, weights: Weights, known: float) -> float:
    """No plan with an estimate as good as that has a slower partition."""
    if not weights.credit:
        return known / (weights.sum + weights.peak) * (1 + 1e-9)
    chains = ((timer.piece.weight, timer.chain) for timer in task.timers)
    falls = any(
        weights.credit * weight > min(o.f + o.b for o in chain.options(i))
        for weights_made, chain in chains
        for i, weight in enumerate(weights_made)
    )
    return math.inf if falls or not weights.peak else known / weights.peak * (1 + 1e-9)


# --------------------------------------------------------------------------------------------------------- 1. tasks


@dataclass(frozen=True, eq=False)
class Given:
    divisions: tuple[Division, ...]
    memory: int
    wishes: Wishes
    effort: Effort
    reshard: Reshard | None


@dataclass(frozen=True, eq=False)
class Task:
    """One search: a division, a number of micro-batches and a schedule; of some only with one number of partitions."""

    division: int
    pipeline: Pipeline
    micro_batches: int
    chunks: int
    timers: tuple[Timer, ...]
    plain: Field  # without seconds
    flights: tuple[int, ...]  # by number from the end

    @property
    def family(self) -> tuple[int, int, str]:
        """Tasks of one are alike but for the numbers of partitions."""
        return self.division, self.micro_batches, self.pipeline.value

    @property
    def weights(self) -> Weights:
        return weights_of(self.pipeline, self.micro_batches, self.chunks)

    def field(self, slowest: float = math.inf, roughly: bool = False) -> Field:
        """With the seconds of all partitions that are no slower."""
        distinct = tuple(sorted(set(self.flights)))
        seconds = [timer.seconds(distinct, slowest, roughly) for timer in self.timers]
        return replace(self.plain, seconds=np.ascontiguousarray(seconds))


def tasks(given: Given, refused: list[str]) -> Iterator[Task]:
    """Every search there is to make; what cannot be is added to `refused`."""
    wishes = given.wishes
    for number, division in enumerate(given.divisions):
        for micro_batches, pieces in sorted(division.pieces.items()):
            if wishes.micro_batches and micro_batches not in wishes.micro_batches:
                continue
            _check(pieces, wishes)
            timer = cache(lambda piece, chunks, micro=micro_batches: Timer(piece, _terms(given, micro, chunks)))
            sends = cache(lambda chosen, link=division.link: _sends(chosen, link, given.reshard))
            for pipeline in wishes.pipelines:
                for shape in _shapes(given, division, pieces, pipeline, micro_batches, refused):
                    timers = tuple(timer(piece, shape.chunks) for piece in shape.pieces)
                    what = _field(given, shape, sends(shape.pieces), weights_of(pipeline, micro_batches).credit)
                    yield Task(number, pipeline, micro_batches, shape.chunks, timers, what, shape.flights)


def _terms(given: Given, micro_batches: int, chunks: int) -> Terms:
    wishes, effort = given.wishes, given.effort
    return Terms(
        memory=given.memory,
        micro_batches=micro_batches,
        recompute=wishes.recompute,
        share=1 / chunks,
        all_buffers=wishes.all_buffers,
        slots=effort.slots,
        step=effort.step,
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
                yield replace(plain, counts=(n,), flights=flights)
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


def _field(given: Given, shape: Shape, send: Floats, credit: float) -> Field:
    links = shape.pieces[0].links
    distinct = tuple(sorted(set(shape.flights)))
    starts = np.ones(links, dtype=bool)
    if given.wishes.boundaries is not None:
        starts[:] = False
        starts[[0, *given.wishes.boundaries]] = True
    allowed = np.ones((len(shape.flights), len(shape.pieces)), dtype=bool)
    for s, size in enumerate(reversed(shape.fixed)):
        allowed[s] = np.array(shape.sizes) == size
    return Field(
        seconds=np.empty((len(shape.pieces), 0, links, links)),
        send=send,
        once=_sums([piece.once for piece in shape.pieces]),
        credit=credit * _sums([piece.weight for piece in shape.pieces]),
        devices=np.array(shape.sizes, dtype=np.int64),
        total=shape.total,
        flight=np.array([distinct.index(k) for k in shape.flights], dtype=np.int64),
        allowed=allowed,
        starts=starts,
        counts=shape.counts,
    )


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


# ---------------------------------------------------------------------------------------------------- 4. in full


def plan_of(task: Task, cuts: Cuts) -> PipelinePlan:
    """The schedules of all partitions, and the step as simulated."""
    spans = cuts.spans(task.plain.links)
    parts = []
    for number, (first, last, p) in enumerate(spans):
        then = spans[number + 1] if number + 1 < len(spans) else None
        send = float(task.plain.send[last + 1, p, then[2]]) / 2 if then else 0.0
        parts.append(_part(task.timers[p], first, last, task.flights[len(spans) - 1 - number], send))
    order = orders(task.pipeline, len(spans) // task.chunks, task.micro_batches, task.chunks)
    timeline = simulate(order, [part.load for part in parts])
    return PipelinePlan(
        pipeline=task.pipeline,
        chunks=task.chunks,
        micro_batches=task.micro_batches,
        partitions=tuple(parts),
        estimate=cuts.estimate,
        seconds=timeline.seconds,
        division=task.division,
        order=order,
        timeline=timeline,
    )


def _part(timer: Timer, first: int, last: int, flight: int, send: float) -> Partition:
    piece, span = timer.piece, slice(first, last + 1)
    region, passage = timer.schedule(first, last, flight)
    weight = min(sum(piece.weight[span]), passage.backward)
    load = Load(passage.forward, passage.backward, send, weight, sum(piece.once[span]))
    if timer.terms.recompute is Recompute.EXCEPT_LAST:
        kept = run_partition(piece.chain, keep_all(first, last), first, last)
        load = replace(load, last_backward=kept.backward)
    room = timer.terms.memory * timer.terms.share
    used = room - timer.room(first, last, flight) + passage.memory(flight)
    return Partition(first, last, piece, flight, region, load, passage.hold, used, room)


# ------------------------------------------------------------------------------------------------------- refusals


def _nothing(given: Given, searched: bool, refused: list[str]) -> PartitionError:
    """Why there is no plan; if it is the memory, how much would do."""
    reasons = f" ({'; '.join(sorted(set(refused)))})" if refused else ""
    if not searched:
        remedy = "ask for other numbers of partitions or micro-batches, or another schedule"
        return PartitionError(f"there is no pipeline as asked for{reasons}", remedy=remedy)
    enough = _enough(given)
    if enough is None:
        remedy = "give plans for other numbers of devices, or other boundaries"
        return PartitionError(f"no pipeline fits, whatever the memory{reasons}", remedy=remedy)
    error = PartitionError(
        f"no pipeline fits {given.memory / 1e9:.4g} GB a device{reasons}",
        remedy=f"{enough / 1e9:.4g} GB would do; or use more devices or smaller micro-batches",
    )
    error.floor = _floor(replace(given, memory=enough))
    return error


def _enough(given: Given) -> int | None:
    """A memory that has a plan, in four digits: first with no choice of recompute, then with all. None: none has."""
    low, high = given.memory, 2 * max(1, given.memory)
    while not _fits(given, high, roughly=True):
        low, high = high, 4 * high
        if high > max(1, given.memory) * 2**40:
            return None
    high = _halved(given, low, high, 1.001, roughly=True)
    if given.wishes.recompute is Recompute.SOLVED:
        high = _halved(given, given.memory, high, 1.005, roughly=False)
    digits = max(0, math.floor(math.log10(high)) - 3)
    rounded = -(-high // 10**digits) * 10**digits
    return rounded if _fits(given, rounded, roughly=False) else high


def _halved(given: Given, low: int, high: int, near: float, roughly: bool) -> int:
    """Nearly the least between them that fits, where `high` does."""
    while high - low > 1 and high > near * low:
        middle = (low + high) // 2
        low, high = (low, middle) if _fits(given, middle, roughly) else (middle, high)
    return high


def _fits(given: Given, memory: int, roughly: bool) -> bool:
    """Whether there is a plan; roughly, one that recomputes nothing or everything of a partition."""
    return next(_some_cuts(replace(given, memory=memory), roughly), None) is not None


def _some_cuts(given: Given, roughly: bool) -> Iterator[tuple[Task, Cuts]]:
    for task in tasks(given, []):
        found = search(task.field(roughly=roughly), task.weights, gap=1.0, keep=1)
        if found:
            yield task, found[0]


def _floor(given: Given) -> Floor:
    """Of a plan that fits: the partition that fills its room the most."""
    task, cuts = next(_some_cuts(given, roughly=False))
    plan = plan_of(task, cuts)
    number, part = max(enumerate(plan.partitions), key=lambda one: one[1].peak_bytes / one[1].room_bytes)
    span = (part.piece.chain, part.region, part.first, part.last)
    return Floor(
        memory=given.memory,
        pipeline=plan.pipeline,
        partition=number,
        partitions=len(plan.partitions),
        first=part.first,
        last=part.last,
        flight=part.flight,
        resident_bytes=sum(part.piece.resident[part.first : part.last + 1]) + part.piece.everywhere,
        waiting_bytes=(part.flight - 1) * part.hold_bytes,
        op=worst_step(*span).op,
    )
