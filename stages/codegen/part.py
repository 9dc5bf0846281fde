"""One class of the generated module: the whole model, or a pipeline's partition, with the functions that it calls."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise, takewhile

from shardwright.pipeline.ir.graph import OpGraph, Role
from shardwright.pipeline.ir.names import is_name, printable
from shardwright.pipeline.ir.plan import Region
from shardwright.pipeline.ir.program import Call, Tensor
from shardwright.pipeline.ops.blocks import convolves, relus_between
from shardwright.pipeline.sharding.sharded import Sharded
from shardwright.stages.codegen.block import (
    RESERVED,
    BlockWriter,
    FunctionBody,
    Outside,
    free_name,
    returned,
    statement,
)
from shardwright.stages.codegen.text import one_or_many, quoted


@dataclass(frozen=True)
class ProgramPart:
    """What a class is written from. A partition's graph, sharding and regions are its own, numbered from zero."""

    sharded: Sharded
    axes: tuple[tuple[str, int], ...]
    regions: tuple[Region, ...]
    released: tuple[str, ...]
    name: str = "Program"
    first: int = 0  # link of the model with which it begins
    common: dict[str, Outside] = field(default_factory=dict)  # of the model: partitions agree on the names
    leaving: tuple[str, ...] = ()  # common values that later partitions read
    recompute: str = "recompute"  # the function that runs its regions

    @property
    def graph(self) -> OpGraph:
        return self.sharded.graph

    @property
    def entry(self) -> Tensor | None:
        """The activation that enters a partition."""
        name = self.graph.chain[0].input
        return Tensor(name, self.sharded.sharding.inputs[name]) if name else None

    @property
    def entering(self) -> dict[str, str]:
        """Common values that enter a partition -> their names."""
        own = (value.name for value in self.graph.of_role(Role.ENTERS))
        return {name: self.common[name].name for name in own if name in self.common}

    def before_chain(self) -> BlockWriter:
        """What writes lines that stand before those of the chain; the names of common values are not free."""
        writer = BlockWriter(self.graph, self.sharded.sharding, self.axes, "", {}, indent=8)
        writer.taken.update(known.name for known in self.common.values())
        return writer


@dataclass(frozen=True)
class Leaf:
    """Links that are one function; where it is run again, the steps whose results it keeps."""

    first: int
    last: int
    kept: tuple[str, ...]
    compiled: float | None  # the part of its activations that it keeps for backward, where it is compiled
    cheapest: bool = False  # the rest is what takes least to make again
    after_relu: bool = False  # x is a relu's result whose gradient it masks
    before_relu: bool = False  # what leaves it is one whose gradient the next one masks


@dataclass(frozen=True)
class Caller:
    """A function as `forward` calls it."""

    leaf: Leaf
    function: str
    scope: str  # the attribute that holds its parameters
    block: FunctionBody

    @property
    def called(self) -> str:
        leaf = self.leaf
        if leaf.compiled is None:
            return self.function
        relus = {(True, True): "_between_relus", (True, False): "_after_relu", (False, True): "_before_relu"}
        where = relus.get((leaf.after_relu, leaf.before_relu), "")
        return f"{self.function}{where}_keeps_{round(100 * leaf.compiled)}{'_cheapest' * leaf.cheapest}"

    @property
    def compiled(self) -> str:
        """How it is made of the function."""
        how = ", cheapest=True" if self.leaf.cheapest else ""
        how += ', after_relu="x"' if self.leaf.after_relu else ""
        how += ", before_relu=True" if self.leaf.before_relu else ""
        return f"compiled({self.function}, keeps={self.leaf.compiled}{how})"

    def arguments(self) -> list[str]:
        own = ["x"] if self.block.takes_x else []
        return [*own, *self.block.common.values(), *([f"self.{self.scope}"] if self.block.reads_parameters else [])]


@dataclass(frozen=True)
class Written:
    """A part with the texts of its blocks; `class_text` needs names for them, which all parts of a module share."""

    part: ProgramPart
    before: FunctionBody  # what `forward` does before the chain; blocks take its results by their names there
    copies: FunctionBody | None  # what is shared, where a step has several passes: made once for all of them
    variables: set[str]
    leaves: list[Leaf]
    blocks: list[FunctionBody]
    used: set[str]  # names of runtime functions
    early: tuple[str, ...]  # calls before the first link, whose results later ones use

    def callers(self, functions: dict[str, str]) -> list[Caller]:
        """`functions`: text of a block -> its name."""
        taken = {"copies", "forward", "tensors", "MESH", "INPUTS", "PARAMETERS", "BUFFERS"}
        prefixes = dict.fromkeys(block.prefix for block in self.blocks)
        scopes = {prefix: free_name(prefix or "whole", taken) for prefix in prefixes}
        return [
            Caller(leaf, functions[block.text], scopes[block.prefix], block)
            for leaf, block in zip(self.leaves, self.blocks, strict=True)
        ]


def write_part(part: ProgramPart) -> Written:
    before, shared, copies = _prologue(part), part.sharded.program.shared, None
    if shared and part.sharded.micro_batches > 1:
        writer = part.before_chain()
        writer.taken.update(before.names.values())
        copies = writer.write(shared, None, shared[-1].target)
    outside = _outside(part, before.names | (copies.names if copies else {}))
    leaves = _beside_relus(part, list(_leaves(part.regions)))
    blocks = [_block(leaf, part, outside) for leaf in leaves]
    used = set(before.used).union(copies.used if copies else (), *(b.used for b in blocks))
    used |= {"scope"} if any(b.reads_parameters for b in blocks) else set()
    used |= {part.recompute} if any(r.recompute for r in part.regions) else set()
    used |= {"keep_shards"} if used & {"again", "regather", "regather_together"} else set()
    used |= {"compiled"} if any(leaf.compiled is not None for leaf in leaves) else set()
    used |= {"channels_last"} if "compiled" in used and convolves(part.graph) else set()
    there = set(before.names.values())
    early = tuple(text for block in blocks for text, read in block.early.items() if read <= there)
    used |= {text.partition("(")[0] for text in early}
    return Written(part, before, copies, {known.name for known in outside.values()}, leaves, blocks, used, early)


def _prologue(part: ProgramPart) -> FunctionBody:
    """With the inputs' names; what is shared too, where there is one pass."""
    program, home = part.sharded.program, part.sharded.home
    writer = part.before_chain()
    for name, own in _input_names(part.graph).items():
        writer.give(Tensor(name, home[name]), own)
    writer.names |= {Tensor(name, home[name]): own for name, own in part.entering.items()}
    shared = program.shared if program.micro_batches == 1 else ()
    return writer.write((*program.prologue, *shared), part.entry, part.entry or next(iter(writer.names)))


def _input_names(graph: OpGraph) -> dict[str, str]:
    """Input -> its name in the program: its own, unless the program has that name for something else."""
    names = [v.name for v in graph.of_role(Role.INPUT)]
    free = {name for name in names if is_name(name) and name not in RESERVED}
    free -= {"batch"} if len(free) < len(names) else set()  # which `forward` has for all of them
    taken = RESERVED.union(names)
    return {name: name if name in free else free_name(name, taken) for name in names}


def _outside(part: ProgramPart, before: dict[Tensor, str]) -> dict[Tensor, Outside]:
    """What blocks may read beside x and parameters: what is made before the chain, and the common values.

    A block calls what is made for it without the number, as layers may each have theirs (`cos.unsqueeze(1)`).
    """
    graph, home = part.graph, part.sharded.home
    given = _input_names(graph)
    found = {
        tensor: Outside(name, name if tensor.value in given else re.sub(r"_\d+(?=_|$)", "", name))
        for tensor, name in before.items()
    }
    agreed = part.common or common_names(graph, RESERVED.union(before.values()))
    return found | {Tensor(name, home[name]): agreed[name] for name in (*part.entering, *graph.common)}


def common_names(graph: OpGraph, taken: set[str]) -> dict[str, Outside]:
    """The common values by names that are not taken yet, which they then are.

    After the op, and the nearest module that has another name: `encoder_dropout`, `down_relu`.
    """
    found = {}
    for name in graph.common:
        op = graph.op(graph.values[name].origin)
        kind = op.target.split(".")[1]
        modules = [part for part in op.module.split(".") if part and not part.isdigit() and part != kind]
        base = "_".join([*modules[-1:], kind])
        found[name] = Outside(free_name(base, taken), base)
    return found


def _leaves(regions: tuple[Region, ...], kept: tuple[str, ...] = ()) -> Iterator[Leaf]:
    for region in regions:
        if region.recompute:
            yield from _leaves(region.inner, region.kept or kept)
        else:
            yield Leaf(region.first, region.last, kept, region.compiled, region.cheapest)


def _beside_relus(part: ProgramPart, leaves: list[Leaf]) -> list[Leaf]:
    """Leaves that know of the relus between them: of two that are compiled, where nothing converts the result."""
    home = part.sharded.home
    between = relus_between(part.graph, [(leaf.first, leaf.last) for leaf in leaves])
    found = list(leaves)
    for number, (one, other) in enumerate(pairwise(leaves)):
        value = part.graph.chain[one.last].output
        calls = (step for step in part.sharded.program.links[one.last] if isinstance(step, Call))
        as_it_is = any(Tensor(value, home[value]) in step.outputs for step in calls)
        if value in between and as_it_is and None not in (one.compiled, other.compiled):
            found[number] = replace(found[number], before_relu=True)
            found[number + 1] = replace(found[number + 1], after_relu=True)
    return found


def _block(leaf: Leaf, part: ProgramPart, outside: dict[Tensor, Outside]) -> FunctionBody:
    graph, program, home = part.graph, part.sharded.program, part.sharded.home
    links = graph.chain[leaf.first : leaf.last + 1]
    steps = tuple(step for own in program.links[leaf.first : leaf.last + 1] for step in own)
    entry = Tensor(links[0].input, home[links[0].input]) if links[0].input else None
    read = {name for link in graph.chain[leaf.last + 1 :] for name in graph.reads_common(link)}.union(part.leaving)
    common = tuple(Tensor(name, home[name]) for link in links for name in link.common if name in read)
    ops = [graph.op(name) for link in links for name in link.ops]
    tensors = [graph.values[name] for op in ops for name in op.inputs]
    paths = [op.module.split(".") for op in ops]
    paths += [v.origin.split(".")[:-1] for v in tensors if v.role in (Role.PARAMETER, Role.BUFFER)]
    alike = takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    prefix = ".".join(parts[0] for parts in alike)  # the innermost module that holds all ops, and their parameters
    writer = BlockWriter(graph, part.sharded.sharding, part.axes, prefix, outside, leaf.kept)
    return writer.write(steps, entry, part.sharded.leaving(leaf.last), common, frozenset(part.released))


def class_text(written: Written, functions: dict[str, str], attributes: str = "") -> str:
    """`forward` is the table of contents; `attributes` are lines for the top of the class."""
    part, before, copies, used = written.part, written.before, written.copies, written.used
    callers = written.callers(functions)
    prefixes = dict.fromkeys(c.block.prefix for c in callers)
    scopes = {c.block.prefix: c.scope for c in callers if c.block.reads_parameters}
    lines = [f"class {part.name}:", *_indented(attributes.splitlines(), 4), *([""] if attributes else [])]
    lines += ["    def __init__(self, tensors: dict[str, Tensor]) -> None:"]
    lines += ["        tensors = channels_last(tensors)"] if "channels_last" in used else []
    lines += ["        self.tensors = tensors"] if before.reads_parameters or copies or not scopes else []
    for prefix in (prefix for prefix in prefixes if prefix in scopes):
        lines += _indented(statement(f"self.{scopes[prefix]} = scope(tensors, {quoted(prefix)})", indent=8), 8)
    if copies is not None:
        told = "Parameters as several links read them: made once a step, for the forward passes of all micro-batches."
        entries = [f'"{name}": {name}' for name in _passed(copies, callers)]
        body = ["p = self.tensors", *copies.lines, *one_or_many("return {", entries, "}").splitlines()]
        lines += ["", "    def copies(self) -> dict[str, Tensor]:", *_indented([f'"""{told}"""', *body], 8)]
    return "\n".join([*lines, "", forward_text(written, functions)])


def _passed(copies: FunctionBody | None, callers: list[Caller]) -> list[str]:
    """What `copies` returns and `forward` takes."""
    read = {name for caller in callers for name in caller.block.common.values()}
    return [name for name in copies.names.values() if name in read] if copies is not None else []


def forward_text(written: Written, functions: dict[str, str]) -> str:
    """The method, and those that it has run again."""
    part, before, used = written.part, written.before, written.used
    callers = written.callers(functions)
    names = _input_names(part.graph) | {name: name for name in part.entering.values()}
    names |= {name: name for name in _passed(written.copies, callers)}
    results = ["x", *(part.common[name].name for name in part.leaving)]
    entry = ["x: Tensor"] if part.entry else []
    plain = all(name == own for name, own in names.items())
    if plain:
        arguments = [*entry, *(f"{name}: Tensor" for name in names)]
    else:  # which takes also an input named x
        arguments = [*entry, *(["/"] if entry else []), "**batch: Tensor"]
    head = f"def forward({', '.join(['self', *arguments])}) -> {returned(len(results))}:"
    lines = _indented(statement(head, indent=4), 4)
    lines += [] if plain else [f"        {own} = batch[{quoted(name)}]" for name, own in names.items()]
    lines += ["        p = self.tensors"] if before.reads_parameters else []
    lines += _indented(list(before.lines), 8)
    for text in written.early:
        lines += _indented(statement(text, "# under way until a later line reads it", 8), 8)
    keeps_shards = "keep_shards" in used
    methods: list[str] = []
    lines += ["        with keep_shards():"] if keeps_shards else []
    indent = 12 if keeps_shards else 8
    lines += _indented(_region_lines(part, part.regions, callers, methods, indent), indent)
    lines += [f"        return {', '.join(results)}", *methods]
    return "\n".join(lines)


def _indented(lines: list[str], columns: int) -> list[str]:
    return [f"{' ' * columns}{line}".rstrip() for line in lines]


def _region_lines(
    part: ProgramPart, regions: tuple[Region, ...], callers: list[Caller], methods: list[str], indent: int
) -> list[str]:
    """Lines for that indent; methods are added to those that there are."""
    lines = []
    for region in regions:
        if not region.recompute:
            (caller,) = (caller for caller in callers if caller.leaf.first == region.first)
            where = f"# {printable(caller.block.prefix)}" if caller.block.prefix else ""
            targets = ", ".join(["x", *caller.block.writes])
            lines += statement(f"{targets} = {caller.called}({', '.join(caller.arguments())})", where, indent)
            continue
        arguments, results = _ends(part, region, callers)
        name = f"links_{part.first + region.first}_to_{part.first + region.last}"
        call = f"{part.recompute}({', '.join([f'self.{name}', *arguments])})"
        lines += statement(f"{', '.join(results)} = {call}", indent=indent)
        body = _region_lines(part, region.inner, callers, methods, 8)
        parameters = ", ".join(["self", *(f"{a}: Tensor" for a in arguments)])
        head = f"def {name}({parameters}) -> {returned(len(results))}:"
        methods += ["", *_indented(statement(head, indent=4), 4)]
        methods += [*(f"        {line}" for line in body), f"        return {', '.join(results)}"]
    return lines


def _ends(part: ProgramPart, region: Region, callers: list[Caller]) -> tuple[list[str], list[str]]:
    """What a region takes: x and what its links read of others. What it returns: x and what later links read of it."""
    inside = [caller for caller in callers if region.first <= caller.leaf.first <= region.last]
    written = [name for caller in inside for name in caller.block.writes]
    read = dict.fromkeys(name for caller in inside for name in caller.block.common.values())
    after = (caller for caller in callers if caller.leaf.first > region.last)
    later = {name for caller in after for name in caller.block.common.values()}
    later |= {part.common[name].name for name in part.leaving}
    arguments = [*(["x"] if inside[0].block.takes_x else []), *(name for name in read if name not in written)]
    return arguments, ["x", *(name for name in written if name in later)]
