"""One link of the sharded program as a function. Links of equal text share one function."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from itertools import groupby

from shardwright.pipeline import runtime_names
from shardwright.pipeline.ir.graph import Arg, Op, OpGraph, Ref, Role, Torch
from shardwright.pipeline.ir.layout import replicated
from shardwright.pipeline.ir.names import is_name, printable
from shardwright.pipeline.ir.plan import Sharding, path_name
from shardwright.pipeline.ir.program import Call, Convert, Step, Tensor
from shardwright.pipeline.ops.public import public_call
from shardwright.pipeline.ops.rule import Rendered, plain_view
from shardwright.pipeline.ops.table import rule_of
from shardwright.pipeline.sharding.conversions import (
    REGATHER,
    TABLE,
    conversion_of,
    gathered_together,
    made_again,
    step_arguments,
    step_axis,
)
from shardwright.stages.codegen.text import LINE, quoted, without_literals

RESERVED = {"F", "complex", "float", "p", "self", "torch", "x", "DEVICE", *runtime_names.NAMES}
_SUFFIX = str.maketrans({",": "_", ":": "x", "'": "p", "(": "", ")": ""})  # `s0_s1x3_s0p` for S(0),S(1:3),S(0)'


@dataclass(frozen=True)
class FunctionBody:
    """The text of a function's body, and what a caller passes to it."""

    prefix: str  # module whose parameters it reads
    takes_x: bool
    common: dict[str, str]  # what it reads beside x: its own name -> the caller's
    reads_parameters: bool
    lines: tuple[str, ...]
    result: tuple[str, ...]  # x and the common values that it writes, by its own names
    writes: tuple[str, ...]  # the latter by the caller's names
    used: frozenset[str]  # names of runtime functions
    early: dict[str, frozenset[str]]  # calls that may be made before the first link -> the caller's names they read
    names: dict[Tensor, str]  # of all tensors but x

    @property
    def text(self) -> str:
        return "\n".join((self.signature, *self.lines, *self.result))

    @property
    def signature(self) -> str:
        arguments = ["x: Tensor"] if self.takes_x else []
        arguments += [f"{name}: Tensor" for name in self.common]
        arguments += ["p: dict[str, Tensor]"] if self.reads_parameters else []
        return f"({', '.join(arguments)}) -> {returned(len(self.result))}"


def returned(count: int) -> str:
    return "Tensor" if count == 1 else f"tuple[{', '.join(['Tensor'] * count)}]"


def free_name(name: str, taken: set[str]) -> str:
    """The name as an identifier that is not taken yet, which it then is."""
    base = re.sub(r"\W", "_", name, flags=re.ASCII)
    base = base if is_name(base) and base not in RESERVED else f"{base}_" if is_name(f"{base}_") else f"n_{base}"
    found, count = base, 0
    while found in taken:
        count += 1
        found = f"{base}_{count}"
    taken.add(found)
    return found


@dataclass(frozen=True)
class Outside:
    """A tensor that the caller has: under which name, and what a block would like to call it.

    Blocks that do the same to different tensors have equal texts only if they call them the same.
    """

    name: str
    inside: str


class BlockWriter:
    """Writes the lines of one link. Tensors have names of their own: after the op that writes them, then the layout."""

    def __init__(
        self,
        graph: OpGraph,
        sharding: Sharding,
        axes: tuple[tuple[str, int], ...],
        prefix: str,
        outside: dict[Tensor, Outside],
        kept: Container[str] = (),
        indent: int = 4,
    ) -> None:
        """`kept` steps are not computed a second time; `indent` is that of the lines where they will stand."""
        self.graph, self.sharding, self.prefix = graph, sharding, prefix
        self.axes, self.sizes = [name for name, _ in axes], tuple(size for _, size in axes)
        self.outside, self.kept, self.indent = outside, kept, indent
        self.names: dict[Tensor, str] = {}
        self.taken = set(RESERVED)
        self.bases: dict[str, str] = {}  # value -> what its copies are named after
        self.readers = graph.consumers()
        leaves = graph.output in sharding.inputs  # a partition whose output the next one reads
        self.loss = None if leaves else Tensor(graph.output, replicated(len(axes)))
        self.arguments: dict[str, str] = {}
        self.reads_parameters = False
        self.returned: set[str] = set()  # values; what leaves a partition may have no reader in its graph
        self.used: set[str] = set()
        self.early: dict[str, frozenset[str]] = {}  # calls that may be made before the first link, and what they read
        self.lines: list[str] = []
        self._group = ""

    def give(self, tensor: Tensor, name: str) -> str:
        self.names[tensor] = free_name(name, self.taken)
        return self.names[tensor]

    def write(
        self,
        steps: tuple[Step, ...],
        entry: Tensor | None,
        exit_: Tensor,
        common: tuple[Tensor, ...] = (),
        released: Container[str] = (),
    ) -> FunctionBody:
        """Names of `released` values are given up after their last use."""
        self.returned = {tensor.value for tensor in (exit_, *common)}
        if entry is not None:
            self.names[entry] = "x"
        written = {tensor for step in steps if isinstance(step, Call) for tensor in step.outputs}
        for step in steps:  # arguments have their names before anything else has
            for tensor in step.inputs if isinstance(step, Call) else (step.source,):
                if tensor in self.outside and tensor not in written and tensor not in self.names:
                    name = self.give(tensor, self.outside[tensor].inside)
                    self.arguments[name] = self.outside[tensor].name
        stays = {exit_, *common} | ({entry} if entry is not None else set())
        written |= {step.target for step in steps if isinstance(step, Convert)}
        ends = self._last_uses(steps, {t for t in written if t.value in released and t not in stays})
        runs = gathered_together(self.graph, steps, self.sizes)
        together = {run[0]: run for run in runs if not any(_path(step) in self.kept for step in run)}
        counts = {run[0]: run for run in counted_together(self.graph, steps)}
        inside = {step for run in (*together.values(), *counts.values()) for step in run[1:]}
        for number, step in enumerate(steps):
            if step in together:
                self._convert_together(together[step])
            elif step in counts:
                self._count_together(counts[step])
            elif step not in inside:
                self._convert(step) if isinstance(step, Convert) else self._call(step)
            if number in ends:
                self.lines.append(f"del {', '.join(map(self._name, ends[number]))}")
        return FunctionBody(
            self.prefix,
            entry is not None,
            self.arguments,
            self.reads_parameters,
            tuple(self.lines),
            tuple(self._name(tensor) for tensor in (exit_, *common)),
            tuple(self.outside[tensor].name for tensor in common),
            frozenset(self.used),
            self.early,
            {tensor: name for tensor, name in self.names.items() if tensor != entry},
        )

    def _last_uses(self, steps: tuple[Step, ...], released: set[Tensor]) -> dict[int, list[Tensor]]:
        """After which steps which of these are not read any more; the end of the function needs none."""
        last: dict[Tensor, int] = {}
        for number, step in enumerate(steps):
            written = step.outputs if isinstance(step, Call) else (step.target,)
            last |= dict.fromkeys((t for t in written if t in released), number)
            read = step.inputs if isinstance(step, Call) else (step.source,)
            last |= {tensor: number for tensor in read if tensor in last}
        found: dict[int, list[Tensor]] = {}
        for tensor, number in last.items():
            if number < len(steps) - 1 and self._is_read(tensor):
                found.setdefault(number, []).append(tensor)
        return found

    def _name(self, tensor: Tensor) -> str:
        value = self.graph.values[tensor.value]
        if tensor in self.names:
            return self.names[tensor]
        assert value.role in (Role.PARAMETER, Role.BUFFER), f"{tensor} is read before it is written"
        self.reads_parameters = True
        return f"p[{quoted(relative(value.origin, self.prefix))}]"

    def _convert(self, step: Convert) -> None:
        """`all_gather(x, axis="d0", dim=1)`; `regather(..)` or `again(gather, x, ..)` where backward makes it again."""
        ends = step.source.layout, step.target.layout
        entry = conversion_of(*ends, self.sizes)
        entry = made_again(entry) if step.again else entry
        told = step_arguments(*ends, self.sizes, self.graph.values[step.source.value].type.shape)
        arguments = [self._name(step.source), f"axis={quoted(self.axes[step_axis(*ends, self.sizes)])}"]
        arguments += [f"{argument}={number}" for argument, number in told.items()]
        if step.target == self.loss and not self.readers[step.target.value] and entry.function == "all_reduce":
            arguments.append("is_last=True")
        target, function = self._target(step), entry.function
        self.used.add(function)
        if entry.again and entry != REGATHER:
            self.used.add("again")
            function, arguments = "again", [function, *arguments]
        text = f"{function}({', '.join(arguments)})"
        text = self._called_by("kept", text) if _path(step) in self.kept else text
        self.lines += statement(f"{target} = {text}", self._remark(step.target, arrow_from=step.source), self.indent)

    def _target(self, step: Convert) -> str:
        value = self.graph.values[step.source.value]
        base = self.bases.setdefault(value.name, self._name(step.source))
        base = value.origin.rpartition(".")[2] if value.role in (Role.PARAMETER, Role.BUFFER) else base
        return self.give(step.target, f"{base}_{str(step.target.layout).lower().translate(_SUFFIX)}")

    def _convert_together(self, steps: tuple[Convert, ...]) -> None:
        """One collective; each tensor has a line with its dim, parts where there are several, and "R" for S -> R."""
        function = "regather_together" if steps[0].again else "all_gather_together"
        self.used.add(function)
        rows = []
        for step in steps:
            ends = step.source.layout, step.target.layout
            given = step_arguments(*ends, self.sizes, self.graph.values[step.source.value].type.shape)
            parts = {"parts": given.get("parts", 1)} if "size" in given else {}
            told = [*map(str, ({"dim": given["dim"]} | parts | given).values())]
            told += ['"R"'] if conversion_of(*ends, self.sizes) is TABLE["SR"] else []
            row = ", ".join([self._name(step.source), *told])
            rows.append(f"    ({row}),  {self._remark(step.target, arrow_from=step.source)}")
        axis = self.axes[step_axis(steps[0].source.layout, steps[0].target.layout, self.sizes)]
        targets = [self._target(step) for step in steps]
        head = f"{', '.join(targets)} = {function}("
        if len(head) > LINE - self.indent:
            head = "\n".join(["(", *(f"    {name}," for name in targets), f") = {function}("])
        self.lines += [*head.splitlines(), *rows, f"    axis={quoted(axis)},", ")"]

    def _call(self, step: Call) -> None:
        op = self.graph.op(step.op)
        title = printable(f"# {relative(op.module, self.prefix) or 'here'}" + (f" ({op.source})" if op.source else ""))
        if title != self._group:
            self.lines.append(title)
            self._group = title
        text = self._op_text(step)
        self.used.update(set(re.findall(r"\b(\w+)\(", text)) & set(runtime_names.BODIES))
        text = self._called_by("without_autocast", text) if op.exact else text
        text = self._called_by("kept", text) if step.op in self.kept else text
        base = op.target.split(".")[1]
        base = base.strip("_") if base.startswith("__") else base  # `a & b` is aten.__and__
        if not any(self._is_read(tensor) for tensor in step.outputs):  # it changes a buffer, or draws random numbers
            self.lines += statement(text, self._remark(step.outputs[0]), self.indent)
            return
        names = (base if self._is_read(tensor) else f"_{base}" for tensor in step.outputs)
        targets = ", ".join(self.give(t, name) for t, name in zip(step.outputs, names, strict=True))
        if len(op.outputs) == 1 and op.outputs != (op.name,):  # a list of one result
            targets = f"({targets},)"
        self.lines += statement(f"{targets} = {text}", self._remark(step.outputs[0]), self.indent)

    def _count_together(self, steps: tuple[Call, ...]) -> None:
        """A counter on each line."""
        number = self.graph.op(steps[0].op).args.positional[-1]
        rows = [f"        {self._name(step.inputs[0])}," for step in steps]
        self.lines += ["# counters", "torch._foreach_add_(", "    [", *rows, "    ],", f"    {number},", ")"]
        self._group = ""

    def _called_by(self, caller: str, text: str) -> str:
        """`kept(F.linear, x, ...)` for `F.linear(x, ...)`"""
        self.used.add(caller)
        parsed = ast.parse(text, mode="eval").body
        ours = ("F", "torch", *runtime_names.NAMES)
        if isinstance(parsed, ast.Call) and ast.unparse(parsed.func).split(".")[0] in ours:
            function, _, arguments = text.partition("(")
            return f"{caller}({function}, {arguments}"
        names = sorted({node.id for node in ast.walk(parsed) if isinstance(node, ast.Name)} - {"torch", "F", "p"})
        return f"{caller}(lambda {', '.join(names)}: {text}, {', '.join(names)})"

    def _is_read(self, tensor: Tensor) -> bool:
        return bool(self.readers[tensor.value]) or tensor.value in self.returned

    def _remark(self, tensor: Tensor, arrow_from: Tensor | None = None) -> str:
        arrow = f"{arrow_from.layout} -> " if arrow_from else ""
        return f"# {arrow}{tensor.layout} {list(self._local(tensor))}"

    def _op_text(self, step: Call) -> str:
        op, rendered = self.graph.op(step.op), self._rendered(step, self._name)
        rule = rule_of(op)
        if rule is None:
            return public_call(rendered)
        if rule.early and (read := {step.inputs[n] for n in rule.early_inputs}) <= self.outside.keys():
            text = rule.early(self._rendered(step, lambda t: self.outside[t].name if t in read else ""))
            self.early |= {text: frozenset(self.outside[tensor].name for tensor in read)} if text else {}
        return rule.render(rendered)

    def _rendered(self, step: Call, name_of: Callable[[Tensor], str]) -> Rendered:
        op = self.graph.op(step.op)
        names = iter(tensors := tuple(map(name_of, step.inputs)))
        positional = tuple(_text(a, names) for a in op.args.positional)
        named = {k: _text(v, names) for k, v in op.args.named if k != "pin_memory"}
        bodies = self.sharding.strategies[op.name].body.split(",")
        return Rendered(
            positional,
            named,
            tensors,
            tuple(self._local(tensor) for tensor in step.inputs),
            tuple(self._local(tensor) for tensor in step.outputs),
            tuple((body, axis) for body, axis in zip(bodies, self.axes, strict=False) if body),
            plain_view(self.graph, op),
        )

    def _local(self, tensor: Tensor) -> tuple[int, ...]:
        return tensor.layout.local_shape(self.graph.values[tensor.value].type.shape, self.sizes)


def _path(step: Convert) -> str:
    return path_name(step.source.value, step.source.layout, step.target.layout)


def counted_together(graph: OpGraph, steps: tuple[Step, ...]) -> list[tuple[Call, ...]]:
    """Runs of two or more steps that each add the same number to a buffer, with nothing between them: one call.

    A kernel for every counter, such as how many batches each norm has seen, takes longer to launch than all to run.
    """
    read = graph.consumers()

    def counts_by(step: Step) -> object:
        return _added(graph, graph.op(step.op)) if isinstance(step, Call) and not read[step.outputs[0].value] else None

    runs = (tuple(run) for number, run in groupby(steps, counts_by) if number is not None)
    return [run for run in runs if len(run) > 1]  # type: ignore[misc]


def _added(graph: OpGraph, op: Op) -> object:
    """The number that an op adds to a buffer of integers; None for any other op."""
    if op.target != "aten.add_.Tensor" or op.args.named or len(op.inputs) != 1:
        return None
    buffer, number = graph.values[op.inputs[0]], op.args.positional[-1]
    counts = buffer.role is Role.BUFFER and buffer.type.dtype == "int64" and isinstance(number, int)
    return number if counts else None


def statement(text: str, remark: str = "", indent: int = 0) -> list[str]:
    """One line with its layout behind it; where that is too long, the arguments on lines of their own."""
    width, code = LINE - indent, without_literals(text)
    if len(f"{text}  {remark}".rstrip()) <= width or "(" not in code:
        return [f"{text}  {remark}".rstrip()]
    start, end = code.index("(") + 1, code.rindex(")")
    head, inside, tail = text[:start], text[start:end], text[end:]
    rows = [inside] if len(inside) + 4 <= width else [f"{argument}," for argument in _arguments(inside)]
    return [head, *(f"    {row}" for row in rows), f"{tail}  {remark}".rstrip()]


def _arguments(text: str) -> list[str]:
    """Splits at the commas that are not inside brackets."""
    found, depth, start = [], 0, 0
    for place, letter in enumerate(without_literals(text)):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            found.append(text[start:place].strip())
            start = place + 1
    return [*found, text[start:].strip()]


def relative(name: str, prefix: str) -> str:
    return name.removeprefix(prefix).removeprefix(".") if prefix else name


def _text(arg: Arg, names: Iterator[str]) -> str:
    """An argument as source; values are taken from `names` in the order in which they are read."""
    if isinstance(arg, Ref):
        return next(names)
    if isinstance(arg, Torch):
        return "DEVICE" if arg.kind == "device" else f"torch.{arg.name}"
    if isinstance(arg, tuple):
        items = [_text(a, names) for a in arg]
        return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
    if isinstance(arg, float) and (arg != arg or arg in (float("inf"), float("-inf"))):
        return f'float("{arg}")'
    if isinstance(arg, complex):
        return f'complex("{arg}")'
    return quoted(arg) if isinstance(arg, str) else repr(arg)
