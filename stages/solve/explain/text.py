"""Explanations as plain text: aligned, at most 100 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence

from shardwright.pipeline.cost.whole_ops import LACK
from shardwright.stages.solve.explain.diff import Changed, CostChange, Diff
from shardwright.stages.solve.explain.one import HeldBytes, SubjectSummary
from shardwright.stages.solve.explain.options import OptionVerdict, PricedOption
from shardwright.stages.solve.explain.whole import Cost, Module, PlanSummary

COLUMNS = 100
LEAST = 24  # columns that the last column of a table needs
MOST = 12  # rows of one table, where there may be hundreds


def seconds(value: float, *, signed: bool = False) -> str:
    if not value:
        return "0"
    unit, scale = ("s", 1.0) if abs(value) >= 1 else ("ms", 1e3) if abs(value) * 1e3 >= 1 else ("us", 1e6)
    return f"{value * scale:{'+' if signed else ''}.4g} {unit}"


def nbytes(value: float, *, signed: bool = False) -> str:
    if not value:
        return "0"
    sign = "+" if signed else ""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(value) >= scale:
            return f"{value / scale:{sign}.4g} {unit}"
    return f"{value:{sign}.0f} B"


def table(rows: Sequence[Sequence[str]], numbers: int = 0) -> list[str]:
    """The first columns are numbers, the last one goes on in the next line where it must."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for *row, text in rows:
        cells = [cell.rjust(widths[n]) if n < numbers else cell.ljust(widths[n]) for n, cell in enumerate(row)]
        head = "  " + "".join(f"{cell}  " for cell in cells)
        room = COLUMNS - len(head)
        if len(text) <= room:
            lines.append(f"{head}{text}".rstrip())
        elif room < LEAST:  # the names left of it are long: it goes below them
            lines += textwrap.wrap(head.rstrip(), COLUMNS, drop_whitespace=False, subsequent_indent=" " * 6)
            lines += textwrap.wrap(text, COLUMNS, initial_indent=" " * 6, subsequent_indent=" " * 6)
        else:
            lines += textwrap.wrap(text, COLUMNS, initial_indent=head, subsequent_indent=" " * len(head))
    return lines


def _titled(title: str, rows: list[str]) -> list[str]:
    return ["", title, *rows] if rows else []


# ----------------------------------------------------------------------------------------------------------- the plan


def whole_text(whole: PlanSummary) -> str:
    step, listed = whole.step_seconds, seconds(whole.priced_seconds)
    where = "" if whole.partition is None else f" of partition {whole.partition}, the busiest"
    lost = [
        ("does not fit" if one.seconds is None else seconds(one.seconds), f"{one.what}: {one.lost}")
        for one in whole.alternatives
    ]
    part = whole.peak_bytes / whole.budget_bytes if whole.budget_bytes else 0.0
    memory = f"memory{where}: {nbytes(whole.peak_bytes)} of {nbytes(whole.budget_bytes)} ({part:.0%})"
    lines = [
        *table(whole.plan),
        *_titled(f"a step takes {seconds(step)}", _costs(whole.parts, step)),
        *_titled(memory, _held(whole.memory, whole.peak_bytes)),
        *_titled("the largest of what stays", _held(whole.largest, whole.peak_bytes)),
        *_titled(f"ops{where}; priced one by one, all below is {listed}", _costs(whole.ops, step)),
        *_titled(LACK, _costs(whole.whole_ops, step)),
        *_titled("collectives", _costs(whole.collectives, step)),
        *_titled("parameters", _costs(whole.parameters, step)),
        *_titled("plans that lost", table(lost, 1)),
    ]
    return "\n".join(lines)


def _costs(costs: Sequence[Cost], step: float) -> list[str]:
    several = any(cost.count > 1 for cost in costs)
    rows = [
        (seconds(one.seconds), _share(one.seconds, step), *((f"x {one.count}",) if several else ()), one.what)
        for one in costs[:MOST]
    ]
    return [*table(rows, 3 if several else 2), *([f"  and {len(costs) - MOST} more"] if len(costs) > MOST else [])]


def _held(parts: Sequence[HeldBytes], peak: int) -> list[str]:
    return table([(nbytes(one.nbytes), _share(one.nbytes, peak), one.what) for one in parts], 2)


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else ""


def _times(count: int) -> str:
    return f"x {count}" if count > 1 else ""


def module_text(module: Module) -> str:
    rows = [
        (seconds(row.seconds), _times(row.count), row.what, row.name, row.how) for row in module.rows if row.seconds
    ]
    kept = [
        (nbytes(one.resident_bytes), seconds(one.sums), seconds(one.optimizer), _times(one.count), one.name, one.stored)
        for one in module.parameters
    ]
    head = [("keep", "sums", "optimizer", "", "", "")] if kept else []
    title = f"{module.name}: {seconds(module.seconds)}, {_share(module.seconds, module.step_seconds)} of a step"
    return "\n".join(
        [title, *_titled("ops and conversions", table(rows, 2)), *_titled("parameters", table(head + kept, 4))]
    )


# --------------------------------------------------------------------------------------------------------- one choice


def one_text(one: SubjectSummary) -> str:
    where = "" if one.partition is None else f", in partition {one.partition}"
    what = "the step and its peak" if one.partition is None else "its partition's work of a step, and memory,"
    costs = {"compute": one.compute_seconds, "communication": one.communication_seconds}
    costs |= {"optimizer": one.optimizer_seconds} if one.optimizer_seconds else {}
    shown = ", ".join(f"{name} {seconds(value)}" for name, value in costs.items())
    share = sum(costs.values()) / one.step_seconds if one.step_seconds else 0.0
    facts = [
        ("chosen", one.chosen),
        ("seconds", f"{shown}: {share:.1%} of a step"),
        ("bytes", ", ".join(f"{held.what} {nbytes(held.nbytes)}" for held in one.held)),
    ]
    moved = [(seconds(item.seconds), item.what, item.name, item.how) for item in one.conversions]
    never = [(f"{n.tensor} dim {n.dim} over {n.axis}", n.why) for n in one.never]
    lines = [
        *textwrap.wrap(f"{one.what} {one.name}{where}: {one.about}", COLUMNS, subsequent_indent="  "),
        *table(facts),
        *_titled("conversions", table(moved, 1)),
        *_titled(f"options, and how {what} would change with each", _options(one.options)),
        *([f"  and {one.more} more, slower still (--most {one.more + len(one.options)})"] if one.more else []),
        *_titled("splits that no option has", table(never)),
    ]
    return "\n".join(lines)


def _options(options: Sequence[PricedOption]) -> list[str]:
    """Each with its figures, then the choice in words with what ruled it out."""
    again = any(one.solved_seconds is not None or one.solved_peak_bytes is not None for one in options)
    rows = [("step", "peak", "solved again", "choice")] if options else []
    for one in options:
        asked = (one.seconds, one.solved_seconds)
        step, solved = ("" if value is None else seconds(value, signed=True) for value in asked)
        peak = "" if one.peak_bytes is None else nbytes(one.peak_bytes, signed=True)
        why = f"{one.verdict.value}: {one.why}" if one.why else one.verdict.value
        rows.append((step, peak, solved, one.choice + (f" ({why})" if one.verdict is not OptionVerdict.slower else "")))
    return table(rows, 3) if again else table([(step, peak, words) for step, peak, _, words in rows], 2)


# ----------------------------------------------------------------------------------------------------------- two plans


def diff_text(diff: Diff) -> str:
    step = diff.seconds[0]
    change = f" ({step.difference / step.before:+.1%})" if step.before else ""
    head = f"{diff.names[0]} -> {diff.names[1]}: a step takes {seconds(step.before)} -> {seconds(step.after)}{change}"
    lines = [
        *textwrap.wrap(head, COLUMNS, subsequent_indent="  "),
        *_titled("seconds", _moved(diff.seconds)),
        *_titled("memory", _moved([diff.peak_bytes], nbytes)),
        *_titled("settings", _changed(diff.settings)),
        *_titled("the plan", _changed(diff.plan)),
        *_titled("parameters", _changed(diff.parameters)),
        *_titled("inputs", _changed(diff.inputs)),
        *_titled("ops", _changed(diff.ops)),
        *_titled("what accounts for the difference", _moved(diff.causes[:MOST])),
    ]
    left = diff.causes[MOST:]
    if left:
        lines.append(f"  and {len(left)} more, {seconds(sum(one.difference for one in left), signed=True)} together")
    if not any((diff.settings, diff.plan, diff.parameters, diff.inputs, diff.ops, diff.causes)):
        lines.append("nothing changed")
    return "\n".join(lines)


def _moved(moved: Sequence[CostChange], shown: Callable[..., str] = seconds) -> list[str]:
    rows = [(shown(one.before), shown(one.after), shown(one.difference, signed=True), one.name) for one in moved]
    return table(rows, 3)


def _changed(changes: Sequence[Changed]) -> list[str]:
    lines = []
    for one in changes:
        text = f"{one.name}: {one.before} -> {one.after} {_times(one.count)}".rstrip()
        lines += textwrap.wrap(text, COLUMNS, initial_indent="  ", subsequent_indent="      ")
    return lines
