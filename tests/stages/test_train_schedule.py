"""The learning rate of a step from its number, and batches that are read ahead in their order."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.pipeline.base.errors import TrainError
from shardwright.stages.train.data import Prefetched
from shardwright.stages.train.loop import Rate, part_of_rate

CONSTANT = {"warm_up": 0, "decay": "none", "decay_steps": None, "least": 0.0}


def parts(steps: int, **schedule: object) -> list[float]:
    return [part_of_rate(CONSTANT | schedule, step, steps) for step in range(steps)]


def test_schedules_by_their_numbers() -> None:
    assert parts(3) == [1.0, 1.0, 1.0]
    assert parts(4, warm_up=2) == [0.5, 1.0, 1.0, 1.0]
    assert parts(5, decay="linear", decay_steps=4, least=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])
    assert parts(6, warm_up=2, decay="linear") == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25])
    assert parts(4, decay="cosine", decay_steps=2) == pytest.approx([1.0, 0.5, 0.0, 0.0])


@settings(deadline=None)
@given(st.integers(0, 9), st.sampled_from(["none", "linear", "cosine"]), st.integers(1, 30), st.floats(0, 1))
def test_the_rate_rises_then_falls_and_never_below_the_least(warm_up: int, decay: str, more: int, least: float) -> None:
    found = parts(50, warm_up=warm_up, decay=decay, decay_steps=warm_up + more, least=least)
    assert found[:warm_up] == sorted(found[:warm_up]) and found[warm_up] == pytest.approx(1.0)
    assert found[warm_up:] == sorted(found[warm_up:], reverse=True)
    assert min(found[warm_up:]) >= least - 1e-12
    assert found[-1] == pytest.approx(1.0 if decay == "none" else least)


@settings(deadline=None)
@given(st.integers(1, 20), st.sampled_from(["linear", "cosine"]))
def test_decays_are_those_of_torch(steps: int, decay: str) -> None:
    def built() -> torch.optim.Optimizer:
        return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)

    theirs, ours = built(), built()
    schedulers = torch.optim.lr_scheduler
    scheduler = (
        schedulers.CosineAnnealingLR(theirs, steps)
        if decay == "cosine"
        else schedulers.LinearLR(theirs, 1.0, 0.0, steps)
    )
    rate = Rate(ours, CONSTANT | {"decay": decay}, steps, "train")
    for step in range(steps):
        rate.set(step)
        assert rate.now() == pytest.approx(theirs.param_groups[0]["lr"], abs=1e-12)
        theirs.step()
        scheduler.step()


def test_groups_keep_their_ratio_and_a_tensor_stays_one() -> None:
    own, other = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    groups = [{"params": [own], "lr": torch.tensor(0.5)}, {"params": [other], "lr": 0.1}]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    rate = Rate(optimizer, CONSTANT | {"warm_up": 4}, 8, "train")
    rate.set(0)
    rate.set(1)  # of the whole rate, not of what the step before left
    assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor)
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([0.25, 0.05])


def test_an_optimizer_without_a_rate_has_no_schedule() -> None:
    class Plain(torch.optim.Optimizer):
        def __init__(self, params: list[torch.nn.Parameter]) -> None:
            super().__init__(params, {})

    optimizer = Plain([torch.nn.Parameter(torch.zeros(1))])
    assert Rate(optimizer, CONSTANT, 3, "train").now() is None
    with pytest.raises(TrainError, match="train: schedule: Plain has no learning rate"):
        Rate(optimizer, CONSTANT | {"warm_up": 1}, 3, "train")


# ---- batches that are read ahead


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), max_size=12))
def test_every_step_gets_its_own_batches_in_any_order(asked: list[int]) -> None:
    read: list[int] = []

    def reading(step: int) -> str:
        read.append(step)
        return f"batches of {step}"

    batches = Prefetched(reading, 10)
    assert [batches[step] for step in asked] == [f"batches of {step}" for step in asked]
    batches.close()
    count = len(read)
    if asked == list(range(len(asked))):
        assert read == list(range(min(10, len(asked) + 1) if asked else 0))  # each once, none after the last
    assert len(read) == count <= 2 * len(asked)


def test_the_next_step_is_read_while_this_one_runs() -> None:
    readers, next_one_is_read = [], threading.Event()

    def reading(step: int) -> int:
        readers.append(threading.current_thread().name)
        if step == 1:
            next_one_is_read.set()
        return step

    batches = Prefetched(reading, 3)
    assert batches[0] == 0
    assert next_one_is_read.wait(600)  # nobody has asked for it
    assert [batches[1], batches[2]] == [1, 2]
    batches.close()
    assert readers == [threading.current_thread().name, "prefetch", "prefetch"]


def test_data_that_draws_from_torch_itself_is_read_in_turn() -> None:
    torch.manual_seed(0)
    batches = Prefetched(lambda step: torch.rand(1).item(), 4)
    found = [(batches[step], torch.rand(1).item()) for step in range(4)]
    torch.manual_seed(0)
    assert [number for pair in found for number in pair] == [torch.rand(1).item() for _ in range(8)]


def test_an_error_of_the_data_is_raised_where_its_step_is_asked_for() -> None:
    def reading(step: int) -> int:
        if step == 2:
            raise OSError("disk is gone")
        return step

    batches = Prefetched(reading, 4)
    assert [batches[0], batches[1]] == [0, 1]
    with pytest.raises(OSError, match="disk is gone"):
        batches[2]
