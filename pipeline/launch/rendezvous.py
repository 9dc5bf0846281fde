"""How ranks of one machine find one another: over a store on its loopback, at a port that the system picks.

`pipeline.launch.launch` names the folder that they share; the first rank writes the port there. Where a launcher
outside has started the ranks it says where they meet, in the environment.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
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

    def wait_for(other: int, came: Callable[[], bool]) -> None:
        while not came():
            if time.monotonic() > deadline:
                what = f"rank {other} on {socket.gethostname()} did not come"
                raise TrainError(what, remedy="see why it was not started, or raise wait_s")
            time.sleep(PAUSE_S)

    if rank:
        wait_for(0, port_file.exists)
        store = dist.TCPStore(LOOPBACK, int(port_file.read_text()), is_master=False, timeout=timeout)
        store.set(f"here is {rank}", "")
        return store
    listening = socket.create_server((LOOPBACK, 0), backlog=4096)  # made here: torch's own listens on all interfaces
    port, own = listening.getsockname()[1], {"wait_for_workers": False, "master_listen_fd": listening.detach()}
    store = dist.TCPStore(LOOPBACK, port, is_master=True, timeout=timeout, **own)
    write_whole(port_file, str(port))
    for other in range(1, ranks):  # so that it can be said who did not come
        wait_for(other, partial(store.check, [f"here is {other}"]))
    return store
