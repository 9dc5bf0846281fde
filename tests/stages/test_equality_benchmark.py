"""benchmarks.equality: its plans are what they are called, and its ranks survive a program that fails."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.equality_models import GPT
from benchmarks.equality_plans import BOTH, NAMES, VOCABULARY, cases, random_cases
from benchmarks.equality_ranks import Group
from pipeline.cost.conversions import TABLE
from pipeline.ir.layout import Layout
from pipeline.lowering import lower


def test_random_plans_use_every_conversion_and_recompute() -> None:
    found = list(random_cases(12, [(2,), (2, 2)]))
    assert {case.sizes for case in found} == {(2,), (2, 2)}
    converted = set()
    for case in found[::2]:
        program = lower(case.graph, case.plan.sharding, case.plan.micro_batches)
        pairs = (f"{c.source.layout}{c.target.layout}" for c in program.conversions())
        converted |= {"".join(letter for letter in pair if letter in "RBSP") for pair in pairs}
    assert converted >= set(TABLE) - {"BP"}
    assert any(region.recompute for case in found for region in case.plan.regions)
    assert {case.plan.micro_batches for case in found} == {1, 2}
    assert any(case.plan.sharding.regathered for case in found) and any(case.plan.sharding.state for case in found)
    again = list(random_cases(12, [(2,), (2, 2)]))
    assert [case.text for case in again] == [case.text for case in found]


def test_plans_have_their_names() -> None:
    """Each with and without recompute; a mesh of two axes just where there are ranks for it."""
    found = {case.name: case for case in cases(GPT, 4, tuple(name for name in NAMES if name != VOCABULARY))}
    assert len(found) == 2 * (len(NAMES) - 1)
    assert found[BOTH].sizes == (2, 2) and found["ddp"].sizes == (4,)
    stored = {name: set(map(str, case.plan.sharding.storage.values())) for name, case in found.items()}
    assert stored["ddp"] == stored["zero1"] == {"R"} and "R" not in stored["zero3"]
    assert set(map(str, found["zero1"].plan.sharding.state.values())) <= {"S(0)", "S(1)"}
    assert found["zero3"].plan.sharding.regathered and not found["ddp"].plan.sharding.regathered
    assert all(("recompute(" in case.text) == ("recompute" in name) for name, case in found.items() if name != "solver")


def test_a_vocabulary_is_split() -> None:
    pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    plain, _ = cases("opt", 2, (VOCABULARY,))
    assert plain.plan.sharding.storage["model.decoder.embed_tokens.weight"] == Layout.parse("S(0)")
    assert "row_split_embedding(" in plain.text and "class_split_cross_entropy(" in plain.text


def test_ranks_judge_and_go_on_after_a_failure() -> None:
    right, other = random_cases(2, [(2,)])
    scaled = replace(right, text=right.text.replace("F.gelu(", "0.99 * F.gelu("))
    failing = replace(right, text=right.text.replace("F.gelu(", "no_such("))
    with Group(2) as group:
        found = [answer for _, answer in group.judge(iter([right, scaled, failing, other]))]
    assert found[0]["worst"] < 1e-3 and found[3]["worst"] < 1e-3
    assert found[1]["worst"] > 1e3 and found[1]["fault"]["target"].startswith("aten.gelu")
    assert found[2]["error"].startswith("NameError") and "no_such" in found[2]["details"]
