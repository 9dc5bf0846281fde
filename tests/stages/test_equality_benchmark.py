"""benchmarks.equality: its plans are what they are called, and its ranks survive a program that fails."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks import equality
from benchmarks.equality_models import GPT, ODD
from benchmarks.equality_plans import BOTH, NAMES, SOLVER, VOCABULARY, Case, Skipped, cases, random_cases
from benchmarks.equality_ranks import Group
from shardwright.pipeline.ir.layout import Layout
from shardwright.pipeline.sharding.conversions import TABLE
from shardwright.pipeline.sharding.lowering import lower


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


# No sequence; 10 patches on three ranks.
IMPOSSIBLE = {("resnet", 2): {"sequence"}, ("vit", 3): {"sequence"}}


@pytest.mark.parametrize(("model", "ranks"), [("gpt2", 2), ("t5", 2), ("mixtral", 2), ("resnet", 2), ("vit", 3)])
def test_a_family_has_every_kind_of_plan(model: str, ranks: int) -> None:
    """But those that are named here; and a split sequence is one, not tensor parallelism by another name.

    A sample: the benchmark runs every family.
    """
    pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    found = list(cases(model, ranks, tuple(name for name in NAMES if name != SOLVER)))
    skipped = {case.name: case.why for case in found if isinstance(case, Skipped)}
    assert set(skipped) == {BOTH} | IMPOSSIBLE.get((model, ranks), set())
    assert skipped[BOTH] == f"{ranks} ranks are no mesh of two axes"
    plans = {case.name: case for case in found if isinstance(case, Case)}
    assert {name for name in plans if "recompute" not in name} == set(NAMES) - {SOLVER} - set(skipped)
    if "sequence" in skipped:
        assert skipped["sequence"] == f"nothing between the blocks can be split so on {ranks} ranks"
        return
    text = plans["sequence"].text
    assert text != plans["tensor"].text
    assert " reduce_scatter(" in text and " all_gather(" in text
    assert " all_reduce(" not in text


@pytest.mark.parametrize(
    ("model", "call"), [("bags", "F.embedding_bag("), ("lstm", "torch.lstm("), ("gru", "torch.gru(")]
)
def test_bags_and_recurrent_layers_are_split_by_samples(model: str, call: str) -> None:
    """Not run whole on every rank."""
    plain = next(iter(cases(model, 2, ("ddp",))))
    after = plain.text[plain.text.index(call) :].splitlines()
    (layout,) = [line for line in after if "  # " in line][:1]
    assert layout.endswith(("# S(0) [6, 48]", "# S(0) [6, 12, 48]", "# S(1) [12, 6, 96]"))


def test_what_is_skipped_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    asked = ["--models", "resnet", "--ranks", "2", "--plans", "sequence", "--random", "1"]
    assert equality.main(asked) == 0
    lines = capsys.readouterr().out.splitlines()
    (said,) = (line for line in lines if "skipped: " in line)
    assert said.startswith("resnet, 2, sequence ") and said.endswith(
        "nothing between the blocks can be split so on 2 ranks"
    )
    assert lines[-2].endswith("; 1 plans skipped")
    last = json.loads(lines[-1])
    assert (last["cases"], last["equal"]) == (1, 1) and set(last) == {"cases", "equal", "worst"}


def test_a_vocabulary_is_split() -> None:
    pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    plain, _ = cases("opt", 2, (VOCABULARY,))
    assert plain.plan.sharding.storage["model.decoder.embed_tokens.weight"] == Layout.parse("S(0)")
    assert "row_split_embedding(" in plain.text and "class_split_cross_entropy(" in plain.text


def test_a_vocabulary_of_97_words_is_split() -> None:
    plain, _ = cases(ODD, 2, (VOCABULARY,))
    assert plain.plan.sharding.storage["token.weight"] == Layout.parse("S(0)")
    assert "row_split_embedding(" in plain.text and "classes=97)" in plain.text


def test_ranks_judge_and_go_on_after_a_failure() -> None:
    right, other = random_cases(2, [(2,)])
    scaled = replace(right, text=right.text.replace("F.gelu(", "0.99 * F.gelu("))
    failing = replace(right, text=right.text.replace("F.gelu(", "no_such("))
    with Group(2) as group:
        found = [answer for _, answer in group.judge(iter([right, scaled, failing, other]))]
    assert found[0]["worst"] < 1e-3 and found[3]["worst"] < 1e-3
    assert found[1]["worst"] > 1e3 and found[1]["fault"]["target"].startswith("aten.gelu")
    assert found[2]["error"].startswith("NameError") and "no_such" in found[2]["details"]
