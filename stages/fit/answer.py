"""What `fit` found, as text, as JSON and as a page with pictures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

STYLE = Path(__file__).parents[1] / "report" / "page.css"
COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#9c6b4e", "#9498a0")
MOST_TIMES = 256  # the batch that is asked about: a larger one is not looked for
COLUMNS = ("cluster", "devices", "fits", "step", "samples/s", "tokens/s", "MFU", "memory", "plan")


@dataclass(frozen=True)
class FitRow:
    """One cluster. Without seconds the model does not fit there, and `why` says so."""

    cluster: str
    devices: int
    memory_bytes: int  # of a device
    step_seconds: float | None = None
    samples: int = 0  # of a step
    tokens: int | None = None
    mfu: float = 0.0
    peak_bytes: int = 0
    memory: Mapping[str, int] = field(default_factory=dict)  # bytes of a device, by what fills them
    seconds: Mapping[str, float] = field(default_factory=dict)  # of a step, by what takes them
    plan: str = ""
    why: str = ""
    fewest: int | None = None  # devices
    too_few: int | None = None
    largest_batch: int | None = None

    @property
    def fits(self) -> bool:
        return self.step_seconds is not None

    def cells(self) -> tuple[str, ...]:
        head = (self.cluster, str(self.devices), "yes" if self.fits else "no")
        if self.step_seconds is None:
            return *head, *["-"] * 5, self.why
        tokens = f"{self.tokens / self.step_seconds:,.0f}" if self.tokens else "-"
        return (
            *head,
            _time(self.step_seconds),
            f"{self.samples / self.step_seconds:,.4g}",
            tokens,
            f"{self.mfu:.1%}",
            f"{_gb(self.peak_bytes)} of {_gb(self.memory_bytes)} GB",
            self.plan,
        )


@dataclass(frozen=True, repr=False)
class FitAnswer:
    model: str
    parameters: int  # that are trained
    frozen: int
    fed: str
    precision: str
    optimizer: str
    rows: tuple[FitRow, ...]
    how: str

    @property
    def fits(self) -> bool:
        return any(row.fits for row in self.rows)

    def about(self) -> str:
        frozen = f" trained, {_count(self.frozen)} frozen" if self.frozen else ""
        how = f"{self.fed}; {self.precision}, {self.optimizer}"
        return f"{self.model}: {_count(self.parameters)} parameters{frozen}; {how}"

    def text(self) -> str:
        body = _alone(self.rows[0]) if len(self.rows) == 1 else _table([COLUMNS, *(row.cells() for row in self.rows)])
        return "\n".join([self.about(), *body, self.how])

    __repr__ = text

    def json(self) -> str:
        rows = [{**vars(row), "memory": dict(row.memory), "seconds": dict(row.seconds)} for row in self.rows]
        return json.dumps({**vars(self), "rows": rows}, indent=1)

    def page(self) -> str:
        """One file of HTML that needs nothing else."""
        parts = "".join(f"<h2>{escape(row.cluster)}, {row.devices} devices</h2>{_picture(row)}" for row in self.rows)
        style = STYLE.read_text(encoding="utf-8")
        return (
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
            f"<title>{escape(self.model)} - Shardwright</title><style>{style}</style></head>"
            f"<body><main><h1>Does it fit?</h1>{self._repr_html_()}{parts}</main></body></html>\n"
        )

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{name}</th>" for name in COLUMNS)
        lines = ("".join(f"<td>{escape(cell)}</td>" for cell in row.cells()) for row in self.rows)
        body = "".join(f"<tr>{line}</tr>" for line in lines)
        told = f"<p>{escape(self.about())}</p><p>{escape(self.how)}</p>"
        return f"{told}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _alone(row: FitRow) -> list[str]:
    each = f"{_gb(row.memory_bytes)} GB"
    lines = [("cluster", f"{row.devices} devices of {row.cluster}, {each} each"), ("fits", "yes" if row.fits else "no")]
    if row.step_seconds is None:
        lines.append(("because", row.why))
    else:
        speed = [f"{row.samples / row.step_seconds:,.4g} samples/s"]
        speed += [f"{row.tokens / row.step_seconds:,.0f} tokens/s"] if row.tokens else []
        of = ", ".join(f"{name} {_time(own)}" for name, own in row.seconds.items() if own > 0.001 * row.step_seconds)
        parts = ", ".join(f"{name} {_gb(nbytes)}" for name, nbytes in row.memory.items() if nbytes > 5e6)
        lines += [
            ("plan", row.plan),
            ("step", f"{_time(row.step_seconds)}: {', '.join(speed)}, MFU {row.mfu:.1%}"),
            ("of which", of),
            ("memory", f"{_gb(row.peak_bytes)} of {each} on each device"),
            ("of which", parts),
        ]
    if row.fewest is not None:
        less = f"; {row.too_few} do not fit" if row.too_few else ""
        lines.append(("fewest", f"{row.fewest} devices fit{less} (of halves, quarters ...)"))
    if row.largest_batch:
        some = "at least" if row.largest_batch >= MOST_TIMES * row.samples > 0 else "about"
        lines.append(("largest", f"{some} {row.largest_batch} samples at a time fit, recomputing as much as it takes"))
    return [f"  {name:10}{value}" for name, value in lines]


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _picture(row: FitRow) -> str:
    if not row.fits:
        return f"<p>{escape(row.why)}</p>"
    memory = {name: nbytes / 1e9 for name, nbytes in row.memory.items()}
    memory["free"] = max(0.0, (row.memory_bytes - row.peak_bytes) / 1e9)
    seconds = {name: own * 1e3 for name, own in row.seconds.items()}
    return _bar("memory of a device, GB", memory) + _bar("a step, ms", seconds)


def _bar(title: str, parts: Mapping[str, float]) -> str:
    """One bar of parts side by side, and what they are."""
    whole, at, boxes, names = sum(parts.values()) or 1.0, 0.0, [], []
    for number, (name, size) in enumerate(parts.items()):
        colour = "#dddddd" if name == "free" else COLOURS[number % len(COLOURS)]
        width = 100 * size / whole
        boxes.append(f'<rect x="{at:.3f}%" y="0" width="{width:.3f}%" height="28" fill="{colour}"/>')
        names.append(f'<span style="color:{colour}">&#9632;</span> {escape(name)} {size:,.4g}')
        at += width
    picture = f'<svg width="100%" height="28" role="img" aria-label="{escape(title)}">{"".join(boxes)}</svg>'
    return f"<h3>{escape(title)}</h3>{picture}<p>{' &nbsp; '.join(names)}</p>"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.3g}"


def _count(number: int) -> str:
    return f"{number / 1e9:,.2f} billion" if number >= 1e9 else f"{number / 1e6:,.1f} million"
