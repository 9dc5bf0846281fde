"""What the links carry: pairs in rounds, collectives of a group over message sizes, overlap with computation."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from shardwright.pipeline.ir.cluster import SEND
from shardwright.pipeline.runtime.programs.collectives import all_gather_into, own_sum
from shardwright.pipeline.runtime.programs.mesh import MeshAxis
from shardwright.stages.cluster.fit import reduce_times
from shardwright.stages.cluster.rounds import SMALLEST, Round, ends_first
from shardwright.stages.cluster.timing import Clock, slowest

FEWEST_SIZES = 3
PAIR_MESSAGE = 1 << 16  # bytes of the first large message of a pair
PAIR_GROWTH = 4
LONG_ENOUGH_S = 0.05  # a message that takes this long tells the bandwidth, whatever small ones do
PAIR_REPEATS = 3
APARTS, APART_BYTES = 60, 1 << 16  # measurements of a collective after a product, and its size
CROSSINGS = 12  # times that pairs cross at once, in turns with one of them alone

Pair = dict[str, float]  # of two ranks `a` and `b`: latency and bandwidth


def measure_pairs(clock: Clock, rounds: list[Round], largest: float, budget: float) -> list[Pair]:
    """Every pair of every round, those of a round at once; the same list on all ranks."""
    rank = dist.get_rank()
    found: list[Pair] = []
    share = budget / max(1, len(rounds))
    for pairs in rounds:
        dist.barrier()
        for a, b in pairs:
            if rank == a:
                found.append({"a": a, "b": b, **_lead(clock, b, largest, share)})
            elif rank == b:
                _follow(clock, a)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, found)
    return [pair for own in gathered for pair in own]


def _lead(clock: Clock, other: int, largest: float, budget: float) -> dict[str, float]:
    """Latency of a small message, and bandwidth between two large ones, grown until one takes long enough."""
    deadline = time.perf_counter() + budget
    small = _exchange(clock, other, SMALLEST, 4 * PAIR_REPEATS)
    sizes, seconds = [float(SMALLEST)], [small]
    nbytes = PAIR_MESSAGE
    while nbytes <= largest or len(sizes) == 1:
        sizes.append(float(nbytes))
        seconds.append(_exchange(clock, other, nbytes, PAIR_REPEATS))
        late = time.perf_counter() + PAIR_GROWTH * 2 * (PAIR_REPEATS + 1) * seconds[-1] > deadline
        if seconds[-1] >= LONG_ENOUGH_S or late:
            break
        nbytes *= PAIR_GROWTH
    dist.send(torch.tensor([0, 0]), other)
    return {"latency": small, "bandwidth": _bandwidth(sizes, seconds)}


def _bandwidth(sizes: list[float], seconds: list[float]) -> float:
    """Between the two largest messages; of the largest alone where the times do not rise."""
    rise, run = seconds[-1] - seconds[-2], sizes[-1] - sizes[-2]
    return run / rise if rise > seconds[-1] / 10 else sizes[-1] / seconds[-1]


def _follow(clock: Clock, other: int) -> None:
    order = torch.zeros(2, dtype=torch.int64)
    while True:
        dist.recv(order, other)
        nbytes, repeats = (int(value) for value in order)
        if not nbytes:
            return
        message = torch.empty(nbytes, dtype=torch.uint8, device=clock.device)
        for _ in range(repeats + 1):
            dist.recv(message, other)
            dist.send(message, other)


def _exchange(clock: Clock, other: int, nbytes: int, repeats: int) -> float:
    """Seconds of one way: half of there and back."""
    dist.send(torch.tensor([nbytes, repeats]), other)
    message = torch.ones(nbytes, dtype=torch.uint8, device=clock.device)

    def there_and_back() -> None:
        dist.send(message, other)
        dist.recv(message, other)

    there_and_back()
    times = [clock.once(there_and_back, together=False) / 2 for _ in range(repeats)]
    return reduce_times(times).seconds


def measure_crossing(clock: Clock, pairs: Round, bandwidth: float, largest: float) -> dict[str, Any]:
    """Bytes/s of the first of these pairs alone, and of each while the first of every pair sends to the second.

    Pairs that go there and back, as in `measure_pairs`, could use the two directions of a shared link in turns. What
    each has left is told by a message alone and one right after it among others: what disturbs the machine for a while
    disturbs both.
    """
    most = min(largest, max(PAIR_GROWTH * PAIR_MESSAGE, LONG_ENOUGH_S * bandwidth * 2 / max(2, len(pairs))))
    sizes = [most / PAIR_GROWTH, most]
    small, large = (torch.ones(int(size), dtype=torch.uint8, device=clock.device) for size in sizes)
    works = [functools.partial(_send_along, *told) for told in ((pairs[:1], small), (pairs[:1], large), (pairs, large))]
    for work in works:
        work()
    turns = [[clock.once(work) for work in works] for _ in range(CROSSINGS)]
    short, long, crowded = (slowest(list(own)) for own in zip(*turns, strict=True))
    alone = _bandwidth(sizes, [reduce_times(own).seconds for own in (short, long)])
    left = statistics.median(one / among for one, among in zip(long, crowded, strict=True))
    return {"ranks": pairs[0], "pairs": len(pairs), "alone": alone, "each": min(1.0, left) * alone}


def _send_along(pairs: Round, message: torch.Tensor) -> None:
    """Done when the message has arrived; a rank of no pair does nothing."""
    rank, word = dist.get_rank(), message[:1].clone()
    for source, target in pairs:
        if rank == source:
            dist.send(message, target)
            dist.recv(word, target)
        elif rank == target:
            dist.recv(message, source)
            dist.send(word, source)


# ---- collectives


AxisGroup = tuple[dist.ProcessGroup | None, tuple[int, ...]]  # of this rank on an axis, and its ranks


def axis_groups(order: list[int], stride: int, size: int) -> AxisGroup:
    """Makes the groups of an axis of a mesh, on every rank in the same order, and returns this rank's own."""
    own: AxisGroup | None = None
    for block in range(0, len(order), stride * size):
        for first in range(block, block + stride):
            ranks = tuple(order[first + stride * number] for number in range(size))
            group = dist.new_group(list(ranks))
            own = (group, ranks) if dist.get_rank() in ranks else own
    assert own is not None
    return own


def measure_axis(clock: Clock, axis: AxisGroup, last: int, budget: float) -> dict[str, Any]:
    """Each collective on messages of 1 KiB to `last`, all groups of the axis at once; bytes are of the unsplit tensor.

    Every second size is not for the fit: it tells how good the fit is. Each call follows a barrier: where
    ranks do not begin together, calls in a row take three times as long in some runs and not in others.
    """
    world = len(axis[1])
    works: list[tuple[str, bool, float, Callable[[], object]]] = []
    begun, spent = clock.elapsed(), 0.0
    for number, (nbytes, fitted) in enumerate(ends_first(last)):
        submesh = max(1, nbytes // 4 // world)
        moves = _moves(clock, axis, submesh)
        cost = 0.0
        for move in moves.values():
            move()
            cost += slowest([clock.once(move)])[0]
        spent += cost * (2 + clock.repeats)
        if spent > budget and number >= FEWEST_SIZES:
            break
        works += [(name, fitted, 4.0 * submesh * world, move) for name, move in moves.items()]
    seconds = clock.together([move for *_, move in works], budget - (clock.elapsed() - begun))
    found: dict[str, Any] = {"fitted": {}, "unseen": {}, "apart": measure_apart(clock, axis)}
    for (name, fits, moved, _), taken in zip(works, seconds, strict=True):
        found["fitted" if fits else "unseen"].setdefault(name, []).append({"bytes": moved, "seconds": taken})
    return found


def measure_apart(clock: Clock, axis: AxisGroup) -> float:
    """Seconds that a collective takes longer when its ranks come from computing: a little apart, with the threads that
    carry it asleep. The mean counts, as in a step: it is much longer for some calls than for others."""
    product = _product(clock)
    message, (group, _) = torch.ones(APART_BYTES // 4, device=clock.device), axis

    def send() -> None:
        dist.all_reduce(message, group=group)

    def both() -> None:
        product()
        send()

    times: dict[Callable[[], None], list[float]] = {product: [], send: [], both: []}
    for _ in range(APARTS):
        for work, own in times.items():
            work()
            own.append(clock.once(work))
    alone, sent, together = (reduce_times(slowest(own)).mean for own in times.values())
    return max(0.0, together - alone - sent)


def _product(clock: Clock) -> Callable[[], None]:
    """Of a millisecond or so."""
    side = 256 if clock.device == "cpu" else 4096
    x = torch.randn(side, side, device=clock.device)

    def product() -> None:
        F.linear(x, x)

    return product


def _moves(clock: Clock, axis: AxisGroup, submesh: int) -> dict[str, Callable[[], object]]:
    group, ranks = axis
    world = len(ranks)
    whole, other = (torch.ones(submesh * world, device=clock.device) for _ in range(2))
    part = torch.ones(submesh, device=clock.device)
    place = ranks.index(dist.get_rank())
    rows = MeshAxis(world, place, group)
    after, before = ranks[(place + 1) % world], ranks[place - 1]

    def shift() -> None:
        """Everyone sends to the next and receives from the one before, as in a pipeline."""
        operations = [dist.P2POp(dist.isend, whole, after, group), dist.P2POp(dist.irecv, other, before, group)]
        for request in dist.batch_isend_irecv(operations):
            request.wait()

    return {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: all_gather_into(other, part, group=group),
        "reduce_scatter": lambda: own_sum(other.view(world, -1).clone(), rows),  # programs make the rows, too
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
        SEND: shift,
    }


def measure_overlap(clock: Clock, nbytes: float) -> float:
    """How much of the shorter of a product and an all-reduce is hidden when both run: 1 is all, 0 is nothing."""
    message = torch.ones(max(1, int(nbytes) // 4), device=clock.device)
    product = _product(clock)
    send = clock.seconds(lambda: dist.all_reduce(message))
    once = clock.seconds(product)
    times = max(1, round(send / once))

    def compute() -> None:
        for _ in range(times):
            product()

    def both() -> None:
        request = dist.all_reduce(message, async_op=True)
        compute()
        request.wait()

    alone, together = clock.seconds(compute), clock.seconds(both)
    return min(1.0, max(0.0, (alone + send - together) / min(alone, send)))
