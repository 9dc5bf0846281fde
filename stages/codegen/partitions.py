"""The module of a pipeline: a class per partition, functions that they share, and how partitions follow one another.

Where micro-batches have different numbers of samples, the module is written for the larger ones. Whatever has other
sizes in it for the smaller ones is there twice: a function, and the `forward` of the class that calls it.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from textwrap import dedent

from shardwright.pipeline.ir.graph import OpGraph, Role, Value
from shardwright.pipeline.ir.layout import Layout
from shardwright.pipeline.ir.names import ranges
from shardwright.pipeline.ir.plan import Plan, Region
from shardwright.pipeline.sharding.partitions import crossing, sharded_parts
from shardwright.stages.codegen.block import RESERVED
from shardwright.stages.codegen.module import (
    functions_of,
    imports,
    parameter_rows,
    told_device,
    told_digest,
    told_norms,
    told_slices,
)
from shardwright.stages.codegen.part import ProgramPart, Written, class_text, common_names, forward_text, write_part
from shardwright.stages.codegen.text import one_or_many, quoted


def write_partitions(graph: OpGraph, plan: Plan, digest: str = "", smaller: OpGraph | None = None) -> str:
    """`graph` is that of the larger micro-batches, `smaller` of the others where these have fewer samples."""
    written = [write_part(part) for part in parts_of(graph, plan, "Partition")]
    fewer = [write_part(part) for part in parts_of(smaller, plan, "Smaller")] if smaller else []
    pairs = [(one, _in_words_of(one, other)) for one, other in zip(written, fewer, strict=False)]
    everything = [*written, *(other for _, other in pairs)]
    functions, texts = functions_of(everything)
    texts += [class_text(one, functions, _attributes(one.part)) for one in written]
    own = _smaller_classes(pairs, functions)
    order = one_or_many("PARTITIONS = (", [one.part.name for one in written], ")")
    if smaller:
        chosen = [(b if b.part.name in own else a).part.name for a, b in pairs]
        order += "\n" + one_or_many("SMALLER = (", chosen, ")")
    texts += [*own.values(), order]
    return "\n\n\n".join([_header(graph, plan, everything, texts, digest, smaller), *texts]) + "\n"


def parts_of(graph: OpGraph, plan: Plan, name: str) -> list[ProgramPart]:
    """Every partition as a class of its own; what crosses cuts has one name in all of them."""
    common = common_names(graph, RESERVED.union(value.name for value in graph.of_role(Role.INPUT)))
    return [
        ProgramPart(
            sharded,
            partition.axes,
            tuple(_shifted(region, partition.first) for region in partition.regions),
            plan.released,
            name=f"{name}{number}",
            first=partition.first,
            common=common,
            leaving=crossing(graph, partition.last + 1)[1:],
            recompute="recompute_except_last" if plan.keeps_last else "recompute",
        )
        for number, (partition, sharded) in enumerate(zip(plan.partitions, sharded_parts(plan, graph), strict=True))
    ]


def _shifted(region: Region, first: int) -> Region:
    inner = tuple(_shifted(one, first) for one in region.inner)
    return replace(region, first=region.first - first, last=region.last - first, inner=inner)


def _in_words_of(larger: Written, smaller: Written) -> Written:
    """Blocks without a size of their own have the text of the larger one's, whose comments tell its sizes."""
    pairs = zip(larger.blocks, smaller.blocks, strict=True)
    blocks = [replace(b, lines=a.lines) if _same(a.lines, b.lines) else b for a, b in pairs]
    return replace(smaller, blocks=blocks)


def _smaller_classes(pairs: list[tuple[Written, Written]], functions: dict[str, str]) -> dict[str, str]:
    """By name, of the partitions that need one: they have another `forward` and nothing else of their own."""
    found = {}
    for one, other in pairs:
        text = forward_text(other, functions)
        if not _same(dedent(forward_text(one, functions)).splitlines(), dedent(text).splitlines()):
            told = '    """For the smaller micro-batches."""'
            found[other.part.name] = f"class {other.part.name}({one.part.name}):\n{told}\n\n{text}"
    return found


def _same(lines: Sequence[str], others: Sequence[str]) -> bool:
    """But for comments, and how long lines are broken."""
    return ast.dump(ast.parse("\n".join(lines))) == ast.dump(ast.parse("\n".join(others)))


def _attributes(part: ProgramPart) -> str:
    last = part.first + len(part.graph.chain) - 1
    links = f"Links {part.first} to {last}" if last > part.first else f"Link {last}"
    layouts = part.sharded.sharding.inputs
    inputs = [f'{quoted(value.name)}: "{layouts[value.name]}"' for value in part.graph.of_role(Role.INPUT)]
    rows = [f"    {quoted(name)}: {row}," for name, row in ranges(dict(parameter_rows(part))).items()]
    buffers = [quoted(name) for name in ranges({value.origin: "" for value in part.graph.of_role(Role.BUFFER)})]
    return "\n".join(
        [
            f'"""{links}."""',
            "",
            one_or_many("MESH: ClassVar = {", [f"{quoted(name)}: {size}" for name, size in part.axes], "}", within=4),
            one_or_many("INPUTS: ClassVar = {", inputs, "}", within=4),
            *(["PARAMETERS: ClassVar = {", *rows, "}"] if rows else ["PARAMETERS: ClassVar = {}"]),
            *([one_or_many("BUFFERS: ClassVar = {", buffers, "}", within=4)] if buffers else []),
        ]
    )


def _header(
    graph: OpGraph, plan: Plan, written: list[Written], texts: list[str], digest: str, smaller: OpGraph | None
) -> str:
    count, used = len(plan.partitions), set().union(*(one.used for one in written))
    submeshes = count // plan.chunks
    devices = [str(prod(partition.sizes)) for partition in plan.partitions[:submeshes]]
    turns = f"partition n is on submesh n % {submeshes}" if plan.chunks > 1 else "partition n is on submesh n"
    less = _LESS if smaller else ""
    last = _LAST if "recompute_except_last" in used else ""
    begin = f"The training program of a pipeline of {count} partitions, written from runs/checkpoint/plan.json."
    return f'''"""{begin}{told_digest(digest)}

A class for each partition, for one micro-batch: `forward` takes what the partition before sends (x and, by their names,
the values in `SENT`) and of the batch what its `INPUTS` name; it returns what the next one reads, x first, and the last
one the loss. `MESH`, `INPUTS` and `PARAMETERS` are those of its submesh. How tensors get from the layout of one
partition's mesh to that of the next is not written here: `SENT` has both.{less}{last}

Each line's layout stands behind it with the shape of one rank's shard: R replicated, B replicated with a partial
gradient, S(d) split on dim d, P partial sums. `del` lets go of what backward does not need, `kept` is not computed
again in a recompute region. Of each parameter: how it is stored, the axes over which its gradient is summed during
backward, and how the optimizer's state is stored; `0-3` stands for any of these numbers. Write it again with
`dvc repro codegen`.
"""

from __future__ import annotations

from typing import ClassVar

{imports(texts, used)}
{told_device(plan)}
SCHEDULE = {quoted(plan.schedule)}
MICRO_BATCHES = {plan.micro_batches}  # forward and backward passes of a step
# Samples of the micro-batches that have together one batch of the model.
SLICES = {told_slices(graph, plan)}{told_norms(graph)}
DEVICES = ({", ".join(devices)}{"," if len(devices) == 1 else ""})  # of each submesh; {turns}
# What each partition sends to the next of one micro-batch: its whole shape, its type (outside autocast), its layouts
# at both ends, and whether its gradient comes back.
{_sent(graph, plan, written, smaller)}
# Parameters that several partitions hold, and these: their gradients have to be summed over them.
{_tied(written[:count])}'''


_LESS = """

Micro-batches have different numbers of samples (`SLICES`). Sizes are those of the larger ones; a `Smaller` partition is
what its base is, for the others. `SMALLER` has these classes in their order, and those that are for both."""


_LAST = """

The last micro-batch of a step keeps everything: `recompute_except_last` runs a region once for it, and for those before
it once more in backward."""


def _sent(graph: OpGraph, plan: Plan, written: list[Written], smaller: OpGraph | None) -> str:
    homes = [one.part.sharded.home for one in written]
    lines = ["SENT = ("]
    for number, after in enumerate(plan.partitions[1:]):
        lines.append(f"    {{  # from Partition{number} to Partition{number + 1}")
        for name in crossing(graph, after.first):
            value, common = graph.values[name], written[number].part.common
            own = common[name].name if name in common else "x"
            less = smaller.values[name].type.shape if smaller else None
            lines += sent_row(own, value, homes[number][name], homes[number + 1][name], less)
        lines += ["    },"]
    return "\n".join([*lines, ")"])


def sent_row(
    name: str, value: Value, source: Layout, target: Layout, smaller: tuple[int, ...] | None = None
) -> list[str]:
    items = [
        f'"shape": {value.type.shape}',
        *([f'"smaller": {smaller}'] if smaller is not None else []),
        f'"dtype": "{value.type.dtype}"',
        f'"from": "{source}"',
        f'"to": "{target}"',
        f'"gradient": {value.grad}',
    ]
    return [f"        {line}" for line in one_or_many(f'"{name}": {{', items, "},", within=8).splitlines()]


def _tied(written: list[Written]) -> str:
    holders: dict[str, list[int]] = {}
    for number, one in enumerate(written):
        for value in one.part.graph.of_role(Role.PARAMETER):
            holders.setdefault(value.origin, []).append(number)
    rows = [f"{quoted(name)}: {tuple(numbers)}" for name, numbers in holders.items() if len(numbers) > 1]
    return one_or_many("TIED = {", rows, "}") if rows else "TIED: dict[str, tuple[int, ...]] = {}"
