"""Answers by formula, in seconds: transformers of any size on described clusters (pipeline/cluster_model)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

from pipeline.cluster_model.machine import Machine
from pipeline.cluster_model.memory import device_bytes
from pipeline.cluster_model.search import Wanted, candidates, described, divisors, search
from pipeline.cluster_model.step import Price, price
from pipeline.cluster_model.transformer import LayoutError, ParallelLayout, Transformer
from pipeline.cluster_model.words import Asked, find_machine, find_model, in_words, read_words
from pipeline.config import Config, load_config
from stages.whatif.answer import FORMULA, Answer, Question, Row, WhatIfError
from stages.whatif.search import fewest, largest

MOST_DEVICES = 16384
Found = tuple[ParallelLayout, Price] | LayoutError


@dataclass(frozen=True)
class ByFormula:
    """A method for each question."""

    root: Path
    question: Question
    config: Config
    asked: Asked
    model: Transformer
    cluster: str
    machine: Machine

    @classmethod
    def of(cls, root: Path, question: Question) -> ByFormula:
        asked, config = read_words(question.words), load_config(root)
        model = find_model(root, asked, config)
        return cls(root, question, config, asked, model, *find_machine(root, asked, config, None))

    @property
    def wanted(self) -> Wanted:
        return Wanted(**self.asked.layout)

    def about(self) -> str:
        memory = f"{self.machine.memory_bytes / 1e9:.0f} GB"
        return f"{self._about_model()}, {self.machine.devices} devices of {self.cluster}, {memory}"

    def _about_model(self) -> str:
        return f"{in_words(self.model)}, batch {self.model.batch}"

    def best(
        self, model: Transformer | None = None, machine: Machine | None = None, wanted: Wanted | None = None
    ) -> Found:
        model = model or self.model
        try:
            return search(model, machine or self.machine, model.batch, wanted or self.wanted, most=1)[0]
        except LayoutError as error:
            return error

    def batch(self) -> Answer:
        """The largest micro-batch, of those that divide the batch of a step."""
        most, step = self.question.most or self.model.batch, self.question.step or 1
        sizes = [size for size in divisors(self.model.batch) if size <= most and size % step == 0]
        found = {size: self.best(wanted=replace(self.wanted, micro_batch=(size,))) for size in sizes}
        rows = tuple({"micro_batch": size, **_row(best)} for size, best in found.items())
        fits = [row["micro_batch"] for row in rows if row["step_ms"] is not None]
        if not fits:
            why = rows[0]["layout"] if rows else "none was tried"
            raise WhatIfError(f"no micro-batch fits: {why}", remedy="add nodes")
        larger = next((size for size in sizes if size > max(fits)), None)
        said = f"the largest micro-batch that fits is {max(fits)}" + (f"; {larger} does not" if larger else "")
        return Answer("batch", FORMULA, self.about(), said, rows, {"fits": max(fits), "fails": larger})

    def sequence(self) -> Answer:
        tried: dict[int, Found] = {}
        unit = self.question.step or 1024

        def fits(size: int) -> bool:
            tried[size] = self.best(replace(self.model, sequence=size))
            return not isinstance(tried[size], LayoutError)

        limit = largest(self.model.sequence, unit, self.question.most or 1 << 22, fits)
        rows = tuple({"sequence": size, **_row(found)} for size, found in sorted(tried.items()))
        if limit.fits is None:
            raise WhatIfError(f"not even a sequence of {unit} fits: {rows[0]['layout']}", remedy="add nodes")
        past = f"; {limit.fails} does not" if limit.fails else " of those tried (--most)"
        said = f"the longest sequence that fits is {limit.fits}{past} (in steps of {unit})"
        return Answer("sequence", FORMULA, self.about(), said, rows, {**vars(limit), "step": unit})

    def devices(self) -> Answer:
        """The fewest: first of one host, then whole hosts."""
        host, model = self.machine.host, self.model
        floor = ceil(2 * model.parameters / self.machine.memory_bytes)  # weights alone, in half precision
        most = self.question.most or MOST_DEVICES
        counts = [n for n in (*range(1, host + 1), *range(2 * host, most + 1, host)) if floor <= n <= most]

        def on(count: int) -> Machine:
            return replace(self.machine, host=min(count, host), hosts=max(1, count // host))

        def fits(count: int) -> bool:
            every = candidates(model, on(count), model.batch, self.wanted)
            return any(device_bytes(model, layout) <= self.machine.memory_bytes for layout in every)

        limit = fewest(counts, fits)
        sides = [count for count in (limit.fails, limit.fits) if count is not None]
        rows = [{"devices": n, **_row(self.best(machine=on(n)))} for n in sides]
        return Answer.of_devices(FORMULA, f"{self._about_model()}, devices of {self.cluster}", limit, most, rows)

    def budget(self) -> Answer:
        """The stairs of the fastest layout over memory: of every layout that nothing smaller beats."""
        model, machine = self.model, self.machine
        every = [
            (device_bytes(model, layout), layout) for layout in candidates(model, machine, model.batch, self.wanted)
        ]
        if not every:
            what = f"no layout of {machine.devices} devices divides the model"
            raise WhatIfError(what, remedy="change `nodes` or `batch`")
        stairs: list[tuple[float, ParallelLayout, Price]] = []
        for needed, layout in sorted(every, key=lambda pair: pair[0]):
            priced = price(model, layout, machine)
            if not stairs or priced.seconds < stairs[-1][2].seconds:
                stairs.append((needed, layout, priced))
        rows = tuple({"from_gb": needed / 1e9, **_row((layout, priced))} for needed, layout, priced in stairs)
        above = f"the fastest layout changes at {len(rows) - 1} budgets above it"
        said = f"{rows[0]['from_gb']:.4g} GB is the least that fits; {above}"
        found = {"least_gb": rows[0]["from_gb"], "changes": [{"from_gb": row["from_gb"]} for row in rows[1:]]}
        return Answer("budget", FORMULA, self.about(), said, rows, found)

    def link(self) -> Answer:
        now = self.best()
        if isinstance(now, LayoutError):
            raise now
        rows: list[Row] = [{"links": "as they are", "same_layout_ms": now[1].seconds * 1e3, **_row(now)}]
        for factor in self.question.factors:
            own, reached = self.machine, self.machine.reached
            machine = replace(
                own,
                link=own.link * factor.bandwidth,
                network=own.network * factor.bandwidth,
                reached=replace(reached, collective=reached.collective * factor.latency),
            )
            same = price(self.model, now[0], machine).seconds * 1e3
            rows.append({"links": str(factor), "same_layout_ms": same, **_row(self.best(machine=machine))})
        return Answer.of_links(FORMULA, self.about(), rows)

    def clusters(self) -> Answer:
        """Each with as many devices as the one that was asked for, or with `nodes` hosts."""
        rows: list[Row] = []
        for name in self.question.clusters:
            asked = replace(self.asked, names={**self.asked.names, "cluster": name})
            _, machine = find_machine(self.root, asked, self.config, self.machine.devices)
            rows.append({"cluster": name, "devices": machine.devices, **_row(self.best(machine=machine))})
        return Answer.of_clusters(FORMULA, self._about_model(), rows)


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
