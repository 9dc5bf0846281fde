"""From torch's exported program to our values and ops.

What export leaves behind goes on the way: asserts and the sizes that only they read, casts and views that change
nothing, zero dropouts, wrappers around regions without gradient or autocast, and in-place ops (see mutation.py).
"""

from __future__ import annotations

import operator
from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._pytree import tree_leaves

from shardwright.pipeline.base.errors import TraceError
from shardwright.pipeline.ir.graph import Arg, Args, Op, Ref, Role, TensorType, Torch, Value
from shardwright.pipeline.ops.autocast import KEYS, policy_of
from shardwright.pipeline.ops.own_names import CONSTANT
from shardwright.pipeline.ops.table import table
from shardwright.pipeline.tracing.autocast import LOW
from shardwright.pipeline.tracing.mutation import Mutations
from shardwright.pipeline.tracing.source import op_line

_PREFIX = "model."  # of LossOnly
_ASSERTS = (
    *("_assert_tensor_metadata", "_assert_scalar", "_assert_async"),
    *("sym_constrain_range_for_size", "sym_constrain_range"),
)
_SAME_SHAPE_IS_SAME = ("alias", "view", "reshape", "flatten", "expand", "slice", "squeeze", "_unsafe_view", "unflatten")
LARGEST_CONSTANT = 4096
COPY = "aten.copy.default"
FIXED_SIZE = "give it a size that is known: a mask in place of indices, a sum of `F.one_hot` in place of `bincount`"
_CASTS = ("to", "type_as", "_to_copy")


@dataclass(frozen=True)
class Ops:
    """A graph whose chain has not been found yet."""

    values: dict[str, Value]
    ops: tuple[Op, ...]
    output: str


def lower(
    program: ExportedProgram, model: nn.Module, inputs: tuple[str, ...], *, amp: bool = False, stay: Container[str] = ()
) -> Ops:
    """`amp`: the program was exported under autocast.

    Ops of the names in `stay` are not left out where they do nothing: in a batch of another size they do something.
    """
    lowering = _Lowering(program, amp, stay)
    lowering.take_placeholders(model, inputs)
    (output,) = lowering.run(program.graph_module, grad=True)
    missing = [name for name in inputs if name not in lowering.values]  # they are kept, read or not: the batch has them
    if missing:
        raise TraceError(f"export merged the inputs {missing}", where="conf/model: batch", remedy="name each once")
    loss = lowering.names[output]
    loss = lowering.mutations.fresh(loss) if isinstance(loss, str) else loss
    if not isinstance(loss, str) or not lowering.values[loss].grad:
        raise TraceError(
            "the loss depends on no trainable parameter",
            where="conf/model: module",
            remedy="return a loss that is computed from the parameters",
        )
    return without_dead_ops(Ops(lowering.values, tuple(lowering.ops), loss))


class _Lowering:
    def __init__(self, program: ExportedProgram, amp: bool, stay: Container[str]) -> None:
        self.program, self.amp, self.stay = program, amp, stay
        self.autocast = amp  # around what is being lowered
        self.values: dict[str, Value] = {}
        self.ops: list[Op] = []
        self.names: dict[Node, str | tuple[str, ...]] = {}  # torch's node -> our value, or an op's several values
        self.taken: set[str] = set()
        self.mutations = Mutations(lambda name: self.values[name].type, self._emit)

    # -- values -------------------------------------------------------------------------------------------------------

    def take_placeholders(self, model: nn.Module, inputs: tuple[str, ...]) -> None:
        """Inputs by the user's names, and parameters and buffers: tied weights are one parameter with two uses."""
        first: dict[int, str] = {}
        tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        canonical = {name: first.setdefault(id(tensor), name) for name, tensor in tensors}
        trainable = {name for name, p in model.named_parameters() if p.requires_grad}
        found = self.program.graph_signature.user_inputs  # export writes their names in small letters
        changed, lost = ([n for n in some if n not in others] for some, others in ((found, inputs), (inputs, found)))
        given = dict(zip(changed, lost, strict=True)) if len(changed) == len(lost) else {}
        nodes = {node.name: node for node in self.program.graph.find_nodes(op="placeholder")}
        sources: dict[str, str] = {}  # a tensor of the model -> its value
        for spec in self.program.graph_signature.input_specs:
            node = nodes[spec.arg.name]
            name = node.name
            if spec.kind is InputKind.USER_INPUT:
                name = given.get(name, name)
                self.values[name] = Value(name, _type(node.meta["val"]), Role.INPUT, name, grad=False)
            elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
                origin = canonical[spec.target.removeprefix(_PREFIX)]
                role = Role.PARAMETER if origin in trainable else Role.BUFFER
                name = sources.setdefault(origin, name)
                if name == node.name:
                    self.values[name] = Value(name, _type(node.meta["val"]), role, origin, role is Role.PARAMETER)
            elif spec.kind is InputKind.CONSTANT_TENSOR:
                name = self._constant(name, self.program.constants[spec.target])
            self.taken.add(name)
            self.names[node] = name

    def _constant(self, wanted: str, tensor: torch.Tensor) -> str:
        """A tensor that forward() makes out of numbers, as the op that makes it."""
        if tensor.numel() > LARGEST_CONSTANT:
            raise TraceError(
                f"forward() makes a constant of {tensor.numel()} numbers",
                where="conf/model: module",
                remedy="register it as a buffer in __init__",
            )
        name = self._name(wanted)
        self.values[name] = Value(name, _type(tensor), Role.RESULT, name, False)
        dtype = Torch("dtype", str(tensor.dtype).removeprefix("torch."))
        args = Args((_nested(tensor.tolist()),), (("dtype", dtype), ("device", Torch("device", "any"))))
        self.ops.append(Op(name, CONSTANT, args, (name,), "", ""))
        return name

    def _name(self, wanted: str) -> str:
        name, count = wanted, 0
        while name in self.taken:
            count += 1
            name = f"{wanted}_{count}"
        self.taken.add(name)
        return name

    # -- nodes --------------------------------------------------------------------------------------------------------

    def run(self, module: GraphModule, grad: bool) -> Any:
        """Lowers the nodes of a graph; `grad` is False inside a region without gradient. Returns its output."""
        checks = _checks(module)
        for node in module.graph.nodes:
            if node.op == "call_function" and node not in checks:
                self._call(node, module, grad)
        return module.graph.output_node().args[0]

    def _call(self, node: Node, module: GraphModule, grad: bool) -> None:
        kind = _kind(node)
        if node.target is operator.getitem:
            whole = self.names[node.args[0]]  # type: ignore[index]
            self.names[node] = whole[node.args[1]]  # type: ignore[index, assignment]
        elif kind == "wrap_with_set_grad_enabled":
            self._inline_gradient(node, module, grad)
        elif kind == "wrap_with_autocast":
            self._inline_autocast(node, module, grad)
        elif not hasattr(node.target, "_schema"):
            raise _unsupported(node)
        elif (same := self._same_as(node, kind)) is not None:
            self.names[node] = same
        else:
            self.node, self.grad = node, grad
            if node.target._schema.is_mutable:
                self._in_place(node)
            else:
                self._add(node, str(node.target))

    def _inline(self, node: Node, body: Any, operands: Any, module: GraphModule, grad: bool) -> tuple[str, ...]:
        inner = getattr(module, body.target)
        for placeholder, operand in zip(inner.graph.find_nodes(op="placeholder"), operands, strict=True):
            self.names[placeholder] = self.names[operand]
        results = tuple(str(self.names[n]) for n in self.run(inner, grad))
        self.names[node] = results
        return results

    def _inline_gradient(self, node: Node, module: GraphModule, grad: bool) -> None:
        """Results of a region without gradient are cut off from what it read, where that has a gradient."""
        enabled, body, *operands = node.args
        before = len(self.ops)
        results = self._inline(node, body, operands, module, grad and bool(enabled))
        if grad and not enabled:
            self.node, self.grad = node, False
            if any(self.values[read].grad for op in self.ops[before:] for read in op.inputs):
                self.names[node] = tuple(
                    self._emit("aten.detach.default", Args((Ref(name),)), self.values[name].type, name)
                    for name in results
                )

    def _inline_autocast(self, node: Node, module: GraphModule, grad: bool) -> None:
        """A region in which the module turns autocast on or off; on another device than the plan's it does nothing."""
        device, dtype, enabled, _, body, *operands = node.args
        before = self.autocast
        if device == "cpu":  # pipeline/tracing/autocast.py
            self.autocast = bool(enabled)
        if self.autocast and (not self.amp or (device == "cpu" and dtype != LOW)):
            region = getattr(module, body.target)  # type: ignore[union-attr]
            first = next((inner for inner in region.graph.nodes if "stack_trace" in inner.meta), None)
            raise TraceError(
                f"forward() turns autocast to {str(dtype).removeprefix('torch.')} on{_in_module(first)}",
                where=_place(first),
                remedy="set `precision: amp` in your conf/model file, which is autocast to bfloat16 around all of"
                " forward()",
            )
        self._inline(node, body, operands, module, grad)
        self.autocast = before

    def _same_as(self, node: Node, kind: str) -> str | tuple[str, ...] | None:
        """The value that the node's result is, where the op does nothing."""
        first: Any = node.args[0] if node.args else None
        if kind == "broadcast_tensors":  # every call of F.mse_loss
            same = (a.meta["val"].shape == v.shape for a, v in zip(first, node.meta["val"], strict=True))
            return tuple(str(self.names[a]) for a in first) if all(same) else None
        if node.name in self.stay or not isinstance(first, Node) or not isinstance(self.names.get(first), str):
            return None
        before, after = first.meta["val"], node.meta["val"]
        nothing = (
            kind == "lift_fresh_copy"
            or (kind in _SAME_SHAPE_IS_SAME and before.shape == after.shape)
            or (kind in _CASTS and before.dtype == after.dtype)
            or (kind == "contiguous" and before.is_contiguous())
            or (kind in ("dropout", "feature_dropout") and (node.args[1] == 0 or not node.args[2]))
        )
        return str(self.names[first]) if nothing else None

    def _in_place(self, node: Node) -> None:
        """A buffer is really changed; anything else becomes a new value that takes the old one's place."""
        written = self.names[node.args[0]]  # type: ignore[index]
        if not isinstance(written, str):
            raise _unsupported(node)
        value = self.values[written]
        if value.role is Role.BUFFER:
            self._add(node, str(node.target), mutates=(written,))
            return
        plain = _out_of_place(str(node.target))
        if value.role is not Role.RESULT or plain is None or not self.mutations.can_change(written):
            raise _unsupported(node)
        content = self._copied(node, value.type) if plain == COPY else self._add(node, plain)
        self.mutations.change(written, content)
        self.names[node] = written

    def _copied(self, node: Node, type_: TensorType) -> str:
        """`a.copy_(b)`: b in the shape and type of a."""
        content: str = self._arg(node.args[1]).value
        if self.values[content].type.dtype != type_.dtype:
            cast = replace(self.values[content].type, dtype=type_.dtype)
            content = self._emit("aten.to.dtype", Args((Ref(content), Torch("dtype", type_.dtype))), cast, content)
        if self.values[content].type.shape != type_.shape:
            content = self._emit("aten.expand.default", Args((Ref(content), type_.shape)), type_, content)
        return content

    def _emit(self, target: str, args: Args, type_: TensorType, like: str) -> str:
        """An op that no node of torch's graph stands for: it undoes or repeats a view."""
        name = self._name(f"{like}_{target.split('.')[1]}")
        grad = self.grad and any(self.values[read].grad for read in args.refs())
        self.values[name] = Value(name, type_, Role.RESULT, name, grad)
        source = op_line(self.node.meta.get("stack_trace"))
        self.ops.append(Op(name, target, args, (name,), module_of(self.node), source))
        return name

    def _add(self, node: Node, target: str, mutates: tuple[str, ...] = ()) -> str:
        args = Args(tuple(self._arg(a) for a in node.args), tuple((k, self._arg(v)) for k, v in node.kwargs.items()))
        rule = table().get(target)
        if rule is not None and rule.mutates:
            read = args.refs()
            mutates = tuple(read[i] for i in rule.mutates if i < len(read))
        kind = target.split(".")[1]  # of `detach`, `zeros_like` and `new_ones` no gradient flows through
        shape_alone = kind == "detach" or kind.endswith("_like") or kind.startswith("new_")
        outputs = self._outputs(node, args, self.grad and not shape_alone)
        source = op_line(node.meta.get("stack_trace"))
        exact = self.amp and not self.autocast and _autocast_acts_on(node)
        origin = self.values[outputs[0]].origin
        self.ops.append(Op(origin, target, args, outputs, module_of(node), source, mutates, exact))
        if _is_view(node) and target == str(node.target):
            parent = str(self.names[node.args[0]])  # type: ignore[index]
            for output in outputs:
                self.mutations.note_view(output, parent, target, args, many=len(outputs) > 1)
        return outputs[0]

    def _outputs(self, node: Node, args: Args, grad: bool) -> tuple[str, ...]:
        results = node.meta["val"]
        many = isinstance(results, tuple | list)
        wanted = [f"{node.name}_{i}" for i in range(len(results))] if many else [node.name]
        names = tuple(self._name(name) for name in wanted)
        writer = self._name(node.name) if many else names[0]
        reads_gradient = grad and any(self.values[name].grad for name in args.refs())
        for name, result in zip(names, results if many else (results,), strict=True):
            if not isinstance(result, torch.Tensor):  # `item`; sizes that are known are no numbers of a tensor
                raise TraceError(
                    f"the op {node.target} takes a number out of a tensor{_in_module(node)}: what it is will be known"
                    " when the program runs, and not before",
                    where=_place(node),
                    remedy="keep it in a tensor, as one of no dims (`x.max()` in place of `x.max().item()`)",
                )
            try:
                type_ = _type(result)
            except GuardOnDataDependentSymNode as error:
                told = f"the op {node.target} makes a tensor whose size depends on values{_in_module(node)}"
                raise TraceError(told, where=_place(node), remedy=FIXED_SIZE) from error
            self.values[name] = Value(name, type_, Role.RESULT, writer, reads_gradient and type_.is_inexact)
        self.names[node] = names if many else names[0]
        return names

    def _arg(self, arg: Any) -> Arg:
        if isinstance(arg, Node):
            name = self.names[arg]
            if isinstance(name, tuple):
                return tuple(Ref(self.mutations.fresh(n)) for n in name)
            return Ref(self.mutations.fresh(name))
        if isinstance(arg, tuple | list):
            return tuple(self._arg(a) for a in arg)
        if isinstance(arg, torch.dtype | torch.layout | torch.memory_format):
            return Torch(type(arg).__name__, str(arg).removeprefix("torch."))
        if isinstance(arg, torch.device):
            return Torch("device", "any")
        if arg is None or isinstance(arg, bool | int | float | complex | str):
            return arg
        raise TraceError(f"an argument of type {type(arg).__name__} is not supported", where="conf/model: module")


def _checks(module: GraphModule) -> set[Node]:
    """Asserts, and the numbers that nothing else reads: sizes that are known, and what is compared with them."""
    found: set[Node] = set()
    for node in reversed(module.graph.nodes):
        if node.op != "call_function":
            continue
        tensors = any(isinstance(each, torch.Tensor) for each in tree_leaves(node.meta.get("val")))
        if _kind(node) in _ASSERTS or (
            node.meta.get("val") is not None and not tensors and found.issuperset(node.users)
        ):
            found.add(node)
    return found


def _unsupported(node: Node) -> TraceError:
    """It writes in place what cannot be written so, or is no op at all."""
    return TraceError(
        f"the op {node.target} is not supported{_in_module(node)}",
        where=_place(node),
        remedy="write it with out-of-place tensor operations",
    )


def _place(node: Node | None) -> str:
    return (op_line(node.meta.get("stack_trace")) if node else "") or "conf/model: module"


def _in_module(node: Node | None) -> str:
    return f" (module {module_of(node)!r})" if node else ""


def _nested(numbers: Any) -> Arg:
    return tuple(_nested(n) for n in numbers) if isinstance(numbers, list) else numbers


def _type(tensor: torch.Tensor) -> TensorType:
    try:
        return TensorType(tuple(int(n) for n in tensor.shape), str(tensor.dtype).removeprefix("torch."))
    except ValueError as error:
        raise TraceError(str(error), where="conf/model: module") from error


def _kind(node: Node) -> str:
    """`aten.linear.default` -> `linear`; the name of anything that is not an op."""
    if hasattr(node.target, "_schema"):
        return str(node.target).split(".")[1]
    return getattr(node.target, "__name__", str(node.target))


def _is_view(node: Node) -> bool:
    """Whether the result shares the memory of the first argument."""
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    shared = arguments[0].alias_info if arguments else None
    return shared is not None and not shared.is_write and isinstance(node.args[0], Node)


def _autocast_acts_on(node: Node) -> bool:
    """Whether autocast would cast what the op reads, or what its parts read."""
    name = node.target.name()  # type: ignore[union-attr]
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
    known = any(policy_of(str(node.target), device) for device in KEYS)
    return known or (composite and not _is_view(node) and _kind(node) not in _CASTS)


def _out_of_place(target: str) -> str | None:
    """`aten.add_.Tensor` -> `aten.add.Tensor`, where there is such an op."""
    namespace, name, overload = target.split(".")
    plain = name.removesuffix("_")
    packet = getattr(torch.ops.aten, plain, None) if namespace == "aten" and plain != name else None
    return f"aten.{plain}.{overload}" if packet is not None and overload in packet.overloads() else None


def module_of(node: Node) -> str:
    stack = list(node.meta.get("nn_module_stack", {}).values())
    return stack[-1][0].removeprefix("model").removeprefix(".") if stack else ""


def is_random(op: Op) -> bool:
    """Whether the op draws random numbers: left out or moved, it would change what the others draw."""
    namespace, name, overload = op.target.split(".")
    packet = getattr(getattr(torch.ops, namespace), name, None) if namespace == "aten" else None
    return packet is not None and torch.Tag.nondeterministic_seeded in getattr(packet, overload).tags


def without_dead_ops(graph: Ops) -> Ops:
    """Keeps what the loss needs, what changes a buffer or draws random numbers, and every input and parameter."""
    needed = {graph.output}
    kept = []
    for op in reversed(graph.ops):
        if op.mutates or is_random(op) or needed.intersection(op.outputs):
            kept.append(op)
            needed.update(op.inputs)
    alive = {n for op in kept for n in op.outputs} | needed
    values = {n: v for n, v in graph.values.items() if n in alive or v.role in (Role.INPUT, Role.PARAMETER)}
    return replace(graph, values=values, ops=tuple(reversed(kept)))
