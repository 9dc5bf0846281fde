"""The compiled table of Rotor, entry by entry, on chains with zeros, equal links, huge sizes and times of any scale."""

# ruff: noqa: E741 - `l` is the last link of a sub-chain, as in C(i,l,m).
from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks import rotor as benchmark
from shardwright.stages.checkpoint.recompute.chain import Chain, ChainError, Option, discretise
from shardwright.stages.checkpoint.recompute.kernels import WIDTH
from shardwright.stages.checkpoint.recompute.rotor import Table, curve, schedule, solve, tightest
from shardwright.stages.checkpoint.recompute.schedule import no_recompute
from shardwright.stages.checkpoint.recompute.simulate import simulate
from tests.schedules import fastest, recurrence

SIZES = {
    "some": st.integers(0, 5),
    "zero": st.just(0),
    "equal": st.just(3),
    "huge": st.integers(0, 10**12),
    "mixed": st.sampled_from((0, 1, 10**6, 10**12)),
    "broken": st.floats(0, 1e9, allow_nan=False),
}
TIMES = {
    "some": st.floats(0, 10, allow_nan=False),
    "zero": st.just(0.0),
    "equal": st.just(0.1),
    "mixed": st.sampled_from((0.0, 1e-9, 0.3, 1e3)),
}


def examples(count: int) -> settings:
    return settings(max_examples=count, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def chains(draw: st.DrawFn, most: int) -> Chain:
    """Sizes and times each of one sort; some with options and a no-grad forward of its own."""
    n = draw(st.integers(1, most))
    sizes, times = draw(st.sampled_from(sorted(SIZES))), draw(st.sampled_from(sorted(TIMES)))

    def size(count: int) -> tuple[float, ...]:
        return tuple(draw(st.lists(SIZES[sizes], min_size=count, max_size=count)))

    def time(count: int) -> tuple[float, ...]:
        return tuple(draw(st.lists(TIMES[times], min_size=count, max_size=count)))

    a = size(n + 1)
    saved = tuple(map(sum, zip(a[1:], size(n), strict=True)))
    more: tuple[tuple[Option, ...], ...] = ()
    if draw(st.booleans()):
        more = tuple(
            tuple(Option(*time(2), a[i + 1] + size(1)[0], *size(2)) for _ in range(draw(st.integers(0, 2))))
            for i in range(n)
        )
    own, early = draw(st.booleans()), draw(st.booleans())
    plain = (a, saved, time(n), time(n + 1), size(n), size(n + 1), time(n) if own else (), size(n) if own else (), more)
    last = tuple(Option(*time(2), *size(3)) for _ in range(n)) if early else ()
    return Chain(*plain, last, size(n + 1) if draw(st.booleans()) else ())


def solved(chain: Chain, slots: int, share: float) -> Table:
    """A table for a budget between the tightest and what keeping everything takes."""
    floor, top = tightest(chain, slots).memory, simulate(chain, no_recompute(chain).sequence).peak
    return solve(discretise(chain, max(1, int(floor + share * max(0, top - floor))), slots))


slots = st.integers(16, 50)
shares = st.floats(0, 1)


def tables(most: int) -> st.SearchStrategy[Table]:
    return st.builds(
        lambda chain, slots, share: solved(chain, slots + 8 * chain.length, share), chains(most), slots, shares
    )


@examples(60)
@given(tables(most=6))
def test_every_entry_is_what_the_recurrence_gives(table: Table) -> None:
    least = recurrence(table.chain)
    scale = sum(table.chain.f_none) + least(0, table.chain.length, table.memory)
    for i in range(table.chain.length + 1):
        for l in range(i, table.chain.length + 1):
            row = table.row(i, l)
            want = [least(i, l, m) for m in range(table.memory + 1)]
            assert list(row) == pytest.approx(want, rel=1e-12, abs=1e-12 * scale)
            assert [table.time(i, l, m) for m in (0, table.memory)] == [row[0], row[-1]]
            assert all(later <= earlier for earlier, later in pairwise(row))
            need = table.floors.need[i, l]
            assert next((m for m, time in enumerate(want) if time < math.inf), need) == need


@examples(40)
@given(tables(most=4))
def test_the_whole_chain_is_what_the_search_of_all_schedules_gives(table: Table) -> None:
    found = schedule(table)
    assert found.time == pytest.approx(fastest(table.chain, table.memory), rel=1e-12)


@examples(60)
@given(tables(most=7))
def test_every_step_of_the_curve_has_a_schedule_as_fast_and_as_small_as_it_says(table: Table) -> None:
    points = curve(table)
    least = table.floors.need[0, table.chain.length] + table.chain.a[0]
    assert points[0].memory == least
    assert all(a.memory < b.memory and a.time > b.time for a, b in pairwise(points))
    assert points[-1].time == schedule(table).time
    source = table.slot_chain.source
    for point in points:
        found = schedule(table, point.memory)
        outcome = simulate(source, found.sequence)
        assert found.time == point.time
        assert outcome.time == pytest.approx(point.time, rel=1e-12)
        assert outcome.peak <= point.memory * table.slot_chain.memory / table.slot_chain.slots * (1 + 1e-12)
        assert simulate(table.chain, found.sequence).peak <= point.memory


def test_a_curve_of_a_table_that_holds_nothing_is_empty() -> None:
    chain = Chain(a=(9, 9), saved=(9,), f=(1,), b=(1, 0), ft=(0,), bt=(0, 0))
    assert curve(solve(chain, 3)) == curve(solve(chain, 20)) == ()
    assert [(point.memory, point.time) for point in curve(solve(chain, 60))] == [(36, 2)]


@pytest.mark.parametrize("memory", [0, 1, WIDTH - 1, WIDTH, WIDTH + 1, 3 * WIDTH])
def test_a_table_ends_where_it_is_told_to(memory: int) -> None:
    chain = Chain(a=(1, 1, 1), saved=(2, 1), f=(1, 2), b=(1, 1, 0), ft=(0, 0), bt=(0, 0, 0))
    table = solve(chain, memory)
    assert list(table.row(0, 2)) == [recurrence(chain)(0, 2, m) for m in range(memory + 1)]
    with pytest.raises(ChainError, match="not in the table"):
        table.time(0, 2, memory + 1)


def test_a_long_chain_at_its_tightest_nests_as_deep_as_it_is_long() -> None:
    n = 120
    chain = Chain((1,) * (n + 1), (3,) * n, (1,) * n, (2,) * n + (0,), (0,) * n, (0,) * (n + 1))
    found = schedule(solve(chain, tightest(chain).memory))
    assert (found.time, len(found.sequence)) == (n * (n + 1) / 2 + 2 * n, n * (n + 1) / 2 + n + 1)
    assert simulate(chain, found.sequence).peak == tightest(chain).memory


def test_a_chain_of_no_size_fits_in_the_least_budget_there_is() -> None:
    chain = Chain(a=(0, 0), saved=(0,), f=(1,), b=(1, 0), ft=(0,), bt=(0, 0))
    assert (tightest(chain).memory, tightest(chain, 10).memory) == (0, 1)
    assert schedule(solve(discretise(chain, 1, 10))).time == 2


def test_sizes_beyond_whole_numbers_of_64_bits_are_refused() -> None:
    with pytest.raises(ChainError, match="too large"):
        tightest(Chain(a=(1, 1e30), saved=(1e30,), f=(1,), b=(1, 0), ft=(0,), bt=(0, 0)))


# --------------------------------------------------------------------------------------------------- the benchmark


PLAIN = {"fw": [1, 1], "bw": [2, 2, 0], "cw": [1, 1, 1], "cbw": [1, 3, 3], "ft": [0, 0], "bt": [0, 0, 0]}
RICH = {"ff": [1], "fft": [0], "cw": [1, 1], "options": [[[5, 5, 2, 0, 0], [1, 1, 3, 0, 0]]], "loss": [4, 0]}


def judged(path: Path, content: object) -> list[benchmark.Verdict]:
    path.write_text(json.dumps(content))
    return [verdict for group in benchmark.read(path) for verdict in benchmark.judge_group(group)]


def test_the_benchmark_finds_every_point_of_a_file_and_says_which_are_wrong(tmp_path, capsys) -> None:
    results = [{"memory": m, "exact_persistent": t} for m, t in ((6, None), (7, 7), (9, 6), (9, 5), (6, 9), (7, None))]
    cases = [{"id": "two", "chain": PLAIN, "min_feasible_memory_exact": 7, "results": results}]
    section = {"why": "options", "cases": [{"chain": RICH, "memory": m, "makespan": t} for m, t in ((5, 14), (6, 6))]}
    verdicts = judged(tmp_path / "chains.json", {"format": 1, "cases": cases, "several": section})
    assert [v.optimal for v in verdicts] == [True, True, True, False, False, False, True, True]
    assert not any(v.over_budget for v in verdicts)
    assert "cases two in 9: 6 holding 9, 5 expected" in capsys.readouterr().out


@pytest.mark.parametrize(
    "content", [{}, {"cases": [{"chain": PLAIN, "memory": 3}]}, {"cases": [{"chain": {"fw": []}, "memory": 3}]}]
)
def test_the_benchmark_refuses_a_file_without_points(tmp_path, capsys, content: object) -> None:
    path = tmp_path / "chains.json"
    path.write_text(json.dumps(content))
    assert benchmark.main(["--chains", str(path)]) == 2
    assert str(path.name) in capsys.readouterr().err
