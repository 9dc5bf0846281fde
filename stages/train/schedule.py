"""The learning rate of every step, from its number alone: nothing to keep, and a resumed run goes on where it was."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pipeline.base.errors import TrainError


def part_of_rate(schedule: Mapping[str, Any], step: int, steps: int) -> float:
    """The part of the optimizer's rate that this step takes.

    It rises evenly over `warm_up` steps, whole with the last of them, then falls to `least` at step `until`.
    """
    warm_up, least = schedule["warm_up"], schedule["least"]
    if step < warm_up:
        return float((step + 1) / warm_up)
    if schedule["decay"] == "none":
        return 1.0
    until = schedule["until"] or steps
    gone = min(1.0, (step - warm_up) / (until - warm_up))
    left = 1 - gone if schedule["decay"] == "linear" else (1 + math.cos(math.pi * gone)) / 2
    return float(least + (1 - least) * left)


class Rate:
    """Sets the rates of an optimizer's groups of parameters, each a part of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: Mapping[str, Any], steps: int, where: str) -> None:
        self.groups, self.schedule, self.steps = optimizer.param_groups, schedule, steps
        self.moves = schedule["warm_up"] > 0 or schedule["decay"] != "none"
        self.whole = [float(group["lr"]) for group in self.groups if "lr" in group]
        if self.moves and len(self.whole) < len(self.groups):
            raise TrainError(
                f"{type(optimizer).__name__} has no learning rate `lr`",
                where=f"{where}: schedule",
                remedy="leave `schedule` out, or name another optimizer",
            )

    def set(self, step: int) -> None:
        if not self.moves:
            return
        part = part_of_rate(self.schedule, step, self.steps)
        for group, whole in zip(self.groups, self.whole, strict=True):
            if isinstance(group["lr"], Tensor):  # as optimizers that are captured in graphs want it
                group["lr"].fill_(whole * part)
            else:
                group["lr"] = whole * part

    def now(self) -> float | None:
        """Of the first group; an optimizer may have none."""
        return float(self.groups[0]["lr"]) if self.whole else None
