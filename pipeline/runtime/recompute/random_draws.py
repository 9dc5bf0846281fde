"""Random numbers that a part of a program draws on its first run, for its second.

The default generators of the host and of the device are looked at before and after. What drew nothing, as nearly
everything does, has nothing to bring back.

While a CUDA graph is captured, the GPU's generator can be neither asked nor set. It can be given another state, which
the graph knows and the host sets before each replay. So a step is first run as it is, and `StepDraws` notes where it
sets the generator; in the capture each of these places has a state of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from shardwright.pipeline.runtime.context import setting, step

States = tuple[Tensor, int | None]  # of the host's generator, and the offset of the GPU's where there is one


class Drawn:
    """From where it is made until `end`: whether numbers were drawn, and which."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.before = self._states()
        self.after: States | None = None  # where anything was drawn

    def end(self) -> None:
        after = self._states()
        drew = not torch.equal(self.before[0], after[0]) or self.before[1] != after[1]
        if step.draws is not None and self.device.type == "cuda":
            drew = step.draws.note(drew)
        self.after = after if drew else None

    @contextmanager
    def again(self) -> Iterator[None]:
        """What runs in it draws the same numbers; after it the generators are where they were."""
        if self.after is None:
            yield
            return
        now = self._states()
        self._set(self.before)
        try:
            yield
        finally:
            self._set(now)

    def skip(self) -> None:
        """As if it were drawn once more."""
        if self.after is not None:
            self._set(self.after)

    def _states(self) -> States:
        if self.device.type != "cuda":
            return torch.get_rng_state(), None
        capturing = step.draws is not None and step.draws.captured
        return torch.get_rng_state(), 0 if capturing else generator_of(self.device).get_offset()

    def _set(self, states: States) -> None:
        torch.set_rng_state(states[0])
        if states[1] is None:
            return
        if step.draws is None or not step.draws.captured:
            generator_of(self.device).set_offset(states[1])
        if step.draws is not None:
            step.draws.jump(states[1])


class StepDraws:
    """What a step draws on a GPU, where it sets the generator, and how far it comes: by offsets from its start."""

    def __init__(self, device: torch.device) -> None:
        self.generator = generator_of(device)
        self.own = self.generator.graphsafe_get_state()  # not of the capture
        self.start, self.length = self.generator.get_offset(), 0
        self.on_host = False  # numbers are drawn on the host, too
        self.drew: list[bool] = []  # of each `Drawn`, in the order in which they end
        self.jumps: list[int] = []
        self.states: list[torch.Generator] = []  # of each jump, while the step is captured
        self.captured = False
        self._next = iter(self.drew)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Around a step as it is."""
        before = torch.get_rng_state()
        with setting(step, draws=self):
            yield
        self.length = self.generator.get_offset() - self.start
        self.on_host = not torch.equal(before, torch.get_rng_state())

    @contextmanager
    def capture(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Around the capture of the same step."""
        self.states = [self.generator.clone_state() for _ in self.jumps]
        for state in self.states:
            graph.register_generator_state(state)
        self._next, self._jumps = iter(self.drew), iter(self.states)
        self.captured = True
        try:
            with setting(step, draws=self):
                yield
        finally:
            self.captured = False
            self.generator.graphsafe_set_state(self.own)

    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        """The captured step, with the next numbers."""
        start = self.own.get_offset()
        for state, offset in zip(self.states, self.jumps, strict=True):
            state.set_offset(start + offset)
        graph.replay()
        self.own.set_offset(start + self.length)

    def note(self, drew: bool) -> bool:
        """Whether a `Drawn` that ends drew anything: while the step is captured, as it did before."""
        if self.captured:
            return next(self._next)
        self.drew.append(drew)
        return drew

    def jump(self, offset: int) -> None:
        """The generator is set: to that offset, or to the state that stands for it in the capture."""
        if self.captured:
            self.generator.graphsafe_set_state(next(self._jumps))
        else:
            self.jumps.append(offset - self.start)


def generator_of(device: torch.device) -> torch.Generator:
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]
