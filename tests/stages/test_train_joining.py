"""Which device a rank has, and what ranks talk over."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from shardwright.pipeline.base.errors import TrainError
from shardwright.pipeline.launch.rendezvous import agree_on_start
from shardwright.stages.train.ranks import joining


@pytest.mark.parametrize(
    ("local_rank", "gpus", "number"), [("0", 8, 0), ("7", 8, 7), ("5", 1, 0), ("3", 2, 1), (None, 4, 0)]
)
def test_each_local_rank_has_a_gpu(local_rank, gpus, number):
    environment = {} if local_rank is None else {"LOCAL_RANK": local_rank}
    assert joining.gpu_of(environment, gpus) == number


def test_ranks_that_share_a_gpu_do_not_talk_over_nccl():
    assert joining.backend_for(["a", "b", "c"]) == joining.NCCL == "cpu:gloo,cuda:nccl"
    assert joining.backend_for(["a", "b", "a"]) == joining.GLOO


def started(place: tuple[str, int], ranks: list[int], world: int, limit: float) -> dict[int, str]:
    """What each of these ranks of a start hears, or why not."""

    def one(rank: int) -> str:
        store = dist.TCPStore(*place, is_master=False, timeout=timedelta(seconds=600))
        store.set_timeout(timedelta(seconds=limit))
        try:
            return agree_on_start(store, rank, world, timedelta(seconds=limit))
        except (TrainError, dist.DistError) as error:
            return f"failed: {error}"

    with ThreadPoolExecutor(world) as pool:
        return dict(zip(ranks, pool.map(one, ranks), strict=True))


def test_ranks_of_a_start_find_one_another_whatever_others_have_left():
    """In between two starts fail: ranks ask and get no answer, and the first one waits for ranks that never come."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = ("127.0.0.1", server.port)
    first = started(place, [0, 1, 2, 3], 4, 600)
    assert len(set(first.values())) == 1
    assert all(word.startswith("failed") for word in started(place, [1, 3], 4, 0.3).values())
    alone = started(place, [0, 2], 4, 0.5)
    assert alone[0].startswith("failed: rank 1 did not come")
    again = started(place, [3, 2, 1, 0], 4, 600)
    assert len(set(again.values())) == 1 and again[0] not in (*first.values(), *alone.values())


@pytest.fixture
def alone(monkeypatch):
    """The environment of a run of one rank; its process group goes with the test."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    yield
    dist.destroy_process_group()


def test_cpus_talk_over_gloo(alone):
    joining.join("cpu", timedelta(seconds=600))
    assert dist.get_backend() == "gloo" and dist.get_world_size() == 1


def test_gpus_of_their_own_join_once_more(alone, monkeypatch):
    """Without a GPU here: what CUDA would say is made up, and gloo stands for NCCL."""
    chosen, joined = [], []
    as_it_is = dist.init_process_group
    monkeypatch.setattr(dist, "init_process_group", lambda kind, **told: (joined.append(kind), as_it_is(kind, **told)))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid=f"gpu {number}"))
    monkeypatch.setattr(joining, "NCCL", "cpu:gloo")
    joining.join("cuda", timedelta(seconds=600))
    assert chosen == [0] and joined == ["gloo", "cpu:gloo"]
    total = torch.ones(3)
    dist.all_reduce(total)
    assert total.tolist() == [1.0, 1.0, 1.0]
