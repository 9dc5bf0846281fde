"""Starting ranks and waiting for them in bounded time, leaving no process.

`torchrun` on this machine, alone or with others (`run_ranks`), or one rank of a launcher outside (`run_here`).
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.place import Place

PARENT = "SHARDWRIGHT_PARENT"
_EXCEPTION = re.compile(r"(?:\[\w+\]:\s*)?[\w.]*(?:Error|Exception)(?::.*)?")  # the last line of a traceback
_DEATH = re.compile(r"rank +: (\d+) .*?\n *exitcode +: -(\d+) ", re.DOTALL)  # in the table of failures of torchrun


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


def run_ranks(
    module: str,
    job: dict[str, Any],
    ranks: int,
    timeout: float | None,
    poll: Callable[[Path], None] | None = None,
    node: Node | None = None,
    restarts: int = 0,
) -> dict[str, Any]:
    """Runs `python -m module JOB` on that many ranks of this machine; one of them writes the result, a JSON object.

    `poll` is called several times a second with the folder the ranks work in. When a rank fails, all are started again,
    at most `restarts` times; not after an error that is final.
    """
    return _run(_command(module, ranks, node, restarts), _environment(ranks), job, timeout, poll)


def run_here(
    module: str, job: dict[str, Any], place: Place, timeout: float | None, poll: Callable[[Path], None] | None = None
) -> dict[str, Any]:
    """Runs `python -m module JOB` as the one rank that a launcher outside has started this process for.

    Rank 0 has the result; of the others it is empty.
    """
    environment = {**_environment(place.local_ranks), **place.environment()}
    command = [sys.executable, "-m", module]
    return _run(command, environment, job, timeout, poll, rank=place.rank)


def _run(
    command: list[str],
    environment: dict[str, str],
    job: dict[str, Any],
    timeout: float | None,
    poll: Callable[[Path], None] | None,
    rank: int | None = None,
) -> dict[str, Any]:
    """The folder that the ranks work in is the last argument; `rank` is the only one that runs, or all of them do."""
    with tempfile.TemporaryDirectory(prefix="shardwright-") as folder:
        work = Path(folder)
        (work / "job.json").write_text(json.dumps(job))
        with open(work / "log.txt", "wb") as log:
            process = subprocess.Popen(
                [*command, folder], stdout=log, stderr=log, env=environment, start_new_session=True
            )
            try:
                _wait(process, timeout, work, poll)
            except LaunchFailed as error:
                error.log = _log(work)
                raise
            finally:
                _stop(process)
        if process.returncode:
            killed = rank is not None and process.returncode < 0
            failure = LaunchFailed(
                f"rank {rank} died of {_signal_name(-process.returncode)}"
                if killed
                else _reason(work, process.returncode)
            )
            failure.log = _log(work)
            raise failure
        if rank:
            return {}
        if not (work / "result.json").exists():
            raise LaunchFailed("the ranks ended without a result")
        result: dict[str, Any] = json.loads((work / "result.json").read_text())
        return result


def _command(module: str, ranks: int, node: Node | None, restarts: int) -> list[str]:
    where = ["--standalone"] if node is None else _place(node)
    again = [f"--max-restarts={restarts}"] if restarts else []
    launcher = [sys.executable, "-m", "torch.distributed.run", *where, *again, f"--nproc-per-node={ranks}"]
    return [*launcher, "--module", module]


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
    return {"OMP_NUM_THREADS": threads, **os.environ, PARENT: str(os.getpid()), "PYTHONPATH": paths, **bytecode}


def _wait(
    process: subprocess.Popen[bytes], timeout: float | None, work: Path, poll: Callable[[Path], None] | None
) -> None:
    started = time.monotonic()
    while process.poll() is None:
        if timeout is not None and time.monotonic() - started > timeout:
            raise LaunchFailed(f"it did not finish within {timeout:g} s")
        if any(work.glob("final-*.txt")):
            raise LaunchFailed(_reason(work))
        if poll:
            poll(work)
        time.sleep(0.05)
    if poll:
        poll(work)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ends the launcher and its ranks where they still run; ranks lie in sessions of their own."""
    import psutil

    if process.poll() is not None:
        return
    try:
        ranks = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        ranks = []
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
            process.wait(timeout=5)
            break
        except ProcessLookupError:
            break
        except subprocess.TimeoutExpired:
            continue
    for rank in ranks:
        try:
            rank.kill()
        except psutil.NoSuchProcess:
            continue


def _reason(work: Path, launcher: int = 0) -> str:
    """Who was killed, or what the first rank to fail wrote (the others only notice), or an exception of the log."""
    if launcher < 0:
        return f"the launcher died of {_signal_name(-launcher)}"
    deaths = [(rank, int(number)) for rank, number in _DEATH.findall(_log(work))]
    killed = [(rank, number) for rank, number in deaths if not _follows(work, rank, number)]
    if killed:
        rank, number = killed[0]
        return f"rank {rank} died of {_signal_name(number)}"
    for path in [*_by_age(work.glob("final-*.txt")), *_by_age(work.glob("error-*.txt"))]:
        return path.read_text().strip()
    lines = _log(work).splitlines()
    errors = [line.strip() for line in lines if "torch.distributed" not in line and _EXCEPTION.fullmatch(line.strip())]
    return errors[0] if errors else (lines[-1].strip() if lines else "a rank died without a word")


def _follows(work: Path, rank: str, number: int) -> bool:
    """Deaths that have another cause: ended by torchrun; or aborted while it ended, after it had told why."""
    told = any(error_path(work, int(rank), final).exists() for final in (True, False))
    return number == signal.SIGTERM or (number == signal.SIGABRT and told)


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
        os._exit(70)

    threading.Thread(target=watch, daemon=True, name="follow-parent").start()


def _alive(pid: int) -> bool:
    import psutil  # here, so that ranks can be started by hand where torch is all there is

    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def report_error(work: Path, rank: int, text: str, *, final: bool = False) -> None:
    """Called in a failing rank: one line for the user. Final: starting the ranks again would not help."""
    path = error_path(work, rank, final)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(" ".join(text.split()))
    temporary.rename(path)


def restart_count() -> int:
    """In a rank: how often torchrun has started the ranks again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def forget_error(work: Path, rank: int) -> None:
    """Called in a rank that is started again: what made it fail before is over."""
    error_path(work, rank).unlink(missing_ok=True)


def error_path(work: Path, rank: int, final: bool = False) -> Path:
    return work / f"{'final' if final else 'error'}-{rank}.txt"
