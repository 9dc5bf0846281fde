"""How far a program's results are from those of the unsplit module; all ranks call these functions at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.pipeline.ir.layout import Layout, P, R, replicated
from shardwright.pipeline.runtime.programs.mesh import combine, joined
from shardwright.pipeline.runtime.programs.parameters import own_elements, shard_of
from shardwright.stages.verify.float64 import in_float64, widest
from shardwright.stages.verify.ranks import Copies, Rank, rank_of
from shardwright.stages.verify.truth import MakeOptimizer, ModuleState, Passes, Truth

TOLERANCE, IN_FLOAT32 = 1e-9, 1e-5
# Of the largest gradient: one below is held against that, as a key's bias has a gradient of rounding alone.
SHARE = 1e-3
# Adam makes much of little: a bias before a norm, whose gradient is rounding alone, moves by 1e-10; statistics follow.
AFTER_UPDATE = 1e-6
UNIT = 1.0  # a buffer below is held against this: statistics begin with zeros and ones, and a mean may be rounding
LOSS = "loss"


@dataclass(frozen=True)
class Gap:
    """The largest difference of an element on any rank, and the largest element that was expected."""

    difference: float
    size: float

    def relative(self, floor: float = 0.0) -> float:
        if self.difference == 0:
            return 0.0
        below = max(self.size, floor)
        return self.difference / below if below else float("inf")


def own_gap(
    found: Tensor | None, expected: Tensor | None, layout: Layout, axes: Sequence[str], *, padding: bool = True
) -> Gap:
    """Of a shard by the layout from the whole, on this rank; where the layout is partial the ranks meet.

    A tensor that is not there is zeros. Padding of uneven shards is zeros where it counts.
    """
    if found is None and expected is None:
        return Gap(0.0, 0.0)
    partial = [axis for axis, state in zip(axes, layout.states, strict=True) if state == P]
    whole = Layout(tuple(R if state == P else state for state in layout.states))
    wanted = None if expected is None else shard_of(expected.detach(), whole, axes)
    found = torch.zeros_like(wanted) if found is None else found.detach()
    if partial and (found.is_floating_point() or found.is_complex()):
        found = combine(found, joined(tuple(partial)))
    if expected is not None and wanted is not None and not padding and found.shape == wanted.shape:
        found, wanted = (own_elements(x, tuple(expected.shape), whole, axes) for x in (found, wanted))
    return Gap(_furthest(found, torch.zeros_like(found) if wanted is None else wanted), _size(expected))


def whole_gap(found: Tensor, expected: Tensor) -> Gap:
    """Of two whole tensors."""
    return Gap(_furthest(found, expected), _size(expected))


def everywhere(gaps: Sequence[Gap]) -> list[Gap]:
    """Each with the largest difference of all ranks; sizes are of whole tensors."""
    if not dist.is_initialized() or not gaps:
        return list(gaps)
    furthest = torch.tensor([each.difference for each in gaps], dtype=torch.float64)
    dist.all_reduce(furthest, op=dist.ReduceOp.MAX)
    return [Gap(difference, each.size) for difference, each in zip(furthest.tolist(), gaps, strict=True)]


def _furthest(found: Tensor, wanted: Tensor) -> float:
    if found.shape != wanted.shape:
        return float("inf")
    if not found.numel():
        return 0.0
    same = (found == wanted) | (found.isnan() & wanted.isnan())
    apart = (widest(found) - widest(wanted)).abs().masked_fill(same, 0.0)
    return float("inf") if bool(apart.isnan().any()) else float(apart.max())


def _size(tensor: Tensor | None) -> float:
    """A mask's infinities are no size."""
    if tensor is None or not tensor.numel():
        return 0.0
    return float(widest(tensor.detach()).abs().nan_to_num(0.0, 0.0, 0.0).max())


def largest(tensors: Iterable[Tensor]) -> float:
    """Of all their elements."""
    return max((float(tensor.abs().max()) for tensor in tensors if tensor.numel()), default=0.0)


# ---- steps


@dataclass(frozen=True)
class Difference:
    """Of one thing in one step, relative to its size."""

    kind: str  # loss, gradient, buffer; parameter: after the optimizer's step
    name: str
    step: int
    relative: float
    tolerance: float
    at: int = 0  # which of the step's passes, of a loss

    @property
    def over(self) -> float:
        """The tolerance; 1 is just equal."""
        return self.relative / self.tolerance


@dataclass(frozen=True)
class ProgramVerdict:
    differences: tuple[Difference, ...]

    @property
    def judged(self) -> list[Difference]:
        """The parameters follow from the gradients, and only help to find a fault."""
        return [d for d in self.differences if d.kind != "parameter"]

    @property
    def worst(self) -> Difference:
        return max(self.judged, key=lambda d: d.over)

    @property
    def equal(self) -> bool:
        return self.worst.over <= 1.0

    def first(self) -> Difference | None:
        """What differs first: of a step the losses, then gradients and buffers; parameters where it was they.

        Of the module as it is written just where nothing else does.
        """
        order = (LOSS, "gradient", "buffer", "parameter")
        found = [d for d in self.differences if d.over > 1.0]
        return min(found, key=lambda d: (d.tolerance == IN_FLOAT32, d.step, order.index(d.kind), d.at), default=None)


def judge(program: ModuleType, truth: Truth, make: MakeOptimizer) -> ProgramVerdict:
    """All steps of the program beside those of the module."""
    rank = rank_of(program, truth.first, make, truth.batch_norm)
    found: list[Difference] = []
    for number, step in enumerate(truth.steps):
        with in_float64(widen=True, draws=truth.draw):
            losses = rank.run(step.batches)
        found += compare_passes(rank, losses, step.passes, number, TOLERANCE)
        if step.as_written is not None:
            found += compare_passes(rank, losses, step.as_written, number, IN_FLOAT32)
        rank.update()
        found += _compare_state(rank, step.after, number)
    return ProgramVerdict(tuple(found))


def compare_passes(rank: Rank, losses: list[Tensor], expected: Passes, step: int, tolerance: float) -> list[Difference]:
    """Losses, and the gradients as the optimizer gets them: whole or in shards."""
    whole = replicated(len(rank.axes))
    known: list[Copies] = [[(loss, whole)] for loss in losses] or [[] for _ in expected.losses]
    gaps = [_gap_of(rank, own, wanted) for own, wanted in zip(known, expected.losses, strict=True)]
    gaps += [_gap_of(rank, rank.gradients_of(name), expected.gradients.get(name)) for name in rank.names]
    floor = SHARE * largest(expected.gradients.values())
    together = iter(everywhere(gaps))
    return [
        *(Difference(LOSS, LOSS, step, next(together).relative(), tolerance, at) for at in range(len(known))),
        *(Difference("gradient", name, step, next(together).relative(floor), tolerance) for name in rank.names),
    ]


def _compare_state(rank: Rank, expected: ModuleState, step: int) -> list[Difference]:
    """Buffers, and the parameters, after the optimizer's step."""
    state = expected.constants | expected.parameters
    together = iter(everywhere([_gap_of(rank, rank.tensors_of(name), value) for name, value in state.items()]))
    floor = SHARE * largest(expected.parameters.values())
    return [
        *(Difference("buffer", n, step, next(together).relative(UNIT), AFTER_UPDATE) for n in expected.constants),
        *(Difference("parameter", n, step, next(together).relative(floor), AFTER_UPDATE) for n in expected.parameters),
    ]


def _gap_of(rank: Rank, copies: Copies, expected: Tensor | None) -> Gap:
    """Of the copy here that is furthest; of what this rank does not hold it knows no difference."""
    gaps = [own_gap(found, expected, layout, rank.axes) for found, layout in copies]
    return max(gaps, key=lambda gap: gap.difference, default=Gap(0.0, _size(expected)))
