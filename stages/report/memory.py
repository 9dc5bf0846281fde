"""What a device is predicted to hold through the step, and what is alive when it holds most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from shardwright.pipeline.cost.resident import Kept, resident_parts, total_of
from shardwright.pipeline.cost.step import Priced
from shardwright.pipeline.ir.plan import Event, Plan, Region
from shardwright.stages.report.model import place_of
from shardwright.stages.report.priced import PricedPartition

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
    in_flight: int
    alive: tuple[Alive, ...]  # sums to the peak


@dataclass(frozen=True)
class MemoryFacts:
    budget_bytes: int
    peak_bytes: int
    peak_event: int | None  # of the plan's timeline; None where it is in the optimizer, or not known
    devices: tuple[DeviceMemory, ...]


def memory_of(plan: Plan, parts: tuple[PricedPartition, ...]) -> MemoryFacts:
    groups = len(plan.partitions) // plan.chunks  # of devices that share their partitions
    sizes = [event.held_bytes or 0 for event in plan.timeline.events]
    most = max(sizes, default=0)
    event = sizes.index(most) if most and most >= plan.prediction.peak_bytes else None
    shared = (tuple(range(group, len(plan.partitions), groups)) for group in range(groups))
    devices = tuple(_device(plan, parts, numbers, event) for numbers in shared)
    return MemoryFacts(plan.budget_bytes, plan.prediction.peak_bytes, event, devices)


def _device(
    plan: Plan, parts: tuple[PricedPartition, ...], numbers: tuple[int, ...], event: int | None
) -> DeviceMemory:
    own = [plan.partitions[number] for number in numbers]
    peak = plan.prediction.peak_bytes if not plan.pipelined else sum(part.peak_bytes for part in own)
    priced = [found for number in numbers if parts and (found := parts[number].priced)]
    alive = _resident(priced)
    if event is not None and priced:
        room = peak - sum(one.nbytes for one in alive)
        alive += _activations(priced[0], kept_at(plan.timeline.events, own[0].regions, event), room)
    left = peak - sum(one.nbytes for one in alive)
    flight = max(part.in_flight for part in own)
    name, kind = REST if event is not None else "everything else", "rest"
    if plan.pipelined:
        name, kind = f"activations, at most {flight} micro-batches in flight", "activations"
    alive.append(Alive(name, kind, left))
    return DeviceMemory(numbers, peak, flight, tuple(alive))


def _resident(parts: Iterable[Priced]) -> list[Alive]:
    sums: Counter[Kept] = Counter()
    for part in parts:
        found = resident_parts(part.sharded, part.optimizer_copies)
        sums.update({kept: total_of(found, kept) for kept in Kept})
    names = {kept: "parameters" if kept is Kept.values else kept.value for kept in Kept}
    return [Alive(name, name, sums[kept]) for kept, name in names.items() if sums[kept]]


def _activations(part: Priced, kept: dict[int, bool], room: int) -> list[Alive]:
    """What these links keep, equal ones together; less each where their sum is more than there is room."""
    links, chain = part.step.links, part.graph.chain
    sums: Counter[tuple[int, bool]] = Counter()
    like: dict[tuple[int, bool], list[int]] = {}
    for link, whole in sorted(kept.items()):
        key = chain[link].block, whole
        sums[key] += links[link].memory.kept if whole else links[link].input_bytes
        like.setdefault(key, []).append(link)
    total = sum(sums.values())
    share = min(1.0, max(0, room) / total) if total else 0.0
    found = []
    for (block, whole), nbytes in sums.most_common():
        first, *others = like[block, whole]
        place = place_of(part.graph, chain[first].ops)
        name = f"link {first}{f' ({place})' if place else ''}"  # `link 3 (layers.0) and 95 like it`
        name += (f" and {len(others)} like it" if others else "") + ("" if whole else ": what enters a region")
        found.append(Alive(name, "activations", int(nbytes * share)))
    return [one for one in found if one.nbytes]


def kept_at(events: tuple[Event, ...], regions: tuple[Region, ...], until: int) -> dict[int, bool]:
    """Links of which something is kept as that event runs: all that backward needs, or (False) what entered a region.

    A link inside n regions runs forward n times without keeping anything, and keeps all the next time.
    """
    depth, starts = _depths(regions)
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


def _depths(regions: tuple[Region, ...], depth: int = 0) -> tuple[dict[int, int], set[int]]:
    """In how many regions that drop what they compute each link lies, and the first links of these regions."""
    depths: dict[int, int] = {}
    starts: set[int] = set()
    for region in regions:
        if region.recompute and not region.kept:
            inner, firsts = _depths(region.inner, depth + 1)
            depths |= inner
            starts |= {region.first, *firsts}
        else:
            depths |= dict.fromkeys(range(region.first, region.last + 1), depth)
    return depths, starts
