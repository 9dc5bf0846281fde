"""What plans send beside what they compute: by hand for named plans, and the same in the solver's problem."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from shardwright.pipeline.config import Checkpoint, Recompute
from shardwright.pipeline.config.schema import Only
from shardwright.pipeline.cost.chain_memory import chain_memory, unrecomputed_peak
from shardwright.pipeline.cost.groups import Join
from shardwright.pipeline.cost.lines import played
from shardwright.pipeline.cost.step import Priced, Workload, gradient_sum_seconds
from shardwright.pipeline.cost.step_lines import tasks_of
from shardwright.pipeline.cost.traffic import Ran, RunKind, _Found, lines_of
from shardwright.pipeline.cost.two_lines import unrecomputed_runs, unrecomputed_seconds
from shardwright.pipeline.ir.buckets import bucket_members
from shardwright.pipeline.ir.cluster import Cluster, Group, Mesh, Overlap
from shardwright.pipeline.ir.graph import Role
from shardwright.pipeline.ir.layout import Layout
from shardwright.pipeline.ir.plan import Frontier, Proof
from shardwright.stages.checkpoint.choose import choose, evaluate
from shardwright.stages.solve.on_mesh import MeshProblem, most_promising, price_point
from shardwright.stages.solve.problem.build import build
from shardwright.stages.solve.problem.data import Node, Share
from shardwright.stages.solve.problem.moments import Moments
from tests import plans
from tests.graphs import SILENT, solve_settings
from tests.pipeline.test_op_prices import any_sharding
from tests.storage_plans import cluster, plan_named, profile_of

RUNTIME = Overlap("runtime", 0.8)


def workload(name: str, sizes: tuple[int, ...] = (2,), overlap: Overlap = RUNTIME, micro_batches: int = 1) -> Workload:
    on = replace(cluster(sizes), overlap=overlap)
    return Workload(plans.graph_of(name), profile_of(name), on, 2.0, micro_batches)


def priced(name: str, plan: str, overlap: Overlap = RUNTIME, micro_batches: int = 1) -> Priced:
    (part,) = plan_named(name, plan).partitions
    sizes = tuple(size for _, size in part.axes)
    return workload(name, sizes, overlap, micro_batches).priced(part.sharding)


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """These models are smaller than the first of them."""
    monkeypatch.setattr(
        "shardwright.pipeline.cost.traffic.bucket_members", partial(bucket_members, first=1000, most=4000)
    )


def test_of_data_parallelism_the_gradient_sums_run_behind(small_buckets: None) -> None:
    found = priced("gpt", "ddp")
    lines = lines_of(found, unrecomputed_runs(found))
    assert lines.behind == pytest.approx(found.step.gradient_sum)
    assert 0 < lines.saved <= 0.8 * lines.behind
    assert unrecomputed_seconds(found) == pytest.approx(found.step.seconds - lines.saved)
    first = lines.buckets[0]
    assert first.link > 0 and lines.buckets[-1].link == 0
    sums = [c for bucket in lines.buckets for c in bucket.sums]
    parameters = [v.type.nbytes for v in found.graph.of_role(Role.PARAMETER)]
    assert sum(c.seconds for c in sums) == pytest.approx(
        sum(gradient_sum_seconds(n, found.cluster.axes) for n in parameters)
    )


@pytest.mark.parametrize("plan", ["ddp", "zero1", "zero2", "zero3", "tp"])
def test_nothing_is_hidden_where_that_is_asked_for_or_all_is_slowed_down(plan: str) -> None:
    for overlap in (Overlap("none", 0.8), Overlap("runtime", 0.0)):
        found = priced("gpt", plan, overlap)
        lines = lines_of(found, unrecomputed_runs(found))
        assert lines.behind == lines.saved == 0.0
        assert unrecomputed_seconds(found) == pytest.approx(found.step.seconds)


@pytest.mark.parametrize("plan", ["ddp", "zero1", "zero2", "zero3", "tp", "ddp_tp", "zero3_tp"])
def test_what_runs_behind(plan: str) -> None:
    """Sums of DDP and ZeRO-1, gathers of ZeRO-3; nothing of ZeRO-2, which keeps its copies."""
    found = priced("gpt", plan)
    lines = lines_of(found, unrecomputed_runs(found))
    gathers = any(run.traffic.gathers for run in lines.runs)
    assert gathers == plan.startswith("zero3")
    assert bool(lines.buckets) == (plan in ("ddp", "zero1", "ddp_tp"))
    assert not any(run.traffic.beside or run.traffic.trailing for run in lines.runs)
    moved = sum(link.communication.total for link in found.step.links)
    sent = sum(one.seconds for run in lines.runs for one in run.traffic.every)
    assert sent <= moved + 1e-12  # local moves are none
    megatron = priced("gpt", plan, Overlap("megatron", 0.8))
    more = lines_of(megatron, unrecomputed_runs(megatron))
    assert more.behind >= lines.behind and more.saved >= lines.saved - 1e-12
    if plan in ("tp", "zero2"):
        assert more.saved > 0 == lines.saved


def test_of_a_product_s_backward_the_half_that_makes_the_weight_s_gradient_waits_for_nothing() -> None:
    found = priced("gpt", "tp", Overlap("megatron", 0.8))
    late = sum(run.traffic.late for run in lines_of(found, unrecomputed_runs(found)).runs)
    products = [op.name for op in found.graph.ops if op.target == "aten.linear.default"]
    assert late == pytest.approx(sum(found.op(name).backward for name in products) / 2) and late > 0


def test_a_gradient_is_complete_with_the_first_link_that_reads_its_parameter() -> None:
    """Of a copy that is made before the chain once all of it is undone; of a partition its own links count."""
    table = "p_model_token_weight"  # read by the first link and the last before the loss
    plain, copied = (_Found(priced("tied", plan)) for plan in ("ddp", "zero2"))
    head = len(plain.graph.chain) - 2
    assert plain._first_readers(None)[table] == 0 and copied._first_readers(None)[table] == -1
    assert plain._first_readers((1, head))[table] == head and table not in plain._first_readers((1, head - 1))


def test_in_several_micro_batches_gathers_are_hidden_in_each_and_sums_in_the_last(small_buckets: None) -> None:
    """Micro-batches as if they were one long one, in which a gather runs beside the end of the one before."""
    for plan, times in (("ddp", 1), ("zero3", 3)):
        one, three = (priced("gpt", plan, micro_batches=count) for count in (1, 3))
        alone, several = (lines_of(own, unrecomputed_runs(own)) for own in (one, three))
        assert alone.saved > 0 and several.saved >= times * alone.saved - 1e-12
        if not several.buckets:
            long = played(tasks_of(several.runs * 3, ()).tasks, 0.8).seconds
            assert sum(sum(several.durations(number)) for number in range(3)) == pytest.approx(long)


def test_a_longer_backward_hides_more(small_buckets: None) -> None:
    """Where all is computed again the sums have more to run behind; what the plan is predicted to take shows it."""
    load = workload("gpt", overlap=Overlap("runtime", 1.0))
    (part,) = plan_named("gpt", "ddp").partitions
    slow = tuple(replace(a, links={k: replace(c, bandwidth=c.bandwidth / 50) for k, c in a.links.items()})
                 for a in load.cluster.axes)  # fmt: skip
    load = replace(load, cluster=replace(load.cluster, axes=slow))
    point = price_point(load, part.sharding, Proof("", "", 0.0, 0.0, 0.0, 0, 0))
    frontier = Frontier(1 << 60, 2.0, (Mesh(load.cluster.axes),), (point,))
    off, full = (
        evaluate(load.graph, load.profile, load.cluster, frontier, 0, Checkpoint(recompute=Recompute(how)))
        for how in ("off", "full")
    )
    assert point.seconds == pytest.approx(off.step_seconds)
    assert full.hidden_seconds > off.hidden_seconds > 0
    for one in (off, full):
        plan = choose([one], load.cluster, frontier, "")
        own = plan.prediction
        parts = own.compute_seconds + own.communication_seconds + own.recompute_seconds + own.optimizer_seconds
        assert own.step_seconds == pytest.approx(parts + own.host_seconds)
        assert sum(event.seconds for event in plan.timeline.events) == pytest.approx(own.step_seconds)
        assert own.hidden_seconds == pytest.approx(one.price.seconds_with(one.outcome.time) - own.step_seconds)


@pytest.mark.parametrize("name", ["gpt", "mlp"])
@pytest.mark.parametrize("seed", range(6))
def test_the_problem_has_the_same_behind_other_work(name: str, seed: int) -> None:
    """So that the solver's seconds, with the share that a plan leaves exposed, are those of its play."""
    load = workload(name)
    problem, choices = build(load)
    cost, sharding = any_sharding(load, seed)
    own = load.priced(sharding)
    lines = lines_of(own, unrecomputed_runs(own))
    picked = found_again(load, sharding, problem, choices)
    assert problem.behind(picked) == pytest.approx(lines.behind, rel=1e-6, abs=1e-12)
    if lines.behind:
        weighed = problem.exposing(1 - lines.saved / lines.behind)
        assert weighed.cost(picked) == pytest.approx(unrecomputed_seconds(own), rel=1e-6)
        assert weighed.behind(picked) == 0.0 and problem.cost(picked) == pytest.approx(cost)


@pytest.mark.parametrize("plan", ["ddp", "zero1", "zero3"])
def test_and_of_named_plans(plan: str) -> None:
    own = priced("gpt", plan)
    load = workload("gpt")
    problem, choices = build(load)
    picked = found_again(load, own.sharding, problem, choices)
    lines = lines_of(own, unrecomputed_runs(own))
    assert problem.behind(picked) == pytest.approx(lines.behind, rel=1e-6) and lines.behind > 0
    weighed = problem.exposing(1 - lines.saved / lines.behind)
    assert weighed.cost(picked) == pytest.approx(unrecomputed_seconds(own), rel=1e-6)


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize(
    ("plan", "off"),
    [("ddp", 0.01), ("zero1", 0.01), ("zero2", 0.02), ("zero3", 0.02), ("tp", 0.01), ("zero3_tp", 0.02)],
)
def test_the_problem_holds_what_a_step_does(plan: str, off: float, micro_batches: int) -> None:
    """Moment by moment what the step's price of memory finds link by link: so the solver's limit is the step's."""
    own = priced("gpt", plan, micro_batches=micro_batches)
    load = workload("gpt", own.cluster.sizes, micro_batches=micro_batches)
    problem, choices = build(load)
    picked = found_again(load, own.sharding, problem, choices)
    assert problem.peak(picked) == pytest.approx(unrecomputed_peak(own), rel=off)
    updating = problem.held(picked)[2 * len(load.graph.ops) :]  # all parameters at once, or the largest
    assert updating.max() == pytest.approx(chain_memory(own, Join.NEEDLESS).optimizer_peak, rel=0.01)


def test_a_copy_that_several_ops_of_a_link_keep_is_held_once() -> None:
    """With the first that keeps it: the copies that query, key and value read go, for the problem, with their link."""
    load = workload("gpt")
    problem, choices = build(load)
    ops = [choices.index[op.name] for op in load.graph.ops if op.target == "aten.linear.default"]
    shares = [s for s in problem.shares if len(s.readers) == 3 and {reader.node for reader in s.readers} <= {*ops}]
    assert len(shares) == 2  # of two blocks
    assert all(h.end <= len(load.graph.ops) for share in shares for h in share.holdings)


def test_what_crosses_to_the_next_link_is_held_until_that_is_undone() -> None:
    """Also where a converted copy is all that backward needs; of partial sums the sum, which the link makes that writes
    them."""
    load = workload("gpt")
    problem, choices = build(load)
    moments = Moments(load.graph, load.profile)
    made, loss, undone = moments.forward("add_1"), moments.count, moments.backward("layer_norm_1") + 1
    node = problem.nodes[choices.index["add_1"]]
    (share,) = (s for s in problem.shares if s.maker == choices.index["add_1"])
    split, partial, whole = (Layout.parse(text) for text in ("S(0)", "P", "R"))
    rows = {o.outputs[0]: k for k, o in enumerate(choices.ops["add_1"])}
    form = share.readers[0].wants[[o.inputs[0] for o in choices.ops["layer_norm_1"]].index(whole)]

    def held(part: Node | Share, entry: tuple[int, ...], moment: int) -> float:
        return sum(h.usages[entry] for h in part.holdings if h.first <= moment < h.end)

    nbytes = load.graph.values["add_1"].type.nbytes
    assert [held(node, (rows[split],), at) for at in (made, loss, undone - 1)] == [nbytes / 2, nbytes / 2, nbytes]
    assert [held(share, (rows[split], form), at) for at in (made, loss)] == [0, nbytes]
    assert [held(node, (rows[partial],), at) for at in (made, moments.ends("add_1"), loss)] == [nbytes, 0, 0]
    assert [held(share, (rows[partial], form), at) for at in (made, loss, undone)] == [nbytes, nbytes, 0]


def found_again(load: Workload, sharding, problem, choices):
    from shardwright.stages.solve.answer.saved import Saved, found_among

    return found_among(Saved("", load.cluster.sizes, sharding), load.graph, problem, choices)


def test_the_search_settles_on_the_share_that_its_fastest_plan_leaves_exposed(small_buckets: None) -> None:
    """Then the sum that it minimises is the play of that plan; and no plan that it tried is faster in the play."""
    for name in ("gpt", "mlp"):
        load = workload(name)
        mesh = MeshProblem(load, solve_settings(frontier_points=3), "conf/solve/test.yaml", SILENT)
        bound, likely = mesh.promise(1e12), mesh.likely(1e12)
        fastest = mesh.left.expand(mesh.sweep.bounder.fastest.picked)
        assert bound <= likely == pytest.approx(mesh._played(fastest)[0], rel=1e-6)
        mesh.settle(SILENT)
        points = mesh.points(1e12, lambda done, note="": None)
        assert 0.2 <= mesh.share <= 1.0
        first = min(points, key=lambda point: point.proof.objective)
        settled = mesh.problem.cost(mesh.left.expand(mesh.sweep.bounder.fastest.picked))
        assert first.proof.objective == pytest.approx(settled) and bound <= min(p.seconds for p in points) * (1 + 1e-9)
        if mesh.summed.behind(mesh.left.expand(mesh.sweep.bounder.fastest.picked)):
            assert first.seconds == pytest.approx(settled, rel=0.02)
        for point in points:
            assert point.seconds == pytest.approx(unrecomputed_seconds(load.priced(point.sharding)))


def test_of_meshes_those_are_kept_whose_plans_are_fast_when_played(small_buckets: None) -> None:
    """On slow links data parallelism promises to hide its sums, and has too little to compute beside them."""
    load = workload("mlp", overlap=Overlap("runtime", 1.0))
    (axis,) = load.cluster.axes

    def on(bandwidth: float) -> MeshProblem:
        links = {kind: replace(cost, bandwidth=cost.bandwidth * bandwidth) for kind, cost in axis.links.items()}
        slower = replace(load.cluster, axes=(replace(axis, links=links),))
        settings = solve_settings(frontier_points=1, only=Only.data)
        return MeshProblem(replace(load, cluster=slower), settings, "conf/solve/test.yaml", SILENT)

    slow, fast = on(1e-3), on(1.0)
    assert slow.promise(1e12) == pytest.approx(fast.promise(1e12), rel=0.1) and slow.likely(1e12) > 1.1 * fast.likely(
        1e12
    )
    assert most_promising([slow, fast], 1e12, 1) == [fast]
    assert most_promising([slow, fast], 1e12, 2) == [fast, slow]


def test_buckets() -> None:
    """The first is small; of two kinds that one leaves first whose last gradient is there first."""
    sizes = [0.28, 0.8, 0.36, 24.0, 1.2, 0.0, 20.0, 4.0]
    assert bucket_members([("d0", 1e6 * size) for size in sizes]) == [[7], [6, 5, 4], [3, 2], [1, 0]]
    assert bucket_members([("d0", 1.0), ("d1", 1.0), ("d0", 1.0)]) == [[1], [2, 0]]


def test_links_of_axes_are_those_of_the_smallest_group_that_holds_their_ranks() -> None:
    hosts = tuple(Group("host", tuple(range(4 * n, 4 * n + 4)), 1e11, 1e-6) for n in range(2))
    whole = Group("cluster", tuple(range(8)), 1e10, 1e-5, members=hosts)
    on = replace(cluster((2, 4)), group=whole, devices=8)
    inside, across = on.links_of([1]), on.links_of([0])
    assert inside != across == on.links_of([0, 1])
    turned = replace(on, order=(0, 4, 1, 5, 2, 6, 3, 7))  # the inner axis of two hosts
    assert turned.links_of([1]) == across
    assert isinstance(on, Cluster) and replace(on, group=None).links_of([0]) == replace(on, group=None).links_of([1])


def test_runs_of_links_have_the_traffic_of_each() -> None:
    found = priced("gpt", "zero3")
    runs = lines_of(found, unrecomputed_runs(found)).runs
    last = max(run.last for run in runs if not run.backward)
    both = [Ran(0, last, RunKind.FORWARD, 1.0), Ran(0, last, RunKind.AGAIN, 1.0), Ran(0, last, RunKind.BOTH, 1.0)]
    forward, again, at_once = (run.traffic for run in lines_of(found, both).runs)
    apart = [run.traffic for run in runs if not run.backward]
    assert len(forward.gathers) == sum(len(traffic.gathers) for traffic in apart) > 0
    assert len(again.gathers) == len(at_once.gathers) > len(forward.gathers)
    assert len(again.blocking) < len(at_once.blocking) or not forward.blocking
    split = priced("gpt", "tp")
    forward, again, at_once = (run.traffic.blocking for run in lines_of(split, both).runs)
    assert forward and len(again) + len(forward) == len(at_once)  # of the forward pass none is sent again
