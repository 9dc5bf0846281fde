"""From torch's exported program to our values and ops."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node

from pipeline.errors import TraceError
from pipeline.ir.graph import Arg, Args, Op, Ref, Role, TensorType, Torch, Value
from stages.trace.source import op_line

_PREFIX = "model."  # of LossOnly
_ASSERTS = ("aten._assert_tensor_metadata.default", "aten._assert_scalar.default", "aten._assert_async.msg")


@dataclass(frozen=True)
class Ops:
    """A graph whose chain has not been found yet."""

    values: dict[str, Value]
    ops: tuple[Op, ...]
    output: str


def lower(program: ExportedProgram, model: nn.Module, inputs: tuple[str, ...]) -> Ops:
    lowering = _Lowering(program, model, inputs)
    for node in program.graph.nodes:
        if node.op == "call_function":
            lowering.add(node)
    return _without_dead_ops(lowering.finish(inputs))


class _Lowering:
    def __init__(self, program: ExportedProgram, model: nn.Module, inputs: tuple[str, ...]) -> None:
        self.values: dict[str, Value] = {}
        self.ops: list[Op] = []
        self.names: dict[str, str | tuple[str, ...]] = {}  # torch's node -> our value, or an op's several values
        self.program = program
        self._placeholders(model, inputs)

    def _placeholders(self, model: nn.Module, inputs: tuple[str, ...]) -> None:
        canonical = _canonical_names(model)
        trainable = {name for name, p in model.named_parameters() if p.requires_grad}
        nodes = {n.name: n for n in self.program.graph.nodes if n.op == "placeholder"}
        given = _given_names(self.program, inputs)
        for spec in self.program.graph_signature.input_specs:
            name = spec.arg.name
            if spec.kind is InputKind.USER_INPUT:
                own = given.get(name, name)
                self.values[own] = Value(own, _type(nodes[name].meta["val"]), Role.INPUT, own, grad=False)
                self.names[name] = own
                continue
            if spec.kind not in (InputKind.PARAMETER, InputKind.BUFFER):
                raise TraceError(
                    f"the model builds the constant tensor {spec.target!r} in forward()",
                    where="conf/model: module",
                    remedy="register it as a buffer in __init__",
                )
            origin = canonical[spec.target.removeprefix(_PREFIX)]
            role = Role.PARAMETER if origin in trainable else Role.BUFFER
            self._value(name, nodes[name], role, origin, grad=role is Role.PARAMETER)

    def _value(self, name: str, node: Node, role: Role, origin: str, grad: bool) -> None:
        """Adds the value, or finds the one of the same parameter: tied weights are one parameter with two uses."""
        same = next((v for v in self.values.values() if v.role is not Role.INPUT and v.origin == origin), None)
        if same is None:
            self.values[name] = Value(name, _type(node.meta["val"]), role, origin, grad)
        self.names[name] = same.name if same else name

    def add(self, node: Node) -> None:
        target = _target(node)
        if target in _ASSERTS:
            return
        if target == "aten.broadcast_tensors.default" and _broadcasts_nothing(node):  # every call of F.mse_loss
            self.names[node.name] = tuple(self.names[a.name] for a in node.args[0])  # type: ignore[union-attr,misc]
            return
        if node.target is operator.getitem:
            whole = self.names[node.args[0].name]  # type: ignore[union-attr]
            self.names[node.name] = whole[node.args[1]]  # type: ignore[index]
            return
        if not target.startswith("aten.") or node.target._schema.is_mutable:  # type: ignore[union-attr]
            raise TraceError(
                f"the op {target} is not supported yet (module {_module(node)!r})",
                where=op_line(node.meta.get("stack_trace")),
                remedy="write it with out-of-place tensor operations",
            )
        args = Args(tuple(self._arg(a) for a in node.args), tuple((k, self._arg(v)) for k, v in node.kwargs.items()))
        outputs = self._outputs(node, args)
        source = op_line(node.meta.get("stack_trace"))
        self.ops.append(Op(node.name, target, args, outputs, _module(node), source))

    def _outputs(self, node: Node, args: Args) -> tuple[str, ...]:
        results = node.meta["val"]
        many = isinstance(results, tuple | list)
        names = tuple(f"{node.name}_{i}" for i in range(len(results))) if many else (node.name,)
        reads_gradient = any(self.values[name].grad for name in args.refs()) and _target(node) != "aten.detach.default"
        for name, result in zip(names, results if many else (results,), strict=True):
            grad = reads_gradient and result.dtype.is_floating_point
            self.values[name] = Value(name, _type(result), Role.RESULT, node.name, grad)
        self.names[node.name] = names if many else node.name
        return names

    def _arg(self, arg: Any) -> Arg:
        if isinstance(arg, Node):
            name = self.names[arg.name]
            return tuple(Ref(n) for n in name) if isinstance(name, tuple) else Ref(name)
        if isinstance(arg, tuple | list):
            return tuple(self._arg(a) for a in arg)
        if isinstance(arg, torch.dtype | torch.layout | torch.memory_format):
            return Torch(type(arg).__name__, str(arg).removeprefix("torch."))
        if isinstance(arg, torch.device):
            return Torch("device", arg.type)
        if arg is None or isinstance(arg, bool | int | float | str):
            return arg
        raise TraceError(f"an argument of type {type(arg).__name__} is not supported", where="conf/model: module")

    def finish(self, inputs: tuple[str, ...]) -> Ops:
        """The inputs are kept, read or not: the batch has them."""
        missing = [name for name in inputs if name not in self.values]
        if missing:
            raise TraceError(f"export merged the inputs {missing}", where="conf/model: batch", remedy="name each once")
        (loss,) = (spec.arg.name for spec in self.program.graph_signature.output_specs)
        output = self.names[loss]
        if not isinstance(output, str) or not self.values[output].grad:
            raise TraceError(
                "the loss depends on no trainable parameter",
                where="conf/model: module",
                remedy="return a loss that is computed from the parameters",
            )
        return Ops(self.values, tuple(self.ops), output)


def _broadcasts_nothing(node: Node) -> bool:
    return all(a.meta["val"].shape == v.shape for a, v in zip(node.args[0], node.meta["val"], strict=True))


def _given_names(program: ExportedProgram, inputs: tuple[str, ...]) -> dict[str, str]:
    """Export writes the names of inputs in small letters: its name -> the user's, for those that it changed."""
    found = program.graph_signature.user_inputs
    changed = [name for name in found if name not in inputs]
    lost = [name for name in inputs if name not in found]
    return dict(zip(changed, lost, strict=True)) if len(changed) == len(lost) else {}


def _canonical_names(model: nn.Module) -> dict[str, str]:
    """Every name of a parameter or buffer -> the first name of the same tensor."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in tensors:
        names[name] = first.setdefault(id(tensor), name)
    return names


def _type(tensor: torch.Tensor) -> TensorType:
    try:
        return TensorType(tuple(int(n) for n in tensor.shape), str(tensor.dtype).removeprefix("torch."))
    except ValueError as error:
        raise TraceError(str(error), where="conf/model: module") from error


def _target(node: Node) -> str:
    return str(node.target)


def _module(node: Node) -> str:
    stack = list(node.meta.get("nn_module_stack", {}).values())
    return stack[-1][0].removeprefix("model").removeprefix(".") if stack else ""


def _without_dead_ops(graph: Ops) -> Ops:
    """Keeps what the loss needs, and every input."""
    needed = {graph.output}
    kept = []
    for op in reversed(graph.ops):
        if needed.intersection(op.outputs):
            kept.append(op)
            needed.update(op.inputs)
    alive = {n for op in kept for n in op.outputs} | needed
    values = {n: v for n, v in graph.values.items() if n in alive or v.role in (Role.INPUT, Role.PARAMETER)}
    return replace(graph, values=values, ops=tuple(reversed(kept)))
