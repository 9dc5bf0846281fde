"""Rotor against a search of every persistent schedule, and every schedule against the simulator."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from shardwright.stages.checkpoint.recompute.chain import Chain, ChainError, Option, default_slots, discretise
from shardwright.stages.checkpoint.recompute.rotor import InfeasibleBudget, schedule, solve, tightest
from shardwright.stages.checkpoint.recompute.schedule import (
    Keep,
    Nesting,
    OpKind,
    Schedule,
    ScheduledOp,
    flatten,
    full_recompute,
    no_recompute,
)
from shardwright.stages.checkpoint.recompute.simulate import InvalidSequence, simulate
from tests.schedules import fastest


def examples(count: int) -> settings:
    return settings(max_examples=count, deadline=None, suppress_health_check=[HealthCheck.too_slow])


# --------------------------------------------------------------------------------------------------------- chains


small = st.integers(0, 4)
spiky = st.sampled_from((0, 1, 3, 12))
seconds = st.integers(0, 9)


def several(strategy, n):
    return st.lists(strategy, min_size=n, max_size=n).map(tuple)


@st.composite
def chains(draw, most: int = 5, rich: bool = False) -> Chain:
    """Small whole numbers; `rich` ones have several options a link, a no-grad forward of its own, early ends of regions
    and backwards that leave something."""
    n = draw(st.integers(1, most))
    a = draw(several(small, n + 1))
    saved = tuple(size + draw(small) for size in a[1:])
    plain = dict(a=a, saved=saved, f=draw(several(seconds, n)), b=draw(several(seconds, n + 1)))
    plain |= dict(ft=draw(several(small, n)), bt=draw(several(small, n + 1)))
    if not rich:
        return Chain(**plain)
    more = tuple(
        tuple(
            Option(draw(seconds), draw(seconds), a[i + 1] + draw(small), draw(small), draw(small))
            for _ in range(draw(st.integers(0, 2)))
        )
        for i in range(n)
    )
    early = draw(st.booleans())
    last = tuple(Option(*(draw(small) for _ in range(5))) for _ in range(n)) if early else ()
    grown = draw(several(small, n + 1))
    return Chain(
        **plain, f_none=draw(several(seconds, n)), ft_none=draw(several(spiky, n)), more=more, last=last, grown=grown
    )


def budget(draw: st.DataObject, chain: Chain) -> int:
    """Around where it matters: from just too little to just enough to keep everything."""
    floor, top = tightest(chain).memory, most(chain)
    return draw.draw(st.integers(max(0, floor - 1), max(floor, top)), label="memory")


def most(chain: Chain) -> int:
    return int(simulate(chain, no_recompute(chain).sequence).peak)


def uniform(n: int, a: int = 1, saved: int = 3) -> Chain:
    return Chain(a=(a,) * (n + 1), saved=(saved,) * n, f=(1,) * n, b=(2,) * n + (0,), ft=(0,) * n, bt=(0,) * (n + 1))


def check(chain: Chain, memory: int, found: Schedule) -> None:
    """What every schedule must be: within the budget, as long as predicted, and nested as it is flat."""
    outcome = simulate(chain, found.sequence)
    assert outcome.peak <= memory
    assert outcome.time == pytest.approx(found.time)
    assert flatten(found.regions, chain.length, early=bool(chain.last)) == found.sequence
    assert covered(found.regions) == list(range(chain.length + 1))


def covered(region: Nesting) -> list[int]:
    return [i for step in region.steps for i in ([step.link] if isinstance(step, Keep) else covered(step))]


# ------------------------------------------------------------------------------------------------------ optimality


@examples(120)
@given(chains(), st.data())
def test_equals_the_search_of_all_persistent_schedules(chain: Chain, data: st.DataObject) -> None:
    agree(chain, budget(data, chain))


@examples(80)
@given(chains(most=4, rich=True), st.data())
def test_options_and_no_grad_forwards_equal_the_search_too(chain: Chain, data: st.DataObject) -> None:
    agree(chain, budget(data, chain))


def agree(chain: Chain, memory: int) -> None:
    best = fastest(chain, memory)
    table = solve(chain, memory)
    if best == math.inf:
        with pytest.raises(InfeasibleBudget) as refusal:
            schedule(table)
        assert refusal.value.tightest > memory
    else:
        found = schedule(table)
        assert found.time == best
        check(chain, memory, found)


@examples(80)
@given(chains(most=4), st.data())
def test_every_sub_chain_of_the_table_is_optimal(chain: Chain, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, chain.length))
    last = data.draw(st.integers(first, chain.length))
    memory = data.draw(st.integers(most(chain) // 3, most(chain)))
    table = solve(chain, max(memory, most(chain)))
    best = fastest(chain, memory, first, last)
    assert table.time(first, last, memory - chain.a[first]) == best
    if best < math.inf:
        found = schedule(table, memory, first, last)
        outcome = simulate(chain, found.sequence, first, last)
        assert (outcome.time, outcome.peak <= memory) == (best, True)


def test_the_forward_is_not_charged_for_a_gradient_that_is_not_there_yet() -> None:
    """Priced as the well-known implementations do, F_all holding the gradient of its output, this takes 31."""
    sizes = dict(a=(2, 2, 2, 1), saved=(3, 3, 4), ft=(4, 4, 4), bt=(0, 0, 0, 0))
    chain = Chain(**sizes, f=(5, 3, 5), b=(3, 4, 3, 0))
    assert schedule(solve(chain, 15)).time == 26
    agree(chain, 15)


@pytest.mark.parametrize(
    "chain",
    [
        Chain(
            (1, 1, 2, 1, 1), (3, 4, 2, 3), (5, 4, 5, 2), (1, 1, 1, 1, 0), (0,) * 4, (0, 0, 0, 0, 5), (), (1, 12, 1, 0)
        ),
        Chain((1, 3, 3, 3), (5, 4, 5), (5, 5, 1), (1, 1, 1, 0), (0,) * 3, (0, 0, 0, 5), (), (1, 12, 0)),
    ],
)
def test_a_link_that_needs_much_to_be_passed_over_is_not_passed_over(chain: Chain) -> None:
    """Link 1 needs 12 more when it saves nothing than when it saves all: the links passed over set their own floor."""
    for memory in range(tightest(chain).memory - 1, most(chain) + 1):
        agree(chain, memory)


def test_a_link_is_not_run_again_before_backward_has_come_to_it() -> None:
    """Links 0 and 1 a second time before the loss, whose gradients of 3 are not there then, would fit into 15."""
    least = Option(0, 0, 0, 0, 0)
    sizes = dict(a=(0, 3, 3, 0), saved=(7, 3, 4), ft=(0,) * 3, bt=(0,) * 4, ft_none=(12, 0, 12), grown=(0, 0, 0, 3))
    chain = Chain(**sizes, f=(0,) * 3, b=(0,) * 4, last=(least,) * 3)
    assert tightest(chain).memory == 16
    for memory in (15, 16):
        agree(chain, memory)


def test_a_large_loss_is_run_with_nothing_kept() -> None:
    """The last forward before the loss may be one that keeps nothing."""
    sizes = dict(a=(3, 3, 3, 4), saved=(3, 6, 16), ft=(0, 0, 0), bt=(0, 0, 0, 25))
    chain = Chain(**sizes, f=(3, 5, 6), b=(20, 15, 16, 0))
    assert [str(op) for op in schedule(solve(chain, 36)).sequence[:4]] == ["F_ck(0)", "F_none(1)", "F_none(2)", "B(3)"]
    agree(chain, 36)


# ------------------------------------------------------------------------------------------------------- budgets


@examples(100)
@given(chains(most=8, rich=True))
def test_time_falls_with_memory_and_begins_at_the_tightest(chain: Chain) -> None:
    floor, top = tightest(chain), most(chain)
    table = solve(chain, max(floor.memory, top))
    row = np.concatenate([np.full(int(chain.a[0]), math.inf), table.row(0, chain.length)])[: table.memory + 1]
    assert all(later <= earlier for earlier, later in itertools.pairwise(row))
    assert next(m for m in range(table.memory + 1) if row[m] < math.inf) == floor.memory
    check(chain, floor.memory, schedule(table, floor.memory))


@examples(60)
@given(chains(most=4, rich=True))
def test_the_floor_is_an_op_that_holds_all_of_the_tightest_budget(chain: Chain) -> None:
    floor = tightest(chain)
    assert fastest(chain, floor.memory, through=floor.op) < math.inf
    assert fastest(chain, floor.memory - 1) == math.inf


def test_an_infeasible_budget_is_refused_with_the_one_that_would_do() -> None:
    chain = uniform(10)
    with pytest.raises(InfeasibleBudget) as refusal:
        schedule(solve(chain, 5))
    assert (refusal.value.memory, refusal.value.tightest, str(refusal.value.op)) == (5, 7, "B(9)")
    assert refusal.value.line().endswith("B(9) needs more; the tightest feasible budget is 7 bytes")
    check(chain, 7, schedule(solve(chain, 7)))


@examples(60)
@given(chains(most=6, rich=True), st.integers(10**6, 10**9), st.integers(40, 400), st.floats(0, 1))
def test_slots_never_let_the_true_peak_over_the_budget(chain: Chain, scale: int, slots: int, share: float) -> None:
    chain = scaled(chain, scale)
    assume(most(chain) > 0)
    exact, floor = tightest(chain), tightest(chain, slots)
    assert floor.memory >= exact.memory
    memory = int(max(floor.memory, 1) + share * most(chain))
    check(chain, memory, schedule(solve(discretise(chain, memory, slots))))


@examples(40)
@given(chains(most=6), st.integers(10**6, 10**9), st.integers(30, 200))
def test_the_tightest_in_slots_is_the_least_that_works(chain: Chain, scale: int, slots: int) -> None:
    chain = scaled(chain, scale)
    assume(most(chain) > 0)
    floor = tightest(chain, slots).memory
    check(chain, floor, schedule(solve(discretise(chain, floor, slots))))
    with pytest.raises(InfeasibleBudget) as refusal:
        schedule(solve(discretise(chain, floor - 1, slots)))
    assert (refusal.value.memory, refusal.value.tightest) == (floor - 1, floor)


def scaled(chain: Chain, scale: int) -> Chain:
    """The same chain in bytes that no slot divides."""

    def up(sizes: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(x * scale + (17.5 if x else 0) for x in sizes)

    sizes = {name: up(getattr(chain, name)) for name in ("a", "saved", "ft", "bt", "ft_none")}
    more = tuple(tuple(Option(o.f, o.b, *up((o.saved, o.ft, o.bt))) for o in link) for link in chain.more)
    return Chain(**sizes, f=chain.f, b=chain.b, f_none=chain.f_none, more=more)


def test_a_smaller_budget_of_the_same_table_is_refused_in_its_own_slots() -> None:
    slots = discretise(uniform(10, a=100, saved=300), 1000, 100)
    with pytest.raises(InfeasibleBudget) as refusal:
        schedule(solve(slots), 50)
    assert (refusal.value.memory, refusal.value.tightest) == (500, 700)


# ------------------------------------------------------------------------------------------------------- pictures


def draw(sequence: tuple[ScheduledOp, ...], links: int) -> str:
    """A row for each link, a column for each op: A keeps all, c and n keep the output only (n drops its input), B."""
    mark = {OpKind.F_ALL: "A", OpKind.F_CK: "c", OpKind.F_NONE: "n", OpKind.B: "B"}
    return "\n".join("".join(mark[op.kind] if op.link == i else "." for op in sequence) for i in range(links + 1))


def picture(text: str) -> str:
    return "\n".join(line.strip() for line in text.strip().splitlines())


def test_six_links_in_nine_units() -> None:
    """Time runs to the right, 6 is the loss. Held across it: a_2, a_3, a_5 and link 5; link 3 runs three times."""
    found = schedule(solve(uniform(6), 9))
    assert str(found.regions) == "(0 1) (2) ((3) 4) 5 6"
    assert draw(found.sequence, 6) == picture("""
        c..............A..B
        .n..............AB.
        ..c..........AB....
        ...c....c..AB......
        ....n....AB........
        .....A.B...........
        ......B............
    """)
    assert found.time == 6 * 3 + 6


def test_off_keeps_every_link() -> None:
    assert str(no_recompute(uniform(3)).regions) == "0 1 2 3"
    assert draw(no_recompute(uniform(3)).sequence, 3) == picture("""
        A.....B
        .A...B.
        ..A.B..
        ...B...
    """)


def test_full_recomputes_every_link_by_itself() -> None:
    assert str(full_recompute(uniform(3)).regions) == "(0) (1) (2) 3"
    assert draw(full_recompute(uniform(3)).sequence, 3) == picture("""
        c.......AB
        .c....AB..
        ..c.AB....
        ...B......
    """)
    outcome = simulate(uniform(3), full_recompute(uniform(3)).sequence)
    assert (outcome.time, outcome.peak) == (3 + 9, 3 + 3 + 2)


def test_a_nested_region_runs_again_inside_its_outer_one() -> None:
    """0 (1 (2)) 3 and the loss 4: link 1 runs twice, link 2 three times."""
    regions = Nesting((Keep(0), Nesting((Keep(1), Nesting((Keep(2),)))), Keep(3), Keep(4)))
    assert draw(flatten(regions, 4), 4) == picture("""
        A..........B
        .c....A...B.
        ..n....cAB..
        ...A.B......
        ....B.......
    """)


# ------------------------------------------------------------------------------------------------------- refusals


def test_a_chain_checks_itself() -> None:
    good = dict(a=(1, 1), saved=(2,), f=(1,), b=(1, 0), ft=(0,), bt=(0, 0))
    assert Chain(**good).f_none == (1,)
    with pytest.raises(ChainError, match="b has 1 entries, 2 expected"):
        Chain(**good | {"b": (1,)})
    with pytest.raises(ChainError, match="link 0: keeps 0, less than its output"):
        Chain(**good | {"saved": (0,)})
    with pytest.raises(ChainError, match="negative or non-finite"):
        Chain(**good | {"ft": (math.nan,)})
    with pytest.raises(ChainError, match="at least one link"):
        Chain((1,), (), (), (1,), (), (1,))
    with pytest.raises(ChainError, match="discretise the chain first"):
        solve(Chain(**good | {"a": (0.5, 1)}), 9)
    with pytest.raises(ChainError, match="discretise to fewer slots"):
        solve(Chain(**good), 10**12)
    with pytest.raises(ChainError, match="are too few"):
        tightest(Chain(**good), 2)
    assert default_slots(100) == 2020


@pytest.mark.parametrize(
    ("ops", "problem"),
    [
        ("A1", "a_1 is not in memory"),
        ("A0 A0", "a_1 is in memory already"),
        ("n0", "a_0 cannot be dropped"),
        ("A0 n1", "a_1 cannot be dropped"),
        ("A0 B0", "the gradient of a_1 is not in memory"),
        ("c0 c1 B2 B1", "link 1 has not been run with this to keep"),
        ("A0 A1 B2 B2", "the loss has been run"),
        ("A0 A1 A2", "the loss has no forward of its own"),
        ("A0 A1 B2 B1 A1", "its backward has been run"),
        ("A0 A1 B2 A7", "no such link or option"),
        ("A0 A1 B2 B1", "it ends with"),
    ],
)
def test_the_simulator_refuses_what_cannot_run(ops: str, problem: str) -> None:
    kinds = {"A": OpKind.F_ALL, "c": OpKind.F_CK, "n": OpKind.F_NONE, "B": OpKind.B}
    with pytest.raises(InvalidSequence, match=problem):
        simulate(uniform(2), [ScheduledOp(kinds[word[0]], int(word[1:])) for word in ops.split()])


def test_the_simulator_counts_by_hand() -> None:
    """a_0 = 1, a_1 = 2, a_2 = 4; link 0 keeps 5, link 1 keeps 7."""
    chain = Chain(a=(1, 2, 4), saved=(5, 7), f=(1, 2), b=(3, 4, 5), ft=(10, 0), bt=(0, 0, 20))
    steps = simulate(chain, no_recompute(chain).sequence).steps
    assert [step.held for step in steps] == [
        1 + 5 + 10,
        1 + 5 + 7,
        1 + 5 + 7 + 4 + 20,
        1 + 5 + 7 + 4 + 2,
        1 + 5 + 2 + 1,
    ]
    steps = simulate(chain, full_recompute(chain).sequence).steps
    held = [1 + 2 + 10, 1 + 2 + 4, 1 + 2 + 4 + 4 + 20, 1 + 2 + 4 + 7, 1 + 2 + 4 + 7 + 2, 1 + 2 + 5 + 10, 1 + 2 + 5 + 1]
    assert [step.held for step in steps] == held
