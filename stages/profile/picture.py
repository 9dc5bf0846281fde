"""The step's memory as figures for the artifact, as a picture and as a table of modules."""

from __future__ import annotations

import re
from collections import Counter
from io import BytesIO
from typing import Any

from shardwright.pipeline.ir.graph import OpGraph
from shardwright.pipeline.ir.names import printable
from shardwright.pipeline.ir.profile import Share, Step
from shardwright.stages.profile.link import ops_by_run
from shardwright.stages.profile.step import StepProfile
from shardwright.stages.profile.timeline import CLASSES

SAMPLES = 400  # of the curves: more than a screen shows
TOP_MODULES = 30
OPTIMIZER_WIDTH = 0.15  # of the passes' width
COLORS = {
    "parameters": "#3b6ea5", "optimizer state": "#7aa6d2", "inputs and buffers": "#b0b7c0",
    "gradients": "#c97b3d", "activations": "#5c9e6f", "temporaries": "#b5544d",
}  # fmt: skip


def describe(graph: OpGraph, profile: StepProfile) -> Step:
    timeline = profile.timeline
    curve = timeline.curve()
    peak = max(range(len(curve)), key=curve.__getitem__)
    by_class: Counter[str] = Counter()
    by_module: Counter[str] = Counter()
    for life in timeline.alive(peak):
        by_class[life.kind] += life.size
        by_module[life.module or "(the step)"] += life.size
    phase, module = _where(graph, profile, peak)
    largest = sorted(by_module.items(), key=lambda item: (-item[1], item[0]))  # equal ones by name
    rest = sum(size for _, size in largest[TOP_MODULES:])
    shown = largest[:TOP_MODULES] + ([("all others", rest)] if rest else [])
    stretch = max(1, -(-len(curve) // SAMPLES))  # of kernels: each is shown at the moment of the most memory
    stretches = (range(len(curve))[start : start + stretch] for start in range(0, len(curve), stretch))
    moments = tuple(max(kernels, key=curve.__getitem__) for kernels in stretches)
    return Step(
        resident_bytes=profile.memory.resident,
        after_forward_bytes=profile.memory.after_forward,
        peak_bytes=curve[peak],
        peak_in=phase,
        peak_module=module,
        peak_by_class=tuple(Share(kind, by_class[kind]) for kind in CLASSES),
        peak_by_module=tuple(Share(name, size) for name, size in shown),
        kernels=(timeline.forward, timeline.backward, timeline.optimizer),
        moments=moments,
        optimizer_bytes=max(0, profile.memory.optimizer_peak - profile.memory.after_backward),
        curves={kind: tuple(of_kind[m] for m in moments) for kind in CLASSES for of_kind in [timeline.curve(kind)]},
    )


def _cell(name: str) -> str:
    """A name that ends no cell and is no markup, whatever a module is called."""
    return re.sub(r"([\\`*\[\]<>|])", r"\\\1", printable(name))


def _where(graph: OpGraph, profile: StepProfile, moment: int) -> tuple[str, str]:
    """The pass in which a kernel runs, and the module that runs it."""
    timeline = profile.timeline
    if moment >= timeline.forward + timeline.backward:
        return "optimizer", "optimizer"
    backward = moment >= timeline.forward
    chain = list(zip(profile.runs, ops_by_run(graph, profile.runs), strict=True))
    left = moment - timeline.forward if backward else moment
    for run, known in reversed(chain) if backward else chain:
        kernels = run.backward if backward else run.forward
        if left < len(kernels):
            op = known.get(kernels[left].op)
            return "backward" if backward else "forward", graph.op(op).module if op else ""
        left -= len(kernels)
    raise AssertionError("the moment lies in the step")


def draw_step(step: Step, title: str) -> bytes:
    """A stacked picture of the classes of memory over the kernels of the step, as PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5))
    axes = figure.add_axes((0.075, 0.055, 0.87, 0.885))  # to find a place for it takes as long as to draw it
    names = [name for name in CLASSES if any(step.curves[name])]
    heights = [[size / 1e6 for size in step.curves[name]] for name in names]
    forward, backward, optimizer = step.kernels
    shown = [_place(moment, step) for moment in step.moments]
    axes.stackplot(shown, heights, labels=names, colors=[COLORS[name] for name in names], linewidth=0)
    for place in (forward, forward + backward):
        axes.axvline(place, color="black", linewidth=0.6, linestyle=":")
    top = axes.get_ylim()[1]
    for place, name in ((0, "forward"), (forward, "backward"), (forward + backward, "optimizer")):
        axes.text(place, top, f" {name}", va="top", fontsize=8)
    total = [sum(column) for column in zip(*heights, strict=True)]
    at = max(range(len(total)), key=total.__getitem__)
    axes.plot([shown[at]], [total[at]], marker="v", color="black", markersize=5)
    where = f" in {printable(step.peak_module)[:80]}" if step.peak_module else ""
    told = f"{title}: peak {step.peak_bytes / 1e6:,.1f} MB in {step.peak_in}{where}"
    axes.set_title(told, fontsize=10, parse_math=False)
    axes.set_xlim(0, _place(forward + backward + optimizer, step))
    axes.set_xticks([])
    axes.set_xlabel(f"kernels: {forward} forward, {backward} backward, {optimizer} in the optimizer (drawn narrower)")
    axes.set_ylabel("MB")
    axes.legend(loc="lower right", fontsize=8)
    return _png(figure)


def _place(moment: int, step: Step) -> float:
    """Where a kernel is drawn: an optimizer that goes from parameter to parameter must not crowd out the passes."""
    passes = step.kernels[0] + step.kernels[1]
    narrowed = min(1.0, OPTIMIZER_WIDTH * passes / max(1, step.kernels[2]))
    return moment if moment <= passes else passes + (moment - passes) * narrowed


def draw_nothing(title: str, why: str) -> bytes:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 2))
    figure.text(0.02, 0.5, f"{title}: not simulated\n{printable(why[:120])}", fontsize=9, parse_math=False)
    return _png(figure)


def _png(figure: Any) -> bytes:
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=110, metadata={"Software": None})
    return buffer.getvalue()


def table(step: Step) -> str:
    """What is alive at the peak, as Markdown."""
    lines = [f"Peak {step.peak_bytes / 1e6:.3f} MB in {step.peak_in} ({_cell(step.peak_module or 'the step')}).", ""]
    for heading, shares in (("class of memory", step.peak_by_class), ("module", step.peak_by_module)):
        lines += [f"| {heading} | MB at the peak | share |", "|---|---:|---:|"]
        lines += [
            f"| {_cell(s.name)} | {s.nbytes / 1e6:.3f} | {100 * s.nbytes / step.peak_bytes:.1f}% |" for s in shares
        ]
        lines.append("")
    return "\n".join(lines)
