"""The user's hand: what conf/solve asks of parameters and modules, as choices that are left.

    constraints:
      lm_head.weight: S(0) on tp       # how a parameter is stored on an axis; the other axes stay free
      "layers.*.norm*": R              # on every axis
      layers.0.attention: R on tp      # a module: its ops are not split on that axis
      "layers.*.up.weight": zero3 on dp  # zero1, zero2 or zero3: sharded by ZeRO on that axis

A name may have `*` and `?`. One that is a parameter's speaks of its storage, one that is a module's of the ops inside.
`only` leaves one way of working in parallel; `shard_only` leaves one module to be split and keeps the others whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from shardwright.pipeline.base.errors import SolveError
from shardwright.pipeline.config import Only, Solve
from shardwright.pipeline.ir.graph import OpGraph, Role
from shardwright.pipeline.ir.layout import Layout, State
from shardwright.pipeline.ir.plan import Strategy
from shardwright.stages.solve.problem.build import Choices
from shardwright.stages.solve.problem.families import Families, Parallel
from shardwright.stages.solve.problem.storage import Stored, Way

ZERO = {"zero1": Way.zero1, "zero2": Way.gathered, "zero3": Way.regathered}
ROLES = {
    Only.data: (Parallel.data,),
    Only.zero: (Parallel.data, Parallel.zero1, Parallel.zero2, Parallel.zero3),
    Only.tensor: (Parallel.tensor, Parallel.sequence),
    Only.sequence: (Parallel.sequence,),
}


@dataclass(frozen=True)
class Constraint:
    pattern: str
    text: str
    axes: tuple[int, ...]  # on which it speaks
    state: State | None
    way: Way | None  # one of ZERO's instead of a state

    def matches(self, name: str) -> bool:
        return fnmatchcase(name, self.pattern)

    def covers(self, module: str) -> bool:
        """Whether a module is the one that is named, or lies inside it."""
        parts = module.split(".")
        return any(self.matches(".".join(parts[:count])) for count in range(1, len(parts) + 1))

    def allows_stored(self, way: Stored) -> bool:
        if self.way is not None:
            return way.way is self.way and all(way.state.states[a].kind == "S" for a in self.axes)
        return all(
            _same(way.layout.states[a], self.state) and _same(way.state.states[a], self.state) for a in self.axes
        )

    def allows_strategy(self, strategy: Strategy) -> bool:
        states = [x.states[a] for x in (*strategy.inputs, *strategy.outputs) for a in self.axes]
        if self.state is not None and self.state.kind == "S":
            return all(_same(strategy.outputs[0].states[a], self.state) for a in self.axes)
        return not any(state.kind == "S" for state in states)


def _same(state: State, wanted: State | None) -> bool:
    return wanted is not None and (state.kind, state.dim, state.outer) == (wanted.kind, wanted.dim, wanted.outer)


def parse(settings: Mapping[str, str], axes: tuple[str, ...], where: str) -> tuple[Constraint, ...]:
    return tuple(_parse(pattern, text, axes, where) for pattern, text in settings.items())


def _parse(pattern: str, text: str, axes: tuple[str, ...], where: str) -> Constraint:
    what, _, axis = (part.strip() for part in text.partition(" on "))
    at = f"{where}: constraints.{pattern}"
    if axis and axis not in axes:
        raise SolveError(f"there is no axis {axis!r}", where=at, remedy=f"the mesh has {', '.join(axes)}")
    numbers = (axes.index(axis),) if axis else tuple(range(len(axes)))
    if what in ZERO:
        return Constraint(pattern, text, numbers, None, ZERO[what])
    try:
        state = State.parse(what)
    except ValueError as error:
        raise SolveError(
            f"cannot read {text!r}", where=at, remedy="write for instance 'S(0) on tp', 'R', or 'zero1 on dp'"
        ) from error
    if state.kind in "BP":
        raise SolveError(f"{what} is no way to store anything", where=at, remedy="use R, S(dim), zero1, zero2 or zero3")
    return Constraint(pattern, text, numbers, state, None)


class UserConstraints:
    """All that the user asks of one problem."""

    def __init__(self, graph: OpGraph, axes: tuple[str, ...], settings: Solve, where: str) -> None:
        self.graph, self.settings, self.where, self.axes = graph, settings, where, axes
        self.constraints = parse(settings.constraints or {}, axes, where)
        self._refuse_unknown()

    @property
    def asks(self) -> bool:
        """Whether there is anything that the user asks for."""
        return bool(self.constraints or self.settings.shard_only or self.settings.only is not Only.any)

    def _refuse_unknown(self) -> None:
        parameters = [v.origin for v in self.graph.of_role(Role.PARAMETER)]
        modules = sorted({op.module for op in self.graph.ops})
        for constraint in self.constraints:
            if not any(map(constraint.matches, parameters)) and not any(map(constraint.covers, modules)):
                self._unknown(constraint.pattern, f"constraints.{constraint.pattern}", (*parameters, *modules))
        only = self.settings.shard_only
        if only and not any(_inside(only, module) for module in modules):
            self._unknown(only, "shard_only", modules)

    def _unknown(self, pattern: str, key: str, known: Iterable[str]) -> None:
        near = get_close_matches(pattern, list(known), n=1)
        raise SolveError(
            f"no parameter or module is called {pattern!r}",
            where=f"{self.where}: {key}",
            remedy=f"did you mean {near[0]!r}?" if near else "names are those of the model's named_parameters()",
        )

    def kept(self, choices: Choices) -> tuple[tuple[int, ...], ...]:
        """Per node of the problem the choices that are left."""
        found: list[tuple[int, ...]] = [()] * len(choices.index)
        families = Families(self.graph, choices)
        self._refuse_no_sequence(families, choices)
        for name, number in choices.index.items():
            left = families.any_of(name, ROLES.get(self.settings.only, ()), len(self.axes))
            left = self._left(name, choices, left)
            if not left:
                raise self._contradiction(name, choices)
            found[number] = left
        return tuple(found)

    def _refuse_no_sequence(self, families: Families, choices: Choices) -> None:
        if self.settings.only is not Only.sequence:
            return
        for axis, (name, size) in enumerate(zip(self.axes, choices.sizes, strict=True)):
            if size > 1 and not families.splits_sequence(axis):
                raise SolveError(
                    "only: sequence: nothing between the blocks of this model can be split along the sequence in"
                    f" {size} on {name}",
                    where=self.where,
                    remedy="use `only: tensor`, or a sequence length that divides",
                )

    def forbids(self, name: str, choices: Choices, number: int) -> str | None:
        """The first setting that on its own leaves a node without that choice; None where every one allows it."""
        free = replace(self.settings, only=Only.any, constraints=None, shard_only=None)
        asked: dict[str, dict[str, Any]] = {
            f"constraints.{c.pattern}: {c.text}": {"constraints": {c.pattern: c.text}} for c in self.constraints
        }
        if self.settings.only is not Only.any:
            asked[f"only: {self.settings.only.value}"] = {"only": self.settings.only}
        if self.settings.shard_only:
            asked[f"shard_only: {self.settings.shard_only}"] = {"shard_only": self.settings.shard_only}
        families = Families(self.graph, choices)
        for setting, change in asked.items():
            alone = UserConstraints(self.graph, self.axes, replace(free, **change), self.where)
            left = families.any_of(name, ROLES.get(alone.settings.only, ()), len(self.axes))
            if number not in alone._left(name, choices, left):
                return setting
        return None

    def _left(self, name: str, choices: Choices, left: tuple[int, ...]) -> tuple[int, ...]:
        only = self.settings.shard_only
        if name in choices.storage:
            origin, ways = self.graph.values[name].origin, choices.storage[name]
            for constraint in self._of_parameter(origin):
                left = tuple(k for k in left if constraint.allows_stored(ways[k]))
            if only and not _inside(only, origin.rpartition(".")[0]):
                left = tuple(k for k in left if _whole((ways[k].layout, ways[k].state)))
        elif name in choices.ops:
            module, options = self.graph.op(name).module, choices.ops[name]
            for constraint in self._of_module(module):
                left = tuple(k for k in left if constraint.allows_strategy(options[k]))
            if only and not _inside(only, module):
                left = tuple(k for k in left if _whole((*options[k].inputs, *options[k].outputs)))
        elif name in choices.inputs and only:
            left = tuple(k for k in left if _whole((choices.inputs[name][k],)))
        return left

    def _of_parameter(self, origin: str) -> list[Constraint]:
        return [c for c in self.constraints if c.matches(origin)]

    def _of_module(self, module: str) -> list[Constraint]:
        return [c for c in self.constraints if c.way is None and c.covers(module)]

    def _contradiction(self, name: str, choices: Choices) -> SolveError:
        """The settings that leave a node without a choice."""
        if name in choices.storage:
            what = f"no way to store {self.graph.values[name].origin}"
            asked = self._of_parameter(self.graph.values[name].origin)
        else:
            op = self.graph.op(name) if name in choices.ops else None
            what = f"no way to run {name} of {op.module or 'the model'}" if op else f"no layout for the input {name}"
            asked = self._of_module(op.module) if op else []
        named = [f"constraints.{c.pattern}: {c.text}" for c in asked]
        named += [f"only: {self.settings.only.value}"] if self.settings.only is not Only.any else []
        named += [f"shard_only: {self.settings.shard_only}"] if self.settings.shard_only else []
        return SolveError(
            f"{' and '.join(named)} leave{'s' if len(named) == 1 else ''} {what}",
            where=self.where,
            remedy="drop one of them",
        )


def _inside(pattern: str, module: str) -> bool:
    parts = module.split(".")
    return any(fnmatchcase(".".join(parts[:count]), pattern) for count in range(1, len(parts) + 1))


def _whole(layouts: Iterable[Layout]) -> bool:
    return not any(state.kind == "S" for layout in layouts for state in layout.states)
