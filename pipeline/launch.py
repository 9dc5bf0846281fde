"""Starting ranks and waiting for them in bounded time, leaving no process.

`torchrun` on this machine, alone or with others (`run_ranks`), or one rank of a launcher outside (`run_here`).
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.files import write_atomic
from pipeline.place import Place
from pipeline.signals import Interrupted, gentle

if TYPE_CHECKING:
    from pipeline.processes import Processes

Poll = Callable[[Path], None]

PARENT = "SHARDWRIGHT_PARENT"
MEET = "SHARDWRIGHT_MEET"  # the folder in which ranks of one machine find one another
FAILED = "shardwright failed: "  # a line in which a rank says why, where it could not write that down
NOTE = "shardwright: "  # begins a line of a rank that is for the user
STOPPED = "stopped.txt"  # the signal that made ranks end before their time
ROOM = "make room there, or set TMPDIR to a folder that has some"
LOOK_S = 0.5  # between two looks at the processes
ORPHAN = 70  # the status of a rank whose parent is gone
ROOM_BYTES = 65536
END_S = 30.0  # that a launcher may take to end when its ranks have
LOG_BYTES = 64_000_000
PATIENCE_S = 3600  # of torchrun with ranks that save what they have; the stage ends who hangs
_EXCEPTION = re.compile(r"(?:\[\w+\]:\s*)?[\w.]*(?:Error|Exception)(?::.*)?")  # the last line of a traceback
_DEATH = re.compile(r"rank +: (\d+) .*?\n *exitcode +: -(\d+) ", re.DOTALL)  # in the table of failures of torchrun

_STATUS = re.compile(r"rank +: (\d+) .*?\n *exitcode +: (\d+) ", re.DOTALL)


@dataclass(frozen=True)
class Node:
    """This machine among those that run the ranks together."""

    count: int
    number: int
    address: str  # of the first one
    port: int


class LaunchFailed(Exception):
    """A rank failed or the time ran out; the text is for the user, `log` is all that the ranks wrote."""

    log = ""


@dataclass(frozen=True)
class Watch:
    """How ranks are looked after."""

    hang_s: float | None = None  # so long a process may stand still
    gentle: bool = False  # ranks that are told to end save what they have
    tell: Callable[[str], None] = lambda text: None  # a line of theirs that is for the user


UNWATCHED = Watch()


def run_ranks(
    module: str,
    job: dict[str, Any],
    ranks: int,
    timeout: float | None,
    poll: Poll | None = None,
    node: Node | None = None,
    restarts: int = 0,
    watch: Watch = UNWATCHED,
) -> dict[str, Any]:
    """Runs `python -m module JOB` on that many ranks of this machine; one of them writes the result, a JSON object.

    `poll` is called several times a second with the folder the ranks work in. When a rank fails, all are started again,
    at most `restarts` times; not after an error that is final.
    """

    def command(work: Path) -> list[str]:
        return _command(module, ranks, node, restarts, work)

    return _run(command, _environment(ranks), job, timeout, poll, watch, ranks, local=node is None)


def run_here(
    module: str,
    job: dict[str, Any],
    place: Place,
    timeout: float | None,
    poll: Poll | None = None,
    watch: Watch = UNWATCHED,
) -> dict[str, Any]:
    """Runs `python -m module JOB` as the one rank that a launcher outside has started this process for.

    Rank 0 has the result; of the others it is empty.
    """
    environment = {**_environment(place.local_ranks), **place.environment()}
    command = [sys.executable, "-m", module]
    return _run(lambda work: [*command, str(work)], environment, job, timeout, poll, watch, rank=place.rank)


def _run(
    command: Callable[[Path], list[str]],
    environment: dict[str, str],
    job: dict[str, Any],
    timeout: float | None,
    poll: Poll | None,
    watch: Watch,
    ranks: int = 1,
    rank: int | None = None,
    local: bool = False,
) -> dict[str, Any]:
    """So many `ranks`, or `rank` alone; `local`: all of them are on this machine, and meet on its loopback."""
    from pipeline.processes import Processes  # here, as in `_alive`

    with _work_folder() as work, _log_of_ranks(work) as log:
        with _in_tmpdir(work / "job.json"):
            _try_room(work)
            (work / "job.json").write_text(json.dumps(job))
        for spare in _spare(job):
            spare.unlink(missing_ok=True)
        more = {**_on_the_loopback(), MEET: str(work)} if local else {}
        with gentle() if watch.gentle else nullcontext(lambda: None) as asked:
            process = subprocess.Popen(
                command(work), stdout=log, stderr=log, env={**environment, **more}, start_new_session=True
            )
            processes = Processes(process, ranks, rank)
            try:
                _Waiting(processes, work, log, watch, asked).wait(timeout, poll)
            except LaunchFailed as error:
                error.log = _log(work)
                raise
            finally:
                processes.end()
            failure = _failure(work, process.returncode, processes.told(), rank) if process.returncode else None
            found = _result(work, job)
            if found is not None and failure is None:
                return {} if rank else found
            number = asked() or _stopped_by(work)
        if number:
            if failure and not _stopped_by(work) and (work / "steps.jsonl").exists():
                watch.tell(f"the ranks failed while they were ended: {failure}")
            raise Interrupted(number)
        if failure:
            raise failure
        if rank:
            return {}
        raise LaunchFailed("the ranks ended without a result")


@contextmanager
def _work_folder() -> Iterator[Path]:
    """For this user alone, and removed in the end."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="shardwright-", ignore_cleanup_errors=True)
    except OSError as error:
        raise LaunchFailed(f"no temporary folder can be made: {error.strerror or error}; {ROOM}") from error
    with folder as name:
        yield Path(name)


@contextmanager
def _log_of_ranks(work: Path) -> Iterator[int]:
    """What ranks print, in memory where the system has files there: a full disk must not end who prints."""
    path = work / "log.txt"
    if hasattr(os, "memfd_create"):
        log = os.memfd_create("log of the ranks")
        path.symlink_to(f"/proc/{os.getpid()}/fd/{log}")
    else:
        log = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        yield log
    finally:
        os.close(log)


@contextmanager
def _in_tmpdir(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LaunchFailed(f"{path} cannot be written ({error.strerror or error}); {ROOM}") from error


def _try_room(work: Path) -> None:
    """For what torchrun and the ranks write there, in words of their own where they cannot."""
    path = work / "room"
    try:
        path.write_bytes(bytes(ROOM_BYTES))
    finally:
        with suppress(OSError):
            path.unlink()


def _spare(job: dict[str, Any]) -> list[Path]:
    """Where a result lies for which the temporary folder has no room, if anywhere."""
    return [Path(job["spare_result"])] if job.get("spare_result") else []


def _result(work: Path, job: dict[str, Any]) -> dict[str, Any] | None:
    for path in (work / "result.json", *_spare(job)):
        with suppress(FileNotFoundError):
            found: dict[str, Any] = json.loads(path.read_text())
            path.unlink()
            return found
    return None


def _command(module: str, ranks: int, node: Node | None, restarts: int, work: Path) -> list[str]:
    where = _own_place(work) if node is None else _place(node)
    again = [f"--max-restarts={restarts}"] if restarts else []
    launcher = [sys.executable, "-m", "torch.distributed.run", *where, *again, f"--nproc-per-node={ranks}"]
    return [*launcher, f"--log-dir={work / 'torchrun'}", "--module", module, str(work)]


def _own_place(work: Path) -> list[str]:
    """One machine: torchrun keeps its own state in a file instead of listening on all interfaces."""
    conf = "store_type=file,keep_alive_interval=3600"  # each of these is a further kilobyte of the file
    return ["--nnodes=1", "--rdzv-backend=c10d", f"--rdzv-endpoint={work / 'torchrun.store'}", f"--rdzv-conf={conf}"]


def _place(node: Node) -> list[str]:
    meet = [f"--master-addr={node.address}", f"--master-port={node.port}"]
    return [f"--nnodes={node.count}", f"--node-rank={node.number}", *meet]


def _environment(ranks: int) -> dict[str, str]:
    """A share of the cores for each of the ranks on this host, unless the user or torchrun has given a number.

    And the import path of this process, so that the user's code is found.
    """
    threads = str(max(1, (os.cpu_count() or 1) // ranks))
    paths = os.pathsep.join(dict.fromkeys(p for p in sys.path if p))
    bytecode = {"PYTHONDONTWRITEBYTECODE": "1"} if sys.dont_write_bytecode else {}
    given = {"OMP_NUM_THREADS": threads, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(PATIENCE_S), **os.environ}
    return {**given, PARENT: str(os.getpid()), "PYTHONPATH": paths, **bytecode}


def _on_the_loopback() -> dict[str, str]:
    """Ranks of one machine need no other interface; one that the user has named is kept."""
    names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    found = {f"{who}_SOCKET_IFNAME": names[0] for who in ("GLOO", "NCCL")} if names else {}
    own = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # torchrun would listen for ranks that meet by themselves
    return {name: value for name, value in found.items() if name not in os.environ} | own


class _Waiting:
    """For the end of a launch, while it is looked after."""

    def __init__(
        self, processes: Processes, work: Path, log: int, watch: Watch, asked: Callable[[], int | None]
    ) -> None:
        self.processes, self.work, self.log, self.watch, self.asked = processes, work, log, watch, asked
        self.read = 0  # how far the log has been read
        self.awake = 0.0  # seconds in which this process was not stopped itself
        self.childless: float | None = None  # since when the launcher has no ranks though it has had some
        self.had_ranks = False

    def wait(self, timeout: float | None, poll: Poll | None) -> None:
        process, started = self.processes.started, time.monotonic()
        last, looked = started, -LOOK_S
        while process.poll() is None:
            if timeout is not None and time.monotonic() - started > timeout:
                told = self.processes.told()
                raise LaunchFailed(f"it did not finish within {timeout:g} s{told and f': {told}'}")
            if any(self.work.glob("final-*.txt")):
                raise LaunchFailed(_reason(self.work))
            now = time.monotonic()
            self.awake += min(now - last, 1.0)
            last = now
            if self.awake - looked >= LOOK_S:
                looked = self.awake
                self._look()
            if poll:
                poll(self.work)
            time.sleep(0.05)
        self._look()
        if poll:
            poll(self.work)

    def _look(self) -> None:
        self._read_log()
        self.processes.look(self.awake)
        number = self.asked()
        if number and self.processes.started.poll() is None:
            self.processes.ask(number)
        if self.watch.hang_s is not None:
            self._end_what_hangs(self.awake - self.watch.hang_s)

    def _end_what_hangs(self, before: float) -> None:
        """What has stood still since then: a rank is ended, and the launcher starts all again or gives up."""
        processes = self.processes
        if processes.launcher_halted is not None and processes.launcher_halted <= before:
            raise LaunchFailed(processes.told())
        processes.end_halted(before)
        self.had_ranks |= bool(processes.ranks())
        idle = self.had_ranks and not processes.ranks()
        self.childless = (self.childless or self.awake) if idle else None
        if self.childless is not None and self.childless <= min(before, self.awake - END_S):
            who = f"the launcher, torchrun (process {processes.above.pid} on {socket.gethostname()})"
            raise LaunchFailed(processes.told() or f"{who} hangs: its ranks have ended, and it has not")

    def _read_log(self) -> None:
        """Lines of ranks that are for the user; a log that has grown too long begins again."""
        size = os.fstat(self.log).st_size
        if size > self.read:
            lines = os.pread(self.log, min(size - self.read, LOG_BYTES), self.read).split(b"\n")
            self.read = size - len(lines[-1])
            for line in lines[:-1]:
                if line.startswith(NOTE.encode()):
                    self.watch.tell(line.decode(errors="replace").removeprefix(NOTE))
        if size > LOG_BYTES:
            os.ftruncate(self.log, 0)
            os.lseek(self.log, 0, os.SEEK_SET)
            self.read = 0


def _failure(work: Path, status: int, stopped: str, rank: int | None) -> LaunchFailed:
    if stopped:
        told = stopped
    elif rank is not None and status < 0:
        told = f"rank {rank} died of {_signal_name(-status)}"
    else:
        told = _reason(work, status)
        if not _ranks_told(work):
            try:
                with _in_tmpdir(work):  # of a launcher that starts ranks again
                    _try_room(work)
            except LaunchFailed as error:
                told = str(error)
    failure = LaunchFailed(told)
    failure.log = _log(work)
    return failure


def _ranks_told(work: Path) -> bool:
    """Whether a rank has said why it failed, in a file or, where there was no room for one, in the log."""
    files = [*work.glob("error-*.txt"), *work.glob("final-*.txt")]
    return bool(files) or any(line.startswith(FAILED) for line in _log(work).splitlines())


def _stopped_by(work: Path) -> int | None:
    """The signal with which the ranks say that they have ended before their time."""
    try:
        return int((work / STOPPED).read_text())
    except (OSError, ValueError):
        return None


def _reason(work: Path, launcher: int = 0) -> str:
    """Who was killed, or what the first rank to fail wrote (the others only notice), or an exception of the log."""
    if launcher < 0:
        return f"the launcher died of {_signal_name(-launcher)}"
    if any(work.glob("hang-*.txt")):
        return _by_age(work.glob("error-*.txt"))[0].read_text().strip()
    deaths = [(rank, int(number)) for rank, number in _DEATH.findall(_log(work))]
    killed = [(rank, number) for rank, number in deaths if not _follows(work, rank, number)]
    if killed:
        rank, number = killed[0]
        return f"rank {rank} died of {_signal_name(number)}"
    for rank, status in _STATUS.findall(_log(work)):
        if int(status) not in (1, ORPHAN) and not _told(work, rank):  # 1: what it says stands in the log
            return f"rank {rank} ended with status {status} without a word"
    for path in [*_by_age(work.glob("final-*.txt")), *_by_age(work.glob("error-*.txt"))]:
        return path.read_text().strip()
    lines = _log(work).splitlines()
    for line in lines:
        if line.startswith(FAILED):
            return line.removeprefix(FAILED)
    errors = [line.strip() for line in lines if "torch.distributed" not in line and _EXCEPTION.fullmatch(line.strip())]
    return errors[0] if errors else (lines[-1].strip() if lines else "a rank died without a word")


def _follows(work: Path, rank: str, number: int) -> bool:
    """Deaths that have another cause: ended by torchrun; or aborted while it ended, after it had told why."""
    return number == signal.SIGTERM or (number == signal.SIGABRT and _told(work, rank))


def _told(work: Path, rank: str) -> bool:
    return any(error_path(work, int(rank), kind).exists() for kind in ("final", "error"))


def _by_age(paths: Iterable[Path]) -> list[Path]:
    return sorted(paths, key=lambda path: (path.stat().st_mtime_ns, path.name))


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in {int(s) for s in signal.Signals} else f"signal {number}"


def _log(work: Path) -> str:
    return (work / "log.txt").read_text(errors="replace").strip()


def follow_parent() -> None:
    """Called in a rank: ends it when the process that started the run or the launcher is gone: a kill leaves no orphan.

    The launcher is ended as well: it would start the ranks again.
    """
    parent = os.environ.get(PARENT)
    if not parent:
        return
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher and _alive(int(parent)):
            time.sleep(0.5)
        if os.getppid() == launcher and launcher != int(parent):
            os.kill(launcher, signal.SIGTERM)
        os._exit(ORPHAN)

    threading.Thread(target=watch, daemon=True, name="follow-parent").start()


def _alive(pid: int) -> bool:
    import psutil  # here, so that ranks can be started by hand where torch is all there is

    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def report_error(work: Path, rank: int, text: str, *, final: bool = False, hang: bool = False) -> None:
    """Called in a failing rank: one line for the user. Final: starting the ranks again would not help.

    A hang is the cause of all that comes after it: ranks that do not end are killed.
    """
    line = " ".join(text.split())
    kinds = ["final" if final else "error", *(["hang"] if hang else [])]
    try:
        for path in (error_path(work, rank, kind) for kind in kinds):
            path.with_suffix(".tmp").write_text(line)
            path.with_suffix(".tmp").rename(path)
    except OSError:  # no room: the log is in memory
        print(f"\n{FAILED}{line}", file=sys.stderr, flush=True)


def tell_user(text: str) -> None:
    """Called in a rank: a warning that the stage passes on."""
    print(f"\n{NOTE}{text}", file=sys.stderr, flush=True)


def write_result(work: Path, result: dict[str, Any], spare: str | None = None) -> None:
    """Called in the first rank; `spare` is a file for it where the temporary folder has no room."""
    text = json.dumps(result)
    try:
        (work / "result.json").write_text(text)
    except OSError:
        if spare is None:
            raise
        (work / "result.json").unlink(missing_ok=True)
        write_atomic(Path(spare), text.encode())


def restart_count() -> int:
    """In a rank: how often torchrun has started the ranks again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def forget_error(work: Path, rank: int) -> None:
    """Called in a rank that is started again: what made it fail before is over."""
    for kind in ("error", "hang"):
        error_path(work, rank, kind).unlink(missing_ok=True)


def error_path(work: Path, rank: int, kind: str = "error") -> Path:
    return work / f"{kind}-{rank}.txt"
