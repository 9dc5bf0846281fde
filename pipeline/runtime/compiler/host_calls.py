"""What torch needs of this host to compile blocks: a folder of its own, and who makes the host's calls of kernels.

Torch runs the code and pickles that it finds in its folder. By itself it takes one of a known name in the temporary
folder, which whoever was there first may have made.

Calls of kernels are made from compiled C++ or from Python, which is decided once in a process. There may be a compiler
that cannot build what torch writes for it: it is too old, or headers are missing. That shows when the first block is
compiled and not before: a program of our own to try it with would need the very headers, flags and libraries of torch,
and where it erred every good compiler would go unused. Ranks need not agree: kernels, and so what they compute, are the
same both ways.
"""

from __future__ import annotations

import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from subprocess import SubprocessError
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
CACHE = "TORCHINDUCTOR_CACHE_DIR"


class _CppCalls:
    failure = ""  # of the compiler, and what comes of it: calls are made from Python since
    cards: ClassVar[set[torch.device]] = set()  # whose threads for backward passes know their card


def in_cpp(inputs: Sequence[Any]) -> bool:
    """For a block with these inputs: on a GPU the host is often what a step waits for."""
    return on_card(inputs) and not _CppCalls.failure and shutil.which(_compiler()) is not None


def wake_backward(inputs: Sequence[Any]) -> None:
    """Calls in C++ ask the card's driver directly, which must have been used in their thread through torch before.

    Autograd has a thread of its own for each card. Where the first thing that it runs is such a call, it fails.
    """
    for card in {given.device for given in inputs if isinstance(given, Tensor) and given.is_cuda} - _CppCalls.cards:
        with torch.enable_grad():
            torch.ones((), device=card, requires_grad=True).mul(2).backward()  # type: ignore[no-untyped-call]
        _CppCalls.cards.add(card)


def why_python() -> str:
    """One line for the user where the compiler failed; nothing where it works, is not there or was not asked."""
    return _CppCalls.failure


def or_from_python(in_cpp: Callable[[], T], from_python: Callable[[], T]) -> T:
    """The first, or the second where the compiler fails; then all that follows in this process is from Python too."""
    try:
        return in_cpp()
    except Exception as error:
        cause = _of_compiler(error)
        if cause is None:
            raise
    made = from_python()  # and where this fails as well, it was not for the compiler
    _CppCalls.failure = (
        f"{_compiler()} cannot build the calls of kernels ({_line(cause)}); they are made from Python: the results are"
        " the same, short steps wait for the host; set CXX to a compiler that builds torch's headers, or install what"
        " it misses"
    )
    logging.getLogger("shardwright.runtime").warning(_CppCalls.failure)
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


@cache
def own_cache_folder() -> None:
    """Once in a process: the folder is this user's alone, or another one is taken. One that was named is as it is."""
    if os.environ.get(CACHE):
        return
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    folder = Path(default_cache_dir())
    if not is_own(folder):
        os.environ[CACHE] = tempfile.mkdtemp(prefix="torchinductor-")
        logging.getLogger("shardwright.runtime").warning(
            "%s belongs to somebody else: compiled blocks are kept in %s; set %s to a folder of yours",
            folder,
            os.environ[CACHE],
            CACHE,
        )


def is_own(folder: Path) -> bool:
    """Made if it is not there; others may not write into it from now on."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = os.lstat(folder)
    except OSError:
        return False
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        return False
    if found.st_mode & 0o022:
        folder.chmod(stat.S_IMODE(found.st_mode) & ~0o022)
    return True
