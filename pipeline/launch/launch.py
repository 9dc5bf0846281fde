"""Starting ranks and waiting for them in bounded time, leaving no process.

By `torchrun` on this machine, alone or with others; or the one rank that a launcher outside wants here.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from shardwright.pipeline.base.signals import Interrupted, gentle
from shardwright.pipeline.launch.place import RankPlace
from shardwright.pipeline.launch.rank import MEET, NOTE, PARENT
from shardwright.pipeline.launch.work_folder import LaunchFailed, WorkFolder, failure_of, reason, work_folder

Poll = Callable[[Path], None]
Asked = Callable[[], int | None]  # the signal that asks to end

LOOK_S = 0.5  # between two looks at the processes
END_S = 30.0  # that a launcher may take to end when its ranks have
LOG_BYTES = 64_000_000
GONE = (ProcessLookupError, psutil.Error)
PATIENCE_S = 3600  # of torchrun with ranks that save what they have; the stage ends who hangs


@dataclass(frozen=True)
class LaunchNode:
    """This machine among those that run the ranks together."""

    count: int
    number: int
    address: str  # of the first one
    port: int


@dataclass(frozen=True)
class Supervision:
    """How ranks are looked after."""

    hang_s: float | None = None  # so long a process may stand still
    gentle: bool = False  # ranks that are told to end save what they have
    tell: Callable[[str], None] = lambda text: None  # a line of theirs that is for the user
    restarts: int = 0  # how often all ranks are started again when one fails; not after an error that is final


UNSUPERVISED = Supervision()


def run_ranks(
    module: str,
    job: Mapping[str, Any],
    ranks: int,
    timeout: float | None,
    poll: Poll | None = None,
    node: LaunchNode | RankPlace | None = None,
    watch: Supervision = UNSUPERVISED,
) -> dict[str, Any]:
    """Runs `python -m module JOB` on that many ranks of this machine; one of them writes the result, a JSON object.

    `poll` is called several times a second with the folder the ranks work in. Without `node` all ranks are on this
    machine, and meet on its loopback. A `RankPlace` is that of the one rank for which a launcher outside has started
    this process: rank 0 has the result then, of the others it is empty.
    """
    rank = node.rank if isinstance(node, RankPlace) else None
    with work_folder() as work:
        work.write_job(job)
        if isinstance(node, RankPlace):
            command = [sys.executable, "-m", module, str(work.path)]
            environment = {**_environment(node.local_ranks), **node.environment()}
        else:
            command = _command(module, ranks, node, watch.restarts, work.path)
            local = {**_on_the_loopback(), MEET: str(work.path)} if node is None else {}
            environment = {**_environment(ranks), **local}
        log = work.descriptor
        with gentle() if watch.gentle else nullcontext(lambda: None) as asked:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
            launched = _Launched(process, ranks, rank, work, watch)
            try:
                launched.wait(timeout, poll, asked)
            except LaunchFailed as error:
                error.log = work.log()
                raise
            finally:
                launched.end()
            failure = failure_of(work, process.returncode, launched.told(), rank) if process.returncode else None
            found = work.result(job)
            if found is not None and failure is None:
                return {} if rank else found
            number = asked() or work.stopped_by()
        if number:
            if failure and not work.stopped_by() and (work.path / "steps.jsonl").exists():
                watch.tell(f"the ranks failed while they were ended: {failure}")
            raise Interrupted(number)
        if failure:
            raise failure
        if rank:
            return {}
        raise LaunchFailed("the ranks ended without a result")


def _command(module: str, ranks: int, node: LaunchNode | None, restarts: int, work: Path) -> list[str]:
    """On one machine torchrun keeps its own state in a file instead of listening on all interfaces."""
    if node is None:
        conf = "store_type=file,keep_alive_interval=3600"  # each of these is a further kilobyte of the file
        store = [f"--rdzv-endpoint={work / 'torchrun.store'}", f"--rdzv-conf={conf}"]
        where = ["--nnodes=1", "--rdzv-backend=c10d", *store]
    else:
        meet = [f"--master-addr={node.address}", f"--master-port={node.port}"]
        where = [f"--nnodes={node.count}", f"--node-rank={node.number}", *meet]
    again = [f"--max-restarts={restarts}"] if restarts else []
    launcher = [sys.executable, "-m", "torch.distributed.run", *where, *again, f"--nproc-per-node={ranks}"]
    return [*launcher, f"--log-dir={work / 'torchrun'}", "--module", module, str(work)]


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


class _Launched:
    """The launcher and its ranks, or the one rank that was started without a launcher: looked after until they end."""

    def __init__(
        self, started: subprocess.Popen[bytes], count: int, rank: int | None, work: WorkFolder, watch: Supervision
    ) -> None:
        """So many ranks, or the one that this is."""
        self.started, self.count, self.work, self.watch = started, count, work, watch
        self.above = psutil.Process(started.pid)
        self.alone = {rank: self.above} if rank is not None else None
        self.known: dict[int, psutil.Process] = {}
        self.halted: dict[int, tuple[psutil.Process, float]] = {}  # by rank: what is stopped, and since when
        self.launcher_halted: float | None = None
        self.asked: set[int] = set()  # processes that were told to end
        self.read = 0  # how far the log has been read
        self.awake = 0.0  # seconds in which this process was not stopped itself
        self.childless: float | None = None  # since when the launcher has no ranks though it has had some
        self.had_ranks = False

    def wait(self, timeout: float | None, poll: Poll | None, asked: Asked) -> None:
        started = last = time.monotonic()
        looked = -LOOK_S
        while self.started.poll() is None:
            if timeout is not None and time.monotonic() - started > timeout:
                told = self.told()
                raise LaunchFailed(f"it did not finish within {timeout:g} s{told and f': {told}'}")
            if any(self.work.path.glob("final-*.txt")):
                raise LaunchFailed(reason(self.work.path, self.work.log()))
            now = time.monotonic()
            self.awake += min(now - last, 1.0)
            last = now
            if self.awake - looked >= LOOK_S:
                looked = self.awake
                self._look(asked)
            if poll:
                poll(self.work.path)
            time.sleep(0.05)
        self._look(asked)
        if poll:
            poll(self.work.path)

    def _look(self, asked: Asked) -> None:
        """Takes note of what is stopped; what was stopped when it ended stays noted until a new rank has its number."""
        self._read_log()
        for rank, process in self._ranks().items():
            if _status(process) == psutil.STATUS_STOPPED:
                if rank not in self.halted or self.halted[rank][0] != process:
                    self.halted[rank] = process, self.awake
            elif _lives(process):
                self.halted.pop(rank, None)
        halted = self.alone is None and _status(self.above) == psutil.STATUS_STOPPED
        self.launcher_halted = (self.launcher_halted or self.awake) if halted else None
        number = asked()
        if number and self.started.poll() is None:
            self._ask(number)
        if self.watch.hang_s is not None:
            self._end_what_hangs(self.awake - self.watch.hang_s)

    def _end_what_hangs(self, before: float) -> None:
        """What has stood still since then: a rank is ended, and the launcher starts all again or gives up."""
        if self.launcher_halted is not None and self.launcher_halted <= before:
            raise LaunchFailed(self.told())
        for process, since in self.halted.values():  # they died, as far as others are concerned
            if since <= before:
                with suppress(psutil.Error):
                    process.kill()
        ranks = self._ranks()
        self.had_ranks |= bool(ranks)
        self.childless = (self.childless or self.awake) if self.had_ranks and not ranks else None
        if self.childless is not None and self.childless <= min(before, self.awake - END_S):
            hangs = f"the launcher, torchrun ({_place(self.above)}) hangs: its ranks have ended, and it has not"
            raise LaunchFailed(self.told() or hangs)

    def _read_log(self) -> None:
        """Lines of ranks that are for the user; a log that has grown too long begins again."""
        log = self.work.descriptor
        size = os.fstat(log).st_size
        if size > self.read:
            lines = os.pread(log, min(size - self.read, LOG_BYTES), self.read).split(b"\n")
            self.read = size - len(lines[-1])
            for line in lines[:-1]:
                if line.startswith(NOTE.encode()):
                    self.watch.tell(line.decode(errors="replace").removeprefix(NOTE))
        if size > LOG_BYTES:
            os.ftruncate(log, 0)
            os.lseek(log, 0, os.SEEK_SET)
            self.read = 0

    def _ranks(self) -> dict[int, psutil.Process]:
        """By their number. Looked for again when one is not there, as that reads all processes of the host."""
        if self.alone is not None:
            return self.alone
        if len(self.known) < self.count or not all(map(_lives, self.known.values())):
            self.known = {}
            with suppress(psutil.Error):
                for process in filter(_lives, self.above.children()):
                    with suppress(psutil.Error, KeyError, ValueError):
                        self.known[int(process.environ()["RANK"])] = process
        return self.known

    def told(self) -> str:
        """Who is stopped, for the user; nothing where nobody is."""
        names = [f"rank {rank} ({_place(process)})" for rank, (process, _) in self.halted.items()]
        if self.launcher_halted is not None:
            names.append(f"the launcher, torchrun ({_place(self.above)})")
        verb = "is" if len(names) == 1 else "are"
        return f"{', '.join(names)} {verb} stopped, by SIGSTOP or a debugger" if names else ""

    def _ask(self, number: int) -> None:
        """Tells the ranks to end; again and again until they do, as a launcher may start others.

        Ranks that come after the first were asked, and a launcher without ranks, are ended by the launcher.
        """
        ranks = [process for process in self._ranks().values() if _lives(process)]
        new = [process for process in ranks if process.pid not in self.asked]
        if not ranks or (self.asked and new):
            with suppress(*GONE):
                self.above.send_signal(signal.SIGTERM)
            self.asked |= {process.pid for process in new}
            return
        for process in new:
            with suppress(*GONE):
                process.send_signal(signal.SIGCONT)
                process.send_signal(number)
            self.asked.add(process.pid)

    def end(self) -> None:
        """At once, where they still run; ranks lie in sessions of their own."""
        if self.started.poll() is not None:
            return
        below: list[psutil.Process] = []
        with suppress(psutil.Error):
            below = self.above.children(recursive=True)
        with suppress(*GONE):
            os.killpg(self.started.pid, signal.SIGTERM)  # a launcher that has heard it starts no more ranks
        for process in below:
            with suppress(*GONE):
                process.kill()
        try:
            self.started.wait(timeout=5)
        except subprocess.TimeoutExpired:
            with suppress(*GONE):
                os.killpg(self.started.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                self.started.wait(timeout=5)


def _lives(process: psutil.Process) -> bool:
    return _status(process) not in (psutil.STATUS_DEAD, psutil.STATUS_ZOMBIE)


def _status(process: psutil.Process) -> str:
    try:
        return str(process.status()) if process.is_running() else psutil.STATUS_DEAD
    except psutil.Error:
        return psutil.STATUS_DEAD


def _place(process: psutil.Process) -> str:
    return f"process {process.pid} on {socket.gethostname()}"
