"""Answers by formula, in seconds: transformers of any size on described clusters (pipeline/cluster_model)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

from pipeline.cluster_model import Layout, LayoutError, Machine, Price, Transformer, Wanted, price, search
from pipeline.cluster_model.memory import device_bytes
from pipeline.cluster_model.search import candidates, described, divisors
from pipeline.cluster_model.words import Asked, find_machine, in_words
from pipeline.config import Config
from stages.whatif.answer import FORMULA, Answer, Row, WhatIfError, shown
from stages.whatif.links import Slower
from stages.whatif.search import fewest, largest

MOST_DEVICES = 16384


@dataclass(frozen=True)
class Asking:
    root: Path
    config: Config
    asked: Asked
    model: Transformer
    cluster: str
    machine: Machine

    @property
    def wanted(self) -> Wanted:
        return Wanted(**self.asked.layout)

    def about(self) -> str:
        held = f"{self.machine.memory_bytes / 1e9:.0f} GB"
        devices = f"{self.machine.devices} devices of {self.cluster}"
        return f"{in_words(self.model)}, batch {self.model.batch}, {devices}, {held}"

    def best(self, model: Transformer, machine: Machine, wanted: Wanted) -> tuple[Layout, Price] | LayoutError:
        try:
            return search(model, machine, model.batch, wanted, most=1)[0]
        except LayoutError as error:
            return error


def batch(asking: Asking, step: int | None, most: int | None) -> Answer:
    """The largest micro-batch, of those that divide the batch of a step."""
    sizes = [
        size
        for size in divisors(asking.model.batch)
        if size <= (most or asking.model.batch) and size % (step or 1) == 0
    ]
    rows = [
        {
            "micro_batch": size,
            **_row(asking.best(asking.model, asking.machine, replace(asking.wanted, micro_batch=(size,)))),
        }
        for size in sizes
    ]
    fits = [row["micro_batch"] for row in rows if row["step_ms"] is not None]
    if not fits:
        raise WhatIfError(f"no micro-batch fits: {rows[0]['layout'] if rows else 'none was tried'}", remedy="add nodes")
    larger = [size for size in sizes if size > max(fits)]
    said = f"the largest micro-batch that fits is {max(fits)}" + (f"; {larger[0]} does not" if larger else "")
    found = {"fits": max(fits), "fails": larger[0] if larger else None}
    return Answer("batch", FORMULA, asking.about(), said, tuple(rows), found)


def sequence(asking: Asking, step: int | None, most: int | None) -> Answer:
    tried: dict[int, tuple[Layout, Price] | LayoutError] = {}
    unit = step or 1024

    def fits(size: int) -> bool:
        tried[size] = asking.best(replace(asking.model, sequence=size), asking.machine, asking.wanted)
        return not isinstance(tried[size], LayoutError)

    edge = largest(asking.model.sequence, unit, most or 1 << 22, fits)
    rows = tuple({"sequence": size, **_row(found)} for size, found in sorted(tried.items()))
    if edge.fits is None:
        raise WhatIfError(f"not even a sequence of {unit} fits: {rows[0]['layout']}", remedy="add nodes")
    past = f"; {edge.fails} does not" if edge.fails else " of those tried (--most)"
    said = f"the longest sequence that fits is {edge.fits}{past} (in steps of {unit})"
    return Answer(
        "sequence", FORMULA, asking.about(), said, rows, {"fits": edge.fits, "fails": edge.fails, "step": unit}
    )


def devices(asking: Asking, most: int | None) -> Answer:
    """The fewest: first of one host, then whole hosts."""
    host, model = asking.machine.host, asking.model
    floor = ceil(2 * model.parameters / asking.machine.memory_bytes)  # weights alone, in half precision
    limit = most or MOST_DEVICES
    counts = [n for n in (*range(1, host + 1), *range(2 * host, limit + 1, host)) if floor <= n <= limit]

    def on(count: int) -> Machine:
        return replace(asking.machine, host=min(count, host), hosts=max(1, count // host))

    def fits(count: int) -> bool:
        machine = on(count)
        every = candidates(model, machine, model.batch, asking.wanted)
        return any(device_bytes(model, layout) <= machine.memory_bytes for layout in every)

    edge = fewest(counts, fits)
    shown = [count for count in (edge.fails, edge.fits) if count is not None]
    rows = tuple({"devices": n, **_row(asking.best(model, on(n), asking.wanted))} for n in shown)
    said = f"{edge.fits} devices are the fewest that fit" if edge.fits else f"up to {limit} devices do not fit (--most)"
    about = f"{in_words(model)}, batch {model.batch}, devices of {asking.cluster}"
    return Answer("devices", FORMULA, about, said, rows, {"fits": edge.fits, "fails": edge.fails})


def budget(asking: Asking) -> Answer:
    """The stairs of the fastest layout over memory: of every layout that nothing smaller beats."""
    model, machine = asking.model, asking.machine
    every = [(device_bytes(model, layout), layout) for layout in candidates(model, machine, model.batch, asking.wanted)]
    if not every:
        raise WhatIfError(
            f"no layout of {machine.devices} devices divides the model", remedy="change `nodes` or `batch`"
        )
    stairs: list[tuple[float, Layout, Price]] = []
    for held, layout in sorted(every, key=lambda pair: pair[0]):
        priced = price(model, layout, machine)
        if not stairs or priced.seconds < stairs[-1][2].seconds:
            stairs.append((held, layout, priced))
    rows = tuple({"from_gb": held / 1e9, **_row((layout, priced))} for held, layout, priced in stairs)
    above = f"the fastest layout changes at {len(rows) - 1} budgets above it"
    said = f"{rows[0]['from_gb']:.4g} GB is the least that fits; {above}"
    found = {"least_gb": rows[0]["from_gb"], "changes": [{"from_gb": row["from_gb"]} for row in rows[1:]]}
    return Answer("budget", FORMULA, asking.about(), said, rows, found)


def link(asking: Asking, factors: Sequence[Slower]) -> Answer:
    now = asking.best(asking.model, asking.machine, asking.wanted)
    if isinstance(now, LayoutError):
        raise now
    rows: list[Row] = [{"links": "as they are", "same_layout_ms": now[1].seconds * 1e3, **_row(now)}]
    for factor in factors:
        machine = _slower(asking.machine, factor)
        same = price(asking.model, now[0], machine)
        again = asking.best(asking.model, machine, asking.wanted)
        rows.append({"links": str(factor), "same_layout_ms": same.seconds * 1e3, **_row(again)})
    before, after = shown(rows[0]["step_ms"]), shown(rows[-1]["step_ms"])
    said = f"with {rows[-1]['links']} a step takes {after} ms instead of {before} ms"
    return Answer("link", FORMULA, asking.about(), said, tuple(rows), {"now_ms": rows[0]["step_ms"]})


def _slower(machine: Machine, factor: Slower) -> Machine:
    reached = replace(machine.reached, collective=machine.reached.collective * factor.latency)
    return replace(
        machine, link=machine.link * factor.bandwidth, network=machine.network * factor.bandwidth, reached=reached
    )


def clusters(asking: Asking, names: Sequence[str]) -> Answer:
    """Each with as many devices as the one that was asked for, or with `nodes` hosts."""
    rows: list[Row] = []
    for name in names:
        asked = replace(asking.asked, names={**asking.asked.names, "cluster": name})
        _, machine = find_machine(asking.root, asked, asking.config, asking.machine.devices)
        found = asking.best(asking.model, machine, asking.wanted)
        rows.append({"cluster": name, "devices": machine.devices, **_row(found)})
    fitting = [row for row in rows if row["step_ms"] is not None]
    best = min(fitting, key=lambda row: row["step_ms"], default=None)
    said = f"{best['cluster']} is the fastest, {shown(best['step_ms'])} ms a step" if best else "it fits none of them"
    about = f"{in_words(asking.model)}, batch {asking.model.batch}"
    return Answer("clusters", FORMULA, about, said, tuple(rows), {"fastest": best["cluster"] if best else None})


def _row(found: tuple[Layout, Price] | LayoutError) -> Row:
    if isinstance(found, LayoutError):
        return {"step_ms": None, "samples_per_s": None, "peak_gb": None, "MFU": None, "layout": found.what}
    layout, priced = found
    chunks = f" chunks={layout.chunks}" if layout.chunks > 1 else ""
    return {
        "step_ms": priced.seconds * 1e3,
        "samples_per_s": priced.samples_per_s,
        "peak_gb": priced.memory_bytes / 1e9,
        "MFU": priced.mfu,
        "layout": f"{described(layout)} recompute={layout.recompute.value}{chunks}",
    }
