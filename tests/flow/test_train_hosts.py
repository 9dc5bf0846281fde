"""Training over several hosts for real: four network namespaces, ranks started by torchrun on each or as Slurm does."""

from __future__ import annotations

import subprocess
import time

import psutil
import pytest

from tests.flow.conftest import Maker
from tests.flow.project import STAGES, TINY, WARM, Done, Project, check_against_plain
from tests.namespaces import OWN, address, hosts, why_not

pytestmark = pytest.mark.flow

HOSTS, MEGABITS, LIMIT_S = 4, 400, 600
TORCHRUN = "torch.distributed.run"


@pytest.fixture(scope="module")
def project(make_project: Maker) -> Project:
    """Everything but train has been run, for four devices."""
    project = make_project(tiny=True, cluster={"devices": HOSTS})
    for stage in STAGES[:-1]:
        project.stages(stage).ok()
    return project


@pytest.fixture(scope="module")
def spaces():
    reason = why_not()
    if reason:
        pytest.skip(f"four hosts of network namespaces: {reason}")
    with hosts("train", HOSTS, lambda a, b: MEGABITS) as made:
        yield made


def start(project: Project, space: str | None, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    inside = ["ip", "netns", "exec", space] if space else []
    network = {"GLOO_SOCKET_IFNAME": OWN} if space else {}
    return subprocess.Popen(
        [*inside, str(WARM.python), "-m", *arguments], cwd=project.root, text=True,
        env={**project.environment(), **network, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def end(project: Project, processes: list[subprocess.Popen[str]]) -> list[Done]:
    found = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=LIMIT_S)
            found.append(Done(process.returncode, out, err))
        return found
    finally:
        project.end_all()


def by_torchrun(project: Project, spaces: list[str], node: int, port: int) -> subprocess.Popen[str]:
    """As docs/launch.md has it for a run that begins again when a rank dies."""
    meet = ["--rdzv-backend=c10d", f"--rdzv-endpoint={address(0)}:{port}", "--rdzv-id=run", "--max-restarts=2"]
    meet += [f"--local-addr={address(node)}", f"--rdzv-conf=is_host={int(node == 0)}"]  # names are those of one machine
    how_many = [f"--nnodes={HOSTS}", "--nproc-per-node=1"]
    return start(project, spaces[node], TORCHRUN, *how_many, *meet, "--module", "stages", "train")


def kill_a_rank(project: Project, launcher: subprocess.Popen[str]) -> None:
    """Once there is a snapshot."""
    deadline = time.monotonic() + LIMIT_S
    while not list(project.root.glob("runs/train/snapshots/*/step-*/manifest.json")):
        assert launcher.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    asked = (psutil.Process(number) for number in WARM.below(launcher.pid))
    rank = next(process.pid for process in asked if "shardwright.stages.train.worker" in process.cmdline())
    psutil.Process(WARM.command_of(rank)).kill()


def by_slurm(project: Project, spaces: list[str], node: int) -> subprocess.Popen[str]:
    step = {
        "SLURM_JOB_ID": "9651",
        "SLURM_PROCID": str(node),
        "SLURM_LOCALID": "0",
        "SLURM_STEP_NUM_TASKS": str(HOSTS),
        "SLURM_STEP_NODELIST": ",".join(address(number) for number in range(HOSTS)),
    }
    return start(project, spaces[node], "stages", "train", **step)


def test_ranks_meet_on_the_first_host_and_begin_again_when_one_dies(project: Project, spaces: list[str]) -> None:
    often = {"steps": 80, "snapshots": {"every": 5}}
    project.write_yaml("conf/train/tiny.yaml", TINY["train"] | often)
    started = [by_torchrun(project, spaces, node, 29651) for node in range(HOSTS)]
    kill_a_rank(project, started[2])
    ended = end(project, started)
    assert [done.status for done in ended] == [0] * HOSTS, ended
    assert sum("wrote runs/train/report.json" in done.err for done in ended) == 1
    # Which of the two is told depends on who saw the death first: the first host's rank, or its torchrun.
    assert any("going on after" in done.err or "all ranks go on from" in done.err for done in ended), ended
    check_against_plain(project, HOSTS, 1e-5)


def test_tasks_of_slurm_are_ranks_of_any_engine(project: Project, spaces: list[str]) -> None:
    project.write_yaml("conf/train/tiny.yaml", TINY["train"] | {"engine": "ddp"})
    ended = end(project, [by_slurm(project, spaces, node) for node in range(HOSTS)])
    assert [done.status for done in ended] == [0] * HOSTS, ended
    check_against_plain(project, HOSTS, 1e-5)
    assert project.load("report").engine == "ddp"


def test_another_number_of_ranks_is_refused(project: Project) -> None:
    before = project.snapshot()
    started = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29652"}
    (done,) = end(project, [start(project, None, "stages", "train", **started)])
    assert "the run needs 4 ranks, and 2 were started" in done.refused()
    assert project.snapshot() == before
