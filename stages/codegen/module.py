"""The whole module: header, one function per distinct block, and a class whose `forward` is the table of contents."""

from __future__ import annotations

import re
import string
from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.blocks import convolves
from pipeline.ir.graph import Link, Op, OpGraph, Role
from pipeline.ir.names import pattern
from pipeline.ir.plan import Plan, Region
from pipeline.ir.program import Program, Tensor
from pipeline.lowering import home_layouts, state_layouts
from pipeline.ops.table import rule_of
from stages.codegen.block import LINE, RESERVED, Block, BlockWriter, Mesh, Outside, free_name, returned, statement


@dataclass(frozen=True)
class Leaf:
    """Links that are one function; where it is run again, the steps whose results it keeps."""

    first: int
    last: int
    kept: tuple[str, ...]
    compiled: float | None  # the part of its activations that it keeps for backward, where it is compiled


@dataclass(frozen=True)
class Caller:
    """A function as `forward` calls it."""

    leaf: Leaf
    function: str
    scope: str  # the attribute that holds its parameters
    block: Block

    @property
    def called(self) -> str:
        part = self.leaf.compiled
        return self.function if part is None else f"{self.function}_keeps_{round(100 * part)}"

    def arguments(self) -> list[str]:
        own = ["x"] if self.block.takes_x else []
        return [*own, *self.block.common.values(), *([f"self.{self.scope}"] if self.block.reads_parameters else [])]


def write_module(graph: OpGraph, plan: Plan, program: Program, digest: str = "") -> str:
    """`digest` is that of the plan's artifact, for the header."""
    mesh = Mesh(plan.axes)
    before = _prologue(graph, plan, program, mesh)
    copies = _copies(graph, plan, program, mesh, before) if program.micro_batches > 1 and program.shared else None
    outside = _outside(graph, plan, before.names | (copies.names if copies else {}))
    leaves = list(_leaves(plan.regions))
    blocks = [_block(leaf, graph, plan, program, mesh, outside) for leaf in leaves]
    functions = _function_names(blocks, {known.name for known in outside.values()})
    scopes = _scope_names(blocks)
    callers = [Caller(f, functions[_text_of(b)], scopes[b.prefix], b) for f, b in zip(leaves, blocks, strict=True)]
    used = set(before.used).union(copies.used if copies else (), *(b.used for b in blocks))
    used |= {"scope"} if any(b.reads_parameters for b in blocks) else set()
    used |= {"recompute"} if any(r.recompute for r in plan.regions) else set()
    used |= {"keep_shards"} if used & {"again", "regather", "regather_together"} else set()
    used |= {"compiled"} if any(leaf.compiled is not None for leaf in leaves) else set()
    used |= {"channels_last"} if "compiled" in used and convolves(graph) else set()
    parts = [
        *(_function(name, block) for name, block in _distinct(blocks, functions).items()),
        *_compiled(callers),
        _class(graph, plan, before, copies, callers, scopes, used),
    ]
    functional = any(re.search(r"\bF\.", part) for part in parts)
    header = _header(graph, plan, program, used, functional, digest)
    return "\n\n\n".join([header, *parts]) + "\n"


@dataclass(frozen=True)
class Before:
    """What is done before the chain; blocks take its results by these names."""

    lines: tuple[str, ...]
    names: dict[Tensor, str]
    used: frozenset[str]
    reads_parameters: bool
    exact: bool = False  # products of what is given, such as rotary angles: never in half precision


def _prologue(graph: OpGraph, plan: Plan, program: Program, mesh: Mesh) -> Before:
    """What `forward` does before the chain, with the inputs' names; what is shared too, where there is one pass."""
    home = home_layouts(graph, plan.sharding)
    inputs = {Tensor(name, home[name]): own for name, own in _input_names(graph).items()}
    rules = (rule_of(graph.op(name)) for name in graph.prologue)
    exact = any(rule is not None and rule.is_product for rule in rules)
    writer = BlockWriter(graph, plan.sharding, mesh, "", {}, indent=12 if exact else 8)
    for tensor, name in inputs.items():
        writer.names.give(tensor, name)
    shared = program.shared if program.micro_batches == 1 else ()
    block = writer.write((*program.prologue, *shared), None, next(iter(inputs)))
    return Before(block.lines, writer.names.known, block.used, block.reads_parameters, exact)


def _copies(graph: OpGraph, plan: Plan, program: Program, mesh: Mesh, before: Before) -> Before:
    """What is shared, where a step has several passes: made once for all of them."""
    writer = BlockWriter(graph, plan.sharding, mesh, "", {}, indent=8)
    writer.names.taken.update(before.names.values())
    block = writer.write(program.shared, None, program.shared[-1].target)
    return Before(block.lines, writer.names.known, block.used, block.reads_parameters)


def _input_names(graph: OpGraph) -> dict[str, str]:
    """Input -> its name in the program: its own, unless the program has that name for something else."""
    names = [v.name for v in graph.of_role(Role.INPUT)]
    taken = RESERVED.union(names)
    return {name: free_name(name, taken) if name in RESERVED else name for name in names}


def _outside(graph: OpGraph, plan: Plan, before: dict[Tensor, str]) -> dict[Tensor, Outside]:
    """What blocks may read beside x and parameters: what is made before the chain, and the common values.

    A block calls what is made for it without the number, as layers may each have theirs (`cos.unsqueeze(1)`).
    """
    home = home_layouts(graph, plan.sharding)
    inputs = _input_names(graph)
    found = {
        tensor: Outside(name, name if tensor.value in inputs else re.sub(r"_\d+(?=_|$)", "", name))
        for tensor, name in before.items()
    }
    taken = RESERVED.union(before.values())
    for name in graph.common:
        base = _common_name(graph.op(graph.values[name].origin))
        found[Tensor(name, home[name])] = Outside(free_name(base, taken), base)
    return found


def _common_name(op: Op) -> str:
    """After its op, and the nearest module that has another name: `encoder_dropout`, `down_relu`."""
    kind = op.target.split(".")[1]
    parts = [part for part in op.module.split(".") if part and not part.isdigit() and part != kind]
    return "_".join([*parts[-1:], kind])


def _leaves(regions: tuple[Region, ...], kept: tuple[str, ...] = ()) -> Iterator[Leaf]:
    for region in regions:
        if region.recompute:
            yield from _leaves(region.inner, region.kept or kept)
        else:
            yield Leaf(region.first, region.last, kept, region.compiled)


def _block(
    leaf: Leaf, graph: OpGraph, plan: Plan, program: Program, mesh: Mesh, outside: dict[Tensor, Outside]
) -> Block:
    home = home_layouts(graph, plan.sharding)
    links = graph.chain[leaf.first : leaf.last + 1]
    steps = tuple(step for own in program.links[leaf.first : leaf.last + 1] for step in own)
    entry = Tensor(links[0].input, home[links[0].input]) if links[0].input else None
    exit_ = program.loss if leaf.last == len(graph.chain) - 1 else Tensor(links[-1].output, home[links[-1].output])
    read = {name for link in graph.chain[leaf.last + 1 :] for name in graph.reads_common(link)}
    common = tuple(Tensor(name, home[name]) for link in links for name in link.common if name in read)
    prefix = _prefix(graph, links)
    writer = BlockWriter(graph, plan.sharding, mesh, prefix, outside, leaf.kept, frozenset(plan.released))
    return writer.write(steps, entry, exit_, common)


def _prefix(graph: OpGraph, links: tuple[Link, ...]) -> str:
    """The innermost module that holds all ops of the links, and their parameters."""
    ops = [graph.op(name) for link in links for name in link.ops]
    paths = [op.module.split(".") for op in ops]
    for op in ops:
        tensors = (graph.values[name] for name in op.inputs)
        paths += [v.origin.split(".")[:-1] for v in tensors if v.role in (Role.PARAMETER, Role.BUFFER)]
    return ".".join(_common(paths))


def _common(paths: list[list[str]]) -> list[str]:
    start = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        start.append(parts[0])
    return start


def _text_of(block: Block) -> str:
    return "\n".join((block.signature, *block.lines, *block.result))


def _function_names(blocks: list[Block], variables: set[str]) -> dict[str, str]:
    """Block text -> name: the module's, without numbers; with a letter where one module has several functions."""
    taken = RESERVED | variables | {"Program", "Tensor", "MESH", "MICRO_BATCHES", "INPUTS", "PARAMETERS"}
    by_base: dict[str, list[str]] = {}
    for block in blocks:
        base = "_".join(part for part in block.prefix.split(".") if part and not part.isdigit()) or "model"
        base = f"{base}_block" if base in taken else base
        texts = by_base.setdefault(base, [])
        if _text_of(block) not in texts:
            texts.append(_text_of(block))
    names = {}
    for base, texts in by_base.items():
        for number, text in enumerate(texts):
            names[text] = free_name(base if len(texts) == 1 else f"{base}_{_letters(number)}", taken)
    return names


def _letters(number: int) -> str:
    letter = string.ascii_lowercase[number % 26]
    return letter if number < 26 else _letters(number // 26 - 1) + letter


def _scope_names(blocks: list[Block]) -> dict[str, str]:
    taken = {"copies", "forward", "tensors"}
    return {prefix: free_name(prefix or "whole", taken) for prefix in dict.fromkeys(b.prefix for b in blocks)}


def _distinct(blocks: list[Block], functions: dict[str, str]) -> dict[str, Block]:
    found: dict[str, Block] = {}
    for block in blocks:
        found.setdefault(functions[_text_of(block)], block)
    return found


def _compiled(callers: list[Caller]) -> list[str]:
    """Each function as it is compiled: in as many ways as it is called."""
    ways = {
        c.called: f"compiled({c.function}, keeps={c.leaf.compiled})" for c in callers if c.leaf.compiled is not None
    }
    told = "# Compiled when first called. Of what a block has for backward it keeps this part, the rest is made again."
    return ["\n".join([told, *(f"{name} = {text}" for name, text in ways.items())])] if ways else []


def _one_or_many(start: str, items: list[str], end: str) -> str:
    """The items behind one another, or each on a line of its own where that is too long."""
    line = f"{start}{', '.join(items)}{end}"
    rows = "".join(f"    {item},\n" for item in items)
    return line if len(line) <= LINE else f"{start}\n{rows}{end}"


def _runtime_import(used: set[str]) -> str:
    line = f"from pipeline.runtime import {', '.join(sorted(used))}"
    return line if len(line) <= LINE else _one_or_many("from pipeline.runtime import (", sorted(used), ")")


def _header(graph: OpGraph, plan: Plan, program: Program, used: set[str], functional: bool, digest: str) -> str:
    mesh = ", ".join(f"{name}={size}" for name, size in plan.axes)
    rows = "\n".join(f'    "{name}": {entry},' for name, entry in _parameters(graph, plan, program).items())
    inputs = [f'"{name}": "{layout}"' for name, layout in plan.sharding.inputs.items()]
    functions = "import torch.nn.functional as F\n" if functional else ""
    told = f"\n\nThe plan's digest is {digest}." if digest else ""
    return f'''"""The training program for the mesh {mesh}, written from runs/checkpoint/plan.json.{told}

Each line's layout stands behind it with the shape of one rank's piece: R replicated, B replicated with a partial
gradient, S(d) split on dim d, P partial sums. `del` lets go of what backward does not need, `kept` is not computed
again in a recompute region. Write it again with `dvc repro codegen`; to train with your own edits, set
`accept_edited_module: true` in your conf/train file and run `python -m stages train`.
"""

from __future__ import annotations

import torch
{functions}from torch import Tensor

{_runtime_import(used)}

DEVICE = torch.device("{plan.device}")
MESH = {{{", ".join(f'"{name}": {size}' for name, size in plan.axes)}}}
MICRO_BATCHES = {program.micro_batches}  # forward and backward passes of a step
{_one_or_many("INPUTS = {", inputs, "}")}
# Of each parameter: how it is stored, the axes over which its gradient is summed during backward, and how the
# optimizer's state is stored; `*` stands for a number.
PARAMETERS = {{
{rows}
}}'''


def _parameters(graph: OpGraph, plan: Plan, program: Program) -> dict[str, str]:
    """One row per parameter; equal rows of numbered modules are written once, with `*` for the number."""
    rows = {}
    for name, state in state_layouts(graph, plan.sharding).items():
        origin, summed = graph.values[name].origin, program.reduced.get(name, ())
        over = "+".join(plan.axes[axis][0] for axis in summed)
        rows[origin] = f'("{plan.sharding.storage[origin]}", "{over}", "{state}")'
    entries: dict[str, set[str]] = {}
    for name, row in rows.items():
        entries.setdefault(pattern(name), set()).add(row)
    return {pattern(name) if len(entries[pattern(name)]) == 1 else name: row for name, row in rows.items()}


def _function(name: str, block: Block) -> str:
    body = (f"    {line}" for line in (*block.lines, f"return {', '.join(block.result)}"))
    return "\n".join([*statement(f"def {name}{block.signature}:"), *body])


def _class(
    graph: OpGraph,
    plan: Plan,
    before: Before,
    copies: Before | None,
    callers: list[Caller],
    scopes: dict[str, str],
    used: set[str],
) -> str:
    keeps_shards = "keep_shards" in used
    prefixes = sorted({c.block.prefix for c in callers if c.block.reads_parameters}, key=list(scopes).index)
    lines = ["class Program:", "    def __init__(self, tensors: dict[str, Tensor]) -> None:"]
    lines += ["        tensors = channels_last(tensors)"] if "channels_last" in used else []
    lines += ["        self.tensors = tensors"] if before.reads_parameters or copies or not prefixes else []
    for prefix in prefixes:
        lines += _indented(statement(f'self.{scopes[prefix]} = scope(tensors, "{prefix}")', indent=8), 8)
    names = _input_names(graph)
    if copies is not None:
        read = {name for caller in callers for name in caller.block.common.values()}
        passed = [name for name in copies.names.values() if name in read]
        lines += _copies_method(copies, passed)
        names |= {name: name for name in passed}
    plain = all(name == own for name, own in names.items())
    inputs = ", ".join(f"{name}: Tensor" for name in names) if plain else "**batch: Tensor"
    lines += ["", *_indented(statement(f"def forward(self, {inputs}) -> Tensor:", indent=4), 4)]
    lines += [] if plain else [f'        {own} = batch["{name}"]' for name, own in names.items()]
    for value in graph.of_role(Role.INPUT) if "channels_last" in used else ():
        if len(value.type.shape) == 4 and "float" in value.type.dtype:
            own = names[value.name]
            lines.append(f"        {own} = {own}.contiguous(memory_format=torch.channels_last)")
    lines += ["        p = self.tensors"] if before.reads_parameters else []
    exact = ["        with torch.autocast(DEVICE.type, enabled=False):"] if before.exact else []
    lines += [*exact, *_indented(list(before.lines), 12 if exact else 8)]
    methods: list[str] = []
    lines += ["        with keep_shards():"] if keeps_shards else []
    indent = 12 if keeps_shards else 8
    lines += _indented(_region_lines(plan.regions, callers, methods, indent), indent)
    lines += ["        return x", *methods]
    return "\n".join(lines)


def _copies_method(copies: Before, passed: list[str]) -> list[str]:
    entries = [f'"{name}": {name}' for name in passed]
    body = ["p = self.tensors", *copies.lines, *_one_or_many("return {", entries, "}").splitlines()]
    told = '"""Parameters as several links read them: made once a step, for the forward passes of all micro-batches."""'
    return ["", "    def copies(self) -> dict[str, Tensor]:", *_indented([told, *body], 8)]


def _indented(lines: list[str], columns: int) -> list[str]:
    return [f"{' ' * columns}{line}" for line in lines]


def _region_lines(regions: tuple[Region, ...], callers: list[Caller], methods: list[str], indent: int) -> list[str]:
    """Lines for that indent; methods are added to those that there are."""
    lines = []
    for region in regions:
        if not region.recompute:
            (caller,) = (caller for caller in callers if caller.leaf.first == region.first)
            where = f"# {caller.block.prefix}" if caller.block.prefix else ""
            targets = ", ".join(["x", *caller.block.writes])
            lines += statement(f"{targets} = {caller.called}({', '.join(caller.arguments())})", where, indent)
            continue
        arguments, results = _ends(region, callers)
        name = f"links_{region.first}_to_{region.last}"
        call = f"recompute({', '.join([f'self.{name}', *arguments])})"
        lines += statement(f"{', '.join(results)} = {call}", indent=indent)
        body = _region_lines(region.inner, callers, methods, 8)
        parameters = ", ".join(["self", *(f"{a}: Tensor" for a in arguments)])
        head = f"def {name}({parameters}) -> {returned(len(results))}:"
        methods += ["", *_indented(statement(head, indent=4), 4)]
        methods += [*(f"        {line}" for line in body), f"        return {', '.join(results)}"]
    return lines


def _ends(region: Region, callers: list[Caller]) -> tuple[list[str], list[str]]:
    """What a region takes: x and what its links read of others. What it returns: x and what later links read of it."""
    inside = [caller for caller in callers if region.first <= caller.leaf.first <= region.last]
    written = [name for caller in inside for name in caller.block.writes]
    read = dict.fromkeys(name for caller in inside for name in caller.block.common.values())
    after = (caller for caller in callers if caller.leaf.first > region.last)
    later = {name for caller in after for name in caller.block.common.values()}
    arguments = [*(["x"] if inside[0].block.takes_x else []), *(name for name in read if name not in written)]
    return arguments, ["x", *(name for name in written if name in later)]
