"""One class of the generated module: the whole model, or a pipeline's partition, with the functions that it calls."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise

from pipeline.ir.graph import Link, Op, OpGraph, Role
from pipeline.ir.layout import Layout
from pipeline.ir.names import is_name, printable
from pipeline.ir.plan import Region, Sharding
from pipeline.ir.program import Call, Program, Tensor
from pipeline.ops.blocks import convolves, relus_between
from pipeline.sharding.sharded import Sharded
from stages.codegen.block import RESERVED, BlockWriter, FunctionBody, NamedMesh, Outside, free_name, returned, statement
from stages.codegen.text import one_or_many, quoted


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
    keeps_last: bool = False  # its regions are not run again in the last micro-batch of a step

    @property
    def recompute(self) -> str:
        """The function that runs its regions."""
        return "recompute_except_last" if self.keeps_last else "recompute"

    @property
    def mesh(self) -> NamedMesh:
        return NamedMesh(self.axes)

    @property
    def graph(self) -> OpGraph:
        return self.sharded.graph

    @property
    def sharding(self) -> Sharding:
        return self.sharded.sharding

    @property
    def program(self) -> Program:
        return self.sharded.program

    @property
    def home(self) -> dict[str, Layout]:
        return self.sharded.home

    @property
    def entry(self) -> Tensor | None:
        """The activation that enters a partition."""
        name = self.graph.chain[0].input
        return Tensor(name, self.sharding.inputs[name]) if name else None

    @property
    def entering(self) -> dict[str, str]:
        """Common values that enter a partition -> their names."""
        own = (value.name for value in self.graph.of_role(Role.ENTERS))
        return {name: self.common[name].name for name in own if name in self.common}


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
    before: Before
    copies: Before | None
    variables: set[str]
    leaves: list[Leaf]
    blocks: list[FunctionBody]
    used: set[str]  # names of runtime functions
    early: tuple[str, ...]  # calls before the first link, whose results later ones use

    def callers(self, functions: dict[str, str]) -> list[Caller]:
        """`functions`: text of a block -> its name."""
        scopes = _scope_names(self.blocks)
        return [
            Caller(leaf, functions[block.text], scopes[block.prefix], block)
            for leaf, block in zip(self.leaves, self.blocks, strict=True)
        ]


@dataclass(frozen=True)
class Before:
    """What is done before the chain; blocks take its results by these names."""

    lines: tuple[str, ...]
    names: dict[Tensor, str]
    used: frozenset[str]
    reads_parameters: bool


def write_part(part: ProgramPart) -> Written:
    before = _prologue(part)
    copies = _copies(part, before) if part.program.micro_batches > 1 and part.program.shared else None
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


def _prologue(part: ProgramPart) -> Before:
    """What `forward` does before the chain, with the inputs' names; what is shared too, where there is one pass."""
    graph, program, home = part.graph, part.program, part.home
    writer = BlockWriter(graph, part.sharding, part.mesh, "", {}, indent=8)
    writer.names.taken.update(known.name for known in part.common.values())
    for name, own in _input_names(graph).items():
        writer.names.give(Tensor(name, home[name]), own)
    writer.names.known |= {Tensor(name, home[name]): own for name, own in part.entering.items()}
    shared = program.shared if program.micro_batches == 1 else ()
    block = writer.write((*program.prologue, *shared), part.entry, part.entry or next(iter(writer.names.known)))
    names = {tensor: name for tensor, name in writer.names.known.items() if tensor != part.entry}
    return Before(block.lines, names, block.used, block.reads_parameters)


def _copies(part: ProgramPart, before: Before) -> Before:
    """What is shared, where a step has several passes: made once for all of them."""
    writer = BlockWriter(part.graph, part.sharding, part.mesh, "", {}, indent=8)
    writer.names.taken.update(before.names.values(), (known.name for known in part.common.values()))
    block = writer.write(part.program.shared, None, part.program.shared[-1].target)
    return Before(block.lines, writer.names.known, block.used, block.reads_parameters)


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
    graph, home = part.graph, part.home
    given = _input_names(graph)
    found = {
        tensor: Outside(name, name if tensor.value in given else re.sub(r"_\d+(?=_|$)", "", name))
        for tensor, name in before.items()
    }
    agreed = part.common or common_names(graph, RESERVED.union(before.values()))
    return found | {Tensor(name, home[name]): agreed[name] for name in (*part.entering, *graph.common)}


def common_names(graph: OpGraph, taken: set[str]) -> dict[str, Outside]:
    """The common values by names that are not taken yet, which they then are."""
    bases = {name: _common_name(graph.op(graph.values[name].origin)) for name in graph.common}
    return {name: Outside(free_name(base, taken), base) for name, base in bases.items()}


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
            yield Leaf(region.first, region.last, kept, region.compiled, region.cheapest)


def _beside_relus(part: ProgramPart, leaves: list[Leaf]) -> list[Leaf]:
    """Leaves that know of the relus between them: of two that are compiled, where nothing converts the result."""
    home = part.home
    between = relus_between(part.graph, [(leaf.first, leaf.last) for leaf in leaves])
    found = list(leaves)
    for number, (one, other) in enumerate(pairwise(leaves)):
        value = part.graph.chain[one.last].output
        calls = (step for step in part.program.links[one.last] if isinstance(step, Call))
        as_it_is = any(Tensor(value, home[value]) in step.outputs for step in calls)
        if value in between and as_it_is and None not in (one.compiled, other.compiled):
            found[number] = replace(found[number], before_relu=True)
            found[number + 1] = replace(found[number + 1], after_relu=True)
    return found


def _block(leaf: Leaf, part: ProgramPart, outside: dict[Tensor, Outside]) -> FunctionBody:
    graph, program, home = part.graph, part.program, part.home
    links = graph.chain[leaf.first : leaf.last + 1]
    steps = tuple(step for own in program.links[leaf.first : leaf.last + 1] for step in own)
    entry = Tensor(links[0].input, home[links[0].input]) if links[0].input else None
    exit_ = program.output if leaf.last == len(graph.chain) - 1 else Tensor(links[-1].output, home[links[-1].output])
    read = {name for link in graph.chain[leaf.last + 1 :] for name in graph.reads_common(link)}.union(part.leaving)
    common = tuple(Tensor(name, home[name]) for link in links for name in link.common if name in read)
    prefix = _prefix(graph, links)
    writer = BlockWriter(graph, part.sharding, part.mesh, prefix, outside, leaf.kept)
    return writer.write(steps, entry, exit_, common, frozenset(part.released))


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


def class_text(written: Written, functions: dict[str, str], attributes: str = "") -> str:
    """`forward` is the table of contents; `attributes` are lines for the top of the class."""
    part, before, copies, used = written.part, written.before, written.copies, written.used
    callers = written.callers(functions)
    passed = _passed(copies, callers)
    prefixes = dict.fromkeys(c.block.prefix for c in callers)
    scopes = {c.block.prefix: c.scope for c in callers if c.block.reads_parameters}
    lines = [f"class {part.name}:", *_indented(attributes.splitlines(), 4), *([""] if attributes else [])]
    lines += ["    def __init__(self, tensors: dict[str, Tensor]) -> None:"]
    lines += ["        tensors = channels_last(tensors)"] if "channels_last" in used else []
    lines += ["        self.tensors = tensors"] if before.reads_parameters or copies or not scopes else []
    for prefix in (prefix for prefix in prefixes if prefix in scopes):
        lines += _indented(statement(f"self.{scopes[prefix]} = scope(tensors, {quoted(prefix)})", indent=8), 8)
    lines += _copies_method(copies, passed) if copies is not None else []
    return "\n".join([*lines, "", forward_text(written, functions)])


def _passed(copies: Before | None, callers: list[Caller]) -> list[str]:
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
    lines = _forward_head(part, names, len(results))
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


def _forward_head(part: ProgramPart, names: dict[str, str], results: int) -> list[str]:
    """Arguments by their names; `**batch` where one of them is not free, which takes also an input named x."""
    plain = all(name == own for name, own in names.items())
    entry = ["x: Tensor"] if part.entry else []
    if plain:
        arguments = [*entry, *(f"{name}: Tensor" for name in names)]
    else:
        arguments = [*entry, *(["/"] if entry else []), "**batch: Tensor"]
    head = statement(f"def forward({', '.join(['self', *arguments])}) -> {returned(results)}:", indent=4)
    taken = [] if plain else [f"        {own} = batch[{quoted(name)}]" for name, own in names.items()]
    return [*_indented(head, 4), *taken]


def _scope_names(blocks: list[FunctionBody]) -> dict[str, str]:
    taken = {"copies", "forward", "tensors", "MESH", "INPUTS", "PARAMETERS", "BUFFERS"}
    return {prefix: free_name(prefix or "whole", taken) for prefix in dict.fromkeys(b.prefix for b in blocks)}


def _copies_method(copies: Before, passed: list[str]) -> list[str]:
    entries = [f'"{name}": {name}' for name in passed]
    body = ["p = self.tensors", *copies.lines, *one_or_many("return {", entries, "}").splitlines()]
    told = '"""Parameters as several links read them: made once a step, for the forward passes of all micro-batches."""'
    return ["", "    def copies(self) -> dict[str, Tensor]:", *_indented([told, *body], 8)]


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
