"""Where in the user's code an op or an error comes from."""

from __future__ import annotations

import re
import sys
import sysconfig
import traceback
from functools import cache
from pathlib import Path
from types import FrameType

import torch

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_HERE = Path(__file__).parents[2]
_TORCH = f"{Path(torch.__file__).parent}/"
_LIBRARIES = tuple(f"{_TORCH}{folder}/" for folder in ("distributions", "nn/utils"))  # of torch, written as users write
_NOT_THEIRS = (
    _TORCH,
    *(f"{_HERE / folder}/" for folder in ("pipeline/tracing", "stages")),
    *(str(_HERE / "pipeline" / file) for file in ("user/loss.py", "base/stage.py", "base/instantiate.py")),
    "<frozen",
    "<string>",
)
_STANDARD = f"{sysconfig.get_path('stdlib')}/"
_PACKAGES = ("/site-packages/", "/dist-packages/")


class Stack:
    """The innermost frame that is not torch's own, without its text; it is asked as torch's `CapturedTraceback` is."""

    def __init__(self, frames: list[traceback.FrameSummary]) -> None:
        self.frames = frames

    @classmethod
    def extract(cls) -> Stack:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not _is_theirs(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is None:
            return cls([])
        # Torch keeps what was called from a function of this name, as all of a model is.
        return cls([traceback.FrameSummary(frame.f_code.co_filename, frame.f_lineno, "forward", line="")])

    def summary(self) -> traceback.StackSummary:
        return traceback.StackSummary.from_list(self.frames)


@cache
def _is_theirs(filename: str) -> bool:
    return not filename.startswith(_NOT_THEIRS)


def op_line(stack_trace: str | None) -> str:
    """File and line of the innermost frame that is not torch's own; the file without its folder."""
    frames = [(f, n) for f, n in _FRAME.findall(stack_trace or "") if _is_theirs(f)]
    return f"{Path(frames[-1][0]).name}:{frames[-1][1]}" if frames else ""


def origin(error: BaseException) -> tuple[str, str, str]:
    """Of an error: the user's own line; the installed package inside which it arose, if it did, and the line there."""
    trace = traceback.extract_tb(error.__traceback__)
    frames = [f for f in trace if _is_theirs(f.filename) or f.filename.startswith(_LIBRARIES)]
    theirs = [f for f in frames if not _package(f.filename) and not f.filename.startswith(_STANDARD)]
    line = f"{theirs[-1].filename}:{theirs[-1].lineno}" if theirs else ""
    if not frames or not (package := _package(frames[-1].filename)):
        return line, "", ""
    return line, package, f"{Path(frames[-1].filename).name}:{frames[-1].lineno}"


def _package(filename: str) -> str:
    """The name of the installed package that a file is of, or nothing."""
    for folder in _PACKAGES:
        if folder in filename:
            return filename.rpartition(folder)[2].split("/")[0].removesuffix(".py")
    return ""
