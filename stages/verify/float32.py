"""The first step once more in float32: a program may be right in float64 alone.

The rounding of float32 depends on the order of sums, so nothing is equal here. How much may differ is told by the
unsplit module itself: its own step in float32 is some way from its step in float64, and a program that is `MARGIN`
times as far does something else. Rounding may also put a number on the other side of a branch (a relu, the choice of an
expert), in one of the two alone; with other parameters it does not. So a program is at fault where it is so `TRIES`
times, each with other parameters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor

from shardwright.pipeline.runtime.programs.source import load_program
from shardwright.stages.verify.compare import LOSS, SHARE, ProgramVerdict, compare_passes, largest, whole_gap
from shardwright.stages.verify.float64 import Asked, in_float32
from shardwright.stages.verify.ranks import rank_of
from shardwright.stages.verify.truth import (
    Batch,
    Build,
    MakeOptimizer,
    ModuleState,
    Passes,
    doubled,
    made,
    passes_of,
    state_of,
    take,
)

MARGIN, LEAST = 16.0, 1e-6  # LEAST: a few roundings, where the module itself has none by luck
TRIES, APART = 3, 1e-3  # how far the parameters of a further try are from the first, relative to each


@dataclass(frozen=True)
class Float32Step:
    """A step of the unsplit module in float32, and how near a program must come to what it is in float64."""

    state: ModuleState  # before it, in float32
    batches: list[Batch]
    exact: Passes  # in float64
    allowed: Mapping[str, float]  # loss, or a parameter -> the largest relative difference of it from `exact`


@dataclass(frozen=True)
class Float32Verdict(ProgramVerdict):
    step: Float32Step
    asked: Mapping[Asked, int]  # casts to lower types that the program's own lines ask for, in all passes


def judge_in_float32(
    build: Build, batches: list[Batch], path: str, make: MakeOptimizer, batch_norm: str, tries: int = TRIES
) -> Float32Verdict:
    """Of the first try in which the program in the file of that path is right, or else of the last."""
    program = load_program(path, compiles=False)
    for step in _steps(build, batches, tries):
        rank = rank_of(program, step.state, make, batch_norm)
        with in_float32(draws=False, path=path) as mode:
            losses = rank.run(step.batches)
        found = compare_passes(rank, losses, step.exact, 0, 1.0)
        judged = tuple(replace(d, tolerance=step.allowed[d.name]) for d in found)
        verdict = Float32Verdict(judged, step, mode.asked)
        if verdict.equal:
            break
    return verdict


def _steps(build: Build, batches: list[Batch], tries: int) -> Iterator[Float32Step]:
    """With the module's own parameters, then with others."""
    wide = [doubled(batch) for batch in batches]
    for number in range(tries):
        module = made(build, torch.float32)
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for parameter in module.parameters() if number else ():
                noise = torch.randn(parameter.shape, generator=generator).to(parameter)
                parameter.add_(APART * noise * parameter)
        before = deepcopy(state_of(module))
        truth = made(build)
        take(truth, before)
        exact = passes_of(truth, wide, widen=True, draw=False)
        own = passes_of(module, batches, widen=True, draw=False, within=in_float32)
        yield Float32Step(before, batches, exact, _allowed(own, exact))


def _allowed(own: Passes, exact: Passes) -> Mapping[str, float]:
    """By the module's own rounding of each, and no less than by its usual one: few numbers may have little by luck."""
    floor = SHARE * largest(exact.gradients.values())
    gaps = {name: _own(own.gradients.get(name), wanted, floor) for name, wanted in exact.gradients.items()}
    gaps[LOSS] = max(_own(mine, wanted, 0.0) for mine, wanted in zip(own.losses, exact.losses, strict=True))
    least = max(median(gaps.values()), LEAST)
    return defaultdict(lambda: MARGIN * least, {name: MARGIN * max(gap, least) for name, gap in gaps.items()})


def _own(found: Tensor | None, expected: Tensor, floor: float) -> float:
    return whole_gap(torch.zeros_like(expected) if found is None else found, expected).relative(floor)
