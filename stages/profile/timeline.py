"""The memory of a whole training step: the storages of all its links and of the optimizer on one line of time.

Forward through the chain, backward through it, optimizer. What a link writes lives until the last of those that read it
has let go of it; a gradient of an activation lives until the link that wrote the activation has gone backward;
parameters' gradients live until the step ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from shardwright.pipeline.ir.graph import OpGraph, Role
from shardwright.stages.profile.link import LinkEnds, LinkRun, ops_by_run
from shardwright.stages.profile.optimizer import OptimizerRun
from shardwright.stages.profile.symbolic import rounded

PARAMETERS, GRADIENTS, STATE = "parameters", "gradients", "optimizer state"
ACTIVATIONS, TEMPORARIES, OTHER = "activations", "temporaries", "inputs and buffers"
RESIDENT = (PARAMETERS, STATE, OTHER)  # from step to step
CLASSES = (*RESIDENT, GRADIENTS, ACTIVATIONS, TEMPORARIES)


@dataclass(slots=True)
class Life:
    """A block of memory from one kernel of the step until before another."""

    size: int
    kind: str
    module: str
    born: int
    died: int


@dataclass(frozen=True)
class StepMemory:
    resident: int
    after_forward: int
    backward_peak: int
    after_backward: int
    optimizer_peak: int
    peak: int


@dataclass(frozen=True)
class MemoryTimeline:
    """Bytes alive at each kernel of the step; the first `forward` kernels are the forward pass."""

    lives: tuple[Life, ...]
    forward: int
    backward: int
    optimizer: int

    @property
    def length(self) -> int:
        return self.forward + self.backward + self.optimizer

    def curve(self, kind: str | None = None) -> list[int]:
        """Bytes alive at each kernel, of one class or of all."""
        change = [0] * (self.length + 1)
        for life in self.lives:
            if kind is None or kind == life.kind:
                change[life.born] += life.size
                change[life.died] -= life.size
        return list(accumulate(change[:-1]))

    def alive(self, moment: int) -> Iterator[Life]:
        return (life for life in self.lives if life.born <= moment < life.died)


class Composer:
    """Lays the storages of all links on the step's line of time; `workspace` is there all the time."""

    def __init__(
        self, graph: OpGraph, runs: Sequence[LinkRun], ends: Sequence[LinkEnds], optimizer: OptimizerRun, workspace: int
    ) -> None:
        self.graph, self.runs, self.ends, self.step, self.workspace = graph, runs, ends, optimizer, workspace
        *self.forward_at, self.forward = accumulate((len(run.forward) for run in runs), initial=0)
        backward = (len(run.backward) for run in reversed(runs))
        *backward_at, self.backward_end = accumulate(backward, initial=self.forward)
        self.backward_at = backward_at[::-1]
        self.end = self.backward_end + len(optimizer.kernels)
        self.lives: list[Life] = []
        self.values: dict[str, Life | None] = {}  # activations that cross links
        self.gradients: dict[str, Life] = {}  # of those
        self.of_parameters: set[str] = set()  # whose gradient is there already: tied weights have one

    def timeline(self) -> MemoryTimeline:
        for value in self.graph.of_role(Role.PARAMETER):
            owner = value.origin.rpartition(".")[0]
            self._add(rounded(value.type.nbytes), PARAMETERS, owner, 0, self.end)
            self._add(self.step.state.get(value.name, 0), STATE, owner, 0, self.end)
        for value in (*self.graph.of_role(Role.BUFFER), *self.graph.of_role(Role.INPUT)):
            self._add(rounded(value.type.nbytes), OTHER, value.origin.rpartition(".")[0], 0, self.end)
        self._add(self.workspace, OTHER, "libraries", 0, self.end)
        known = ops_by_run(self.graph, self.runs)
        modules = [{there: self.graph.op(here).module for there, here in ops.items()} for ops in known]
        placed = [self._forward(number, modules[number]) for number in range(len(self.runs))]
        for number in reversed(range(len(self.runs))):
            self._backward(number, modules[number], placed[number])
        for storage in self.step.storages:
            died = self.end if storage.died is None else self.backward_end + storage.died
            self._add(storage.size, TEMPORARIES, "optimizer", self.backward_end + storage.born, died)
        sizes = (self.forward, self.backward_end - self.forward, self.end - self.backward_end)
        return MemoryTimeline(tuple(self.lives), *sizes)

    def _add(self, size: int, kind: str, module: str, born: int, died: int) -> Life:
        life = Life(size, kind, module, born, died)
        if size:
            self.lives.append(life)
        return life

    def _forward(self, number: int, modules: dict[str, str]) -> list[Life | None]:
        run, ends, start = self.runs[number], self.ends[number], self.forward_at[number]
        count, back = len(run.forward), self.backward_at[number]
        entered = dict(zip(run.reads, ends.reads, strict=True))
        placed: list[Life | None] = []
        for place, storage in enumerate(run.storages):
            if storage.born >= count and place not in run.reads:
                placed.append(None)  # of the backward pass
                continue
            gone = count if storage.died is None else storage.died
            kept = gone > count  # for the link's own backward
            died = back + gone - count if kept else start + min(count, gone)
            if place in entered:
                life = self.values[entered[place]]
                if life is not None:
                    life.died = max(life.died, died)
                    life.kind = ACTIVATIONS if kept else life.kind
            else:
                module = modules.get(storage.op, "")
                kind = ACTIVATIONS if kept or place in run.writes else TEMPORARIES
                life = self._add(storage.size, kind, module, start + storage.born, died)
            placed.append(life)
        for written, name in zip(run.writes, ends.writes, strict=True):
            self.values[name] = None if written is None else placed[written]
        return placed

    def _backward(self, number: int, modules: dict[str, str], placed: list[Life | None]) -> None:
        run, ends, start = self.runs[number], self.ends[number], self.backward_at[number]
        count, end = len(run.forward), start + len(run.backward)
        arrived = dict(zip(run.write_gradients, ends.writes, strict=True))
        parameters = dict(zip(run.parameter_gradients, ends.parameters, strict=True))
        leaving = dict(zip(run.read_gradients, ends.reads, strict=True))
        for place, storage in enumerate(run.storages):
            if placed[place] is not None or storage.born < count:
                continue
            if place in arrived:
                life = self.gradients.get(arrived[place])
                if life is None:  # the gradient of the loss
                    life = self._add(storage.size, TEMPORARIES, "", start, end)
                life.died = end
            else:
                died = end if storage.died is None else start + storage.died - count
                module = modules.get(storage.op, "")
                life = self._add(storage.size, TEMPORARIES, module, start + storage.born - count, died)
            placed[place] = life
            if place in parameters and parameters[place] not in self.of_parameters:
                self.of_parameters.add(parameters[place])
                life.kind, life.died = GRADIENTS, self.end
            if place in leaving and leaving[place] not in self.gradients:  # further ones are added to the first
                self.gradients[leaving[place]] = life
                life.died = self.end  # until the writer's backward says better


def summary(timeline: MemoryTimeline) -> StepMemory:
    curve = timeline.curve()
    forward, backward = timeline.forward, timeline.forward + timeline.backward
    resident = sum(life.size for life in timeline.lives if life.kind in RESIDENT and life.born == 0)
    kept = sum(life.size for life in timeline.lives if life.born < forward < life.died)
    left = (life for life in timeline.lives if life.born < backward <= life.died)
    after = sum(life.size for life in left if life.kind in (*RESIDENT, GRADIENTS))
    backward_peak = max(curve[forward:backward], default=resident)
    optimizer_peak = max(curve[backward:], default=after)
    return StepMemory(resident, kept, backward_peak, after, optimizer_peak, max(curve, default=resident))
