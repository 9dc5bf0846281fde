"""Random numbers of a region's first run are those of its second; also in a CUDA graph, here with a generator that is
played: a state is an offset, which the host cannot see or set while the graph is captured."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from shardwright.pipeline.runtime.recompute import random_draws
from shardwright.pipeline.runtime.recompute.random_draws import Drawn, StepDraws

GPU = torch.device("cuda", 0)


@dataclass
class State:
    offset: int = 0
    inside: int = 0  # drawn in the capture


@dataclass
class Generator:
    """As torch has those of a GPU."""

    state: State = field(default_factory=State)
    captures: bool = False
    seen: list[tuple[State, int]] = field(default_factory=list)  # where numbers were drawn in the capture

    def get_offset(self) -> int:
        assert not self.captures, "not while a graph is captured"
        return self.state.offset

    def set_offset(self, offset: int) -> None:
        assert not self.captures, "not while a graph is captured"
        self.state.offset = offset

    def graphsafe_get_state(self) -> Generator:
        return Generator(self.state)

    def clone_state(self) -> Generator:
        return Generator(State(self.state.offset))

    def graphsafe_set_state(self, other: Generator) -> None:
        self.state = other.state

    def draw(self, count: int) -> int:
        """The place of the first."""
        if self.captures:
            self.seen.append((self.state, self.state.inside))
            self.state.inside += count
            return -1
        self.state.offset += count
        return self.state.offset - count


@dataclass
class Graph:
    generator: Generator
    known: list[State] = field(default_factory=list)
    places: list[int] = field(default_factory=list)  # of the numbers of the last replay

    def register_generator_state(self, generator: Generator) -> None:
        self.known.append(generator.state)

    def replay(self) -> None:
        states = [self.generator.state, *self.known]
        self.places = [state.offset + inside for state, inside in self.generator.seen]
        assert all(state in states for state, _ in self.generator.seen)
        for state in states:
            state.offset += state.inside


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> Generator:
    found = Generator(State(1000))
    monkeypatch.setattr(random_draws, "generator_of", lambda device: found)
    return found


def step(generator: Generator) -> list[int]:
    """Two regions that draw, one of them with a result that is kept, one that does not, and draws around them."""
    places = [generator.draw(4)]
    one = Drawn(GPU)
    places.append(generator.draw(8))
    one.end()
    quiet = Drawn(GPU)
    quiet.end()
    two = Drawn(GPU)
    places.append(generator.draw(16))
    kept = Drawn(GPU)
    places.append(generator.draw(32))
    kept.end()
    places.append(generator.draw(64))
    two.end()
    with two.again():
        places.append(generator.draw(16))
        kept.skip()
        places.append(generator.draw(64))
    with quiet.again():
        pass
    with one.again():
        places.append(generator.draw(8))
    places.append(generator.draw(128))
    return places


def test_the_second_run_draws_what_the_first_did(generator: Generator) -> None:
    places = step(generator)
    assert places == [1000, 1004, 1012, 1028, 1060, 1012, 1060, 1004, 1124] and generator.get_offset() == 1252


def test_a_captured_step_draws_what_the_step_itself_would(generator: Generator) -> None:
    draws = StepDraws(GPU)
    with draws.noted():
        step(generator)
    expected = []
    for _ in range(3):
        expected.append(step(generator))
    after = generator.get_offset()
    generator.set_offset(draws.start + draws.length)
    graph = Graph(generator)
    with draws.capture(graph):  # type: ignore[arg-type]
        generator.captures = True
        step(generator)
        generator.captures = False
    for places in expected:
        draws.replay(graph)  # type: ignore[arg-type]
        assert graph.places == places
    assert generator.get_offset() == after and not draws.on_host


def test_numbers_of_the_host_are_seen(generator: Generator) -> None:
    draws = StepDraws(GPU)
    with draws.noted():
        torch.rand(1)
    assert draws.on_host


def test_on_a_cpu() -> None:
    with torch.random.fork_rng(devices=[]):
        region = Drawn(torch.device("cpu"))
        first = torch.rand(2)
        region.end()
        now = torch.get_rng_state()
        with region.again():
            assert torch.equal(torch.rand(2), first)
        assert torch.equal(torch.get_rng_state(), now)
        torch.rand(5)
        region.skip()
        assert torch.equal(torch.get_rng_state(), now)
