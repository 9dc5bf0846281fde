"""Prices by hand: an op's roofline, conversions, the buckets, what a link holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from shardwright.pipeline.cost.step import BUCKET_BYTES, Workload, gradient_sum_seconds, resident_bytes, update_seconds
from shardwright.pipeline.cost.unsplit import card_of
from shardwright.pipeline.ir.cluster import COLLECTIVES, LATER, Curve, LinkCost, Pace
from shardwright.pipeline.ir.graph import Role
from shardwright.pipeline.ir.layout import B, Layout, P, R, S
from shardwright.pipeline.ir.plan import Sharding, Strategy
from shardwright.pipeline.ir.profile import as_run
from shardwright.pipeline.ir.program import Convert, Tensor
from shardwright.pipeline.ops.dims import strategies
from shardwright.pipeline.ops.mesh import view_op
from shardwright.pipeline.ops.table import rule_of
from shardwright.pipeline.rates.compute import Seconds, op_seconds, optimizer_bytes, optimizer_seconds
from shardwright.pipeline.rates.inner_collectives import talk_seconds
from shardwright.pipeline.rates.joined_axes import joined_link
from shardwright.pipeline.sharding.conversions import TABLE, conversion, entry_seconds, gathered_beside, gathered_share
from shardwright.pipeline.sharding.lowering import lower
from shardwright.stages.profile.by_table import profile_graph
from tests.graphs import (
    GRAPHS,
    frontier_of,
    gpt_graph,
    ladder_graph,
    mlp,
    mlp_batch,
    mlp_graph,
    preset,
    profile_of,
    shared_graph,
    trace,
)
from tests.meshes import mesh
from tests.skips import LENGTH, SAMPLES, WIDTH

COMPUTE = preset().compute
AXIS = preset(2).axes[0]


def whole(*layouts: str) -> tuple[Layout, ...]:
    return tuple(Layout.parse(text) for text in layouts)


def everywhere(graph, name: str) -> Sharding:
    """The strategy of that name for every op that has it, else the replicated one; parameters and inputs to fit."""
    chosen = {}
    for op in graph.ops:
        options = {s.name: s for s in strategies(rule_of(op), view_op(graph, op), 2)}
        chosen[op.name] = options.get(name, options["R"])
    return Sharding(
        chosen,
        {v.origin: Layout((R,)) for v in graph.of_role(Role.PARAMETER)},
        {v.name: Layout((R,)) for v in graph.of_role(Role.INPUT)},
    )


def data_parallel() -> Sharding:
    """The MLP with its batch split: what one would write by hand."""
    graph = mlp_graph()
    chosen = {}
    for op in graph.ops:
        options = strategies(rule_of(op), view_op(graph, op), 2)
        (chosen[op.name],) = (s for s in options if str(s.inputs[0]) == "S(0)" and str(s.outputs[0]) in ("S(0)", "P"))
    return Sharding(
        chosen,
        {v.origin: Layout((R,)) for v in graph.of_role(Role.PARAMETER)},
        {v.name: Layout((S(0),)) for v in graph.of_role(Role.INPUT)},
    )


def price(name: str, sharding: Sharding, devices: int = 2, copies: float = 2.0, micro_batches: int = 1, **figures):
    graph = GRAPHS[name]()
    cluster = preset(devices, **figures)
    return Workload(graph, profile_of(name), cluster, copies, micro_batches).priced(sharding).step


# ------------------------------------------------------------------------------------------------------------ ops


def first_linear():
    graph = mlp_graph()
    op = graph.ops[0]
    return graph, op.name, profile_of("mlp").ops[op.name]


def test_the_seconds_of_a_linear_layer():
    graph, name, cost = first_linear()
    strategy = Strategy("R", whole("R", "R", "R"), whole("R"))
    moved = 4 * (8 * 12 + 32 * 12 + 32 + 8 * 32)
    flops = 2 * 8 * 12 * 32
    forward = max(flops / 50e9, moved / 10e9) + COMPUTE.launch
    backward = max(2 * flops / 50e9, 2 * moved / 10e9) + COMPUTE.launch_backward
    assert op_seconds(graph, name, cost, strategy, COMPUTE, (2,)) == Seconds(
        pytest.approx(forward), pytest.approx(backward)
    )
    slow = replace(COMPUTE, matmul=Curve((1.0,), (1e6,)))
    assert op_seconds(graph, name, cost, strategy, slow, (2,)).forward == pytest.approx(flops / 1e6 + COMPUTE.launch)


def test_an_op_runs_at_the_rate_of_its_precision():
    """Under autocast the graph has the types that run."""
    graph, name, cost = first_linear()
    strategy = Strategy("R", whole("R", "R", "R"), whole("R"))
    measured = replace(COMPUTE, matmul=Curve((1.0,), (1e6,)), matmul_by_dtype={"bfloat16": Curve((1.0,), (4e6,))})
    cast = as_run(graph, {graph.op(name).outputs[0]: "bfloat16"})
    single, half = (op_seconds(g, name, cost, strategy, measured, (2,)) for g in (graph, cast))
    assert single.forward - COMPUTE.launch == pytest.approx(4 * (half.forward - COMPUTE.launch))
    assert single.backward - COMPUTE.launch_backward == pytest.approx(4 * (half.backward - COMPUTE.launch_backward))


def test_a_card_has_a_rate_for_each_precision():
    curves = {"bfloat16": Curve((1.0, 2.0), (2e12, 9e12)), "float16": Curve((1.0,), (8e12,))}
    measured = replace(COMPUTE, matmul=Curve((1.0, 2.0), (1e12, 3e12)), matmul_by_dtype=curves, processors=80)
    card = card_of(measured)
    assert [card.rate(dtype) for dtype in ("float32", "bfloat16", "float16", "float64")] == [3e12, 9e12, 8e12, 3e12]
    assert (card.memory, card.processors) == (COMPUTE.memory_rate, 80)
    assert card_of(COMPUTE).rate("bfloat16") == 50e9


def test_a_split_divides_the_work():
    graph, name, cost = first_linear()
    slow = replace(COMPUTE, matmul=Curve((1.0,), (1e6,)), launch=0.0, launch_backward=0.0)
    strategy = Strategy("R", whole("R", "R", "R"), whole("R"))
    alone = op_seconds(graph, name, cost, strategy, slow, (2,))
    for split in (("S(0)", "B", "B", "S(0)"), ("R", "S(0)", "S(0)", "S(1)"), ("S(1)", "S(1)", "P", "P")):
        *inputs, output = whole(*split)
        shared = op_seconds(graph, name, cost, Strategy("x", tuple(inputs), (output,)), slow, (2,))
        assert shared.total == pytest.approx(alone.total / 2)


def test_a_view_costs_its_launch():
    graph, profile = gpt_graph(), profile_of("gpt")
    view = next(op for op in graph.ops if op.target == "aten.view.default")
    strategy = Strategy("R", whole("R"), whole("R"))
    assert op_seconds(graph, view.name, profile.ops[view.name], strategy, COMPUTE, (2,)) == Seconds(
        COMPUTE.launch, COMPUTE.launch_backward
    )


def test_what_has_no_gradient_has_no_backward():
    graph, profile = gpt_graph(), profile_of("gpt")
    for name in graph.prologue:
        options = strategies(rule_of(graph.op(name)), view_op(graph, graph.op(name)), 2)
        assert op_seconds(graph, name, profile.ops[name], options[0], COMPUTE, (2,)).backward == 0.0


def test_a_calibrated_op_is_bound_by_its_arithmetic():
    graph, profile = gpt_graph(), profile_of("gpt")
    gelu = next(op for op in graph.ops if op.target == "aten.gelu.default")
    slow = replace(COMPUTE, ops={"aten.gelu.default": Pace(1e-3, 2e-3)})
    elements = graph.values[gelu.outputs[0]].type.numel
    for layout, share in (("R", 1), ("S(0)", 2)):
        strategy = Strategy("x", whole(layout), whole(layout))
        found = op_seconds(graph, gelu.name, profile.ops[gelu.name], strategy, slow, (2,))
        assert found.forward == pytest.approx(1e-3 * elements / share + slow.launch)
        assert found.backward == pytest.approx(2e-3 * elements / share + slow.launch_backward)


def test_an_op_with_kernels_of_its_own_has_its_own_pace():
    """The model's attention is causal."""
    graph, profile = gpt_graph(), profile_of("gpt")
    attention = next(op for op in graph.ops if op.target == "aten.scaled_dot_product_attention.default")
    slow = replace(COMPUTE, flops={attention.target: Pace(1.0, 1.0), f"{attention.target}, causal": Pace(1e-6, 3e-6)})
    cost = profile.ops[attention.name]
    strategy = Strategy("x", whole(*["S(0)"] * len(attention.inputs)), whole("S(0)"))
    found = op_seconds(graph, attention.name, cost, strategy, slow, (2,))
    assert found.forward == pytest.approx(1e-6 * cost.flops_forward / 2 + slow.launch)
    assert found.backward == pytest.approx(3e-6 * cost.flops_backward / 2 + slow.launch_backward)


def test_bytes_of_a_product_count_beside_its_arithmetic():
    graph, name, cost = first_linear()
    strategy = Strategy("R", whole("R", "R", "R"), whole("R"))
    thin = replace(COMPUTE, product_bytes=Pace(1e-6, 2e-6))
    found = op_seconds(graph, name, cost, strategy, thin, (2,))
    rate = max(COMPUTE.matmul.rates)
    assert found.forward == pytest.approx(cost.flops_forward / rate + 1e-6 * cost.bytes_forward + thin.launch)
    undone = cost.flops_backward / rate + 2e-6 * cost.bytes_backward
    assert found.backward == pytest.approx(undone + thin.launch_backward * max(1, cost.kernels_backward))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filters, self.norm = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.norm(self.filters(images)).square().mean()


def test_what_a_local_form_sends_is_communication():
    """A batch norm of a split batch gathers each rank's statistics, and what its gradient is made of from few ranks."""
    graph = trace(Normed(), {"images": torch.randn(4, 3, 5, 5)})
    norm = next(op for op in graph.ops if op.target == "aten.batch_norm.default")
    options = {s.name: s for s in strategies(rule_of(norm), view_op(graph, norm), 2)}
    split = next(s for s in options.values() if s.body)
    links = AXIS.links
    found = talk_seconds(graph, norm.name, split, (AXIS,))
    assert found.forward == links["all_gather"].seconds(2 * 2 * 6 * 4)
    assert found.backward == links["all_gather"].seconds(2 * 2 * 6 * 4)
    slower = replace(COMPUTE, bodies={"batch": Pace(3e-4, 2e-4)})
    cost, (small, more) = profile_graph(graph).ops[norm.name], (COMPUTE, slower)
    plain, body = (op_seconds(graph, norm.name, cost, split, compute, (2,)) for compute in (small, more))
    assert body.forward - plain.forward == pytest.approx(3e-4) and body.backward - plain.backward == pytest.approx(2e-4)
    many = replace(AXIS, size=16)
    assert talk_seconds(graph, norm.name, split, (many,)).backward == links["all_reduce"].seconds(2 * 6 * 4)
    assert talk_seconds(graph, norm.name, options["R"], (AXIS,)) == Seconds(0.0, 0.0)
    first = graph.ops[0]
    assert talk_seconds(graph, first.name, Strategy("x", (), (), "mean"), (AXIS,)) == Seconds(0.0, 0.0)


def test_the_optimizer():
    assert optimizer_bytes(100, 2) == 700 and optimizer_bytes(100, 0) == 300
    assert optimizer_seconds(1e6, 2, COMPUTE) == pytest.approx(7e6 / 10e9 + COMPUTE.launch)
    measured = replace(COMPUTE, optimizer_rate=1e9, optimizer_launch=1e-3)
    assert optimizer_seconds(1e6, 2, measured) == pytest.approx(7e-3 + 1e-3)
    assert resident_bytes(100, 100, 2) == 400 and resident_bytes(100, 100, 0) == 200
    assert resident_bytes(100, 25, 2) == 250  # ZeRO-1 on four ranks


# -------------------------------------------------------------------------------------------------- conversions


def test_every_pair_of_states_has_a_conversion():
    kinds = (R, B, P, S(0))
    pairs = {a.kind + b.kind for a in kinds for b in kinds if a != b} | {"SS"}
    assert pairs == set(TABLE)
    assert len({entry.function for entry in TABLE.values()}) == len(TABLE)
    steps = {step for entry in TABLE.values() for step in (entry.forward, entry.backward)}
    assert steps <= {*COLLECTIVES, "", "slice", "mask", "pad"}


@pytest.mark.parametrize("pair", TABLE)
def test_the_seconds_of_a_conversion(pair):
    source, target = (S(dim) if kind == "S" else {"R": R, "B": B, "P": P}[kind] for dim, kind in enumerate(pair))
    nbytes = 1_000_000
    entry = conversion(source, target)
    found = entry_seconds(entry, nbytes, True, AXIS, COMPUTE)

    def seconds(step):
        if step in COLLECTIVES:
            return AXIS.links[step].seconds(nbytes)
        return COMPUTE.launch + nbytes / COMPUTE.memory_rate if step else 0.0

    assert found == Seconds(seconds(entry.forward), seconds(entry.backward))
    assert entry_seconds(entry, nbytes, False, AXIS, COMPUTE) == Seconds(found.forward, 0.0)


def test_a_gradients_share_of_the_buckets():
    link = AXIS.links["all_reduce"]
    small, large = 1e6, 100e6
    assert gradient_sum_seconds(small, [AXIS]) == pytest.approx(small / link.bandwidth + link.latency * small / 25e6)
    assert gradient_sum_seconds(large, [AXIS]) == pytest.approx(large / link.bandwidth + link.latency)
    curve = LinkCost(1.0, 1.0, ((10e6, 0.1), (25e6, 0.2), (100e6, 2.0)))  # measured: the line counts no more
    measured = replace(AXIS, links={**AXIS.links, "all_reduce": curve})
    assert gradient_sum_seconds(small, [measured]) == pytest.approx(0.2 / 25)
    assert gradient_sum_seconds(large, [measured]) == pytest.approx(2.0)
    assert entry_seconds(conversion(P, R), 10_000_000, True, measured, COMPUTE).forward == pytest.approx(0.1)
    assert gradient_sum_seconds(large, preset(1).axes) == gradient_sum_seconds(large, []) == 0.0
    assert BUCKET_BYTES == 25e6


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_axes_taken_as_one(collective):
    """Two axes of equal links are a ring of all their ranks; a slower one slows down the whole."""
    a, b = mesh(2, 4, latency=1e-6, bandwidth=10e9)
    (ring,) = mesh(8, latency=1e-6, bandwidth=10e9)
    found = joined_link(collective, [a, b])
    assert found.latency == pytest.approx(ring.links[collective].latency)
    assert found.bandwidth == pytest.approx(ring.links[collective].bandwidth)
    (slow,) = mesh(2, latency=5e-6, bandwidth=1e9)
    (slow_ring,) = mesh(8, latency=5e-6, bandwidth=1e9)
    mixed = joined_link(collective, [slow, b])
    assert mixed.latency == pytest.approx(slow_ring.links[collective].latency)
    assert mixed.bandwidth == pytest.approx(slow_ring.links[collective].bandwidth)
    (alone,) = mesh(1)
    assert joined_link(collective, [a, alone]) == a.links[collective] and joined_link(collective, [alone]) is None


def test_a_sum_over_two_axes_is_one_collective():
    a, b = mesh(2, 4)
    (ring,) = mesh(8)
    assert gradient_sum_seconds(1e6, [a, b]) == pytest.approx(gradient_sum_seconds(1e6, [ring]))
    assert gradient_sum_seconds(1e6, [a, b]) < sum(gradient_sum_seconds(1e6, [axis]) for axis in (a, b))


def test_what_zero_1_moves_once_a_step():
    a, b = mesh(2, 4, latency=0.0)
    n = 8e6

    def seconds(axis, collective, nbytes):
        return nbytes / axis.links[collective].bandwidth

    assert update_seconds(n, [a], []) == gradient_sum_seconds(n, [a]) and update_seconds(n, [], []) == 0.0
    both = seconds(a, "reduce_scatter", n) + seconds(a, "all_gather", n)
    assert update_seconds(n, [a], [a]) == pytest.approx(both) == pytest.approx(gradient_sum_seconds(n, [a]))
    # summed over a and b, split over b alone: a sums what b has scattered
    found = seconds(b, "reduce_scatter", n) + seconds(a, "all_reduce", n / 4) + seconds(b, "all_gather", n)
    assert update_seconds(n, [a, b], [b]) == pytest.approx(found)
    # whole on b: sliced first
    found = seconds(a, "reduce_scatter", n / 4) + joined_seconds("all_gather", n, a, b)
    assert update_seconds(n, [a], [a, b]) == pytest.approx(found)
    assert update_seconds(n, [], [b]) == pytest.approx(seconds(b, "all_gather", n))
    # where to scatter without waiting is another thing, by that
    later = replace(a, links=a.links | {LATER: a.links["all_reduce"]})
    found = seconds(a, "all_reduce", n) + seconds(a, "all_gather", n)
    assert update_seconds(n, [later], [later]) == pytest.approx(found)


def joined_seconds(collective, nbytes, *axes):
    return joined_link(collective, axes).seconds(nbytes)


# ------------------------------------------------------------------------------------------------- whole steps


def test_data_parallel_by_hand():
    graph, sharding = mlp_graph(), data_parallel()
    program = lower(graph, sharding)
    assert len(program.reduced) == 8 and not program.shared
    found = price("mlp", sharding)
    parameters = [v.type.nbytes for v in graph.of_role(Role.PARAMETER)]
    assert found.gradient_sum == pytest.approx(sum(gradient_sum_seconds(n, [AXIS]) for n in parameters))
    assert found.resident_bytes == 4 * sum(parameters)
    assert found.optimizer == pytest.approx(sum(optimizer_seconds(n, 2.0, COMPUTE) for n in parameters))
    (loss,) = (link for link in found.links if link.communication.total)  # P -> R of the loss
    assert loss.communication == Seconds(AXIS.links["all_reduce"].seconds(4), 0.0)
    assert found.seconds == pytest.approx(
        sum(link.forward + link.backward for link in found.links) + found.gradient_sum + found.optimizer
    )
    assert found.communication == pytest.approx(loss.communication.total + found.gradient_sum)


def stored(sharding: Sharding, state: dict | None = None, regathered: bool = False) -> Sharding:
    """The same with parameters in halves of their first dim: all of them, or their states alone."""
    halves = {name: Layout((S(0),)) for name in sharding.storage}
    if state is not None:
        return replace(sharding, state=halves)
    return replace(sharding, storage=halves, regathered=tuple(halves) if regathered else ())


def test_the_price_of_zero_1():
    graph, plain = mlp_graph(), data_parallel()
    ddp, zero1 = price("mlp", plain), price("mlp", stored(plain, {}))
    parameters = [v.type.nbytes for v in graph.of_role(Role.PARAMETER)]
    assert zero1.links == ddp.links and zero1.outside == ddp.outside
    assert zero1.resident_bytes == ddp.resident_bytes - sum(parameters)  # two copies of a half
    assert zero1.gradient_sum == pytest.approx(sum(update_seconds(n, [AXIS], [AXIS]) for n in parameters))
    assert zero1.optimizer == pytest.approx(sum(optimizer_seconds(n / 2, 2.0, COMPUTE) for n in parameters))


def test_the_price_of_zero_3():
    """As ZeRO-2, with each matrix gathered a second time and nothing of it kept; a bias is not needed again."""
    graph, plain = mlp_graph(), data_parallel()
    ddp, kept, again = (price("mlp", s) for s in (plain, stored(plain), stored(plain, regathered=True)))
    largest = 0
    assert kept.gradient_sum == again.gradient_sum == 0.0
    assert kept.resident_bytes == again.resident_bytes == ddp.resident_bytes / 2
    for link, *held in zip(graph.chain, ddp.links, kept.links, again.links, strict=True):
        read = [graph.values[n] for op in link.ops for n in graph.op(op).inputs]
        matrix = sum(v.type.nbytes for v in read if v.role is Role.PARAMETER and len(v.type.shape) == 2)
        bias = sum(v.type.nbytes for v in read if v.role is Role.PARAMETER and len(v.type.shape) == 1)
        whole, once, twice = (entry.memory for entry in held)
        saved = matrix if link is not graph.chain[0] else 0  # the step's inputs have no gradient
        assert once.kept - whole.kept == saved and twice.kept == whole.kept
        together = 2 * (matrix + bias)  # copies of one collective, beside what it receives
        assert once.forward_peak == twice.forward_peak == max(whole.forward_peak + matrix + bias, together)
        largest = max(largest, matrix + bias)
        assert twice.backward_extra >= whole.backward_extra + saved
        sent = [entry.communication for entry in held]
        links = AXIS.links if matrix else {name: LinkCost(0.0, 1e9) for name in AXIS.links}
        assert sent[1].forward == sent[2].forward
        assert sent[1].forward - sent[0].forward == pytest.approx(links["all_gather"].seconds(matrix + bias))
        assert sent[1].backward == pytest.approx(links["reduce_scatter"].seconds(matrix + bias))
        share = matrix / (matrix + bias) if saved else 0.0  # of what the link gathers, and of its latency
        more = sent[2].backward - sent[1].backward
        assert more == pytest.approx(share * links["all_gather"].seconds(matrix + bias))
    assert again.ahead_bytes == largest + largest // 2, "the next link's copies are gathered while this one computes"
    assert kept.ahead_bytes == ddp.ahead_bytes == 0 and again.fixed_bytes == again.resident_bytes + again.ahead_bytes


@pytest.mark.parametrize("regathered", [False, True])
def test_what_every_rank_reads_whole_is_gathered_together_too(regathered: bool):
    """S -> R: one collective forward, and again; of a gradient each rank takes its shard and sends nothing."""
    graph, plain = mlp_graph(), everywhere(mlp_graph(), "R")
    whole, split = price("mlp", plain), price("mlp", stored(plain, regathered=regathered))
    largest = 0
    for link, before, after in zip(graph.chain, whole.links, split.links, strict=True):
        read = {name for op in link.ops for name in graph.op(op).inputs}
        own = [v.type.nbytes for v in graph.of_role(Role.PARAMETER) if v.name in read]
        gather = AXIS.links["all_gather"].seconds(sum(own)) if own else 0.0
        assert after.communication.forward - before.communication.forward == pytest.approx(gather)
        slices = sum(COMPUTE.launch + n / COMPUTE.memory_rate for n in own)
        again = max(own, default=0) / sum(own) * gather if regathered and own and link is not graph.chain[0] else 0.0
        assert after.communication.backward - before.communication.backward == pytest.approx(slices + again)
        largest = max(largest, sum(own))
    assert split.ahead_bytes == (largest + largest // 2 if regathered else 0)


@pytest.mark.parametrize(("width", "dim"), [(64, 0), (64, 1), (1024, 0), (1024, 1)])
def test_a_large_gather_needs_no_memory_to_send(width: int, dim: int):
    """It receives the whole itself, but where its shards lie across it."""
    graph = trace(mlp(), mlp_batch())
    weight = next(graph.of_role(Role.PARAMETER))
    wide = replace(weight, type=replace(weight.type, shape=(1024, width)))
    graph = replace(graph, values={**graph.values, weight.name: wide})
    step = Convert(Tensor(weight.name, Layout((S(dim),))), Tensor(weight.name, Layout((B,))))
    whole = 4 * width * 1024
    expected = {64: (whole // 2, whole), 1024: (0, whole if dim else 0)}[width]
    assert gathered_beside(graph, step, (2,)) == expected


def test_gradients_that_are_not_sent_need_no_memory_to_send():
    """S -> R beside S -> B of one sample, whose activations are small: what is sent lies beside the gradients."""
    graph = trace(mlp(), {name: tensor[:1] for name, tensor in mlp_batch().items()})
    profile, extra = profile_graph(graph), {}
    for name in ("R", "B"):
        sharding = stored(everywhere(graph, name))
        (first, *_) = Workload(graph, profile, preset(), 2.0).priced(sharding).step.links
        extra[name] = first.memory.backward_extra
    weight, bias = (graph.values[n].type.nbytes for n in graph.ops[0].inputs[1:])
    assert extra["R"] < 2 * weight < 2 * weight + bias < extra["B"]  # the gradients are there in both
    assert extra["B"] - extra["R"] == weight + bias  # small ones are sent together


def test_what_is_gathered_together_pays_for_one_collective():
    """Also of links that were measured as a curve; what several links of the chain read is gathered apart."""
    curve = LinkCost(1.0, 1.0, ((1e3, 0.1), (1e6, 0.2), (2e6, 0.5)))
    for link in (AXIS.links["all_gather"], curve):
        parts = [link.part(nbytes / 1.5e6).seconds(nbytes) for nbytes in (1e6, 3e5, 2e5)]
        assert sum(parts) == pytest.approx(link.seconds(1.5e6))
        assert link.part(1.0) == link
    graph = gpt_graph(tie=True)
    shares = {v.origin: gathered_share(graph, v.name) for v in graph.of_role(Role.PARAMETER)}
    (tied,) = (v for v in graph.of_role(Role.PARAMETER) if len(graph.consumers()[v.name]) > 1)
    assert shares.pop(tied.origin) == 1.0 and graph.beside(tied.name) == ()
    assert sum(shares.values()) == pytest.approx(
        len({graph.beside(v.name) for v in graph.of_role(Role.PARAMETER)} - {()})
    )


@pytest.mark.parametrize("way", ["ddp", "zero1", "zero2", "zero3"])
def test_micro_batches_pay_for_links_again_and_for_the_step_once(way):
    plain = data_parallel()
    sharding = {"ddp": plain, "zero1": stored(plain, {}), "zero2": stored(plain)}.get(way) or stored(plain, None, True)
    one, three = price("mlp", sharding), price("mlp", sharding, micro_batches=3)
    assert three == replace(one, micro_batches=3)  # but for the number nothing is another
    chain = sum(link.forward + link.backward for link in one.links)
    assert three.seconds == pytest.approx(one.seconds + 2 * chain)
    moved = sum(link.communication.total for link in one.links)
    assert three.communication == pytest.approx(3 * moved + one.gradient_sum)
    assert three.compute == pytest.approx(3 * one.compute)


def test_a_copy_for_several_links_lives_through_all_micro_batches():
    """It is made once; beside the gradient of a pass lies what the passes before have added up."""
    graph = GRAPHS["gpt_tied"]()
    name = next(v.origin for v in graph.of_role(Role.PARAMETER) if v.origin.startswith("token"))
    size = next(v.type.nbytes for v in graph.of_role(Role.PARAMETER) if v.origin == name)
    plain = everywhere(graph, "R")
    once = replace(plain, storage={**plain.storage, name: Layout((S(0),))})
    one, three = price("gpt_tied", once), price("gpt_tied", once, micro_batches=3)
    assert three.shared_bytes == one.shared_bytes + size == 3 * size
    before = price("gpt_tied", plain).outside.total  # the prologue
    assert three.outside.total == pytest.approx(one.outside.total + 2 * before)


def test_a_layout_that_one_of_several_links_reads_is_a_copy_of_the_step_too():
    """With one micro-batch its link converts it; with several it would do so in each."""
    graph = GRAPHS["gpt_tied"]()
    plain = everywhere(graph, "R")
    table = next(v for v in graph.of_role(Role.PARAMETER) if v.origin.startswith("token"))
    head = next(op for op in graph.ops if table.name in op.inputs[1:])
    split = next(s for s in strategies(rule_of(head), view_op(graph, head), 2) if str(s.inputs[1]) == "S(0)")
    sharding = replace(plain, strategies={**plain.strategies, head.name: split})
    one, three = lower(graph, sharding), lower(graph, sharding, 3)
    assert not one.shared and [step.target for step in three.shared] == [Tensor(table.name, Layout((S(0),)))]
    assert len(list(one.conversions())) == len(list(three.conversions()))


def test_a_copy_for_several_links_is_there_for_the_whole_step():
    """The table of a tied model is gathered once; regathered, each of its two links has a copy for itself."""
    graph = GRAPHS["gpt_tied"]()
    name = next(v.origin for v in graph.of_role(Role.PARAMETER) if v.origin.startswith("token"))
    size = next(v.type.nbytes for v in graph.of_role(Role.PARAMETER) if v.origin == name)
    plain = everywhere(graph, "R")
    once = replace(plain, storage={**plain.storage, name: Layout((S(0),))})
    assert price("gpt_tied", plain).shared_bytes == 0
    found, again = price("gpt_tied", once), price("gpt_tied", replace(once, regathered=(name,)))
    assert found.shared_bytes == 2 * size and found.outside.total > again.outside.total  # with its gradient
    assert found.fixed_bytes == found.resident_bytes + found.common_bytes + found.shared_bytes
    assert again.shared_bytes == 0
    gathers = AXIS.links["all_gather"].seconds(size)
    moved = sum(link.communication.total for link in again.links)
    assert moved - sum(link.communication.total for link in price("gpt_tied", plain).links) > 2.9 * gathers


def test_what_the_links_of_a_data_parallel_mlp_hold():
    graph = mlp_graph()
    split, alone = price("mlp", data_parallel()), price("mlp", everywhere(graph, "R"))
    for index, (half, full) in enumerate(zip(split.links, alone.links, strict=True)):
        last = index == len(split.links) - 1
        assert half.input_bytes == full.input_bytes / 2
        assert half.memory.kept >= half.memory.output > 0
        assert half.memory.forward_peak >= half.memory.kept >= 0 and half.memory.backward_extra >= 0
        if not last:
            assert half.memory.output == full.memory.output / 2
            assert half.memory.kept == full.memory.kept / 2
    # a linear layer and a relu of width 32, half of 8 rows, keep just their outputs
    assert [link.memory.kept for link in split.links[:6]] == [4 * 4 * 32] * 6


# ------------------------------------------------------------------------------------------------- common values

ACTIVATION = 4 * SAMPLES * LENGTH * WIDTH


def first_link(sharding, **taken):
    """Where its first op takes that beside its tensors."""
    graph, profile = mlp_graph(), profile_of("mlp")
    op = graph.chain[0].ops[0]
    own = replace(profile, ops={**profile.ops, op: replace(profile.ops[op], **taken)})
    return Workload(graph, own, preset(2), 2.0).priced(sharding).step.links[0].memory


@pytest.mark.parametrize("part", [1, 2])
def test_what_an_op_takes_is_in_the_peak_of_every_run(part):
    """Also of the one that drops what it made, and backward; each rank of a split op takes its part."""
    sharding = data_parallel() if part == 2 else everywhere(mlp_graph(), "R")
    none, forward = (first_link(sharding, temporary_forward=n) for n in (0, 10**6))
    assert forward.forward_peak - none.forward_peak == forward.dropped_peak - none.dropped_peak == 10**6 // part
    assert (forward.kept, forward.backward_extra) == (none.kept, none.backward_extra)
    once, twice = (first_link(sharding, temporary_backward=n) for n in (10**6, 2 * 10**6))
    assert twice.backward_extra - once.backward_extra == 10**6 // part
    assert (once.kept, once.forward_peak) == (none.kept, none.forward_peak)
    kept = first_link(sharding, extra_saved=10**6)
    assert kept.kept - none.kept == kept.forward_peak - none.forward_peak == 10**6 // part


def test_a_rung_is_counted_once_with_its_gradient():
    graph = ladder_graph()
    found = price("ladder", everywhere(graph, "R"))
    writes = [bool(link.common) for link in graph.chain]
    assert [link.memory.common for link in found.links] == [2 * ACTIVATION * w for w in writes]
    assert found.common_bytes == 2 * ACTIVATION * 3
    assert found.fixed_bytes == found.resident_bytes + found.common_bytes
    for link, held in zip(graph.chain, found.links, strict=True):
        if link.common:  # tanh and linear: the result of tanh, which backward needs, is not counted again
            assert held.memory.kept == held.memory.output == held.memory.forward_peak == ACTIVATION
        if graph.reads_common(link):  # an addition: its share of the rung's gradient takes the place of its result
            assert held.memory.kept == ACTIVATION and held.memory.backward_extra == 0


def test_a_split_rung_takes_a_shard_on_each_rank():
    graph = ladder_graph()
    assert price("ladder", everywhere(graph, "R")).common_bytes == 2 * ACTIVATION * 3
    options = {op.name: strategies(rule_of(op), view_op(graph, op), 2) for op in graph.ops}
    split = {n: next((s for s in o if str(s.outputs[0]) == "S(0)"), o[0]) for n, o in options.items()}
    sharding = replace(everywhere(graph, "R"), strategies=split)
    assert price("ladder", sharding).common_bytes == ACTIVATION * 3


def test_a_common_value_without_a_gradient_has_none():
    graph = shared_graph()
    bias, gate = 4 * LENGTH * LENGTH, SAMPLES * LENGTH * WIDTH
    assert price("shared", everywhere(graph, "R")).common_bytes == 2 * ACTIVATION + 2 * bias + gate


class Views(nn.Module):
    """A square of each kind is read again at the end: of a parameter, of a link's input, and under its output."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.table = nn.Parameter(torch.rand(6, 6))
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        if self.kind == "parameter":
            skip = self.table.t()
        elif self.kind == "input":
            skip = x.t()
        else:
            skip = torch.relu(x)
            x = skip.t()
        for layer in self.layers[1:]:
            x = layer(x)
        return (x + skip).mean()


@pytest.mark.parametrize(("kind", "shards"), [("parameter", 1), ("input", 2), ("output", 2)])
def test_a_common_value_may_share_memory(kind, shards):
    """Gradient and value; the memory of a parameter is there anyway. A view of it as output counts as any output."""
    graph = trace(Views(kind), {"x": torch.randn(6, 6)})
    sharding = everywhere(graph, "R")
    found = Workload(graph, profile_graph(graph), preset(1), 0.0).priced(sharding).step
    assert len(graph.common) == 1
    assert found.common_bytes == shards * 4 * 6 * 6
    (writer,) = (held for link, held in zip(graph.chain, found.links, strict=True) if link.common)
    assert writer.memory.output == writer.memory.kept == 4 * 6 * 6


# ----------------------------------------------------------------------------------------------------- machines


def test_a_replicated_plan_costs_the_same_on_any_number_of_ranks():
    graph = gpt_graph()
    one = price("gpt", everywhere(graph, "R"), 1)
    two = price("gpt", everywhere(graph, "R"), 2)
    assert one.seconds == pytest.approx(two.seconds) and one.resident_bytes == two.resident_bytes
    assert two.communication == 0.0


def test_a_slower_machine_takes_longer_everywhere():
    sharding = frontier_of("gpt").points[0].sharding
    base = price("gpt", sharding).seconds
    for figure, worse in (
        ("matmul_gflops", 0.001), ("memory_gbytes_per_s", 1), ("launch_us", 1), ("latency_us", 5),
        ("link_gbytes_per_s", 0.2),
    ):  # fmt: skip
        assert price("gpt", sharding, **{figure: worse}).seconds > base, figure


def test_an_optimizer_that_keeps_less_needs_less():
    sharding = data_parallel()
    assert price("mlp", sharding, copies=0.0).resident_bytes == price("mlp", sharding).resident_bytes / 2
