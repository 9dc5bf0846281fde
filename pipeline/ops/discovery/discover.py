"""Strategies of an op that has no rule, found by trying: split random tensors, run the op on the shards, compare.

The op runs on small tensors (trial.py). What each input holds forward (the whole, a shard of a dim, a summand) is tried
in all combinations; what the outputs then hold, and how the gradients come back, decides the states. A strategy counts
when outputs and all gradients are right on two and on three ranks. Ops that are random, change their inputs, depend on
values or fail have none: they run replicated.

An op may do anything with such tensors, indices that point nowhere among them: it is tried in a child process. One that
crashes it, or does not come back, has no strategies.

What is found is kept by the op's signature, in memory and, once `remember_in` named a folder, as JSON for later runs.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shardwright.pipeline.base.files import write_atomic
from shardwright.pipeline.ir.graph import Arg, Ref
from shardwright.pipeline.ir.layout import B, Layout, P, R, S, State
from shardwright.pipeline.ir.plan import Strategy
from shardwright.pipeline.ops.discovery import remembered, shards
from shardwright.pipeline.ops.discovery.child import attempt
from shardwright.pipeline.ops.discovery.trial import (
    Trial,
    can_be_tried,
    integers,
    is_finite,
    is_triable,
    shrunk_in_order,
    small_trial,
)
from shardwright.pipeline.ops.rule import OpView

NAME = "discovered"
SEARCH = 2  # of the way to search: what another one found is not read
RANKS = (2, 3)
MOST_TRIALS = 3000  # combinations of input states


@dataclass(frozen=True)
class FoundStrategy:
    """A state for each input and each output."""

    inputs: tuple[State, ...]
    outputs: tuple[State, ...]


# ---- for the planner

_known: dict[str, tuple[FoundStrategy, ...]] = {}


def discovered(view: OpView, size: int) -> tuple[Strategy, ...]:
    """The strategies that were found for an op, where the op's own sizes divide by that many ranks."""
    found = []
    tensors = (*view.inputs, *view.outputs)
    for number, one in enumerate(find(view)):
        states = (*one.inputs, *one.outputs)
        if all(s.kind != "S" or shards.splits(s, t.shape, size) for s, t in zip(states, tensors, strict=True)):
            inputs, outputs = (tuple(Layout((s,)) for s in side) for side in (one.inputs, one.outputs))
            found.append(Strategy(f"{NAME} {number}", inputs, outputs))
    return tuple(found)


def find(view: OpView) -> tuple[FoundStrategy, ...]:
    """What holds for the op, from memory, from the folder, or by search."""
    key = _signature(view)
    if key not in _known:
        folder = remembered.folder()
        place = folder / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json" if folder else None
        kept = _read(place, key) if place else None
        if kept is not None and not all(_fits(one, view) for one in kept):
            kept = None
        found, certain = (kept, True) if kept is not None else search(view)
        _known[key] = found
        if place and kept is None and certain:
            _write(place, key, found)
    return _known[key]


def _signature(view: OpView) -> str:
    """Equal for ops that shrink to the same trial: by their own sizes where a constant might name one of them."""
    tensors = (*view.inputs, *view.outputs)
    sizes = shrunk_in_order(tensors)
    constants = integers((view.op.args.positional, *(v for _, v in view.op.args.named)))
    named = any(n > 1 and n in sizes for n in constants)
    shapes = [list(t.shape) if named else [sizes[n] for n in t.shape] for t in tensors]
    kinds = [t.dtype for t in tensors]
    numbers = itertools.count()  # of tensors: their names differ from layer to layer

    def plain(arg: Arg) -> object:
        if isinstance(arg, Ref):
            return f"tensor {next(numbers)}"
        return [plain(a) for a in arg] if isinstance(arg, tuple) else repr(arg)

    arguments = json.dumps([plain(view.op.args.positional), {k: plain(v) for k, v in view.op.args.named}])
    return json.dumps([SEARCH, view.op.target, torch.__version__, shapes, kinds, list(view.input_grads), arguments])


def _read(place: Path, key: str) -> tuple[FoundStrategy, ...] | None:
    """What an earlier run kept; a file that cannot be read is as good as none."""
    try:
        data = json.loads(place.read_text())
        return _parse(data["found"]) if data["signature"] == key else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _fits(one: FoundStrategy, view: OpView) -> bool:
    """A state for each tensor, of a dim that it has: the file may come from anywhere."""
    if (len(one.inputs), len(one.outputs)) != (len(view.inputs), len(view.outputs)):
        return False
    tensors = zip((*one.inputs, *one.outputs), (*view.inputs, *view.outputs), strict=True)
    return all(state.kind != "S" or state.dim < len(tensor.shape) for state, tensor in tensors)


def _write(place: Path, key: str, found: tuple[FoundStrategy, ...]) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(place, json.dumps({"signature": key, "found": _plain(found)}, indent=1).encode())


def _plain(found: tuple[FoundStrategy, ...]) -> list[list[list[str]]]:
    return [[[str(s) for s in one.inputs], [str(s) for s in one.outputs]] for one in found]


def _parse(plain: list[list[list[str]]]) -> tuple[FoundStrategy, ...]:
    sides = [tuple(tuple(State.parse(s) for s in side) for side in one) for one in plain]
    return tuple(FoundStrategy(*one) for one in sides)


# ---- the search


def search(view: OpView) -> tuple[tuple[FoundStrategy, ...], bool]:
    """Every valid assignment of states that splits something or sums, and whether another search would find the same.

    None where the op cannot be tried.
    """
    if not is_triable(view):
        return (), True
    importlib.import_module("torch.fx.experimental.symbolic_shapes")  # autograd would, in every child anew
    answer = attempt(_try_and_tell, view)
    if answer.text is None:
        told = "%s runs whole on every rank: the process that tried it %s; give its rule in conf/model, under ops"
        logging.getLogger("shardwright.solve").warning(told, view.op.target, answer.why)
        return (), answer.certain
    return _parse(json.loads(answer.text)), True


def _try_and_tell(view: OpView) -> str:
    return json.dumps(_plain(try_all(view)))


def try_all(view: OpView) -> tuple[FoundStrategy, ...]:
    """What `search` finds, in this process."""
    with torch.random.fork_rng(devices=[]):
        trial = small_trial(view)
        if trial is None or not can_be_tried(trial):
            return ()
        whole = _unsplit(trial, trial.draw(1))
        found = tuple(dict.fromkeys(_candidates(whole, RANKS[0]))) if whole else ()
        drawn = [trial.draw(2 + ranks, signed) for signed in (False, True) for ranks in RANKS]
        for ranks, tensors in zip(2 * RANKS, drawn, strict=True):
            if found and is_finite(trial, tensors):
                whole = _unsplit(trial, tensors)
                found = _held(found, whole, ranks) if whole else ()
        return found


Run = tuple[list[Tensor], tuple[Tensor, ...]]


@dataclass(frozen=True)
class _Unsplit:
    """The whole op on some tensors: run once, for all that is tried with these."""

    trial: Trial
    tensors: list[Tensor]
    outputs: tuple[Tensor, ...]
    coming: list[Tensor | None]  # the gradients of the outputs, where they have one
    gradients: list[Tensor] | None  # None: it has no derivative


def _unsplit(trial: Trial, tensors: list[Tensor]) -> _Unsplit | None:
    try:
        inputs, outputs = _run(trial, tensors)
    except Exception:  # where it keeps something for backward
        return None
    torch.default_generator.manual_seed(1)  # other numbers than the summands, which are drawn after a run
    coming = [torch.randn_like(x) if x.requires_grad else None for x in outputs]
    try:
        gradients = _gradients(outputs, coming, inputs)
    except Exception:  # no derivative
        gradients = None
    return _Unsplit(trial, tensors, outputs, coming, gradients)


def _candidates(whole: _Unsplit, ranks: int) -> Iterator[FoundStrategy]:
    """Tries every combination of what the inputs hold forward."""
    options = [_forms(x, grad, ranks) for x, grad in zip(whole.tensors, whole.trial.grads, strict=True)]
    if math.prod(map(len, options)) > MOST_TRIALS:
        options = [[s for s in own if s.kind != "P"] for own in options]
    if math.prod(map(len, options)) > MOST_TRIALS:
        return
    for states in itertools.product(*options):
        if any(s.kind != "R" for s in states):
            yield from _states(whole, states, ranks)


def _forms(tensor: Tensor, grad: bool, ranks: int) -> list[State]:
    shards_of = [S(d) for d, n in enumerate(tensor.shape) if n and n % ranks == 0]
    return [R, *shards_of, *([P] if grad and (tensor.is_floating_point() or tensor.is_complex()) else [])]


def _held(found: tuple[FoundStrategy, ...], whole: _Unsplit, ranks: int) -> tuple[FoundStrategy, ...]:
    """Those whose states hold with these numbers too."""
    forwards = dict.fromkeys(tuple(R if s == B else s for s in one.inputs) for one in found)
    again = {one for forward in forwards for one in _states(whole, forward, ranks)}
    return tuple(one for one in found if one in again)


def _states(whole: _Unsplit, forward: tuple[State, ...], ranks: int) -> list[FoundStrategy]:
    """The states that follow where the inputs hold this forward; `R` stands for the whole, with either gradient."""
    try:
        return list(_tried(whole, forward, ranks))
    except Exception:  # the op does not take such shards, or gives what cannot be compared
        return []


def _tried(whole: _Unsplit, forward: tuple[State, ...], ranks: int) -> Iterator[FoundStrategy]:
    local = [shards.values(s, x, ranks) for s, x in zip(forward, whole.tensors, strict=True)]
    runs = [_run(whole.trial, [own[rank] for own in local]) for rank in range(ranks)]
    if any(len(run[1]) != len(whole.outputs) for run in runs):
        return
    outputs = [_output_state([run[1][i] for run in runs], x, ranks) for i, x in enumerate(whole.outputs)]
    known = [(s, x.requires_grad) for s, x in zip(outputs, whole.outputs, strict=True) if s is not None]
    if len(known) < len(outputs):
        return
    for choice in (R, B) if (R, True) in known else (R,):
        made = tuple(choice if (s, carries) == (R, True) else s for s, carries in known)
        inputs = _input_states(whole, forward, made, runs, ranks)
        if inputs is not None:
            yield FoundStrategy(inputs, made)


def _run(trial: Trial, tensors: Sequence[Tensor]) -> Run:
    own = [x.detach().clone().requires_grad_(grad) for x, grad in zip(tensors, trial.grads, strict=True)]
    return own, trial(own)


def _output_state(found: list[Tensor], whole: Tensor, ranks: int) -> State | None:
    """What the ranks' outputs are of the whole output: the whole, a shard or a summand."""
    near = _near(whole)
    values = [x.detach() for x in found]
    if values[0].dim() != whole.dim() or len({x.shape for x in values}) > 1:
        return None
    cut = [S(dim) for dim in range(whole.dim()) if whole.shape[dim] != values[0].shape[dim]]
    if cut and not shards.splits(cut[0], tuple(whole.shape), ranks):
        return None
    right = (s for s in cut[:1] or (R, P) if not shards.wrong_values(s, values, whole.detach(), near))
    return next(right, None)


def _input_states(
    whole: _Unsplit, forward: tuple[State, ...], made: tuple[State, ...], runs: list[Run], ranks: int
) -> tuple[State, ...] | None:
    """The states of the inputs by the gradients that come back, or None where they are wrong."""
    if not any(x.requires_grad for x in whole.outputs):
        return forward if all(s.kind != "P" for s in forward) else None
    if whole.gradients is None:
        return None
    try:
        arriving = [
            shards.gradients(s, g, ranks) if g is not None else None for s, g in zip(made, whole.coming, strict=True)
        ]
        local = [
            _gradients(run[1], [None if g is None else g[rank] for g in arriving], run[0])
            for rank, run in enumerate(runs)
        ]
    except Exception:  # no derivative
        return None
    states: list[State] = []
    for number, (state, grad) in enumerate(zip(forward, whole.trial.grads, strict=True)):
        options = (R, B) if state == R and grad else (state,)
        found, full = [x[number] for x in local], whole.gradients[number]
        right = [s for s in options if not grad or not shards.wrong_gradients(s, found, full, _near(full))]
        if not right:
            return None
        states.append(right[-1])
    return tuple(states)


def _gradients(outputs: Sequence[Tensor], coming: Sequence[Tensor | None], inputs: list[Tensor]) -> list[Tensor]:
    pairs = [(x, g) for x, g in zip(outputs, coming, strict=True) if g is not None and x.requires_grad]
    wanted = [x for x in inputs if x.requires_grad]
    found = torch.autograd.grad(
        [x for x, _ in pairs], wanted, [g for _, g in pairs], retain_graph=True, allow_unused=True
    )
    by_input = dict(zip(map(id, wanted), found, strict=True))
    return [torch.zeros_like(x) if by_input.get(id(x)) is None else by_input[id(x)] for x in inputs]


def _near(tensor: Tensor) -> float:
    return 1e-8 if tensor.dtype in (torch.float64, torch.complex128) else 1e-4
