"""How the ranks of a start find one another.

Those of one machine over a store on its loopback, at a port that the system picks: `pipeline.launch.launch` names the
folder that they share, and the first rank writes the port there. To others the environment says where they meet.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch.distributed as dist

from shardwright.pipeline.base.errors import TrainError
from shardwright.pipeline.launch.rank import MEET, restart_count, write_whole

LOOPBACK = "127.0.0.1"
PAUSE_S = 0.02


def init_process_group(backend: str, timeout: timedelta, store: dist.Store | None = None) -> dist.Store:
    """As torch's own. The store on which the ranks met: over it they can go on to another backend."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if store is None:
        store = local_store(timeout) or _store_of_environment(rank, ranks, timeout)
    own = dist.PrefixStore(f"over {backend}", store)
    dist.init_process_group(backend, store=own, rank=rank, world_size=ranks, timeout=timeout)
    return store


def _store_of_environment(rank: int, ranks: int, timeout: timedelta) -> dist.Store:
    """As torch finds it, but for torchrun's own: it outlives a start, with what ranks that are gone left there.

    Torch tells starts apart by how often torchrun has restarted ranks, which is not the same number on all hosts.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return next(dist.rendezvous("env://", timeout=timeout))[0]
    port = int(os.environ["MASTER_PORT"])
    shared = dist.TCPStore(os.environ["MASTER_ADDR"], port, is_master=False, timeout=timeout)
    return dist.PrefixStore(f"start {agree_on_start(shared, rank, ranks, timeout)}", shared)


def agree_on_start(store: dist.Store, rank: int, ranks: int, timeout: timedelta) -> str:
    """A word that the first rank of this start gives to all others of this start, and that no start before has had.

    Each asks by a number that it has drawn; one that died unanswered may have left a question, which then is answered,
    too, and helps nobody. The first rank answers until everyone has said that it has heard.
    """
    own = uuid.uuid4().hex
    if rank:
        store.set(f"question of {rank}", own)
        store.wait([f"answer to {own}"], timeout)
        word = str(store.get(f"answer to {own}").decode())
        store.set(f"{word} heard by {rank}", "")
        return word
    deadline = time.monotonic() + timeout.total_seconds()
    waiting = set(range(1, ranks))
    while waiting:
        for other in waiting:
            if store.check([f"question of {other}"]):
                store.set(f"answer to {store.get(f'question of {other}').decode()}", own)
        waiting = {other for other in waiting if not store.check([f"{own} heard by {other}"])}
        if waiting and time.monotonic() > deadline:
            raise TrainError(f"rank {min(waiting)} did not come", remedy="see why it was not started, or raise wait_s")
        time.sleep(PAUSE_S if waiting else 0)
    return own


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
