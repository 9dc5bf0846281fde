"""The fastest layouts that fit: all are looked at, and those priced that nothing is known to beat.

Free are dp, tp, pp (where it divides the layers), micro-batch, 1F1B or interleaved, recompute, ZeRO, sequence
parallelism. What is asked for is kept. Of two layouts that differ in recompute and ZeRO alone the one with less of
both is faster, so that once it fits the other is left out. ZeRO 1 beats none, and sequence parallelism beats none, in
memory, and in time but for what is within half a percent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from shardwright.pipeline.config.schema import OverlapMode
from shardwright.pipeline.cost.pipelines.schedules import Pipeline
from shardwright.pipeline.layouts.sizes import (
    AttentionKernel,
    LayoutError,
    LayoutModel,
    ParallelLayout,
    divisors,
    why_not,
)
from shardwright.pipeline.layouts.step import LayoutPrices, Price
from shardwright.pipeline.layouts.work import RecomputeMode

WAYS = tuple(RecomputeMode)  # the faster and larger first
MOST_MICRO = 64  # sequences of a micro-batch: more fill no device better


@dataclass(frozen=True)
class Wanted:
    """What the search may choose from; nothing where all is free."""

    dp: tuple[int, ...] = ()
    tp: tuple[int, ...] = ()
    pp: tuple[int, ...] = ()
    micro_batch: tuple[int, ...] = ()
    schedule: tuple[Pipeline, ...] = ()
    chunks: tuple[int, ...] = ()
    recompute: tuple[RecomputeMode, ...] = ()
    zero: tuple[int, ...] = ()
    sequence_parallel: tuple[bool, ...] = ()
    attention: tuple[AttentionKernel, ...] = (AttentionKernel.flash,)
    overlap: tuple[OverlapMode, ...] = (OverlapMode.runtime,)


def search(prices: LayoutPrices, wanted: Wanted | None = None, most: int = 10) -> list[tuple[ParallelLayout, Price]]:
    """The fastest first, of each division of the devices one. Where nothing fits, an error names what needs least."""
    found: dict[tuple[int, int, int], tuple[ParallelLayout, Price]] = {}
    fitting: dict[ParallelLayout, list[tuple[int, int]]] = {}
    smallest = None
    machine = prices.machine
    for layout in candidates(prices.model, machine.devices, wanted or Wanted()):
        less = (WAYS.index(layout.recompute), layout.zero)
        fits = fitting.setdefault(replace(layout, recompute=RecomputeMode.none, zero=0), [])
        if any(own[0] <= less[0] and own[1] <= less[1] for own in fits):
            continue
        needed = prices.memory(layout)
        if needed > machine.memory_bytes:
            smallest = min(smallest or (needed, layout), (needed, layout), key=lambda pair: pair[0])
            continue
        if layout.zero:
            fits.append(less)
        division, own = (layout.dp, layout.tp, layout.pp), (layout, prices.price(layout))
        found[division] = min(found.get(division, own), own, key=_rank)
    if not found:
        if smallest is None:
            what = f"no layout of {machine.devices} devices divides the model and batch={prices.model.batch}"
            raise LayoutError(what, remedy="change `nodes` or `batch`, or leave more free")
        least, layout = smallest
        needs = f"{described(layout)} needs least, {least / 1e9:.1f} GB"
        raise LayoutError(
            f"nothing fits {machine.memory_bytes / 1e9:.0f} GB: {needs}", remedy="add nodes, or leave more free"
        )
    return sorted(found.values(), key=_rank)[:most]


def _rank(pair: tuple[ParallelLayout, Price]) -> tuple[float, int, float]:
    """Of equally fast ones the plainer."""
    layout, priced = pair
    return priced.seconds, layout.zero, priced.memory_bytes


def described(layout: ParallelLayout) -> str:
    return f"dp={layout.dp} tp={layout.tp} pp={layout.pp} micro_batch={layout.micro_batch} zero={layout.zero}"


def candidates(model: LayoutModel, devices: int, wanted: Wanted) -> Iterator[ParallelLayout]:
    for tp in wanted.tp or model.slices:
        for pp in wanted.pp or divisors(model.layers):
            dp, left = divmod(devices, tp * pp)
            batch = model.batch
            if left or not dp or batch % dp or (wanted.dp and dp not in wanted.dp):
                continue
            for micro in wanted.micro_batch or [m for m in divisors(batch // dp) if m <= MOST_MICRO]:
                plain = ParallelLayout(dp, tp, pp, micro, batch)
                for layout in _ways(model, plain, wanted):
                    if why_not(model, layout) is None:
                        yield layout


def _ways(model: LayoutModel, plain: ParallelLayout, wanted: Wanted) -> Iterator[ParallelLayout]:
    """Schedules, recompute, ZeRO and sequence parallelism of one division of the devices."""
    sequence_parallel = wanted.sequence_parallel or (plain.tp > 1 and model.sequence % plain.tp == 0,)
    zeros = wanted.zero or ((1, 2, 3) if plain.dp > 1 else (0,))
    free = product(_schedules(model, plain, wanted), wanted.attention, wanted.overlap)
    for (schedule, chunks), attention, overlap in free:
        scheduled = replace(plain, schedule=schedule, chunks=chunks, attention=attention, overlap=overlap)
        for recompute, parallel, zero in product(wanted.recompute or WAYS, sequence_parallel, zeros):
            yield replace(scheduled, recompute=recompute, sequence_parallel=parallel, zero=zero)


def _schedules(model: LayoutModel, plain: ParallelLayout, wanted: Wanted) -> Iterator[tuple[Pipeline, int]]:
    both = (Pipeline.ONE_F_ONE_B, Pipeline.INTERLEAVED)
    for schedule in wanted.schedule or (both[1:] if wanted.chunks else both):
        if schedule is not Pipeline.INTERLEAVED:
            yield schedule, 1
        elif plain.pp > 1:
            free = [n for n in divisors(max(1, model.layers // plain.pp)) if n > 1]
            yield from ((schedule, chunks) for chunks in wanted.chunks or free)
