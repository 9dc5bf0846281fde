"""What a user may write as an optimizer, and the one line for what cannot be used as one."""

from __future__ import annotations

import pytest
import torch

from pipeline.instantiate import TargetError
from pipeline.optimizer import build_optimizer, try_optimizer

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
        f"{WHERE}: torch.optim.SGD refused its arguments: TypeError",
    ),
    "argument out of range": (
        {"_target_": "torch.optim.SGD", "lr": -1},
        f"{WHERE}: torch.optim.SGD refused its arguments: ValueError: Invalid learning rate",
    ),
    "text for a number": (
        {"_target_": "torch.optim.AdamW", "lr": "fast"},
        f"{WHERE}: torch.optim.AdamW refused its arguments: TypeError",
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
    assert told in line and "\n" not in line and refusal.value.remedy


@pytest.mark.parametrize("name", ["no optimizer", "needs a closure", "unknown argument"])
def test_a_rank_refuses_it_too(name):
    """Which builds it for its own parameters, without a trial."""
    settings, told = MISTAKES[name]
    with pytest.raises(TargetError) as refusal:
        build_optimizer(settings, WHERE, [torch.nn.Parameter(torch.ones(2))])
    assert told in refusal.value.line()
