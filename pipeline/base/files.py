"""Files that are either whole or absent: written under a temporary name, then renamed. And such as grow by lines."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from shardwright.pipeline.base.errors import ShardwrightError

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
        act = "make room on the disk or in your quota" if error.errno in NO_ROOM else "see that it may be written"
        temporary = path is not None and path.is_relative_to(tempfile.gettempdir()) and not path.is_relative_to(root)
        if temporary and error.errno in NO_ROOM:
            act = "make room there, or set TMPDIR to a folder that has some"
        what = f"{'it' if where else 'a file'} cannot be written ({error.strerror})"
        raise ShardwrightError(what, where=where, remedy=f"{act}, and run again") from error


def write_atomic(path: Path, content: bytes) -> None:
    with writing_whole(path) as file:
        file.write(content)


@contextmanager
def writing_whole(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, which is at `path` once it is whole."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        for stale in path.parent.glob(f".{path.name}.*.tmp"):
            writer = stale.name.split(".")[-2]
            if not writer.isdecimal() or int(writer) == os.getpid() or not lives(int(writer)):
                stale.unlink(missing_ok=True)  # left by a killed process; never read by anyone
        temporary = path.parent / f".{path.name}.{os.getpid()}.tmp"
        try:
            with open(temporary, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def whole_lines(path: Path, offset: int = 0) -> Iterator[tuple[int, bytes]]:
    """Those of a file that may still grow, from a byte on, each with the byte after it; none where there is no file."""
    with suppress(FileNotFoundError), open(path, "rb") as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return  # still being written, or all there will ever be of it
            offset += len(line)
            yield offset, line


def lives(pid: int) -> bool:
    """Whether a process of this system has that number."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True
