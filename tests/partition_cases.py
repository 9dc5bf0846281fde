"""Small random pipelines, and the search of every way to cut them, without in_flight_dp.py and cuts.py."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, product

from shardwright.pipeline.cost.pipelines.play import Load
from shardwright.pipeline.cost.pipelines.schedules import Pipeline, StepWeights, in_flight, orders, refusal, weights_of
from shardwright.stages.checkpoint.pipelines.search_inputs import Division, UserChoices
from shardwright.stages.checkpoint.pipelines.submesh_plans import SubmeshPlan
from shardwright.stages.checkpoint.recompute.chain import Chain
from shardwright.stages.checkpoint.recompute.in_flight import PartitionRun, run_partition
from shardwright.stages.checkpoint.recompute.schedule import Keep, Nesting
from shardwright.stages.checkpoint.recompute.simulate import InvalidSequence


@dataclass(frozen=True)
class Case:
    division: Division
    memory: int
    wishes: UserChoices
    toll: int  # for a cut between plans of unlike names

    def reshard(self, cut: int, before: SubmeshPlan, after: SubmeshPlan) -> float:
        return self.toll * (cut % 2 + 1) if before.name != after.name else 0.0


def random_case(seed: int) -> Case:
    rng = random.Random(seed)
    links, devices = rng.choice([2, 3, 3, 3, 4]), rng.randint(1, 4)
    micro = rng.sample([1, 2, 3, 4, 6], rng.randint(1, 2))
    pipeline = rng.choice([Pipeline.ONE_F_ONE_B] * 4 + list(Pipeline))
    submeshes = {
        m: tuple(_submesh(rng, links, size, name) for size, name in ((1, "x"), (1, "y"), (2, "x"))) for m in micro
    }
    sizes = tuple(rng.choice([c for c in compositions(devices) if len(c) <= links + 1])) if rng.random() < 0.3 else ()
    boundaries = tuple(sorted(rng.sample(range(1, links + 1), rng.randint(0, 2)))) if rng.random() < 0.2 else None
    slow = rng.randint(0, 3)
    division = Division(devices, submeshes, lambda nbytes: slow + nbytes / 2, sizes)
    return Case(division, 2 * rng.randint(6, 24), UserChoices((pipeline,), boundaries=boundaries), rng.randint(0, 4))


def _submesh(rng: random.Random, links: int, size: int, name: str) -> SubmeshPlan:
    def some(count: int, most: int) -> tuple[int, ...]:
        return tuple(rng.randint(0, most) for _ in range(count))

    a = some(links + 1, 3)
    chain = Chain(
        a=a,
        saved=tuple(x + rng.randint(0, 4) for x in a[1:]),
        f=some(links, 20 // size),
        b=tuple(1 + x for x in some(links + 1, 30 // size)),
        ft=some(links, 2),
        bt=some(links + 1, 2),
    )
    weight = tuple(b // 2 for b in chain.b)
    common = rng.random() < 0.3  # values that several links read
    return SubmeshPlan(
        name,
        size,
        chain,
        some(links + 1, 4),
        some(links + 1, 6),
        weight,
        held=some(links + 1, 1) if common else (),
        crosses=some(links + 1, 3) if common else (),
        everywhere=rng.randint(0, 2) if common else 0,
        everywhere_held=rng.randint(0, 1) if common else 0,
    )


def compositions(total: int) -> list[tuple[int, ...]]:
    """Of 1 and 2."""
    if total < 1:
        return [()] if total == 0 else []
    return [(first, *rest) for first in (1, 2) for rest in compositions(total - first)]


# ---------------------------------------------------------------------------------------------------- every schedule


def trees(first: int, last: int, loss: int, top: bool = True) -> Iterator[tuple[Keep | Nesting, ...]]:
    """Every nesting of links first..last; inside a region the last link is kept, or it would run again for nothing."""
    if first > last:
        yield ()
        return
    for rest in trees(first + 1, last, loss, top):
        yield (Keep(first), *rest)
    for end in range(first, min(last, loss - 1) + 1):
        if end < last or top:
            for inner, rest in product(trees(first, end, loss, False), trees(end + 1, last, loss, top)):
                yield (Nesting(inner), *rest)


@cache
def passages(chain: Chain, first: int, last: int) -> tuple[PartitionRun, ...]:
    found = set()
    for steps in trees(first, last, chain.length):
        try:
            found.add(run_partition(chain, Nesting(steps), first, last))
        except InvalidSequence:
            continue
    return tuple(sorted(found, key=lambda passage: passage.time))


# --------------------------------------------------------------------------------------------------------- every cut


def least_estimate(case: Case) -> float:
    """The least estimate of a step over every way to cut; infinite where none fits."""
    division, wishes = case.division, case.wishes
    best = math.inf
    for micro, submeshes in division.submeshes.items():
        links = submeshes[0].links
        for count in range(1, links + 1):
            for cuts in combinations(range(1, links), count - 1):
                if wishes.boundaries is None or cuts == wishes.boundaries:
                    for chosen in product(submeshes, repeat=count):
                        best = min(best, _one(case, micro, (0, *cuts, links), chosen))
    return best


def _one(case: Case, micro: int, ends: tuple[int, ...], submeshes: tuple[SubmeshPlan, ...]) -> float:
    pipeline, count = case.wishes.pipelines[0], len(submeshes)
    chunks = 2 if pipeline is Pipeline.INTERLEAVED else 1
    devices = count // chunks
    used = tuple(submesh.devices for submesh in submeshes)[:devices]
    alike = {submesh.devices for submesh in submeshes}
    if count % chunks or (chunks > 1 and len(alike) > 1) or sum(used) != case.division.devices:
        return math.inf
    if (case.division.sizes and used != case.division.sizes) or refusal(pipeline, devices, chunks, micro):
        return math.inf
    flights = in_flight(orders(pipeline, devices, micro, chunks))
    loads = []
    for n, (submesh, flight) in enumerate(zip(submeshes, flights, strict=True)):
        first, last = ends[n], ends[n + 1] - 1
        room = case.memory / chunks - sum(submesh.resident[first : last + 1]) - submesh.everywhere
        room -= flight * (sum(submesh.held[first : last + 1]) + submesh.everywhere_held)
        time = next((p.time for p in passages(submesh.chain, first, last) if p.memory(flight) <= room), math.inf)
        send = 0.0
        if n + 1 < count:
            cut = last + 1
            nbytes = max(p.chain.a[cut] + p.crosses[cut] for p in (submesh, submeshes[n + 1]))
            send = case.division.link(nbytes) + case.reshard(last + 1, submesh, submeshes[n + 1])
        weight, once = sum(submesh.weight[first : last + 1]), sum(submesh.once[first : last + 1])
        loads.append(Load(time, 0.0, send, weight, once))
    return estimate(weights_of(pipeline, micro, chunks), loads)


def estimate(weights: StepWeights, loads: Sequence[Load]) -> float:
    """The seconds of a step in closed form; what it is worth stands in schedules.py."""
    total = sum(load.time + weights.sends * 2 * load.send - weights.credit * load.weight for load in loads)
    slowest = max(load.time + (2 * load.send if weights.send_in_peak else 0.0) for load in loads)
    return weights.sum * total + weights.peak * slowest + max(load.once for load in loads)
