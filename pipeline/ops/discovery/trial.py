"""An op on small random tensors, as it is tried where no rule describes it.

Sizes shrink so that equal ones stay equal, in order or in proportion. The numbers are positive, so that any op takes
them, and then of both signs where it takes these too: below zero `prelu` reads a tensor that it ignores above.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from shardwright.pipeline.ir.graph import Arg, Ref, TensorType, Torch
from shardwright.pipeline.ops.public import overload_of
from shardwright.pipeline.ops.rule import OpView

STEP = 6  # sizes are multiples of it, so that they divide by 2 and by 3
LARGEST = 1 << 20  # elements of an op that is tried in its own size
_FLOATS = ("float64", "float32", "bfloat16", "float16")
_COMPLEX = {"float64": "complex128", "float32": "complex64"}  # numbers of two such
_COMPLEXES = ("complex128", "complex64", "complex32")


@dataclass(frozen=True)
class Trial:
    """An op on small tensors."""

    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    grads: tuple[bool, ...]
    arguments: tuple[tuple[Arg, ...], tuple[tuple[str, Arg], ...]]

    def __call__(self, tensors: Sequence[Tensor], seed: int = 0) -> tuple[Tensor, ...]:
        order = iter(tensors)

        def real(arg: Arg) -> Any:
            if isinstance(arg, Ref):
                return next(order)
            if isinstance(arg, Torch):
                return torch.device("cpu") if arg.kind == "device" else getattr(torch, arg.name)
            return [real(a) for a in arg] if isinstance(arg, tuple) else arg

        positional, named = self.arguments
        torch.default_generator.manual_seed(seed)  # torch.manual_seed formats a stack for every absent device
        result = self.function(*(real(a) for a in positional), **{k: real(v) for k, v in named})
        return (result,) if isinstance(result, Tensor) else tuple(result)

    def draw(self, seed: int, signed: bool = False) -> list[Tensor]:
        """Random tensors, positive or of both signs; integers are valid as indices of any dim but one of size one."""
        generator = torch.Generator().manual_seed(seed)
        least = min((n for shape in self.shapes for n in shape if n > 1), default=2)
        low = -1.0 if signed else 0.5
        types = zip(self.shapes, self.dtypes, strict=True)
        return [_draw(shape, dtype, low, least, generator) for shape, dtype in types]


def _draw(shape: tuple[int, ...], dtype: str, low: float, least: int, generator: torch.Generator) -> Tensor:
    """Numbers between `low` and 1.5, whole ones below `least`."""
    if dtype == "bool":
        return torch.rand(shape, generator=generator) < 0.5
    if dtype in _FLOATS:
        drawn = torch.rand(shape, generator=generator, dtype=torch.float64) * (1.5 - low) + low
        return drawn.to(getattr(torch, dtype))
    if dtype in _COMPLEX.values():
        parts = torch.rand((*shape, 2), generator=generator, dtype=torch.float64) * (1.5 - low) + low
        return torch.view_as_complex(parts).to(getattr(torch, dtype))
    return torch.randint(least, shape, generator=generator).to(getattr(torch, dtype))


def is_triable(view: OpView) -> bool:
    return _function(view.op.target) is not None and not view.op.mutates and bool(view.inputs)


def small_trial(view: OpView) -> Trial | None:
    """The op on small tensors that it takes, with outputs as they should be; or in its own size if that is small."""
    function = _function(view.op.target)
    if function is None or not is_triable(view):
        return None
    tensors = (*view.inputs, *view.outputs)
    for shrink in (shrunk_in_order(tensors), _shrunk_in_proportion(tensors), None):
        if shrink is None and sum(t.numel for t in tensors) > LARGEST:
            continue
        sizes = shrink or {n: n for t in tensors for n in t.shape}
        shapes = [tuple(sizes[n] for n in t.shape) for t in tensors]
        own = (view.op.args.positional, view.op.args.named)
        renamed = (_map(own[0], sizes), tuple((k, _map(v, sizes)) for k, v in own[1]))
        for arguments in dict.fromkeys((own, renamed)):
            for float_type in ("float64", "float32"):
                tried = dict.fromkeys(_FLOATS, float_type) | dict.fromkeys(_COMPLEXES, _COMPLEX[float_type])
                dtypes = tuple(tried.get(t.dtype, t.dtype) for t in view.inputs)
                trial = Trial(function, tuple(shapes[: len(view.inputs)]), dtypes, view.input_grads, arguments)
                if _gives(trial, shapes[len(view.inputs) :]):
                    return trial
    return None


def _function(target: str) -> OpOverload | None:
    """The op itself, if torch knows it here, and it neither draws random numbers nor changes its inputs."""
    found = overload_of(target)
    if found is None or torch.Tag.nondeterministic_seeded in found.tags or found._schema.is_mutable:
        return None
    return found


def shrunk_in_order(tensors: Sequence[TensorType]) -> dict[int, int]:
    """Each size as a small one: one stays one, larger stays larger."""
    sizes = sorted({n for t in tensors for n in t.shape if n > 1})
    return {0: 0, 1: 1, **{n: STEP * (i + 1) for i, n in enumerate(sizes)}}


def _shrunk_in_proportion(tensors: Sequence[TensorType]) -> dict[int, int]:
    """Each size as a small one with the same ratios: three times another stays so."""
    sizes = {n for t in tensors for n in t.shape if n > 1}
    common = math.gcd(*sizes) if sizes else 1
    return {0: 0, 1: 1, **{n: n // common * STEP for n in sizes}}


def _map(arg: Arg, sizes: dict[int, int]) -> Arg:
    if isinstance(arg, tuple):
        return tuple(_map(a, sizes) for a in arg)
    return sizes.get(arg, arg) if isinstance(arg, int) and not isinstance(arg, bool) and arg > 1 else arg


def integers(arg: Arg) -> Iterator[int]:
    if isinstance(arg, tuple):
        for item in arg:
            yield from integers(item)
    elif isinstance(arg, int) and not isinstance(arg, bool):
        yield arg


def _gives(trial: Trial, shapes: Sequence[tuple[int, ...]]) -> bool:
    if sum(math.prod(s) for s in (*trial.shapes, *shapes)) > LARGEST:
        return False
    try:
        return [tuple(x.shape) for x in trial(trial.draw(0))] == list(shapes)
    except Exception:  # whatever an op raises at sizes that it does not take
        return False


def can_be_tried(trial: Trial) -> bool:
    """Not where the same tensors give other results (random), or all results are alike: nothing could be told."""
    tensors = trial.draw(1)
    try:
        once, again = trial(tensors, seed=0), trial(tensors, seed=1)
        if any(not torch.equal(a, b) for a, b in zip(once, again, strict=True) if not a.isnan().any()):
            return False
        return all(x.numel() < 2 or not bool((x == x.flatten()[0]).all()) for x in once)
    except Exception:  # whatever an op raises at numbers that it does not take
        return False


def is_finite(trial: Trial, tensors: list[Tensor]) -> bool:
    """Some ops do not take numbers below zero."""
    try:
        return all(bool(x.isfinite().all()) for x in trial(tensors))
    except Exception:  # whatever an op raises at numbers that it does not take
        return False
