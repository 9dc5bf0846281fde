"""`python -m ...` where the large libraries are imported already: they take most of the time of a short command.

A server imports them once and forks for every command. It knows none of the project's own modules: each command finds
them in its folder, with environment, files and exit status as under `python -m`. The server writes a `python` that
asks it, for the PATH of those who start `python -m ...` themselves, as dvc does.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LARGE = ("torch", "torch._dynamo", "torch.export", "numba", "omegaconf", "pyomo.environ", "matplotlib.figure")
LIMIT_S = 240.0


class Server:
    """Started when it is first needed; it ends with the process that started it."""

    def __init__(self) -> None:
        self._folder: Path | None = None

    @property
    def folder(self) -> Path:
        """Where its `python` is."""
        import atexit
        import subprocess
        import tempfile

        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="warm-"))
            python = self._folder / "python"
            python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -IS "{__file__}" ask "{self._folder}" "$@"\n')
            python.chmod(0o700)
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


def ask(place: Path, request: Mapping[str, Any], files: list[int]) -> int:
    """The exit status of a command that reads and writes these files."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(LIMIT_S)
        connection.connect(str(place / "socket"))
        text = f"{json.dumps(request)}\n".encode()
        sent = socket.send_fds(connection, [text], files)
        connection.sendall(text[sent:])
        return int(connection.makefile().readline())


def ask_as_python(place: Path, arguments: list[str]) -> int:
    """`python -m MODULE ...` as the shell wrote it."""
    assert arguments[0] == "-m", arguments
    request = {"module": arguments[1], "arguments": arguments[2:], "folder": os.getcwd(), "path": [os.getcwd()]}
    return ask(place, request | {"environment": dict(os.environ)}, [0, 1, 2])


def serve(place: Path) -> None:
    """Forks for every request; returns at the end, and in each fork as the command that was asked for."""
    import gc
    import importlib
    import select
    import shutil

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place / "socket"))
        listener.listen()
        print("listening", flush=True)
        for name in LARGE:
            importlib.import_module(name)
        gc.freeze()  # what is never collected is never copied either
        answering: list[int] = []
        while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
            connection, _ = listener.accept()
            answering = [process for process in answering if os.waitpid(process, os.WNOHANG)[0] == 0]
            answering.append(os.fork())
            if answering[-1] == 0:
                listener.close()
                return answer(connection)
            connection.close()
    for process in answering:
        os.waitpid(process, 0)
    shutil.rmtree(place)


def answer(connection: socket.socket) -> None:
    """Waits for the command, which is a fork of its own, and tells its exit status."""
    text, files, _, _ = socket.recv_fds(connection, 1 << 16, 3)
    while not text.endswith(b"\n"):
        text += connection.recv(1 << 16)
    command = os.fork()
    if command == 0:
        connection.close()
        return become(json.loads(text), files)
    _, status = os.waitpid(command, 0)
    connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def become(request: Mapping[str, Any], files: Sequence[int]) -> None:
    import runpy
    import tempfile

    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    tempfile.tempdir = None  # found anew, in this environment
    sys.dont_write_bytecode = "PYTHONDONTWRITEBYTECODE" in os.environ
    sys.path[:1] = request["path"]
    sys.argv = ["", *request["arguments"]]
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    if sys.argv[1] == "ask":
        sys.exit(ask_as_python(Path(sys.argv[2]), sys.argv[3:]))
    serve(Path(sys.argv[2]))
