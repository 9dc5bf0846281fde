"""Symbolic profile: what every op costs, from its types alone. Nothing is executed."""

from __future__ import annotations

from pipeline.config import Config
from pipeline.ir.graph import OpGraph, Role
from pipeline.ir.profile import OpCost, Profile
from pipeline.log import Log
from pipeline.ops.rule import OpRule, OpView, view_op
from pipeline.ops.table import rule_of
from pipeline.stage import Inputs, Result


def run(inputs: Inputs, config: Config) -> Result:
    profile = profile_graph(inputs["graph"])
    unknown = sorted({op.target for op in inputs["graph"].ops if rule_of(op) is None})
    for target in unknown:
        inputs.log.debug("%s has no rule: it runs replicated", target)
    figures = {
        "forward_gflops": round(sum(c.flops_forward for c in profile.ops.values()) / 1e9, 6),
        "backward_gflops": round(sum(c.flops_backward for c in profile.ops.values()) / 1e9, 6),
        "parameter_bytes": profile.parameter_bytes,
        "saved_bytes": profile.saved_bytes,
        "ops_without_rule": len(unknown),
    }
    return Result(profile, {**figures, **step_figures(inputs["graph"], inputs.log)})


def step_figures(graph: OpGraph, log: Log) -> dict[str, float | int | str]:
    """What the unsplit step would hold on one device beyond what stays between steps, kernel by kernel."""
    from stages.profile.step import profile_step

    try:
        step = profile_step(graph, "cpu", "native")
    except (NotImplementedError, RuntimeError) as error:  # an op that needs values cannot run without memory
        log.info("the unsplit step cannot be simulated: %s", str(error).splitlines()[0])
        return {}
    return {
        "unsplit_peak_mb": round((step.memory.peak - step.memory.resident) / 1e6, 3),
        "kernels": len(step.prologue) + sum(len(link.forward) + len(link.backward) for link in step.links),
    }


def profile_graph(graph: OpGraph) -> Profile:
    storage = find_storage(graph)
    ops = {op.name: op_cost(view_op(graph, op), rule_of(op), storage) for op in graph.ops}
    parameters = list(graph.of_role(Role.PARAMETER))
    return Profile(
        ops=ops,
        storage=storage,
        parameters=sum(p.type.numel for p in parameters),
        parameter_bytes=sum(p.type.nbytes for p in parameters),
        saved_bytes=_saved_bytes(graph, ops, storage),
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


Order = tuple[int, ...] | None  # the dims of a tensor, outermost in memory first; None is some other order
IN_ORDER: Order = ()


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
    saves = (*_kept_inputs(view, rule), *(outputs if rule is None or rule.saves_output else ()))
    return OpCost(
        flops_forward=flops,
        flops_backward=flops * rule.backward_factor if rule and differentiable else 0.0,
        bytes_forward=moved,
        bytes_backward=2 * moved if differentiable else 0,
        saves=tuple(dict.fromkeys(saves)) if differentiable else (),
        extra_saved=rule.extra_saved(view) if rule and differentiable else 0,
        free=storage[outputs[0]] != outputs[0],
    )


def _kept_inputs(view: OpView, rule: OpRule | None) -> tuple[str, ...]:
    if rule is None:
        return view.op.inputs
    places = [i for i in rule.saves_inputs if i < len(view.inputs)]
    if rule.crosswise:
        places = [i for i in places if any(view.input_grads[j] for j in places if j != i)]
    return tuple(view.op.inputs[i] for i in places)


def _saved_bytes(graph: OpGraph, ops: dict[str, OpCost], storage: dict[str, str]) -> int:
    kept = {storage[name] for cost in ops.values() for name in cost.saves}
    activations = {name for name in kept if graph.values[name].role is Role.RESULT}
    extra = sum(cost.extra_saved for cost in ops.values())
    return extra + sum(graph.values[name].type.nbytes for name in sorted(activations))
