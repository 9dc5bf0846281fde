"""One op as a graph, and its strategies run on simulated ranks of one process: each must equal the unsplit op.

What runs on a rank is the line that generated programs have, so the printed call is proved as well.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from pipeline.ir.graph import Args, Op, OpGraph, Ref, Role, TensorType, Torch, Value
from pipeline.ir.plan import Sharding, Strategy
from pipeline.ir.program import Call
from pipeline.ir.program import Tensor as Placed
from pipeline.ops.dims import strategies
from pipeline.ops.rule import OpRule, OpView, view_op
from pipeline.runtime import batch_norm
from stages.codegen.block import BlockWriter, Mesh, Outside
from tests import pieces


@dataclass(frozen=True)
class Draw:
    """A tensor argument, to be drawn at random; `high` makes it an index, `sometimes` some entries of it."""

    shape: tuple[int, ...]
    high: int = 0
    grad: bool = True
    dtype: str = "float64"
    sometimes: int | None = None

    def tensor(self) -> torch.Tensor:
        if not self.high:
            return torch.randn(self.shape, dtype=getattr(torch, self.dtype))
        drawn = torch.randint(self.high, self.shape)
        if self.sometimes is not None:
            drawn[torch.rand(self.shape) < 0.4] = self.sometimes
        return drawn


def t(*shape: int, **options) -> Draw:
    return Draw(shape, **options)


@dataclass(frozen=True)
class Example:
    """An op with tensors for its arguments."""

    graph: OpGraph
    tensors: tuple[torch.Tensor, ...]
    output: torch.Tensor

    @property
    def op(self) -> Op:
        return self.graph.ops[0]

    @property
    def view(self) -> OpView:
        return view_op(self.graph, self.op)


def example(target: str, *args, **named) -> Example:
    """Builds the op; a `Draw` among the arguments becomes a value of the graph."""
    torch.manual_seed(len(args) + 10 * len(target))
    values: dict[str, Value] = {}
    tensors: list[torch.Tensor] = []

    def argument(arg):
        if isinstance(arg, Draw):
            name = f"in{len(tensors)}"
            tensors.append(arg.tensor())
            values[name] = Value(name, _type(tensors[-1]), Role.INPUT, name, arg.grad and not arg.high)
            return Ref(name)
        return tuple(argument(a) for a in arg) if isinstance(arg, tuple) else arg

    op = Op("it", target, Args(tuple(map(argument, args)), tuple((k, argument(v)) for k, v in named.items())),
            ("it",), "", "")  # fmt: skip
    output = run_unsplit(op, tuple(tensors))
    grad = output.is_floating_point() and any(v.grad for v in values.values())
    values["it"] = Value("it", _type(output), Role.RESULT, "it", grad)
    return Example(OpGraph(values, (op,), "it", (), ()), tuple(tensors), output)


def _type(tensor: torch.Tensor) -> TensorType:
    return TensorType(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def run_unsplit(op: Op, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The op itself, as torch has it."""
    order = iter(tensors)

    def argument(arg):
        if isinstance(arg, Ref):
            return next(order)
        if isinstance(arg, Torch):
            return torch.device(arg.name) if arg.kind == "device" else getattr(torch, arg.name)
        return [argument(a) for a in arg] if isinstance(arg, tuple) else arg

    _, name, overload = op.target.split(".")
    function = getattr(getattr(torch.ops.aten, name), overload)
    positional = [argument(a) for a in op.args.positional]
    return function(*positional, **{k: argument(v) for k, v in op.args.named})


def run_on_rank(it: Example, strategy: Strategy, ranks: int, tensors: list[torch.Tensor]) -> torch.Tensor:
    """The generated line on one rank's tensors. The two losses that talk to other ranks are worked out from afar."""
    inputs = tuple(Placed(name, layout) for name, layout in zip(it.op.inputs, strategy.inputs, strict=True))
    outputs = (Placed("it", strategy.outputs[0]),)
    sharding = Sharding({"it": strategy}, {}, {})
    outside = {tensor: Outside(tensor.value, tensor.value) for tensor in inputs}
    writer = BlockWriter(it.graph, sharding, Mesh((("d0", ranks),)), "", outside)
    block = writer.write((Call("it", inputs, outputs),), None, outputs[0])

    def mean_cross_entropy(logits, target, axis, **options):
        valid = (it.tensors[1] != options.get("ignore_index", -100)).sum()
        return F.cross_entropy(logits, target, reduction="sum", **options) / valid

    names = {
        "torch": torch,
        "F": F,
        "DEVICE": torch.device("cpu"),
        "batch_norm": batch_norm,
        "mean_of_pieces": lambda mean, axis: mean / ranks,
        "mean_cross_entropy": mean_cross_entropy,
        **{i.value: tensor for i, tensor in zip(inputs, tensors, strict=True)},
    }
    exec("\n".join(block.lines), names)
    return names[block.result[0]]


def check_strategy(it: Example, strategy: Strategy, ranks: int) -> None:
    """Forward and backward on simulated ranks against the unsplit op."""
    states = [layout.states[0] for layout in strategy.inputs]
    (made,) = strategy.outputs[0].states
    held = [pieces.values(state, tensor, ranks) for state, tensor in zip(states, it.tensors, strict=True)]
    wanted = [value.grad for value in (it.graph.values[name] for name in it.op.inputs)]
    whole = [tensor.clone().requires_grad_(grad) for tensor, grad in zip(it.tensors, wanted, strict=True)]
    mine = [[p.requires_grad_(grad) for p in own] for own, grad in zip(held, wanted, strict=True)]
    near = 1e-5 if torch.float32 in {x.dtype for x in (*it.tensors, it.output)} else 1e-9
    expected = run_unsplit(it.op, tuple(whole))
    found = [run_on_rank(it, strategy, ranks, [own[rank] for own in mine]) for rank in range(ranks)]
    pieces.check_values(made, [f.detach() for f in found], expected.detach(), "the output", near)
    if not it.graph.values["it"].grad:
        return
    gradient = torch.randn_like(expected)
    expected.backward(gradient)
    for output, own in zip(found, pieces.gradients(made, gradient, ranks), strict=True):
        output.backward(own)
    for number, (state, own, unsplit, grad) in enumerate(zip(states, mine, whole, wanted, strict=True)):
        if grad:
            pieces.check_gradients(state, [p.grad for p in own], unsplit.grad, f"input {number}", near)


def check_rule(rule: OpRule | None, it: Example, ranks: int) -> list[str]:
    """Every strategy of the op on that many ranks; their names."""
    found = strategies(rule, it.view, ranks)
    for strategy in found:
        try:
            check_strategy(it, strategy, ranks)
        except Exception as error:
            inputs = "; ".join(map(str, strategy.inputs))
            text = f"{it.op.target} {[tuple(x.shape) for x in it.tensors]} on {ranks}: {strategy.name}: {inputs} -> "
            raise AssertionError(f"{text}{strategy.outputs[0]}: {error}") from error
    return [s.name for s in found]
