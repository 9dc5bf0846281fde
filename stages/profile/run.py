"""Symbolic profile: what every op costs, and what the unsplit step does to a device's memory. Nothing is executed."""

from __future__ import annotations

import functools
from pathlib import Path

from pipeline.config import Config
from pipeline.files import write_atomic
from pipeline.instantiate import instantiate
from pipeline.ir.graph import OpGraph, Role
from pipeline.ir.profile import OpCost, Profile, as_run
from pipeline.log import Log
from pipeline.ops.rule import OpRule, OpView, view_op
from pipeline.ops.table import rule_of
from pipeline.stage import Inputs, Result
from stages.profile.costs import all_kernels, op_costs, value_types
from stages.profile.optimizer import Build
from stages.profile.picture import describe, draw, draw_nothing, table
from stages.profile.step import profile_step

PICTURE, MODULES = "runs/profile/memory.png", "runs/profile/modules.md"


def run(inputs: Inputs, config: Config) -> Result:
    graph: OpGraph = inputs["graph"]
    device, precision = config.cluster.device.value, config.model.precision.value
    where = f"conf/train/{config.choices['train']}.yaml: optimizer"
    build = functools.partial(instantiate, config.train.optimizer, where)
    profile, why = make_profile(graph, device, precision, build, inputs.log)
    files = write_pictures(inputs.root, profile, why, config.choices["model"])
    unknown = sorted({op.target for op in graph.ops if rule_of(op) is None})
    for target in unknown:
        inputs.log.debug("%s has no rule: it runs replicated", target)
    return Result(profile, figures(profile, len(unknown)), files)


def make_profile(graph: OpGraph, device: str, precision: str, build: Build, log: Log) -> tuple[Profile, str]:
    """The profile, and why it is only the table's where the step cannot be run without memory."""
    from_table = profile_graph(graph, device, precision)
    try:
        step = profile_step(graph, device, "amp" if precision == "amp" else "native", build)
    except (NotImplementedError, RuntimeError) as error:  # an op that needs values cannot run without memory
        why = str(error).splitlines()[0]
        log.info("the unsplit step cannot be simulated, costs are those of the op table: %s", why)
        return from_table, why
    costs, types = op_costs(graph, step), value_types(graph, step)
    profile = Profile(
        device=device,
        precision=precision,
        source="symbolic",
        ops=costs,
        storage=from_table.storage,
        parameters=from_table.parameters,
        parameter_bytes=from_table.parameter_bytes,
        saved_bytes=_saved_bytes(as_run(graph, types), costs, from_table.storage),
        types=types,
        step=describe(graph, step),
        kernels=all_kernels(step),
    )
    return profile, ""


def write_pictures(root: Path, profile: Profile, why: str, model: str) -> tuple[Path, Path]:
    """The memory of the step as a picture, and its peak as a table."""
    step = profile.step
    title = f"{model}, unsplit, {profile.precision} on {profile.device}"
    picture = draw(step, title) if step else draw_nothing(title, why)
    text = table(step) if step else f"The unsplit step cannot be simulated: {why}\n"
    for name, content in ((PICTURE, picture), (MODULES, text.encode())):
        write_atomic(root / name, content)
    return root / PICTURE, root / MODULES


def figures(profile: Profile, unknown: int) -> dict[str, float | int | str]:
    found: dict[str, float | int | str] = {
        "forward_gflops": round(sum(c.flops_forward for c in profile.ops.values()) / 1e9, 6),
        "backward_gflops": round(sum(c.flops_backward for c in profile.ops.values()) / 1e9, 6),
        "parameter_bytes": profile.parameter_bytes,
        "saved_bytes": profile.saved_bytes,
        "ops_without_rule": unknown,
        "source": profile.source,
    }
    if profile.step:
        found |= {
            "unsplit_peak_mb": round(profile.step.peak_bytes / 1e6, 3),
            "unsplit_peak_in": profile.step.peak_in,
            "kernels": sum(profile.step.kernels),
        }
    return found


def profile_graph(graph: OpGraph, device: str = "cpu", precision: str = "fp32") -> Profile:
    """Costs as the op table has them: for graphs that cannot be run on tensors without memory."""
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
