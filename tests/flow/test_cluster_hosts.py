"""The probe across hosts for real: four network namespaces with shaped links; and hosts that fail are told by name."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from torch.distributed import TCPStore

from pipeline.ir.cluster import Cluster
from pipeline.ir.codec import decode
from tests.flow.project import WARM
from tests.namespaces import OWN, address, hosts, why_not

pytestmark = pytest.mark.flow

ROOT = Path(__file__).resolve().parents[2]
FAST, SLOW = 400, 100  # megabits a second


@pytest.fixture(scope="module")
def four_hosts():
    """Two fast pairs, slow between them."""
    reason = why_not()
    if reason:
        pytest.skip(f"four hosts of network namespaces: {reason}")
    with hosts("four", 4, lambda a, b: FAST if a // 2 == b // 2 else SLOW) as made:
        yield made


def start(command: list[str], space: str | None = None, **environment: str) -> subprocess.Popen[str]:
    """The interpreter is a fork of the warm one, for modules, and so are the launchers and ranks that it starts."""
    inside = ["ip", "netns", "exec", space] if space else []
    known = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen(
        [*inside, str(WARM.python), *command], env=known, cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def first(settings: dict, space: str | None = None, **environment: str) -> subprocess.Popen[str]:
    return start(["-m", "tests.flow.first_host", json.dumps(settings)], space, **environment)


def join(
    place: str, host: str, space: str | None = None, wait: int = 60, devices: int = 1, **environment: str
) -> subprocess.Popen[str]:
    told = ["--host", host, "--wait", str(wait), "--devices", str(devices)]
    return start(["-m", "stages.cluster.join", place, *told], space, **environment)


def end(processes: list[subprocess.Popen[str]], within: float = 150) -> list[tuple[int, str, str]]:
    deadline = time.monotonic() + within
    found = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=max(1, deadline - time.monotonic()))
            found.append((process.returncode, out, err))
        return found
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def test_four_hosts_are_found_as_they_are_linked(four_hosts):
    names = [address(number) for number in range(4)]
    network = {"GLOO_SOCKET_IFNAME": OWN}
    settings = {
        "hosts": names, "port": 29611, "join_s": 60, "timeout_s": 120, "budget_s": 6, "repeats": 3,
        "max_message_mb": 8,
    }  # fmt: skip
    processes = [first(settings, four_hosts[0], **network)]
    processes += [join(f"{names[0]}:29611", names[n], four_hosts[n], **network) for n in (1, 2, 3)]
    ended = end(processes)
    assert [code for code, _, _ in ended] == [0, 0, 0, 0], ended
    cluster = decode(Cluster, json.loads(ended[0][1].splitlines()[-1]))
    group = cluster.group
    assert [host.name for host in cluster.hosts] == names and cluster.devices == 4
    assert group.kind == "cluster" and [member.ranks for member in group.members] == [(0, 1), (2, 3)]
    assert [member.kind for member in group.members] == ["switch", "switch"]
    # Four ranks share the cores with other tests: a fast wire may look slower, but never like a slow one.
    assert group.bandwidth == pytest.approx(SLOW * 1e6 / 8, rel=0.3)
    for member in group.members:
        assert 2 * SLOW < member.bandwidth * 8 / 1e6 < 1.3 * FAST
    two = [mesh for mesh in cluster.meshes if len(mesh.axes) == 2]
    outer, inner = two[0].axes
    assert two[0].sizes == (2, 2) and outer.measured and inner.measured
    assert outer.links["all_reduce"].seconds(4e6) > 1.2 * inner.links["all_reduce"].seconds(4e6)


def test_two_devices_share_the_wire_of_their_host(four_hosts):
    names = [address(0), address(2)]
    network = {"GLOO_SOCKET_IFNAME": OWN}
    settings = {
        "hosts": names, "port": 29631, "timeout_s": 120, "budget_s": 6, "repeats": 3, "max_message_mb": 8,
        "devices": 2,
    }  # fmt: skip
    ended = end([
        first(settings, four_hosts[0], **network),
        join(f"{names[0]}:29631", names[1], four_hosts[2], devices=2, **network),
    ])  # fmt: skip
    assert [code for code, _, _ in ended] == [0, 0], ended
    cluster = decode(Cluster, json.loads(ended[0][1].splitlines()[-1]))
    group = cluster.group
    assert [member.ranks for member in group.members] == [(0, 1), (2, 3)] and group.kind == "cluster"
    # Four ranks share the cores with other tests. Apart from noise, together they get what one gets, not twice that.
    assert group.bandwidth == pytest.approx(SLOW * 1e6 / 8, rel=0.3)
    assert group.uplink == pytest.approx(SLOW * 1e6 / 8, rel=0.3)
    assert all(axis.measured for mesh in cluster.meshes for axis in mesh.axes)


# ---- failures, on this machine alone


def test_a_rank_that_is_through_is_not_aborted_by_its_voice():
    """A thread inside the store while the interpreter ends would be: so it must have ended before."""
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=20))
    script = (
        "import stages.cluster.meeting as meeting\n"
        "meeting.BEAT_S = 0\n"  # nearly always inside
        f"voice = meeting.Voice({{'host': 'a', 'meeting': ['127.0.0.1', {store.port}], 'timeout_s': 20}}, 0)\n"
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
    return {"hosts": ["127.0.0.1", *names], "port": port, "timeout_s": 100, "repeats": 3, **more}


def test_a_host_that_does_not_come_is_named():
    started = time.monotonic()
    ((code, _, err),) = end([first(local(free_port(), "far-away", join_s=1))])
    assert code == 2 and "host far-away (node 1) did not join within 1 s" in err.splitlines()[-1]
    assert time.monotonic() - started < 60


def test_a_first_host_that_is_not_there_is_named():
    port = free_port()
    ((code, _, err),) = end([join(f"127.0.0.1:{port}", "other", wait=1)])
    assert code == 2 and f"host 127.0.0.1 did not answer at port {port} within 1 s" in err.splitlines()[-1]


def test_another_version_of_torch_is_refused_on_both_sides():
    port = free_port()
    other = (
        "import torch; torch.__version__ = '1.0'; import sys; from stages.cluster.join import main;"
        f"sys.exit(main(['127.0.0.1:{port}', '--host', 'old']))"
    )
    ended = end([first(local(port, "old", join_s=60)), start(["-c", other])])
    for code, _, err in ended:
        assert code == 2 and "host old (node 1) has torch 1.0, host 127.0.0.1 has" in err.splitlines()[-1]


def ranks_below(pid: int) -> dict[int, int]:
    """The process of each rank that works already."""
    found = {}
    for number in WARM.below(pid):
        try:
            child = psutil.Process(number)
            if "stages.cluster.probe" in child.cmdline() and "torch.distributed.run" not in child.cmdline():
                found[int(child.environ()["RANK"])] = WARM.command_of(number)
        except psutil.Error:
            continue
    return {rank: process for rank, process in found.items() if process}


def rank_of(process: subprocess.Popen[str], rank: int, within: float = 60) -> psutil.Process:
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        found = ranks_below(process.pid)
        if rank in found:
            return psutil.Process(found[rank])
        time.sleep(0.05)
    raise AssertionError(f"rank {rank} did not start")


def until_it_speaks(port: int, rank: int, within: float = 60) -> None:
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=within))
    store.wait([f"beat/{rank}"])


@pytest.mark.parametrize(("sign", "told"), [(signal.SIGKILL, "died of SIGKILL"), (signal.SIGSTOP, "no longer answers")])
def test_a_rank_that_dies_or_stops_on_another_host_is_named(sign, told):
    port = free_port()
    processes = [first(local(port, "other", silent_s=8)), join(f"127.0.0.1:{port}", "other")]
    rank = rank_of(processes[1], 1)
    until_it_speaks(port, 1)
    rank.send_signal(sign)
    stopped = time.monotonic()
    ended = end(processes)
    assert time.monotonic() - stopped < 60
    assert all(code == 2 for code, _, _ in ended), ended
    assert f"rank 1 on host other {told}" in ended[0][2].splitlines()[-1]
    assert "conf/cluster/ours.yaml: the probe failed: " in ended[0][2].splitlines()[-1]


def test_a_rank_that_dies_on_the_only_host_is_named():
    process = first({"timeout_s": 100, "repeats": 3, "devices": 2})
    rank_of(process, 1).send_signal(signal.SIGKILL)
    ((code, _, err),) = end([process])
    assert code == 2 and f"rank 1 on host {socket.gethostname()} died of SIGKILL" in err.splitlines()[-1]
