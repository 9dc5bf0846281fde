"""Where in the user's code an op or an error comes from."""

from __future__ import annotations

import re
import sys
import sysconfig
import traceback
from pathlib import Path

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
    """Frames that are not torch's own, without their text; it is asked as torch's `CapturedTraceback` is."""

    def __init__(self, frames: list[traceback.FrameSummary]) -> None:
        self.frames = frames

    @classmethod
    def extract(cls) -> Stack:
        frames, frame = [], sys._getframe(1)
        while (frame := frame.f_back) is not None:  # type: ignore[assignment]
            code = frame.f_code
            if not code.co_filename.startswith(_TORCH) or code.co_filename.startswith(_LIBRARIES):
                found = traceback.FrameSummary(code.co_filename, frame.f_lineno, code.co_name, line="")
                frames.append(found)
        return cls(frames[::-1])

    def summary(self) -> traceback.StackSummary:
        return traceback.StackSummary.from_list(self.frames)


def op_line(stack_trace: str | None) -> str:
    """File and line of the innermost frame that is not torch's own; the file without its folder."""
    frames = [(f, n) for f, n in _FRAME.findall(stack_trace or "") if not f.startswith(_NOT_THEIRS)]
    return f"{Path(frames[-1][0]).name}:{frames[-1][1]}" if frames else ""


def origin(error: BaseException) -> tuple[str, str, str]:
    """Of an error: the user's own line; the installed package inside which it arose, if it did, and the line there."""
    trace = traceback.extract_tb(error.__traceback__)
    frames = [f for f in trace if not f.filename.startswith(_NOT_THEIRS) or f.filename.startswith(_LIBRARIES)]
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
