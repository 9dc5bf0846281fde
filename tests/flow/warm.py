"""`python -m ...` where the large libraries are imported already: they take most of the time of a short command.

A server imports them once and forks for every command. It knows none of the project's own modules: each command finds
them in its folder, with environment, files and exit status as under `python -m`. The server writes a `python` that
asks it, for the PATH of those who start `python -m ...` themselves, as dvc does, and for those who start this
interpreter again, as torchrun does with its ranks; and a `dvc` that is `python -m dvc`. A command ends when the
`python` that asked for it does. It sees the network of who asked, so that hosts of network namespaces
(tests/namespaces.py) need no interpreter of their own.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

LARGE = (
    *("torch", "torch._dynamo", "torch.export._trace", "torch._export.passes.replace_autocast_with_hop_pass"),
    *("torch._export.passes.replace_set_grad_with_hop_pass", "torch._inductor.fx_passes.dedupe_symint_uses"),
    *("torch.distributed.run", "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend"),
    *("torch.distributed.pipelining", "torch.profiler"),
    *("numba", "highspy", "omegaconf", "pyomo.environ", "ruamel.yaml"),
    *("matplotlib.figure", "matplotlib.backends.backend_agg"),
    *("dvc.cli.parser", "dvc.commands.repro", "dvc.repo", "dvc.repo.experiments.queue.tempdir"),
    *("dvc.repo.experiments.run", "dvc.repo.artifacts", "dvc.repo.plots", "dvc.repo.stage", "dvc.utils.strictyaml"),
    *("dvc_data.hashfile.db.local", "dvc_data.hashfile.status", "dulwich.worktree", "fsspec.implementations.memory"),
    *("mlflow.store.tracking.sqlalchemy_workspace_store", "sqlalchemy.dialects.sqlite", "alembic.command"),
)
LIMIT_S, GRACE_S = 900.0, 30.0
NETWORK = "/proc/self/ns/net"


class Server:
    """Started when it is first needed; it ends with the process that started it."""

    def __init__(self) -> None:
        self._folder: Path | None = None

    @property
    def python(self) -> Path:
        return self.folder / "python"

    @property
    def folder(self) -> Path:
        """Where its `python` is."""
        import atexit
        import subprocess
        import tempfile

        if self._folder is None or self._process.poll() is not None:  # not yet, or something has ended it
            self._folder = Path(tempfile.mkdtemp(prefix="warm-"))
            ask = f'exec "{sys.executable}" -IS "{__file__}" ask "{self._folder}" "$@"'
            other = f'exec "{sys.executable}" "$@"'
            python = self._folder / "python"
            python.write_text(f'#!/bin/sh\n[ "$1" = -u ] && [ "$2" = -m ] && shift\n[ "$1" = -m ] && {ask}\n{other}\n')
            python.chmod(0o700)
            for command in ("dvc", "shardwright"):
                script = self._folder / command
                script.write_text(f'#!/bin/sh\nexec "{python}" -m {command} "$@"\n')
                script.chmod(0o700)
            command = [sys.executable, __file__, "serve", str(self._folder)]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            assert self._process.stdout
            self._process.stdout.readline()  # it listens
            atexit.register(self._process.communicate)  # it sees the end of its input
        return self._folder

    def run(
        self, module: str, *arguments: str, folder: Path, environment: Mapping[str, str], path: Sequence[Path] = ()
    ) -> tuple[int, str, str]:
        """Exit status, stdout and stderr; modules are found in `path`, or else in the folder."""
        import tempfile

        request = {"module": module, "arguments": arguments, "folder": str(folder), "environment": dict(environment)}
        request["path"] = [str(p) for p in path or (folder,)]
        with open(os.devnull) as nothing, tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            status = ask(self.folder, request, [file.fileno() for file in (nothing, out, err)])
            out.seek(0)
            err.seek(0)
            return status, out.read(), err.read()

    def command_of(self, asked: int) -> int:
        """The process that works for a `python` with this number; 0: none does yet."""
        told = self.folder / f"{asked}.command"
        return int(told.read_text()) if told.exists() else 0

    def below(self, process: int) -> list[int]:
        """All that was started below a process, through every `python` that asked for a command."""
        import psutil

        try:
            found = [child.pid for child in psutil.Process(process).children()]
        except psutil.NoSuchProcess:
            return []
        found += filter(None, [self.command_of(process)])
        return [*found, *(deeper for child in found for deeper in self.below(child))]


def ask(place: Path, request: Mapping[str, Any], files: list[int]) -> int:
    """The exit status of a command that reads and writes these files."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(LIMIT_S)
        connection.connect(str(place / "socket"))
        text = f"{json.dumps({**request, 'asked': os.getpid()})}\n".encode()
        with open(NETWORK) as network:
            sent = socket.send_fds(connection, [text], [*files, network.fileno()])
        connection.sendall(text[sent:])
        return int(connection.makefile().readline())


def ask_as_python(place: Path, arguments: list[str]) -> int:
    """`python -m MODULE ...` as the shell wrote it; a command that died of a signal takes this process with it."""
    request = {"module": arguments[1], "arguments": arguments[2:], "folder": os.getcwd(), "path": [os.getcwd()]}
    status = ask(place, request | {"environment": dict(os.environ)}, [0, 1, 2])
    if status < 0:
        os.kill(os.getpid(), -status)
    return status


def serve(place: Path) -> None:
    """Forks for every request until its input ends."""
    import gc
    import importlib
    import select
    import shutil

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place / "socket"))
        listener.listen()
        print("listening", flush=True)
        os.environ["MLFLOW_LOGGING_LEVEL"] = "CRITICAL"  # as pipeline.tracking.store sets it before it imports MLflow
        os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
        gc.disable()  # all that imports make stays
        for name in LARGE:
            importlib.import_module(name)
        prepare()
        gc.freeze()  # what is never collected is never copied either
        gc.enable()
        leave_quietly()
        answering: list[int] = []
        while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
            connection, _ = listener.accept()
            answering = [process for process in answering if os.waitpid(process, os.WNOHANG)[0] == 0]
            answering.append(os.fork())
            if answering[-1] == 0:
                listener.close()
                answer(connection, place)
            connection.close()
    for process in answering:
        os.waitpid(process, 0)
    shutil.rmtree(place)


def prepare() -> None:
    """What libraries do when they are first used, or do again for every one of so many modules."""
    from numba.core.registry import cpu_target
    from PIL import Image
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    Image.preinit()
    cpu_target.typing_context.refresh()
    cpu_target.target_context.refresh()
    dynamic_rendezvous.get_method_name = lambda depth=2: ""  # for a log at level DEBUG: a second in each torchrun


def leave_quietly() -> None:
    """What libraries do at an interpreter's end with what their import made: half of the time of a short command."""
    import atexit
    import weakref

    atexit.unregister(sys.modules["torch._dynamo.utils"].dump_compile_times)
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False


def answer(connection: socket.socket, place: Path) -> NoReturn:
    """Waits for the command, which is a fork of its own, and tells its exit status."""
    text, files, _, _ = socket.recv_fds(connection, 1 << 16, 4)
    while not text.endswith(b"\n"):
        text += connection.recv(1 << 16)
    request = json.loads(text)
    command = os.fork()
    if command == 0:
        connection.close()
        enter(files.pop())
        become(request, files, place)
    new = place / f"{request['asked']}.new"
    new.write_text(str(command))
    told = new.rename(new.with_suffix(".command"))
    end_with(connection, command)
    _, status = os.waitpid(command, 0)
    told.unlink()
    with contextlib.suppress(OSError):  # nobody waits for it any more
        connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def end_with(connection: socket.socket, command: int) -> None:
    """Returns when the command has ended, or was told to because whoever asked for it has."""
    import select
    import signal

    ended = os.pidfd_open(command)
    if ended not in select.select([ended, connection], [], [])[0]:
        signal.pidfd_send_signal(ended, signal.SIGTERM)
        if not select.select([ended], [], [], GRACE_S)[0]:
            signal.pidfd_send_signal(ended, signal.SIGKILL)


def enter(network: int) -> None:
    """The network of who asked, where it is another."""
    import ctypes

    if os.fstat(network).st_ino != os.stat(NETWORK).st_ino and ctypes.CDLL(None, use_errno=True).setns(network, 0):
        raise OSError(ctypes.get_errno(), "setns")
    os.close(network)


def become(request: Mapping[str, Any], files: Sequence[int], place: Path) -> NoReturn:
    import runpy
    import tempfile
    import threading

    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    tempfile.tempdir = None  # found anew, in this environment
    sys.modules["numba.core.config"].reload_config()
    # Pyomo's is shared by all forks, and stays locked for ever when one of them is killed while it holds it.
    sys.modules["pyomo.common.dependencies"].capture_output_lock = threading.Lock()
    sys.dont_write_bytecode = "PYTHONDONTWRITEBYTECODE" in os.environ
    sys.path[:1] = [*request["path"], *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    sys.executable = str(place / "python")
    sys.argv = ["", *request["arguments"]]
    leave(lambda: runpy.run_module(request["module"], run_name="__main__", alter_sys=True))


def leave(command: Callable[[], object]) -> NoReturn:
    """Ends with the command as the interpreter would, but takes none of the many modules apart: that takes longer."""
    import atexit
    import threading
    import traceback

    status: object = 0
    try:
        command()
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
        status = 1
    if not isinstance(status, int | None):
        print(status, file=sys.stderr)
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status or 0)


if __name__ == "__main__":
    if sys.argv[1] == "ask":
        sys.exit(ask_as_python(Path(sys.argv[2]), sys.argv[3:]))
    serve(Path(sys.argv[2]))
