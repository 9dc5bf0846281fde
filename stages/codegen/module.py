"""The whole module: header, one function per distinct block, and a class whose `forward` is the table of contents."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterator

from shardwright.pipeline.ir.graph import OpGraph
from shardwright.pipeline.ir.names import pattern, ranges
from shardwright.pipeline.ir.plan import Plan
from shardwright.pipeline.sharding.partitions import sharded_parts
from shardwright.stages.codegen.block import RESERVED, FunctionBody, free_name, statement
from shardwright.stages.codegen.part import ProgramPart, Written, class_text, write_part
from shardwright.stages.codegen.text import LINE, one_or_many, quoted

GLOBALS = {  # what else a module has by name
    *("Program", "Tensor", "ONEDNN", "CUDA_GRAPHS", "MESH", "MICRO_BATCHES", "SLICES", "INPUTS", "PARAMETERS"),
    *("PER_RANK", "SCHEDULE", "DEVICES", "SENT", "TIED", "PARTITIONS", "SMALLER"),  # of a pipeline
}
_COMPILED = "# Compiled when first called. Of what a block has for backward it keeps this part, the rest is made again."
_MASKED = "# The gradient of a relu's result that one block gives to the next is masked by the latter."

_PER_RANK = "# Batch norms are of each rank's own samples; of their running statistics those of rank 0 are the model's."


def write_module(graph: OpGraph, plan: Plan, digest: str = "") -> str:
    """`digest` is that of the plan's artifact, for the header."""
    (sharded,) = sharded_parts(plan, graph)
    part = ProgramPart(sharded, plan.axes, plan.regions, plan.released)
    written = write_part(part)
    functions, texts = functions_of([written])
    texts.append(class_text(written, functions))
    return "\n\n\n".join([_header(part, plan, imports(texts, written.used), digest), *texts]) + "\n"


# ----------------------------------------------------------------------------------------------------------- functions


def functions_of(parts: list[Written]) -> tuple[dict[str, str], list[str]]:
    """The functions' names by the texts of blocks (equal ones are one), and how they are defined and compiled."""
    blocks = [block for part in parts for block in part.blocks]
    variables = set().union(*(part.variables for part in parts))
    names = _names(blocks, variables | {part.part.name for part in parts})
    texts = []
    for name, block in {names[block.text]: block for block in blocks}.items():
        body = (f"    {line}" for line in (*block.lines, f"return {', '.join(block.result)}"))
        texts.append("\n".join([*statement(f"def {name}{block.signature}:"), *body]))
    callers = [caller for part in parts for caller in part.callers(names)]
    ways = {c.called: c.compiled for c in callers if c.leaf.compiled is not None}  # in as many as it is called
    if ways:
        lines = [_COMPILED, *([_MASKED] if any(c.leaf.after_relu for c in callers) else [])]
        lines += [line for name, text in ways.items() for line in statement(f"{name} = {text}")]
        texts.append("\n".join(lines))
    return names, texts


def _names(blocks: list[FunctionBody], variables: set[str]) -> dict[str, str]:
    """Block text -> name: the module's, without numbers; with a letter where one module has several functions."""
    taken = RESERVED | variables | GLOBALS
    by_base: dict[str, list[str]] = {}
    for block in blocks:
        base = "_".join(part for part in block.prefix.split(".") if part and not part.isdigit()) or "model"
        base = f"{base}_block" if base in taken else base
        texts = by_base.setdefault(base, [])
        if block.text not in texts:
            texts.append(block.text)
    names = {}
    for base, texts in by_base.items():
        for number, text in enumerate(texts):
            names[text] = free_name(base if len(texts) == 1 else f"{base}_{_letters(number)}", taken)
    return names


def _letters(number: int) -> str:
    letter = string.ascii_lowercase[number % 26]
    return letter if number < 26 else _letters(number // 26 - 1) + letter


# -------------------------------------------------------------------------------------------------------------- header


def imports(texts: list[str], used: set[str]) -> str:
    functions = "import torch.nn.functional as F\n" if any(re.search(r"\bF\.", text) for text in texts) else ""
    runtime = f"\nfrom shardwright.pipeline.runtime import {', '.join(sorted(used))}\n"
    if len(runtime) - 2 > LINE:
        runtime = "\n" + one_or_many("from shardwright.pipeline.runtime import (", sorted(used), ")") + "\n"
    return f"import torch\n{functions}from torch import Tensor\n{runtime if used else ''}"


def told_digest(digest: str) -> str:
    return f"\n\nThe plan's digest is {digest}." if digest else ""


def told_device(plan: Plan) -> str:
    onednn = "" if plan.onednn else "\nONEDNN = False  # the CPU was measured to be faster with torch's own kernels"
    graphs = "\nCUDA_GRAPHS = True  # the passes of a step are captured once, then replayed" if plan.cuda_graphs else ""
    return f"DEVICE = torch.device({quoted(plan.device)}){onednn}{graphs}"


def told_norms(graph: OpGraph) -> str:
    """Nothing, where batch norms have the statistics of the whole batch."""
    norms = [op for op in graph.ops if op.per_rank]
    names = [quoted(name) for name in ranges({graph.values[value].origin: "" for op in norms for value in op.mutates})]
    return f"\n{_PER_RANK}\n{one_or_many('PER_RANK = {', names, '}') if names else 'PER_RANK = ()'}" if norms else ""


def told_slices(graph: OpGraph, plan: Plan) -> str:
    """As Python writes them, equal ones once."""
    counted = Counter(plan.slices or (graph.batch,))
    return " + ".join(f"({size},) * {times}" if times > 1 else f"({size},)" for size, times in counted.items())


def _header(part: ProgramPart, plan: Plan, imported: str, digest: str) -> str:
    mesh = ", ".join(f"{name}={size}" for name, size in plan.axes)
    rows = "\n".join(f"    {quoted(name)}: {entry}," for name, entry in _parameters(part).items())
    inputs = [f'{quoted(name)}: "{layout}"' for name, layout in plan.sharding.inputs.items()]
    slices = f"SLICES = {told_slices(part.graph, plan)}  # samples of those of one batch\n" if plan.slices else ""
    return f'''"""The training program for the mesh {mesh}, written from runs/checkpoint/plan.json.{told_digest(digest)}

Each line's layout stands behind it with the shape of one rank's shard: R replicated, B replicated with a partial
gradient, S(d) split on dim d, P partial sums. `del` lets go of what backward does not need, `kept` is not computed
again in a recompute region. Write it again with `dvc repro codegen`; to train with your own edits, set
`accept_edited_module: true` in your conf/train file and run `shardwright train`.
"""

from __future__ import annotations

{imported}
{told_device(plan)}
MESH = {{{", ".join(f"{quoted(name)}: {size}" for name, size in plan.axes)}}}
MICRO_BATCHES = {plan.micro_batches}  # forward and backward passes of a step
{slices}{one_or_many("INPUTS = {", inputs, "}")}{told_norms(part.graph)}
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
    sharded = part.sharded
    for name, state in sharded.states.items():
        origin, summed = part.graph.values[name].origin, sharded.program.reduced.get(name, ())
        over = "+".join(part.axes[axis][0] for axis in summed)
        yield origin, f'("{sharded.sharding.storage[origin]}", {quoted(over)}, "{state}")'
