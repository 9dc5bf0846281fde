"""The forward and backward passes of a step, one for each of its micro-batches: the gradients of their mean loss.

| in a step                      | first to last but one      | last                                 |
|--------------------------------|----------------------------|--------------------------------------|
| gradients (`Gradients`)        | add up on each rank        | are brought together, in buckets     |
| copies that are made once      | are read in their stand-in | are read; all their gradients come   |
| (a program's `copies`)         | where gradients add up     | together, and go back to parameters  |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor

from shardwright.pipeline.runtime.pipelining.deferred_weight_grads import leaves_of, undo
from shardwright.pipeline.runtime.step.gradients import Gradients


def run_passes(
    program: Any,
    gradients: Gradients,
    batches: Iterable[Mapping[str, Tensor]],
    count: int,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> list[Tensor]:
    """The losses of all micro-batches; then the gradients are there for the optimizer. `around` is for forward."""
    gradients.start(armed=count == 1)
    with around():
        copies = StepCopies(copies_of(program))
    losses = []
    for left, batch in zip(reversed(range(count)), batches, strict=True):
        if not left:
            gradients.arm()
        losses.append(_pass(program, {**batch, **(copies.stand_ins if left else copies.last())}, count, around))
    gradients.wait()
    return losses


def _pass(
    program: Any, read: Mapping[str, Tensor], count: int, around: Callable[[], AbstractContextManager[Any]]
) -> Tensor:
    with around():
        loss: Tensor = program.forward(**read)
    (loss / count if count > 1 else loss).backward()
    return loss.detach()


def copies_of(program: Any) -> Mapping[str, Tensor]:
    """Of parameters, made once a step; few programs have any."""
    return program.copies() if hasattr(program, "copies") else {}


class StepCopies:
    """Copies of parameters, of which autograd undoes the making once: in the backward pass that is last.

    Where gradients of weights are deferred, that is an entry of what the last pass has deferred.
    """

    def __init__(self, made: Mapping[str, Tensor]) -> None:
        self.made = made
        self.stand_ins = {name: copy.detach().requires_grad_(copy.requires_grad) for name, copy in made.items()}

    def last(self) -> dict[str, Tensor]:
        """The copies, whose gradients are joined by what has come together in their stand-ins."""
        found = {}
        for name, copy in self.made.items():
            found[name] = copy.view_as(copy)  # of its own, as the copy may be the parameter itself
            if found[name].requires_grad:  # other passes may be undone after this one has run forward, as in a pipeline
                found[name].register_hook(partial(_join, self.stand_ins[name]))
        return found

    def leaves(self) -> list[Tensor]:
        made = [copy for copy in self.made.values() if copy.requires_grad]
        return [*(c for c in made if c.grad_fn is None), *leaves_of(c.grad_fn for c in made if c.grad_fn is not None)]

    def run(self) -> None:
        """Of all that has come together in the stand-ins."""
        undo((copy, self.stand_ins[name].grad) for name, copy in self.made.items())


def _join(stand_in: Tensor, gradient: Tensor) -> Tensor:
    found, stand_in.grad = stand_in.grad, None
    return gradient if found is None else found.add_(gradient)
