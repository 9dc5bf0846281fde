"""Starting ranks and waiting for them in bounded time, leaving no process.

By `torchrun` on this machine, alone or with others; or the one rank that a launcher outside wants here.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.base.signals import Interrupted, gentle
from pipeline.launch.place import RankPlace
from pipeline.launch.processes import Processes
from pipeline.launch.rank import MEET, NOTE, PARENT
from pipeline.launch.work_folder import LaunchFailed, WorkFolder, failure_of, reason, work_folder

Poll = Callable[[Path], None]
Asked = Callable[[], int | None]  # the signal that asks to end

LOOK_S = 0.5  # between two looks at the processes
END_S = 30.0  # that a launcher may take to end when its ranks have
LOG_BYTES = 64_000_000
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
            processes = Processes(process, ranks, rank)
            try:
                _Waiting(processes, work, watch, asked).wait(timeout, poll)
            except LaunchFailed as error:
                error.log = work.log()
                raise
            finally:
                processes.end()
            failure = failure_of(work, process.returncode, processes.told(), rank) if process.returncode else None
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


class _Waiting:
    """For the end of a launch, while it is looked after."""

    def __init__(self, processes: Processes, work: WorkFolder, watch: Supervision, asked: Asked) -> None:
        self.processes, self.work, self.watch, self.asked = processes, work, watch, asked
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
            if any(self.work.path.glob("final-*.txt")):
                raise LaunchFailed(reason(self.work.path, self.work.log()))
            now = time.monotonic()
            self.awake += min(now - last, 1.0)
            last = now
            if self.awake - looked >= LOOK_S:
                looked = self.awake
                self._look()
            if poll:
                poll(self.work.path)
            time.sleep(0.05)
        self._look()
        if poll:
            poll(self.work.path)

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
            hangs = f"{processes.launcher()} hangs: its ranks have ended, and it has not"
            raise LaunchFailed(processes.told() or hangs)

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
