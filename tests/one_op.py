"""One op as a graph, and its strategies run on simulated ranks of one process: each must equal the unsplit op.

What runs on a rank is the line that generated programs have, so the printed call is proved as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import CodeType

import torch
import torch.nn.functional as F

from shardwright.pipeline import runtime
from shardwright.pipeline.ir.graph import Args, Op, OpGraph, Ref, Role, TensorType, Torch, Value
from shardwright.pipeline.ir.plan import Sharding, Strategy
from shardwright.pipeline.ir.program import Call
from shardwright.pipeline.ir.program import Tensor as Placed
from shardwright.pipeline.ops.dims import strategies
from shardwright.pipeline.ops.public import overload_of
from shardwright.pipeline.ops.rule import OpRule, OpView, plain_view
from shardwright.pipeline.ops.table import table
from shardwright.stages.codegen.block import BlockWriter, Outside
from tests import shards
from tests.simulated import AXIS, at_once, one_after_another

NO_VALUES = {"empty_like", "empty"}  # what these hold is whatever memory held before


@dataclass(frozen=True)
class Draw:
    """A tensor argument, to be drawn at random; `high` makes it an index, `sometimes` some entries of it."""

    shape: tuple[int, ...]
    high: int = 0
    grad: bool = True
    dtype: str = "float64"
    sometimes: int | None = None
    values: tuple | None = None  # given instead of drawn
    positive: bool = False  # between 0 and 1
    distinct: bool = False  # indices without repetition

    def tensor(self) -> torch.Tensor:
        dtype = getattr(torch, self.dtype)
        if self.values is not None:
            return torch.tensor(self.values, dtype=dtype)
        if self.dtype == "bool":
            return torch.rand(self.shape) < 0.5
        if not self.high:
            return (
                torch.rand(self.shape, dtype=dtype) * 0.8 + 0.1
                if self.positive
                else torch.randn(self.shape, dtype=dtype)
            )
        if self.distinct:
            return torch.stack([torch.randperm(self.high)[: self.shape[-1]] for _ in range(_rows(self.shape))]).view(
                self.shape
            )
        drawn = torch.randint(self.high, self.shape)
        if self.sometimes is not None:
            drawn[torch.rand(self.shape) < 0.4] = self.sometimes
        return drawn if self.dtype == "float64" else drawn.to(dtype)


def _rows(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape[:-1]:
        count *= size
    return count


def t(*shape: int, **options) -> Draw:
    return Draw(shape, **options)


@dataclass(frozen=True)
class Example:
    """An op with tensors for its arguments."""

    graph: OpGraph
    tensors: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]

    @property
    def op(self) -> Op:
        return self.graph.ops[0]

    @property
    def view(self) -> OpView:
        return plain_view(self.graph, self.op)


def example(target: str, *args, **named) -> Example:
    """Builds the op; a `Draw` among the arguments becomes a value of the graph."""
    torch.default_generator.manual_seed(len(args) + 10 * len(target))
    values: dict[str, Value] = {}
    tensors: list[torch.Tensor] = []

    def argument(arg):
        if isinstance(arg, Draw):
            name = f"in{len(tensors)}"
            tensor = arg.tensor()
            tensors.append(tensor)
            values[name] = Value(
                name, _type(tensor), Role.INPUT, name, arg.grad and not arg.high and _type(tensor).is_inexact
            )
            return Ref(name)
        return tuple(argument(a) for a in arg) if isinstance(arg, tuple) else arg

    arguments = Args(tuple(map(argument, args)), tuple((k, argument(v)) for k, v in named.items()))
    rule = table().get(target)
    mutated = tuple(f"in{i}" for i in rule.mutates if i < len(tensors)) if rule else ()
    op = Op("it", target, arguments, ("it",), "", "", mutated)
    whole = tuple(x.clone().requires_grad_(v.grad) for x, v in zip(tensors, values.values(), strict=True))
    found = run_unsplit(op, whole)
    outputs = tuple(found) if isinstance(found, (tuple, list)) else (found,)
    names = ("it",) if isinstance(found, torch.Tensor) else tuple(f"it{i}" for i in range(len(outputs)))
    op = Op("it", target, arguments, names, "", "", mutated)
    for name, output in zip(names, outputs, strict=True):
        values[name] = Value(name, _type(output), Role.RESULT, "it", output.requires_grad)
    return Example(OpGraph(values, (op,), names[0], (), ()), tuple(tensors), tuple(x.detach() for x in outputs))


def _type(tensor: torch.Tensor) -> TensorType:
    return TensorType(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def run_unsplit(op: Op, tensors: tuple[torch.Tensor, ...]):
    """The op itself, as torch has it."""
    order = iter(tensors)

    def argument(arg):
        if isinstance(arg, Ref):
            return next(order)
        if isinstance(arg, Torch):
            return torch.device("cpu") if arg.kind == "device" else getattr(torch, arg.name)
        return [argument(a) for a in arg] if isinstance(arg, tuple) else arg

    positional = [argument(a) for a in op.args.positional]
    torch.default_generator.manual_seed(7)  # random ops draw the same numbers whole and on each rank
    return overload_of(op.target)(*positional, **{k: argument(v) for k, v in op.args.named})


@dataclass(frozen=True)
class Printed:
    """The lines of a generated program that run the op, and the names they give its results."""

    code: CodeType
    text: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def printed(it: Example, strategy: Strategy, ranks: int) -> Printed:
    inputs = tuple(Placed(name, layout) for name, layout in zip(it.op.inputs, strategy.inputs, strict=True))
    outputs = tuple(Placed(name, layout) for name, layout in zip(it.op.outputs, strategy.outputs, strict=True))
    sharding = Sharding({"it": strategy}, {}, {})
    writer = BlockWriter(it.graph, sharding, ((AXIS, ranks),), "", {i: Outside(i.value, i.value) for i in inputs})
    writer._is_read = lambda tensor: True  # every result is looked at here
    writer.write((Call("it", inputs, outputs),), None, outputs[0])
    text = "\n".join(writer.lines)
    names = tuple(writer.names[o] for o in outputs)
    return Printed(compile(text, it.op.target, "exec"), text, tuple(i.value for i in inputs), names)


RUNTIME = {name: getattr(runtime, name) for name in runtime.__all__}


def run_printed(it: Printed, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    names = {"torch": torch, "F": F, "DEVICE": torch.device("cpu"), **RUNTIME}
    names |= dict(zip(it.inputs, tensors, strict=True))
    exec(it.code, names)
    return [names[name] for name in it.outputs]


def check_strategy(it: Example, strategy: Strategy, ranks: int) -> None:
    """Forward and backward on simulated ranks against the unsplit op."""
    states = [layout.states[0] for layout in strategy.inputs]
    made = [layout.states[0] for layout in strategy.outputs]
    values = it.graph.values
    wanted = [values[name].grad for name in it.op.inputs]
    carry = [values[name].grad for name in it.op.outputs]
    mine = [
        [p.requires_grad_(grad) for p in shards.values(state, tensor, ranks)]
        for state, tensor, grad in zip(states, it.tensors, wanted, strict=True)
    ]
    whole = [tensor.clone().requires_grad_(grad) for tensor, grad in zip(it.tensors, wanted, strict=True)]
    found = run_unsplit(it.op, tuple(whole))
    expected = list(found) if isinstance(found, (tuple, list)) else [found]
    coming = [torch.randn_like(x) if grad else None for x, grad in zip(expected, carry, strict=True)]
    arriving = [
        shards.gradients(state, g, ranks) if g is not None else None for state, g in zip(made, coming, strict=True)
    ]
    _backward(expected, coming)
    line = printed(it, strategy, ranks)

    def run(rank: int) -> list[torch.Tensor]:
        if strategy.body in ("", "apart"):
            torch.default_generator.manual_seed(7)
        outputs = run_printed(line, [own[rank] for own in mine])
        _backward(outputs, [None if own is None else own[rank] for own in arriving])
        return [output.detach() for output in outputs]

    talks = strategy.body not in ("", "apart", "mean")
    results = (at_once if talks or "cross_entropy" in line.text else one_after_another)(ranks, run)
    near = 1e-5 if torch.float32 in {x.dtype for x in (*it.tensors, *it.outputs)} else 1e-9
    if it.op.target.split(".")[1] in NO_VALUES:
        expected = [torch.zeros_like(x) for x in expected]
        results = [[torch.zeros_like(x) for x in own] for own in results]
    if strategy.body == "apart":  # other numbers than the unsplit op's: see test_ops_random.py
        return
    for number, (state, output) in enumerate(zip(made, expected, strict=True)):
        shards.check_values(state, [own[number] for own in results], output.detach(), f"output {number}", near)
    for number, (state, own, unsplit, grad) in enumerate(zip(states, mine, whole, wanted, strict=True)):
        if grad and any(carry):
            zero = torch.zeros_like
            gradients = [zero(p) if p.grad is None else p.grad for p in own]
            full = zero(unsplit) if unsplit.grad is None else unsplit.grad
            shards.check_gradients(state, gradients, full, f"input {number}", near)
        elif it.op.inputs[number] in it.op.mutates:
            shards.check_values(state, own, unsplit, f"changed input {number}", near)


def _backward(outputs: list[torch.Tensor], gradients: list[torch.Tensor | None]) -> None:
    pairs = [(x, g) for x, g in zip(outputs, gradients, strict=True) if g is not None and x.requires_grad]
    if pairs:
        torch.autograd.backward([x for x, _ in pairs], [g for _, g in pairs])


def check_rule(rule: OpRule | None, it: Example, ranks: int) -> list[str]:
    """Every strategy of the op on that many ranks; their names."""
    found = strategies(rule, it.view, ranks)
    for strategy in found:
        try:
            check_strategy(it, strategy, ranks)
        except Exception as error:
            raise AssertionError(f"{describe(it, strategy)} on {ranks}: {error}") from error
    return [s.name for s in found]


def describe(it: Example, strategy: Strategy) -> str:
    inputs, outputs = ("; ".join(map(str, side)) for side in (strategy.inputs, strategy.outputs))
    return f"{it.op.target} {[tuple(x.shape) for x in it.tensors]} {strategy.name}: {inputs} -> {outputs}"
