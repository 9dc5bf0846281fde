"""The probe across hosts for real, in network namespaces; and hosts that fail are told by name."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
from datetime import timedelta

import psutil
import pytest
from torch.distributed import TCPStore

from shardwright.pipeline.ir.cluster import Cluster
from shardwright.pipeline.ir.codec import decode
from tests.flow.probed_hosts import LIMIT_S, end, first, join, start
from tests.flow.project import WARM
from tests.namespaces import OWN, address, hosts, why_not

pytestmark = pytest.mark.flow


@pytest.fixture(scope="module")
def three_hosts():
    reason = why_not()
    if reason:
        pytest.skip(f"hosts of network namespaces: {reason}")
    with hosts("three", 3, lambda a, b: 400) as made:
        yield made


@pytest.mark.long
def test_three_hosts_are_measured_over_their_own_links(three_hosts):
    """How fast the links are found to be is the machine's affair: benchmarks.cluster_probe judges that."""
    names = [address(number) for number in range(3)]
    network = {"GLOO_SOCKET_IFNAME": OWN}
    settings = {
        "hosts": names, "port": 29611, "join_s": 200, "timeout_s": 220, "budget_s": 2, "repeats": 3,
        "max_message_mb": 1, "devices": 2,
    }  # fmt: skip
    processes = [first(settings, three_hosts[0], **network)]
    processes += [join(f"{names[0]}:29611", names[n], three_hosts[n], **network) for n in (1, 2)]
    ended = end(processes)
    assert [code for code, _, _ in ended] == [0, 0, 0], ended
    cluster = decode(Cluster, json.loads(ended[0][1].splitlines()[-1]))
    assert [(host.name, host.ranks) for host in cluster.hosts] == list(zip(names, ((0, 1), (2,), (3,)), strict=True))
    assert cluster.devices == 4 and cluster.group.kind == "cluster" and cluster.measured.pairs == 6
    assert {mesh.sizes for mesh in cluster.meshes} == {(4,), (2, 2)}
    assert all(axis.measured for mesh in cluster.meshes for axis in mesh.axes)


# ---- failures, on this machine alone


def test_a_rank_that_is_through_is_not_aborted_by_its_voice():
    """A thread inside the store while the interpreter ends would be: so it must have ended before."""
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=LIMIT_S))
    script = (
        "import shardwright.stages.cluster.meeting as meeting\n"
        "meeting.BEAT_S = 0\n"  # nearly always inside
        f"voice = meeting.Voice({{'host': 'a', 'meeting': ['127.0.0.1', {store.port}], 'timeout_s': 200}}, 0)\n"
        "while not voice.store.check(['beat/0']):\n    pass\n"
        "voice.stop()\n"
    )
    assert end([start(["-c", script])])[0] == (0, "", "")
    assert store.get("beat/0")


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def local(port: int, *names: str, **more) -> dict:
    return {"hosts": ["127.0.0.1", *names], "port": port, "timeout_s": 200, "repeats": 3, **more}


def test_a_host_that_does_not_come_is_named():
    ((code, _, err),) = end([first(local(free_port(), "far-away", join_s=1))])
    assert code == 2 and "host far-away (node 1) did not join within 1 s" in err.splitlines()[-1]


def test_a_first_host_that_is_not_there_is_named():
    port = free_port()
    ((code, _, err),) = end([join(f"127.0.0.1:{port}", "other", wait=1)])
    assert code == 2 and f"host 127.0.0.1 did not answer at port {port} within 1 s" in err.splitlines()[-1]


def test_another_version_of_torch_is_refused_on_both_sides():
    port = free_port()
    other = (
        "import torch; torch.__version__ = '1.0'; import sys; from shardwright.stages.cluster.join import main;"
        f"sys.exit(main(['127.0.0.1:{port}', '--host', 'old']))"
    )
    ended = end([first(local(port, "old", join_s=200)), start(["-c", other])])
    for code, _, err in ended:
        assert code == 2 and "host old (node 1) has torch 1.0, host 127.0.0.1 has" in err.splitlines()[-1]


def ranks_below(pid: int) -> dict[int, int]:
    """The process of each rank that works already."""
    found = {}
    for number in WARM.below(pid):
        try:
            child = psutil.Process(number)
            if "shardwright.stages.cluster.probe" in child.cmdline() and "torch.distributed.run" not in child.cmdline():
                found[int(child.environ()["RANK"])] = WARM.command_of(number)
        except psutil.Error:
            continue
    return {rank: process for rank, process in found.items() if process}


def rank_of(process: subprocess.Popen[str], rank: int, within: float = LIMIT_S) -> psutil.Process:
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        found = ranks_below(process.pid)
        if rank in found:
            return psutil.Process(found[rank])
        time.sleep(0.05)
    raise AssertionError(f"rank {rank} did not start")


def until_it_speaks(port: int, rank: int, within: float = LIMIT_S) -> None:
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=within))
    store.wait([f"beat/{rank}"])


@pytest.mark.parametrize(
    ("sign", "told"),
    [
        (signal.SIGKILL, "died of SIGKILL"),
        pytest.param(signal.SIGSTOP, "no longer answers", marks=pytest.mark.long),  # after the silence that is allowed
    ],
)
def test_a_rank_that_dies_or_stops_on_another_host_is_named(sign, told):
    port = free_port()
    processes = [first(local(port, "other", silent_s=8)), join(f"127.0.0.1:{port}", "other")]
    rank = rank_of(processes[1], 1)
    until_it_speaks(port, 1)
    rank.send_signal(sign)
    ended = end(processes)
    assert all(code == 2 for code, _, _ in ended), ended
    assert f"rank 1 on host other {told}" in ended[0][2].splitlines()[-1]
    assert "conf/cluster/ours.yaml: the probe failed: " in ended[0][2].splitlines()[-1]


def test_a_rank_that_dies_on_the_only_host_is_named():
    process = first({"timeout_s": 200, "repeats": 3, "devices": 2})
    rank_of(process, 1).send_signal(signal.SIGKILL)
    ((code, _, err),) = end([process])
    assert code == 2 and f"rank 1 on host {socket.gethostname()} died of SIGKILL" in err.splitlines()[-1]
