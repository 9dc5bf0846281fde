"""A partition of a pipeline as it runs: forwards of one micro-batch, a wait, its backwards; others wait meanwhile.

Links first..last run forwards as the steps of a region say; the output is sent and leaves (unless a tape holds it);
what stays, with the input, is the *hold* of the micro-batch. When its gradient comes the backwards run. The buffer of
that gradient is there from the start, as a receive is posted early. With k micro-batches in flight the partition needs

    (k - 1) * hold + peak        peak: the most that one micro-batch has while it runs, its own hold included

Where the last micro-batch of a step keeps everything, it runs beside k - 1 others, or waits while one of them runs:
`fullest` is the worst of these.

`run_partition` executes a region on the simulator and is the judge of `in_flight_dp.py`, sharing none of its formulas.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwright.stages.checkpoint.recompute.chain import Chain
from shardwright.stages.checkpoint.recompute.schedule import Keep, Nesting, flatten, forwards
from shardwright.stages.checkpoint.recompute.simulate import ExecutedOp, MemoryState, check_end, run, start


@dataclass(frozen=True)
class PartitionRun:
    """One micro-batch through a partition: seconds and bytes, the partition's input counted in both sizes."""

    forward: float
    backward: float
    hold: float
    peak: float

    @property
    def time(self) -> float:
        return self.forward + self.backward

    def memory(self, flight: int) -> float:
        """With so many micro-batches in flight."""
        return (flight - 1) * self.hold + self.peak


@dataclass(frozen=True)
class Moment:
    """One micro-batch of a partition runs, others wait: bytes of each."""

    waiting: float
    running: float
    last: bool = False  # whether it is the last of a step that runs, and keeps everything

    @property
    def memory(self) -> float:
        return self.waiting + self.running


def fullest(each: PartitionRun, last: PartitionRun | None, flight: int) -> Moment:
    """The moment at which a partition holds the most; `last` is the last micro-batch where that is run otherwise."""
    moments = [Moment((flight - 1) * each.hold, each.peak)]
    if last is not None:
        moments.append(Moment((flight - 1) * each.hold, last.peak, last=True))
    if last is not None and flight > 1:
        moments.append(Moment((flight - 2) * each.hold + last.hold, each.peak))
    return max(moments, key=lambda moment: moment.memory)


def run_partition(chain: Chain, region: Nesting, first: int, last: int) -> PartitionRun:
    """Run links first..last as the region says; the steps of the region itself are not recomputed."""
    ahead, waiting, back = _phases(chain, region, first, last)
    forward, backward = (sum(step.seconds for step in steps) for steps in (ahead, back))
    return PartitionRun(forward, backward, held(chain, waiting), max(step.held for step in (*ahead, *back)))


def worst_step(chain: Chain, region: Nesting, first: int, last: int) -> ExecutedOp:
    """The one that holds the peak of `run_partition`."""
    ahead, _, back = _phases(chain, region, first, last)
    return max((*ahead, *back), key=lambda step: step.held)


def _phases(
    chain: Chain, region: Nesting, first: int, last: int
) -> tuple[list[ExecutedOp], MemoryState, list[ExecutedOp]]:
    """Forwards, what is held between, backwards."""
    sequence = flatten(region, chain.length)
    before = len(tuple(forwards(region, chain.length)))
    state = start(chain, first, last)
    ahead = run(chain, state, sequence[:before], first)
    waiting = sent(ahead[-1].state if ahead else state, last)
    back = run(chain, waiting, sequence[before:], first)
    check_end(back[-1].state, first)
    return ahead, waiting, back


def sent(state: MemoryState, last: int) -> MemoryState:
    """The output has been sent: it leaves unless a tape holds it."""
    return replace(state, activations=state.activations - {last + 1})


def held(chain: Chain, state: MemoryState) -> float:
    """Bytes of a micro-batch that waits for its gradient."""
    return replace(state, gradient=None).bytes(chain)


def keep_all(first: int, last: int) -> Nesting:
    """Nothing recomputed."""
    return Nesting(tuple(Keep(i) for i in range(first, last + 1)))


def drop_all(first: int, last: int, loss: int) -> Nesting:
    """GPipe's way: only the input is held, everything recomputed once; the loss follows its forward at once."""
    if last < loss:
        return Nesting((keep_all(first, last),))
    return Nesting((*((keep_all(first, last - 1),) if first < last else ()), Keep(last)))
