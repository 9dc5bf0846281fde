"""Where in the user's code an op or an error comes from."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_NOT_THEIRS = ("/torch/", "/pipeline/tracing/", "/stages/trace/", "<frozen", "<string>")


def op_line(stack_trace: str | None) -> str:
    """File and line of the innermost frame that is not torch's own; the file without its folder."""
    frames = [(f, n) for f, n in _FRAME.findall(stack_trace or "") if not _foreign(f)]
    return f"{Path(frames[-1][0]).name}:{frames[-1][1]}" if frames else ""


def user_line(error: BaseException) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _foreign(f.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames and _is_model_code(frames[-1].filename) else ""


def _foreign(filename: str) -> bool:
    return any(part in filename for part in _NOT_THEIRS)


def _is_model_code(filename: str) -> bool:
    return not filename.endswith(("/stages/__main__.py", "/pipeline/stage.py", "/runpy.py"))
