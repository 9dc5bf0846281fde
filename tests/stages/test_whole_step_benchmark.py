"""Whole steps by the large search, at a size that takes seconds."""

import pytest

from benchmarks import contest_search, parallel_search, whole_step
from benchmarks.step_problems import Sizes, traced
from shardwright.pipeline.ir.graph import Role
from shardwright.stages.solve.search.large import descent, presolve
from tests.clocks import Ticks

SMALL = {"width": 32, "heads": 4, "kv_heads": 2, "inner": 48, "context": 8, "batch": 8, "vocabulary": 32}


def test_a_small_step_is_planned_as_well_as_by_dynamic_programming(monkeypatch):
    """The search is given so much work, not time: other tests may have the cores."""
    search = parallel_search.search

    def counted(problem, budget, deadline, seed):
        with pytest.MonkeyPatch.context() as patch:
            clock = Ticks().in_place_of_time(patch, parallel_search, contest_search, descent, presolve)
            return search(problem, budget, clock.now + 1000, seed, workers=0)

    monkeypatch.setattr(parallel_search, "search", counted)
    monkeypatch.setattr(whole_step, "EXACT_SECONDS", 3.0)
    monkeypatch.setattr(whole_step, "OVER", 600.0)
    row = whole_step.plan("gpt", 1, 3.0, 0, **SMALL)
    assert row["met"], row
    assert row["bound_ms"] <= row["cost_ms"] * (1 + 1e-9) and row["dp_bound_ms"] <= row["cost_ms"] * (1 + 1e-9)
    assert row["left"]["choices"] < row["choices"]
    assert "gpt         1" in whole_step._line("gpt", 1, row)


def test_a_llama_is_traced_with_fewer_heads_of_keys_and_values():
    graph, profile = traced("llama", 1, Sizes(**SMALL))
    shapes = {tuple(value.type.shape) for value in graph.of_role(Role.PARAMETER)}
    assert {(32, 32), (16, 32), (48, 32)} <= shapes
    assert set(profile.ops) == {op.name for op in graph.ops}


def test_a_missed_bar_is_the_exit_status(monkeypatch, capsys):
    row = {"nodes": 2, "edges": 1, "choices": 4, "left": {"nodes": 1, "edges": 0, "choices": 2}, "trace": 1.0}
    row |= {"build": 1.0, "search": 1.0, "bound_ms": 1.0, "dp_ms": 1.0, "dp_bound_ms": 1.0}
    for cost, met in ((1.0, True), (None, False)):
        part = {"cost_ms": cost, "ratio": cost, "gap": cost, "met": met}
        monkeypatch.setattr(whole_step, "in_process", lambda *a, part=part: row | part)
        assert whole_step.main(["--layers", "1", "--families", "gpt"]) == (0 if met else 1)
        assert ("missed" in capsys.readouterr().out) is not met
