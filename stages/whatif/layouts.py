"""Answers by layouts with their choices given, in seconds: transformers of any size on described clusters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

from shardwright.pipeline.config import Config, load_config
from shardwright.pipeline.layouts.conf_model import TracedModel, with_works
from shardwright.pipeline.layouts.machine import Machine
from shardwright.pipeline.layouts.planner_stages import PlannerStages
from shardwright.pipeline.layouts.search import Wanted, candidates, described, search
from shardwright.pipeline.layouts.sizes import LayoutError, ParallelLayout, Transformer, divisors
from shardwright.pipeline.layouts.step import LayoutPrices, Price
from shardwright.pipeline.layouts.traced import Works
from shardwright.pipeline.layouts.words import Asked, find_machine, find_model, read_words
from shardwright.stages.whatif.answer import LAYOUTS, Answer, Question, Row, WhatIfError, largest_in_words
from shardwright.stages.whatif.presets import described_gpus, that_may_have
from shardwright.stages.whatif.search import FitLimit, fewest, largest

MOST_DEVICES = 16384
Found = tuple[ParallelLayout, Price] | LayoutError


@dataclass(frozen=True)
class ByLayouts:
    """A method for each question: what is known so far, after every try."""

    root: Path
    question: Question
    config: Config
    asked: Asked
    model: Transformer | TracedModel
    cluster: str
    machine: Machine
    works: Works  # of the model

    @classmethod
    def of(cls, root: Path, question: Question, stages: PlannerStages) -> ByLayouts:
        asked, config = read_words(question.words), load_config(root)
        model, works = with_works(find_model(root, asked, config), config, stages)
        cluster, machine = find_machine(root, asked, config, stages, None)
        return cls(root, question, config, asked, model, cluster, machine, works)

    @property
    def wanted(self) -> Wanted:
        return Wanted(**self.asked.layout)

    def prices(self, model: Transformer | None = None, machine: Machine | None = None) -> LayoutPrices:
        own = with_works(model, self.config, self.works.stages) if model else (self.model, self.works)
        return LayoutPrices(*own, machine or self.machine)

    def about(self) -> str:
        memory = f"{self.machine.memory_bytes / 1e9:.0f} GB"
        return f"{self._about_model()}, {self.machine.devices} devices of {self.cluster}, {memory}"

    def _about_model(self) -> str:
        return f"{self.model}, batch {self.model.batch}"

    def best(
        self, model: Transformer | None = None, machine: Machine | None = None, wanted: Wanted | None = None
    ) -> Found:
        try:
            return search(self.prices(model, machine), wanted or self.wanted, most=1)[0]
        except LayoutError as error:
            return error

    def batch(self) -> Iterator[Answer]:
        """The largest micro-batch, of those that divide the batch of a step."""
        most, step = self.question.most or self.model.batch, self.question.step or 1
        sizes = [size for size in divisors(self.model.batch) if size <= most and size % step == 0]
        rows: list[Row] = []
        for size in sizes:
            rows.append({"micro_batch": size, **_row(self.best(wanted=replace(self.wanted, micro_batch=(size,))))})
            if fits := [row["micro_batch"] for row in rows if row["step_ms"] is not None]:
                larger = next((row["micro_batch"] for row in rows if row["micro_batch"] > max(fits)), None)
                said = f"the largest micro-batch that fits is {max(fits)}" + (f"; {larger} does not" if larger else "")
                if larger is None and size != sizes[-1]:
                    said = f"a micro-batch of {size} fits, and no larger one was tried yet"
                yield Answer("batch", LAYOUTS, self.about(), said, tuple(rows), {"fits": max(fits), "fails": larger})
        if not rows or all(row["step_ms"] is None for row in rows):
            why = rows[0]["layout"] if rows else "none was tried"
            raise WhatIfError(f"no micro-batch fits: {why}", remedy="add nodes")

    def sequence(self) -> Iterator[Answer]:
        tried: dict[int, Found] = {}
        unit, model = self.question.step or 1024, self.model
        if not isinstance(model, Transformer):
            remedy = "ask the planner, without words of layouts"
            raise WhatIfError(f"layouts of {model.name} are priced for its own sequence", remedy=remedy)

        def needs(size: int) -> float:
            tried[size] = self.best(replace(model, sequence=size))
            return math.inf if isinstance(tried[size], LayoutError) else 0.5

        for limit in largest(model.sequence, unit, self.question.most or 1 << 22, needs):
            rows = tuple({"sequence": size, **_row(found)} for size, found in sorted(tried.items()))
            said = largest_in_words("sequence", limit, unit)
            yield Answer("sequence", LAYOUTS, self.about(), said, rows, {**vars(limit), "step": unit})
        if limit.fits is None:
            why = _row(tried[min(tried)])["layout"]
            raise WhatIfError(f"not even a sequence of {unit} fits: {why}", remedy="add nodes")

    def devices(self) -> Iterator[Answer]:
        """The fewest: first of one host, then whole hosts."""
        host, model = self.machine.host, self.model
        floor = ceil(2 * model.parameters / self.machine.memory_bytes)  # weights alone, in half precision
        most = self.question.most or MOST_DEVICES
        counts = [n for n in (*range(1, host + 1), *range(2 * host, most + 1, host)) if floor <= n <= most]

        def fits(count: int) -> bool:
            prices = self.prices(machine=self.machine.sized(count))
            every = candidates(model, count, self.wanted)
            return any(prices.memory(layout) <= self.machine.memory_bytes for layout in every)

        def known(limit: FitLimit, sides: Sequence[int | None]) -> Answer:
            tried = [count for count in sides if count is not None]
            rows = [{"devices": n, **_row(self.best(machine=self.machine.sized(n)))} for n in tried]
            return Answer.of_devices(LAYOUTS, f"{self._about_model()}, devices of {self.cluster}", limit, most, rows)

        limit = FitLimit(None, None)
        for limit in fewest(counts, fits):
            if limit.fits is None:
                yield known(limit, ())
        yield known(limit, (limit.fails, limit.fits))

    def budget(self) -> Iterator[Answer]:
        """The stairs of the fastest layout over memory: of every layout that nothing smaller beats."""
        prices, devices = self.prices(), self.machine.devices
        every = [(prices.memory(layout), layout) for layout in candidates(self.model, devices, self.wanted)]
        if not every:
            what = f"no layout of {devices} devices divides the model"
            raise WhatIfError(what, remedy="change `nodes` or `batch`")
        rows: list[Row] = []
        fastest = math.inf
        for needed, layout in sorted(every, key=lambda pair: pair[0]):
            priced = prices.price(layout)
            if priced.seconds < fastest:
                fastest = priced.seconds
                rows.append({"from_gb": needed / 1e9, **_row((layout, priced))})
                above = f"the fastest layout changes at {len(rows) - 1} budgets above it"
                said = f"{rows[0]['from_gb']:.4g} GB is the least that fits; {above}"
                found = {"least_gb": rows[0]["from_gb"], "changes": [{"from_gb": row["from_gb"]} for row in rows[1:]]}
                yield Answer("budget", LAYOUTS, self.about(), said, tuple(rows), found)

    def link(self) -> Iterator[Answer]:
        now = self.best()
        if isinstance(now, LayoutError):
            raise now
        rows: list[Row] = [{"links": "as they are", "same_layout_ms": now[1].seconds * 1e3, **_row(now)}]
        for factor in self.question.factors:
            machine = self.machine.with_links(factor.bandwidth, factor.latency)
            same = self.prices(machine=machine).seconds(now[0]) * 1e3
            rows.append({"links": str(factor), "same_layout_ms": same, **_row(self.best(machine=machine))})
            yield Answer.of_links(LAYOUTS, self.about(), rows)

    def clusters(self) -> Iterator[Answer]:
        """Each with as many devices as the one that was asked for, or with `nodes` hosts."""
        rows: list[Row] = []
        names = self.question.clusters or that_may_have(self.machine.devices, described_gpus(self.root))
        for name in names:
            asked = replace(self.asked, names={**self.asked.names, "cluster": name})
            _, machine = find_machine(self.root, asked, self.config, self.works.stages, self.machine.devices)
            rows.append({"cluster": name, "devices": machine.devices, **_row(self.best(machine=machine))})
            yield Answer.of_clusters(LAYOUTS, self._about_model(), rows)


def _row(found: Found) -> Row:
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
