"""Files that are either whole or absent: written under a temporary name, then renamed."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.base.errors import ShardwrightError

NO_ROOM = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


class NotWritten(OSError):
    """A file that the system would not take: no room, no right. Nothing of it is left."""

    def __init__(self, path: Path, cause: OSError) -> None:
        super().__init__(cause.errno, cause.strerror or str(cause), str(path))


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Errors of the system name the file."""
    try:
        yield
    except NotWritten:
        raise
    except OSError as error:
        raise NotWritten(path, error) from error


@contextmanager
def told(root: Path) -> Iterator[None]:
    """What could not be written is a line for the user; `root` is where the user sees files from."""
    try:
        yield
    except OSError as error:
        if not isinstance(error, NotWritten) and error.errno not in (*NO_ROOM, errno.EROFS):
            raise
        path = Path(error.filename) if isinstance(error.filename, str) else None
        where = str(path.relative_to(root) if path.is_relative_to(root) else path) if path else None
        act = _remedy(path, root) if error.errno in NO_ROOM else "see that it may be written"
        raise ShardwrightError(
            f"{'it' if where else 'a file'} cannot be written ({error.strerror})",
            where=where,
            remedy=f"{act}, and run again",
        ) from error


def _remedy(path: Path | None, root: Path) -> str:
    if path is not None and path.is_relative_to(tempfile.gettempdir()) and not path.is_relative_to(root):
        return "make room there, or set TMPDIR to a folder that has some"
    return "make room on the disk or in your quota"


def write_atomic(path: Path, content: bytes) -> None:
    with writing(path):
        _write_atomic(path, content)


def _of_a_process(temporary: Path) -> bool:
    """Whether another one that lives here writes it now."""
    number = temporary.name.split(".")[-2]
    try:
        os.kill(int(number), 0)
    except (ProcessLookupError, ValueError, OverflowError):
        return False
    except PermissionError:
        pass
    return int(number) != os.getpid()


def _write_atomic(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    for stale in path.parent.glob(f".{path.name}.*.tmp"):
        if not _of_a_process(stale):
            stale.unlink(missing_ok=True)  # left by a killed process; never read by anyone
    temporary = path.parent / f".{path.name}.{os.getpid()}.tmp"
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
