"""How ranks of one machine find one another: over a store on its loopback, at a port that the system picks.

`pipeline.launch.launch` names the folder that they share; the first rank writes the port there. Where a launcher
outside has started the ranks it says where they meet, in the environment.
"""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from pipeline.base.errors import TrainError
from pipeline.launch.rank import MEET, restart_count, write_whole

LOOPBACK = "127.0.0.1"
PAUSE_S = 0.02


def init_process_group(backend: str, timeout: timedelta) -> None:
    """As torch's own, on the loopback where that is enough."""
    store = local_store(timeout)
    if store is None:
        dist.init_process_group(backend, timeout=timeout)
        return
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)


def local_store(timeout: timedelta) -> dist.Store | None:
    """None where ranks are on several machines, or a launcher outside has started them."""
    folder = os.environ.get(MEET)
    if not folder:
        return None
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    port_file = Path(folder) / f"port-{restart_count()}"
    deadline = time.monotonic() + timeout.total_seconds()
    store = _serve(port_file, timeout) if rank == 0 else _visit(port_file, timeout, deadline)
    _wait_for_all(store, rank, ranks, deadline)
    return store


def _serve(port_file: Path, timeout: timedelta) -> dist.Store:
    """The socket is made here: torch's own listens on all interfaces."""
    listening = socket.create_server((LOOPBACK, 0), backlog=4096)
    port = listening.getsockname()[1]
    store = dist.TCPStore(
        LOOPBACK, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listening.detach()
    )
    write_whole(port_file, str(port))
    return store


def _visit(port_file: Path, timeout: timedelta, deadline: float) -> dist.Store:
    while not port_file.exists():
        if time.monotonic() > deadline:
            raise _missing(0)
        time.sleep(PAUSE_S)
    return dist.TCPStore(LOOPBACK, int(port_file.read_text()), is_master=False, timeout=timeout)


def _wait_for_all(store: dist.Store, rank: int, ranks: int, deadline: float) -> None:
    """So that it can be said who did not come."""
    store.set(f"here is {rank}", "")
    for other in range(ranks if rank == 0 else 0):
        while not store.check([f"here is {other}"]):
            if time.monotonic() > deadline:
                raise _missing(other)
            time.sleep(PAUSE_S)


def _missing(rank: int) -> TrainError:
    return TrainError(
        f"rank {rank} on {socket.gethostname()} did not come",
        remedy="see why it was not started, or raise wait_s",
    )
