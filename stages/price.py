"""`shardwright price`: what a layout of a transformer on a described cluster costs, or which one is fastest.

Words are `name=value` (pipeline/layouts/words.py); several values with commas between are all combined. `search`
leaves free what is not given.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from shardwright.pipeline.base.log import Log, say
from shardwright.pipeline.config import load_config
from shardwright.pipeline.cost.pipelines.schedules import Pipeline
from shardwright.pipeline.layouts.conf_model import with_works
from shardwright.pipeline.layouts.planner_stages import PlannerStages
from shardwright.pipeline.layouts.search import Wanted, search
from shardwright.pipeline.layouts.sizes import LayoutError, LayoutModel, ParallelLayout, why_not
from shardwright.pipeline.layouts.step import LayoutPrices, Price
from shardwright.pipeline.layouts.words import Asked, find_machine, find_model, read_words

Row = tuple[ParallelLayout, Price | str]


def run(root: Path, arguments: argparse.Namespace, stages: PlannerStages, log: Log) -> int:
    say(answer(root, arguments.words, stages).text())
    return 0


@dataclass(frozen=True)
class PriceAnswer:
    """Layouts with their prices, or why one cannot be."""

    about: str
    each: str  # memory of a device
    rows: tuple[Row, ...]

    def text(self) -> str:
        return f"{self.about} with {self.each} each\n{table(self.rows, self.each)}"


def answer(root: Path, words: Sequence[str], stages: PlannerStages) -> PriceAnswer:
    asked = read_words(words)
    config = load_config(root)
    model, works = with_works(find_model(root, asked, config), config, stages)
    if asked.free:
        cluster, machine = find_machine(root, asked, config, stages, None)
        prices = LayoutPrices(model, works, machine)
        rows: list[Row] = list(search(prices, Wanted(**asked.layout)))
    else:
        wanted = list(layouts(model, asked))
        cluster, machine = find_machine(root, asked, config, stages, max(layout.devices for layout in wanted))
        prices = LayoutPrices(model, works, machine)
        rows = [_priced(prices, layout, alone=len(wanted) == 1) for layout in wanted]
    each = f"{machine.memory_bytes / 1e9:g} GB"
    about = f"{model}, batch {model.batch}, {machine.devices} devices of {cluster}"
    return PriceAnswer(about, each, tuple(rows))


def layouts(model: LayoutModel, asked: Asked) -> Iterator[ParallelLayout]:
    """Every combination, in the order of the words' values."""
    given = {"dp": (1,), "tp": (1,), "pp": (1,), "micro_batch": (1,), **asked.layout}
    for values in product(*given.values()):
        chosen = dict(zip(given, values, strict=True))
        if chosen.get("chunks", 1) > 1 and "schedule" not in chosen:
            chosen["schedule"] = Pipeline.INTERLEAVED
        if chosen.get("schedule") is Pipeline.INTERLEAVED and "chunks" not in chosen:
            chosen["chunks"] = 2
        yield ParallelLayout(batch=model.batch, **chosen)


def _priced(prices: LayoutPrices, layout: ParallelLayout, alone: bool) -> Row:
    """One of several that cannot be has its reason in the table."""
    what, there = why_not(prices.model, layout), prices.machine.devices
    if what is None and layout.devices > there:
        what = f"it needs {layout.devices} devices, and there are {there}"
    if what is not None and alone:
        raise LayoutError(what, remedy="change the word")
    return layout, prices.price(layout) if what is None else what


COLUMNS = (
    ("dp", 5), ("tp", 4), ("pp", 4), ("micro", 6), ("schedule", 17), ("recompute", 10), ("zero", 5), ("seq", 4),
    ("step", 11), ("samples/s", 11), ("tokens/s", 12), ("TFLOP/s", 8), ("MFU", 7), ("memory", 10), ("bubble", 8),
    ("comm.", 7),
)  # fmt: skip


def table(rows: Sequence[Row], each: str) -> str:
    """One line for each; `!` after the memory of one that does not fit into what each device has."""
    lines = ["".join(name.rjust(width) for name, width in COLUMNS)]
    for layout, priced in rows:
        line = "".join(cell.rjust(width) for cell, (_, width) in zip(_cells(layout, priced), COLUMNS, strict=False))
        lines.append(line if isinstance(priced, Price) else f"{line}  {priced}")
    if any(isinstance(priced, Price) and not priced.fits for _, priced in rows):
        lines.append(f"! more than the {each} that a device has")
    return "\n".join(lines)


def _cells(layout: ParallelLayout, priced: Price | str) -> list[str]:
    chunks = f" x{layout.chunks}" if layout.chunks > 1 else ""
    sizes = [str(size) for size in (layout.dp, layout.tp, layout.pp, layout.micro_batch)]
    sliced = "yes" if layout.sequence_parallel else "no"
    cells = [*sizes, f"{layout.schedule.value}{chunks}", layout.recompute.value, str(layout.zero), sliced]
    if isinstance(priced, str):
        return cells
    return [
        *cells,
        f"{priced.seconds:.2f} s" if priced.seconds >= 1 else f"{priced.seconds * 1e3:.2f} ms",
        f"{priced.samples_per_s:.1f}",
        f"{priced.tokens_per_s:,.0f}",
        f"{priced.flops / 1e12:.1f}",
        f"{priced.mfu:.1%}",
        f"{priced.memory_bytes / 1e9:.1f} GB" + (" " if priced.fits else "!"),
        f"{priced.bubble:.1%}",
        f"{priced.communication:.1%}",
    ]
