"""Clocks of the tests' own: what is judged does not depend on how busy the machine is."""

from __future__ import annotations

from types import ModuleType

import pytest


class Ticks:
    """Stands for the module `time`: goes on by one tick whenever it is looked at, so that time is a count of work."""

    def __init__(self, tick: float = 1.0) -> None:
        self.now, self.tick = 0.0, tick

    def monotonic(self) -> float:
        self.now += self.tick
        return self.now

    def in_place_of_time(self, monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> Ticks:
        for module in modules:
            monkeypatch.setattr(module, "time", self)
        return self
