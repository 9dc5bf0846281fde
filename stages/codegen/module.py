"""The whole module: header, one function per distinct block, and a class whose `forward` is the table of contents."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from pipeline.ir.graph import OpGraph
from pipeline.ir.names import pattern
from pipeline.ir.plan import Plan
from pipeline.sharding.partitions import sharded_parts
from stages.codegen.functions import functions_of
from stages.codegen.part import ProgramPart, class_text, write_part
from stages.codegen.text import one_or_many, quoted, runtime_import


def write_module(graph: OpGraph, plan: Plan, digest: str = "") -> str:
    """`digest` is that of the plan's artifact, for the header."""
    (sharded,) = sharded_parts(plan, graph)
    part = ProgramPart(sharded, plan.axes, plan.regions, plan.released)
    written = write_part(part)
    functions = functions_of([written])
    parts = [*functions.texts, class_text(written, functions.names)]
    functional = any(re.search(r"\bF\.", text) for text in parts)
    return "\n\n\n".join([_header(part, plan, written.used, functional, digest), *parts]) + "\n"


def told_digest(digest: str) -> str:
    return f"\n\nThe plan's digest is {digest}." if digest else ""


def told_device(plan: Plan) -> str:
    onednn = "" if plan.onednn else "\nONEDNN = False  # the CPU was measured to be faster with torch's own kernels"
    graphs = "\nCUDA_GRAPHS = True  # the passes of a step are captured once, then replayed" if plan.cuda_graphs else ""
    return f"DEVICE = torch.device({quoted(plan.device)}){onednn}{graphs}"


def told_slices(graph: OpGraph, plan: Plan) -> str:
    """As Python writes them, equal ones once."""
    counted = Counter(plan.slices or (graph.batch,))
    return " + ".join(f"({size},) * {times}" if times > 1 else f"({size},)" for size, times in counted.items())


def _header(part: ProgramPart, plan: Plan, used: set[str], functional: bool, digest: str) -> str:
    mesh = ", ".join(f"{name}={size}" for name, size in plan.axes)
    rows = "\n".join(f"    {quoted(name)}: {entry}," for name, entry in _parameters(part).items())
    inputs = [f'{quoted(name)}: "{layout}"' for name, layout in plan.sharding.inputs.items()]
    functions = "import torch.nn.functional as F\n" if functional else ""
    slices = f"SLICES = {told_slices(part.graph, plan)}  # samples of those of one batch\n" if plan.slices else ""
    return f'''"""The training program for the mesh {mesh}, written from runs/checkpoint/plan.json.{told_digest(digest)}

Each line's layout stands behind it with the shape of one rank's piece: R replicated, B replicated with a partial
gradient, S(d) split on dim d, P partial sums. `del` lets go of what backward does not need, `kept` is not computed
again in a recompute region. Write it again with `dvc repro codegen`; to train with your own edits, set
`accept_edited_module: true` in your conf/train file and run `python -m stages train`.
"""

from __future__ import annotations

import torch
{functions}from torch import Tensor

{runtime_import(used)}

{told_device(plan)}
MESH = {{{", ".join(f"{quoted(name)}: {size}" for name, size in plan.axes)}}}
MICRO_BATCHES = {plan.micro_batches}  # forward and backward passes of a step
{slices}{one_or_many("INPUTS = {", inputs, "}")}
# Of each parameter: how it is stored, the axes over which its gradient is summed during backward, and how the
# optimizer's state is stored; `*` stands for a number.
PARAMETERS = {{
{rows}
}}'''


def _parameters(part: ProgramPart) -> dict[str, str]:
    """One row per parameter; equal rows of numbered modules are written once, with `*` for the number."""
    rows = dict(parameter_rows(part))
    entries: dict[str, set[str]] = {}
    for name, row in rows.items():
        entries.setdefault(pattern(name), set()).add(row)
    return {pattern(name) if len(entries[pattern(name)]) == 1 else name: row for name, row in rows.items()}


def parameter_rows(part: ProgramPart) -> Iterator[tuple[str, str]]:
    for name, state in part.sharded.states.items():
        origin, summed = part.graph.values[name].origin, part.program.reduced.get(name, ())
        over = "+".join(part.axes[axis][0] for axis in summed)
        yield origin, f'("{part.sharding.storage[origin]}", {quoted(over)}, "{state}")'
