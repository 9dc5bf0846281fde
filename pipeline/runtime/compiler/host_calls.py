"""What makes the host's calls of kernels in compiled blocks: compiled C++, or Python. Decided once in a process.

There may be a compiler that cannot build what torch writes for it: it is too old, or headers are missing. That shows
when the first block is compiled and not before: a program of our own to try it with would need the very headers, flags
and libraries of torch, and where it erred every good compiler would go unused. Ranks need not agree: kernels, and so
what they compute, are the same both ways.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Sequence
from subprocess import SubprocessError
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class _Here:
    failure = ""  # of the compiler, and what comes of it: calls are made from Python since
    cards: ClassVar[set[torch.device]] = set()  # whose threads for backward passes know their card


def in_cpp(inputs: Sequence[Any]) -> bool:
    """For a block with these inputs: on a GPU the host is often what a step waits for."""
    return on_card(inputs) and not _Here.failure and shutil.which(_compiler()) is not None


def wake_backward(inputs: Sequence[Any]) -> None:
    """Calls in C++ ask the card's driver directly, which must have been used in their thread through torch before.

    Autograd has a thread of its own for each card. Where the first thing that it runs is such a call, it fails.
    """
    for card in {given.device for given in inputs if isinstance(given, Tensor) and given.is_cuda} - _Here.cards:
        with torch.enable_grad():
            torch.ones((), device=card, requires_grad=True).mul(2).backward()  # type: ignore[no-untyped-call]
        _Here.cards.add(card)


def why_python() -> str:
    """One line for the user where the compiler failed; nothing where it works, is not there or was not asked."""
    return _Here.failure


def or_from_python(in_cpp: Callable[[], T], from_python: Callable[[], T]) -> T:
    """The first, or the second where the compiler fails; then all that follows in this process is from Python too."""
    try:
        return in_cpp()
    except Exception as error:
        cause = _of_compiler(error)
        if cause is None:
            raise
    made = from_python()  # and where this fails as well, it was not for the compiler
    _Here.failure = (
        f"{_compiler()} cannot build the calls of kernels ({_line(cause)}); they are made from Python: the results are"
        " the same, short steps wait for the host; set CXX to a compiler that builds torch's headers, or install what"
        " it misses"
    )
    logging.getLogger("shardwright.runtime").warning(_Here.failure)
    return made


def on_card(inputs: Sequence[Any]) -> bool:
    return any(isinstance(given, Tensor) and given.is_cuda for given in inputs)


def _compiler() -> str:
    return os.environ.get("CXX", "g++")


def _of_compiler(error: BaseException | None) -> Exception | None:
    """The failure that torch has wrapped in others: the compiler did not start, did not build, or built in vain."""
    from torch._inductor.exc import CppCompileError, InvalidCxxCompiler  # slow to import

    kinds = (CppCompileError, InvalidCxxCompiler, SubprocessError, OSError, ImportError)
    while error is not None and not isinstance(error, kinds):
        error = getattr(error, "inner_exception", None) or error.__cause__
    return error


def _line(error: Exception) -> str:
    """One of what the compiler wrote: the first that speaks of an error."""
    written = getattr(error, "output", None)
    text = written if isinstance(written, str) else str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), lines[0] if lines else type(error).__name__)
