"""One command at a time writes to a folder: the others are told who does, where, and since when.

The lock is the kernel's (`flock` on the file `.lock`): whatever ends its holder ends it, and NFS and other shared file
systems pass it on to all hosts. Some of them keep it to each host, and some know no locks. So the file also says who
holds it, with a number that grows while that process lives: what another host has written counts as long as it grows.
"""

from __future__ import annotations

import errno
import fcntl
import getpass
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from shardwright.pipeline.base.errors import ShardwrightError
from shardwright.pipeline.base.files import lives, writing

FILE = ".lock"
BEAT_S = 4.0  # how often the number grows
WATCH_S = 15.0  # so long it is watched for growing
SETTLE_S = 0.5  # without locks: within which all who came at once have written
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)  # what a file system says that has none


class Locked(ShardwrightError):
    """Another command is at work there: `found`, where the file says which."""

    def __init__(self, path: Path, found: Holder | None) -> None:
        what, remedy = "another command is at work there", "wait until it has ended"
        if found is not None:
            who = f"`{found.command}` of {found.user} (process {found.pid} on {found.host})"
            what, remedy = f"{who} is at work there since {found.since}", f"{remedy}, or end it"
        super().__init__(what, where=path.parent.name, remedy=remedy)


@dataclass(frozen=True)
class Holder:
    user: str
    pid: int
    command: str
    host: str
    system: str  # one start of one kernel, and one numbering of processes: where `pid` means something
    since: str
    beats: int = 0


def this_process(command: str) -> Holder:
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a number without a name, as in some containers
        user = f"user {os.getuid()}"
    return Holder(user, os.getpid(), command, socket.gethostname(), _system(), time.strftime("%Y-%m-%d %H:%M:%S"))


def _system() -> str:
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


@contextmanager
def locked(folder: Path, command: str = "") -> Iterator[None]:
    """Held inside by this process, which may ask again while it has it; `Locked` where another one has it."""
    key = str(folder.resolve())
    if key in _held:
        yield
        return
    path = folder / FILE
    with writing(path):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, kernel = _take(path)
    if not command:
        name = Path(sys.argv[0]).name
        command = " ".join(["shardwright" if name == "__main__.py" else name, *sys.argv[1:]])
    own = this_process(command)
    _write(descriptor, own)
    if not kernel:  # of several that came at once, the last to write its name has it
        time.sleep(SETTLE_S)
        if (found := _read(path)) != own:
            os.close(descriptor)
            raise Locked(path, found)
    _held[key] = descriptor
    ended = threading.Event()
    beating = threading.Thread(target=_beat, args=(descriptor, own, ended), daemon=True, name="lock")
    try:
        beating.start()
        yield
    finally:
        ended.set()
        beating.join()  # it must not write to what is opened next under this number
        del _held[key]
        with suppress(OSError):
            path.unlink()  # first: who waits for the file that goes sees that it is gone
        os.close(descriptor)


def refuse_locked(folder: Path) -> None:
    """For a command that leaves the work to others which take the lock themselves."""
    if (folder / FILE).exists():
        with locked(folder):
            pass


_held: dict[str, int] = {}


def _let_go() -> None:
    """A process that was forked has no part in it: it could outlive the one that holds it."""
    for descriptor in _held.values():
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)


def _take(path: Path) -> tuple[int, bool]:
    """The file, opened, and whether the kernel's lock is on it."""
    while True:
        # no link, as that would be to a file of somebody's
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            with suppress(OSError):  # for all who may write to the folder, whatever the umask
                os.fchmod(descriptor, path.parent.stat().st_mode & 0o666)
            kernel = _flock(descriptor, path)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), path.stat()):
                    _refuse_living(path, kernel)
                    return descriptor, kernel
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its holder has removed it in the meantime


def _flock(descriptor: int, path: Path) -> bool:
    """Whether the file system has locks; `Locked` where another process has this one."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Locked(path, _read(path)) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return False
    return True


def _refuse_living(path: Path, kernel: bool) -> None:
    """What the file says of its holder, where the kernel's lock does not settle it."""
    found = _read(path)
    if found is None:
        return
    if found.system == _system():
        if not kernel and lives(found.pid):
            raise Locked(path, found)
        return
    deadline = time.monotonic() + WATCH_S
    while time.monotonic() < deadline:
        time.sleep(min(0.25, WATCH_S))
        now = _read(path)
        if now is None and not (path.exists() and path.read_bytes()):  # given back
            return
        if now is not None and now != found:
            raise Locked(path, now)


def _read(path: Path) -> Holder | None:
    """Opened anew each time: then hosts that share the file agree on it."""
    try:
        return Holder(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError, RecursionError):  # not there, not yet written, or not ours
        return None


def _write(descriptor: int, holder: Holder) -> None:
    """A full disk does not matter: who holds it is then not told, and other hosts rely on the kernel's lock alone."""
    with suppress(OSError):
        content = json.dumps(asdict(holder)).encode()
        os.pwrite(descriptor, content, 0)
        os.ftruncate(descriptor, len(content))
        os.fsync(descriptor)


def _beat(descriptor: int, holder: Holder, ended: threading.Event) -> None:
    beats = 0
    while not ended.wait(BEAT_S):
        beats += 1
        _write(descriptor, replace(holder, beats=beats))
