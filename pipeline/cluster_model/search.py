"""The fastest layouts that fit: all are looked at, and those priced that nothing is known to beat.

Free are dp, tp, pp (where it divides the layers), micro-batch, 1F1B or interleaved, recompute, ZeRO, sequence
parallelism. What is wished for is kept. Of two layouts that differ in recompute and ZeRO alone the one with less of
both is faster, so that once it fits the other is left out. ZeRO 1 beats none, and sequence parallelism beats none, in
time and in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pipeline.cluster_model.layout import Attention, Layout, LayoutError, Recompute, Schedule, why_not
from pipeline.cluster_model.machine import Machine
from pipeline.cluster_model.memory import device_bytes
from pipeline.cluster_model.sizes import Transformer
from pipeline.cluster_model.step import Price, price

WAYS = tuple(Recompute)  # the faster and larger first
MOST_MICRO = 64  # sequences of a micro-batch: more fill no device better


@dataclass(frozen=True)
class Wanted:
    """What the search may choose from; nothing where all is free."""

    dp: tuple[int, ...] = ()
    tp: tuple[int, ...] = ()
    pp: tuple[int, ...] = ()
    micro_batch: tuple[int, ...] = ()
    schedule: tuple[Schedule, ...] = ()
    chunks: tuple[int, ...] = ()
    recompute: tuple[Recompute, ...] = ()
    zero: tuple[int, ...] = ()
    sequence_parallel: tuple[bool, ...] = ()
    attention: tuple[Attention, ...] = (Attention.flash,)


def search(
    model: Transformer, machine: Machine, batch: int, wanted: Wanted | None = None, most: int = 10
) -> list[tuple[Layout, Price]]:
    """The fastest first, of each division of the devices one. Where nothing fits, an error names what needs least."""
    found: dict[tuple[int, int, int], tuple[Layout, Price]] = {}
    fitting: dict[Layout, list[tuple[int, int]]] = {}
    smallest = None
    for layout in candidates(model, machine, batch, wanted or Wanted()):
        less = (WAYS.index(layout.recompute), layout.zero)
        fits = fitting.setdefault(replace(layout, recompute=Recompute.none, zero=0), [])
        if any(own[0] <= less[0] and own[1] <= less[1] for own in fits):
            continue
        held = device_bytes(model, layout)
        if held > machine.memory_bytes:
            smallest = min(smallest or (held, layout), (held, layout), key=lambda pair: pair[0])
            continue
        if layout.zero:
            fits.append(less)
        division, own = (layout.dp, layout.tp, layout.pp), (layout, price(model, layout, machine))
        found[division] = min(found.get(division, own), own, key=_rank)
    if not found:
        raise _nothing(machine, batch, smallest)
    return sorted(found.values(), key=_rank)[:most]


def _rank(pair: tuple[Layout, Price]) -> tuple[float, int, float]:
    """Of equally fast ones the plainer."""
    layout, priced = pair
    return priced.seconds, layout.zero, priced.memory_bytes


def _nothing(machine: Machine, batch: int, smallest: tuple[float, Layout] | None) -> LayoutError:
    if smallest is None:
        what = f"no layout of {machine.devices} devices divides the model and batch={batch}"
        return LayoutError(what, remedy="change `nodes` or `batch`, or leave more free")
    held, layout = smallest
    what = f"nothing fits {machine.memory_bytes / 1e9:.0f} GB: {described(layout)} needs least, {held / 1e9:.1f} GB"
    return LayoutError(what, remedy="add nodes, or leave more free")


def described(layout: Layout) -> str:
    return f"dp={layout.dp} tp={layout.tp} pp={layout.pp} micro_batch={layout.micro_batch} zero={layout.zero}"


def candidates(model: Transformer, machine: Machine, batch: int, wanted: Wanted) -> Iterator[Layout]:
    for tp in wanted.tp or divisors(model.heads):
        for pp in wanted.pp or divisors(model.layers):
            dp, left = divmod(machine.devices, tp * pp)
            if left or not dp or batch % dp or (wanted.dp and dp not in wanted.dp):
                continue
            for micro in wanted.micro_batch or [m for m in divisors(batch // dp) if m <= MOST_MICRO]:
                plain = Layout(dp, tp, pp, micro, batch)
                for layout in _ways(model, plain, wanted):
                    if why_not(model, layout) is None:
                        yield layout


def _ways(model: Transformer, plain: Layout, wanted: Wanted) -> Iterator[Layout]:
    """Schedules, recompute, ZeRO and sequence parallelism of one division of the devices."""
    for schedule, chunks in _schedules(model, plain, wanted):
        for attention in wanted.attention:
            for recompute in wanted.recompute or _recomputes(attention):
                for sliced in wanted.sequence_parallel or (plain.tp > 1 and model.sequence % plain.tp == 0,):
                    for zero in wanted.zero or ((1, 2, 3) if plain.dp > 1 else (0,)):
                        yield replace(
                            plain,
                            schedule=schedule,
                            chunks=chunks,
                            recompute=recompute,
                            sequence_parallel=sliced,
                            zero=zero,
                            attention=attention,
                        )


def _recomputes(attention: Attention) -> tuple[Recompute, ...]:
    """Flash attention has no square tensors to compute again."""
    return WAYS if attention is Attention.plain else (Recompute.none, Recompute.full)


def _schedules(model: Transformer, plain: Layout, wanted: Wanted) -> Iterator[tuple[Schedule, int]]:
    both = (Schedule.one_f_one_b, Schedule.interleaved)
    for schedule in wanted.schedule or (both[1:] if wanted.chunks else both):
        if schedule is not Schedule.interleaved:
            yield schedule, 1
        elif plain.pp > 1:
            free = [n for n in divisors(max(1, model.layers // plain.pp)) if n > 1]
            yield from ((schedule, chunks) for chunks in wanted.chunks or free)


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
