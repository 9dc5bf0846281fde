"""What a user may write as an optimizer, and the one line for what cannot be used as one."""

from __future__ import annotations

import pytest
import torch

from shardwright.pipeline.base.instantiate import TargetError
from shardwright.pipeline.user.optimizer import (
    build_optimizer,
    refuse_mixing,
    refuse_moving_zeros,
    try_optimizer,
    updates_elements,
)

WHERE = "conf/train/x.yaml: optimizer"


class Forgetful(torch.optim.SGD):
    """A step with arguments of its own, none of which must be given."""

    def step(self, closure=None, *more, scale=1.0, **named):
        return super().step()


class Stubborn(torch.optim.SGD):
    def step(self, closure=None, *, scale):
        return super().step()


@pytest.mark.parametrize(
    "settings",
    [
        {"_target_": "torch.optim.AdamW", "lr": 1e-3, "betas": [0.8, 0.9]},
        {"_target_": "torch.optim.SGD", "lr": 0.1},
        {"_target_": "torch.optim.Adafactor"},
        {"_target_": f"{__name__}.Forgetful", "lr": 0.1},
    ],
)
def test_an_optimizer_takes_its_step(settings):
    optimizer, parameter = try_optimizer(settings, WHERE)
    assert isinstance(optimizer, torch.optim.Optimizer) and not torch.equal(parameter, torch.ones(8, 8))


MISTAKES = {
    "no optimizer": (
        {"_target_": "builtins.list"},
        f"{WHERE}._target_: builtins.list gives a list, which is no torch.optim.Optimizer; name an optimizer",
    ),
    "a module": ({"_target_": "torch.nn.ParameterList"}, "gives a ParameterList, which is no torch.optim.Optimizer"),
    "needs a closure": (
        {"_target_": "torch.optim.LBFGS"},
        f"{WHERE}._target_: the step of torch.optim.LBFGS needs a closure",
    ),
    "needs something else": ({"_target_": f"{__name__}.Stubborn"}, "needs a closure"),
    "unknown argument": (
        {"_target_": "torch.optim.SGD", "learning_rate": 1},
        f"{WHERE}.learning_rate: torch.optim.SGD takes no such argument; it takes: lr, ",
    ),
    "argument out of range": (
        {"_target_": "torch.optim.SGD", "lr": -1},
        f"{WHERE}: torch.optim.SGD refused its arguments: ValueError: Invalid learning rate",
    ),
    "text for a number": (
        {"_target_": "torch.optim.AdamW", "lr": "fast"},
        f"{WHERE}.lr: got 'fast', and torch.optim.AdamW takes a number",
    ),
    "wants sparse gradients": (
        {"_target_": "torch.optim.SparseAdam"},
        f"{WHERE}: torch.optim.SparseAdam cannot take a step: RuntimeError",
    ),
    "not there": ({"_target_": "torch.optim.AdamX"}, f"{WHERE}: 'torch.optim.AdamX' cannot be found"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_with_a_remedy(name):
    settings, told = MISTAKES[name]
    with pytest.raises(TargetError) as refusal:
        try_optimizer(settings, WHERE)
    line = refusal.value.line()
    assert told in line and "\n" not in line and (refusal.value.remedy or "takes a number" in line)


@pytest.mark.parametrize("name", ["no optimizer", "needs a closure", "unknown argument"])
def test_a_rank_refuses_it_too(name):
    """Which builds it for its own parameters, without a trial."""
    settings, told = MISTAKES[name]
    with pytest.raises(TargetError) as refusal:
        build_optimizer(settings, WHERE, [torch.nn.Parameter(torch.ones(2))])
    assert told in refusal.value.line()


BY_ELEMENT = ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
FUSED = ("Adagrad", "Adam", "AdamW", "SGD")


class Normed(torch.optim.SGD):
    """Scales all gradients by their norm."""

    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        return super().step()


@pytest.mark.parametrize(
    ("name", "how"), [*((name, "foreach") for name in BY_ELEMENT), *((name, "fused") for name in FUSED)]
)
def test_optimizers_that_are_the_same_on_shards(name, how):
    settings = {"_target_": f"torch.optim.{name}", "lr": 0.1}
    assert updates_elements(settings, WHERE) and updates_elements(settings | {how: True}, WHERE)


@pytest.mark.parametrize("target", ["torch.optim.Adafactor", "torch.optim.Muon", f"{__name__}.Normed"])
def test_optimizers_that_look_at_whole_tensors_are_refused_on_shards(target):
    state = torch.get_rng_state()
    with pytest.raises(TargetError) as refusal:
        refuse_mixing({"_target_": target, "lr": 0.1}, WHERE, "head.weight")
    assert f"{WHERE}._target_: {target} looks at whole tensors, and the plan splits that of head.weight" in (
        refusal.value.line()
    )
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", ["AdamW", "Adagrad", "RMSprop", "Rprop", "SGD", "NAdam", "Adadelta"])
def test_padding_stays_as_it_is(name: str) -> None:
    refuse_moving_zeros({"_target_": f"torch.optim.{name}", "lr": 0.1}, WHERE, "head.weight")


def test_an_optimizer_that_changes_padding_is_refused() -> None:
    with pytest.raises(TargetError, match=r"changes zeros that have no gradient, and the plan pads head.weight"):
        refuse_moving_zeros({"_target_": "torch.optim.Adam", "lr": 0.1, "eps": 0.0}, WHERE, "head.weight")


def test_an_optimizer_for_gpus_is_tried_without_one() -> None:
    """Its step on a CPU is refused by torch: as that of one that must be captured into a CUDA graph."""
    settings = {"_target_": "torch.optim.AdamW", "lr": 0.1, "capturable": True}
    with pytest.raises(TargetError, match="cannot take a step"):
        try_optimizer(settings, WHERE)
    optimizer, parameter = try_optimizer(settings, WHERE, "cuda")
    assert {"exp_avg", "exp_avg_sq"} <= set(optimizer.state[parameter])
    with pytest.raises(TargetError, match="closure"):
        try_optimizer({"_target_": "torch.optim.LBFGS"}, WHERE, "cuda")
