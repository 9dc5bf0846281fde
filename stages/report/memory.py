"""What a device is predicted to hold through the step, and what is alive when it holds most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pipeline.cost.resident import Kept, resident_parts, total_of
from pipeline.ir.plan import Event, Plan, Region
from stages.report.model import place_of
from stages.report.priced import PricedPartition

REST = "temporaries, gradients of activations and what is kept in part"


@dataclass(frozen=True)
class Alive:
    name: str
    kind: str  # parameters, gradients, optimizer state, buffers, activations, rest
    nbytes: int


@dataclass(frozen=True)
class DeviceMemory:
    """Of the devices of one partition, or of several that share them."""

    partitions: tuple[int, ...]
    peak_bytes: int
    resident_bytes: int | None
    in_flight: int
    alive: tuple[Alive, ...]  # sums to the peak


@dataclass(frozen=True)
class Memory:
    budget_bytes: int
    peak_bytes: int
    peak_event: int | None  # of the plan's timeline; None where it is in the optimizer, or not known
    devices: tuple[DeviceMemory, ...]


def memory_of(plan: Plan, parts: tuple[PricedPartition, ...], optimizer_copies: float | None) -> Memory:
    pieces = len(plan.partitions) // plan.chunks
    event = peak_event(plan)
    devices = tuple(
        _device(plan, parts, tuple(range(device, len(plan.partitions), pieces)), optimizer_copies, event)
        for device in range(pieces)
    )
    return Memory(plan.budget_bytes, plan.prediction.peak_bytes, event, devices)


def peak_event(plan: Plan) -> int | None:
    held = [event.held_bytes or 0 for event in plan.timeline.events]
    most = max(held, default=0)
    return held.index(most) if most and most >= plan.prediction.peak_bytes else None


def _device(
    plan: Plan, parts: tuple[PricedPartition, ...], numbers: tuple[int, ...], copies: float | None, event: int | None
) -> DeviceMemory:
    own = [plan.partitions[number] for number in numbers]
    peak = plan.prediction.peak_bytes if not plan.pipelined else sum(part.peak_bytes for part in own)
    priced = [parts[number] for number in numbers if parts and parts[number].price is not None]
    resident = sum(part.price.resident_bytes for part in priced if part.price) if priced else None
    alive = _resident(priced, copies) if copies is not None else []
    if event is not None and priced:
        alive += _activations(plan, priced[0], event, peak - sum(one.nbytes for one in alive))
    left = peak - sum(one.nbytes for one in alive)
    flight = max(part.in_flight for part in own)
    if plan.pipelined:
        alive.append(Alive(f"activations, at most {flight} micro-batches in flight", "activations", left))
    else:
        alive.append(Alive(REST if event is not None else "everything else", "rest", left))
    return DeviceMemory(numbers, peak, resident, flight, tuple(alive))


def _resident(parts: Iterable[PricedPartition], copies: float) -> list[Alive]:
    sums: Counter[Kept] = Counter()
    for part in parts:
        found = resident_parts(part.sharded, copies)
        sums.update({kept: total_of(found, kept) for kept in Kept})
    names = {Kept.values: "parameters"}
    return [Alive(names.get(kept, kept.value), names.get(kept, kept.value), sums[kept]) for kept in Kept if sums[kept]]


def _activations(plan: Plan, part: PricedPartition, event: int, room: int) -> list[Alive]:
    """What the links keep at that event, equal ones together; less each where their sum is more than there is room."""
    assert part.price is not None
    links, chain = part.price.links, part.graph.chain
    sums: Counter[tuple[int, bool]] = Counter()
    like: dict[tuple[int, bool], list[int]] = {}
    for link, whole in sorted(kept_at(plan.timeline.events, part.partition.regions, event).items()):
        key = chain[link].block, whole
        sums[key] += links[link].memory.kept if whole else links[link].input_bytes
        like.setdefault(key, []).append(link)
    total = sum(sums.values())
    share = min(1.0, max(0, room) / total) if total else 0.0
    return [
        Alive(_named(part, like[key], key[1]), "activations", int(nbytes * share))
        for key, nbytes in sums.most_common()
        if int(nbytes * share)
    ]


def _named(part: PricedPartition, links: list[int], whole: bool) -> str:
    """`link 3 (layers.0) and 95 like it`"""
    place = place_of(part.graph, part.graph.chain[links[0]].ops)
    others = f" and {len(links) - 1} like it" if len(links) > 1 else ""
    what = "" if whole else ": what enters a region"
    return f"link {links[0]}{f' ({place})' if place else ''}{others}{what}"


def kept_at(events: tuple[Event, ...], regions: tuple[Region, ...], until: int) -> dict[int, bool]:
    """Links of which something is kept as that event runs: all that backward needs, or (False) what entered a region.

    A link inside n regions runs forward n times without keeping anything, and keeps all the next time.
    """
    depth = dict(_depths(regions, 0))
    starts = {region.first for region in _dropped(regions)}
    ran: Counter[int] = Counter()
    kept: dict[int, bool] = {}
    micro = events[until].micro_batch if events else None
    for event in events[: until + 1]:
        if event.micro_batch != micro or micro is None:
            continue
        for link in range(event.first, event.last + 1):
            if event.what in ("forward", "recompute"):
                ran[link] += 1
                if ran[link] > depth.get(link, 0):
                    kept[link] = True
                elif link in starts and link:
                    kept[link] = False
            elif event is not events[until]:
                kept.pop(link, None)
    return kept


def _depths(regions: tuple[Region, ...], depth: int) -> Iterator[tuple[int, int]]:
    for region in regions:
        if region.recompute and not region.kept:
            yield from _depths(region.inner, depth + 1)
        else:
            yield from ((link, depth) for link in range(region.first, region.last + 1))


def _dropped(regions: tuple[Region, ...]) -> Iterator[Region]:
    for region in regions:
        if region.recompute and not region.kept:
            yield region
            yield from _dropped(region.inner)
