"""Costs as the op table has them: for graphs that cannot be run on tensors without memory."""

from __future__ import annotations

from shardwright.pipeline.ir.graph import OpGraph, Role
from shardwright.pipeline.ir.profile import OpCost, Profile
from shardwright.pipeline.ops.mesh import view_op
from shardwright.pipeline.ops.rule import OpRule, OpView
from shardwright.pipeline.ops.table import rule_of

Order = tuple[int, ...] | None  # the dims of a tensor, outermost in memory first; None is some other order
IN_ORDER: Order = ()


def profile_graph(graph: OpGraph, device: str = "cpu", precision: str = "fp32") -> Profile:
    storage = find_storage(graph)
    ops = {op.name: op_cost(view_op(graph, op), rule_of(op), storage) for op in graph.ops}
    parameters = list(graph.of_role(Role.PARAMETER))
    return Profile(
        device=device,
        precision=precision,
        source="table",
        ops=ops,
        storage=storage,
        parameters=sum(p.type.numel for p in parameters),
        parameter_bytes=sum(p.type.nbytes for p in parameters),
        saved_bytes=saved_bytes(graph, ops, storage),
    )


def find_storage(graph: OpGraph) -> dict[str, str]:
    """The value whose memory each value shares. A reshape of permuted memory is a copy, any other view is free."""
    storage = {name: name for name in graph.values}
    permuted: dict[str, Order] = {}
    for op in graph.ops:
        rule = rule_of(op)
        if rule is None or not op.inputs or not (rule.is_view or rule.keeps_order):
            continue
        source, target = op.inputs[0], op.outputs[0]
        if rule.is_view and rule.needs_order and source in permuted:
            continue
        if rule.is_view:
            storage[target] = storage[source]
        order = _order(rule, view_op(graph, op), permuted.get(source, IN_ORDER))
        if order != IN_ORDER:
            permuted[target] = order
    return storage


def _order(rule: OpRule, view: OpView, before: Order) -> Order:
    """How the dims of an op's output lie in memory, where its first input's lie as `before`."""
    rank = len(view.output.shape)
    if before is None or (before == IN_ORDER and not rule.permutes):
        return before
    if rule.permutes:
        left, right = (side.split() for side in rule.line(view).split("->"))
        after = tuple(right.index(left[dim]) for dim in before or range(rank))
        return IN_ORDER if after == tuple(range(rank)) else after
    same = rule.keeps_order and len(view.inputs[0].shape) == rank
    return before if same else None


def op_cost(view: OpView, rule: OpRule | None, storage: dict[str, str]) -> OpCost:
    """An op without a rule is priced as moving its tensors once, and as keeping all of them for backward."""
    outputs = view.op.outputs
    moved = sum(t.nbytes for t in (*view.inputs, *view.outputs))
    flops = rule.flops(view) if rule else 0.0
    differentiable = any(view.input_grads)
    places = range(len(view.inputs)) if rule is None else [i for i in rule.saves_inputs if i < len(view.inputs)]
    if rule is not None and rule.crosswise:
        places = [i for i in places if any(view.input_grads[j] for j in places if j != i)]
    saves = (*(view.op.inputs[i] for i in places), *(outputs if rule is None or rule.saves_output else ()))
    return OpCost(
        flops_forward=flops,
        flops_backward=flops * rule.backward_factor if rule and differentiable else 0.0,
        bytes_forward=moved,
        bytes_backward=2 * moved if differentiable else 0,
        saves=tuple(dict.fromkeys(saves)) if differentiable else (),
        extra_saved=rule.extra_saved(view) if rule and differentiable else 0,
        free=storage[outputs[0]] != outputs[0],
    )


def saved_bytes(graph: OpGraph, ops: dict[str, OpCost], storage: dict[str, str]) -> int:
    """What one step keeps for backward, each block of memory once."""
    kept = {storage[name] for cost in ops.values() for name in cost.saves}
    activations = {name for name in kept if graph.values[name].role is Role.RESULT}
    extra = sum(cost.extra_saved for cost in ops.values())
    return extra + sum(graph.values[name].type.nbytes for name in sorted(activations))
