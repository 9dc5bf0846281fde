"""The overhead benchmark: how steps are paired and judged, the programs it plans, and that both sides do the same."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benchmarks import overhead, overhead_steps
from benchmarks.overhead import NEAR, PEERS, Row
from benchmarks.overhead_models import ONE_RANK, TWO_RANKS, batch_two, build_two
from benchmarks.overhead_plans import FAMILIES, two_ranks
from benchmarks.overhead_steps import (
    Compared,
    compare,
    ddp_step,
    fsdp_step,
    middle,
    our_step,
    plain_step,
    tensor_step,
)
from shardwright.pipeline.runtime.programs.source import load_program
from tests.ranks import run_ranks

TINY = {"vocab_size": 16, "context": 4, "width": 8, "layers": 2, "heads": 2, "batch": 4}
STEPS = 3


# ------------------------------------------------------------------------------------------------------------- pairs


def clocked(seconds: dict[str, list[float]], order: list[str]) -> Callable[[Callable[[], Tensor]], tuple[float, float]]:
    """Stands for `timed`: each step takes what it is said to."""

    def timed(step: Callable[[], Tensor]) -> tuple[float, float]:
        name = "ours" if float(step()) else "theirs"
        order.append(name)
        return seconds[name].pop(0), {"ours": 2.0, "theirs": 2.001}[name]

    return timed


def test_pairs_are_adjacent_and_take_turns_to_begin() -> None:
    order: list[str] = []
    seconds = {"ours": [9.0, 1.0, 2.0, 4.0, 1.0], "theirs": [9.0, 2.0, 4.0, 2.0, 2.0]}
    with mock.patch.object(overhead_steps, "timed", clocked(seconds, order)):
        found = compare(lambda: torch.ones(()), lambda: torch.zeros(()), pairs=4, warm_up=1)
    assert [order[n : n + 2] for n in range(0, 10, 2)] == [["theirs", "ours"], ["ours", "theirs"]] * 2 + [
        ["theirs", "ours"]
    ]
    assert found.ratio == 0.5, "the median of the pairs' ratios, the first pair left out"
    assert (found.ours_ms, found.theirs_ms) == (1500.0, 2000.0)
    assert found.losses == (2.0, 2.001) and found.differ == pytest.approx(0.001 / 2.001)


@given(st.lists(st.floats(0.5, 2.0), min_size=4, max_size=40))
def test_noise_is_that_of_the_middle(ratios: list[float]) -> None:
    ratio, noise = middle(ratios)
    assert min(ratios) <= ratio <= max(ratios) and noise >= 0
    assert middle([ratios[0]] * len(ratios)) == (pytest.approx(ratios[0]), pytest.approx(0.0))


@pytest.mark.parametrize(
    ("ratio", "noise", "differ", "met"),
    [(0.99, 0.0, 0.0, True), (1.02, 0.03, 0.0, True), (1.02, 0.01, 0.0, False), (0.5, 0.0, 2 * NEAR, False)],
)
def test_a_bar_is_met_within_the_noise_and_with_equal_losses(ratio, noise, differ, met) -> None:
    row = Row("x", 1.0, Compared(1.0, 1.0, ratio, noise, (1.0, 1.0), differ))
    assert row.met is met


def test_the_last_line_has_the_ratios_by_name(capsys, tmp_path: Path) -> None:
    fast, slow = (Compared(1.0, 1.0, ratio, 0.01, (1.0, 1.0), 0.0) for ratio in (0.5, 1.5))
    rows = {"one_rank": [Row("gpt2", 1.0, fast)], "two_ranks": [Row("ddp_small", 1.0, slow)]}
    with (
        mock.patch.multiple(overhead, **{name: mock.Mock(return_value=found) for name, found in rows.items()}),
        mock.patch.multiple(overhead, logging=mock.DEFAULT, warnings=mock.DEFAULT, torch=mock.DEFAULT),
        mock.patch("sys.argv", ["overhead", "--only", "measure", "--folder", str(tmp_path)]),
    ):
        assert overhead.main() == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"gpt2": 0.5, "ddp_small": 1.5}


# ---------------------------------------------------------------------------------------------------------- programs


def test_what_is_planned_is_what_is_measured() -> None:
    assert {peer.family for peer in PEERS.values()} == set(FAMILIES)
    assert all("batch" in model for model in ONE_RANK.values()) and TWO_RANKS


@pytest.fixture(scope="module")
def programs(tmp_path_factory) -> Path:
    folder: Path = tmp_path_factory.mktemp("overhead")
    for family in FAMILIES:
        (folder / f"{family}.py").write_text(two_ranks(TINY, family))
    return folder


def test_programs_are_of_their_family(programs: Path) -> None:
    texts = {family: (programs / f"{family}.py").read_text() for family in FAMILIES}
    stored = {family: ast.literal_eval(_assigned(text, "PARAMETERS")) for family, text in texts.items()}
    assert set(stored["ddp"].values()) == {("R", "d0", "R")}
    assert {row[0] for row in stored["zero3"].values()} == {"S(0)"} and "regather_together(" in texts["zero3"]
    assert stored["tensor"]["layers.*.up.weight"][0] == "S(0)" and stored["tensor"]["layers.*.down.weight"][0] == "S(1)"
    assert "all_gather" not in texts["ddp"], "nothing but gradients and the loss goes over the wire"


def _assigned(text: str, name: str) -> str:
    found = [node for node in ast.parse(text).body if isinstance(node, ast.Assign)]
    return next(ast.unparse(node.value) for node in found if node.targets[0].id == name)


def losses_of(folder: str) -> dict[str, list[list[float]]]:
    """On a rank: the losses of ours, of the peer and of the plain module on the whole batch, step by step."""
    model, batch = build_two(TINY), batch_two(TINY)
    makers = {"ddp": ddp_step, "zero3": fsdp_step, "tensor": tensor_step}
    found = {}
    for family, peer in makers.items():
        plain = build_two(TINY)
        steps = [
            our_step(load_program(f"{folder}/{family}.py"), model, batch),
            peer(model, batch),
            plain_step(plain, plain.parameters(), batch),
        ]
        found[family] = [[overhead_steps.timed(step)[1] for _ in range(STEPS)] for step in steps]
    return found


def test_both_sides_train_alike(programs: Path) -> None:
    for found in run_ranks(2, losses_of, str(programs)):
        for ours, theirs, plain in found.values():
            assert ours == pytest.approx(plain, rel=1e-5) and theirs == pytest.approx(plain, rel=1e-5)
            assert len(set(plain)) == STEPS, "it learns"
