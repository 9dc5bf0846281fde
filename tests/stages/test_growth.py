"""Whether a loss is a mean or a sum over samples, told from two graphs; against the loss of repeated samples."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.stages.codegen.growth import STAYS, UNKNOWN, loss_growth
from tests.graphs import trace

Loss = Callable[[Tensor, Tensor], Tensor]
SAMPLES, FEWER = 8, 2

MEANS: dict[str, Loss] = {
    "mean": lambda y, x: F.mse_loss(y, x),
    "sum by the number of samples": lambda y, x: ((y - x) ** 2).sum() / len(x),
    "sum by the number of values": lambda y, x: F.mse_loss(y, x, reduction="none").flatten().sum() / x.numel(),
    "sum by a count": lambda y, x: ((y - x) ** 2).sum((0, 1)) / (x > 0).sum(),
    "sum times a fraction": lambda y, x: torch.mul((y - x).abs().sum(), other=1 / (3 * len(x))),
    "sum of features": lambda y, x: y.pow(2).sum(1).mean() + 1,
    "batchmean": lambda y, x: F.kl_div(y.log_softmax(1), x.softmax(1), reduction="batchmean"),
    "cross entropy": lambda y, x: F.cross_entropy(y, x.argmax(1)),
    "sum and a count by a count": lambda y, x: ((y - x) ** 2).sum().add(len(x)) / len(x),
    "sum of losses in a list": lambda y, x: sum([F.mse_loss(y, x), y.abs().mean()]),
    "sum times a fraction that is added": lambda y, x: torch.add(y.abs().mean(), x.sum(), alpha=1 / len(x)),
}
SUMS: dict[str, Loss] = {
    "sum": lambda y, x: F.mse_loss(y, x, reduction="sum"),
    "sum by a fixed number": lambda y, x: ((y - x) ** 2).sum() / 8.0,
    "sum of classes": lambda y, x: 2 * F.cross_entropy(y, x.argmax(1), reduction="sum"),
    "sum of losses": lambda y, x: F.cross_entropy(y, x.argmax(1), reduction="none").sum(),
    "huber": lambda y, x: -F.huber_loss(y, x, reduction="sum"),
}
BOTH: dict[str, Loss] = {
    "mean and sum": lambda y, x: F.mse_loss(y, x) + 0.1 * y.abs().sum(),
    "stacked": lambda y, x: torch.stack([y.sum(), x.mean()]).sum(),
    "sum and a number": lambda y, x: y.abs().sum() + 3,
    "sum less a number": lambda y, x: y.abs().sum() - 0.5,
    "mean and a count": lambda y, x: F.mse_loss(y, x) + 0.1 * len(x),
}
# Of the number that is added the mean has less with more samples.
FALLING: dict[str, Loss] = {
    "sum and a number by a count": lambda y, x: (((y - x) ** 2).sum() + 3) / len(x),
    "mean and a fraction": lambda y, x: F.mse_loss(y, x) + 1 / len(x),
}
NOT_TOLD: dict[str, Loss] = {
    "over samples by a product": lambda y, x: (y.T @ x).sum(),
    "norm": lambda y, x: y.norm(),
    "not a number": lambda y, x: y.sum() / (float("nan") if len(x) == SAMPLES else 1.0),
}


class Model(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.first, self.loss = nn.Linear(4, 4), loss

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.first(x), x)


def growth(loss: Loss) -> frozenset[int]:
    larger, smaller = (trace(Model(loss), {"x": torch.rand(count, 4)}) for count in (SAMPLES, FEWER))
    return loss_growth(larger, smaller)


def repeated(loss: Loss) -> float:
    """How many times the loss it is when each sample is there four times."""
    x = torch.rand(FEWER, 4, dtype=torch.float64)
    model = Model(loss).double()
    with torch.no_grad():
        return float(model(x.repeat(SAMPLES // FEWER, 1)) / model(x))


@pytest.mark.parametrize("loss", MEANS.values(), ids=MEANS)
def test_means_stay(loss: Loss) -> None:
    assert growth(loss) == STAYS and repeated(loss) == pytest.approx(1)


@pytest.mark.parametrize("loss", SUMS.values(), ids=SUMS)
def test_sums_grow(loss: Loss) -> None:
    assert growth(loss) == {1} and repeated(loss) == pytest.approx(SAMPLES / FEWER)


@pytest.mark.parametrize("loss", BOTH.values(), ids=BOTH)
def test_terms_that_differ_are_told(loss: Loss) -> None:
    assert growth(loss) == {0, 1}


@pytest.mark.parametrize("loss", FALLING.values(), ids=FALLING)
def test_a_number_that_is_added_is_a_term(loss: Loss) -> None:
    assert growth(loss) == {0, -1} and 1 / (SAMPLES / FEWER) < repeated(loss) < 1


@pytest.mark.parametrize("loss", NOT_TOLD.values(), ids=NOT_TOLD)
def test_what_takes_samples_together_is_not_known(loss: Loss) -> None:
    assert growth(loss) == UNKNOWN
