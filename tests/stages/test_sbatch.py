"""The script for Slurm: what its tasks run on each node, with stand-ins for Slurm's own programs."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from shardwright.pipeline.base.errors import ShardwrightError
from shardwright.pipeline.config import TrainEngine
from shardwright.pipeline.launch.place import PORTS
from shardwright.stages import sbatch as written
from shardwright.stages.command_line import _parser
from shardwright.stages.commands import COMMANDS
from tests.graphs import SILENT

PORT = PORTS[41007 % len(PORTS)]
FAKES = {
    "scontrol": '[ "$*" = "show hostnames a[3-4]" ] && printf "a3\\na4\\n"',
    "srun": 'shift; for node in 0 1; do SLURM_NODEID=$node "$@"; done',
    "python": 'echo "$PWD, $OMP_NUM_THREADS threads: $*"',
}


def cluster(*sizes: int, device: str = "cuda") -> Any:
    hosts = tuple(SimpleNamespace(ranks=tuple(range(size))) for size in sizes)
    return SimpleNamespace(hosts=hosts, devices=sum(sizes), device=device)


def script(
    root: Path, found: Any, *options: str, engine: TrainEngine = TrainEngine.planned, restarts: int = 0, every: int = 0
) -> str:
    train = SimpleNamespace(engine=engine, max_restarts=restarts, snapshots=SimpleNamespace(every=every))
    config = SimpleNamespace(train=train, choices={"model": "gpt"})
    artifact = SimpleNamespace(body=found, digest="0123456789abcdef")
    with (
        mock.patch.object(written, "load_config", return_value=config),
        mock.patch.object(written.artifacts, "load", return_value=artifact),
    ):
        assert COMMANDS["sbatch"].run(root, _parser().parse_args(["sbatch", *options]), SILENT) == 0  # type: ignore[arg-type]
    return (root / "train.sbatch").read_text()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    found = tmp_path / "my project"
    (tmp_path / "bin").mkdir()
    found.mkdir()
    for name, body in FAKES.items():
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)
    return found


def run(root: Path, **more: str) -> list[str]:
    """What each node runs."""
    slurm = {"SLURM_JOB_NODELIST": "a[3-4]", "SLURM_JOB_ID": "41007", "PATH": f"{root.parent}/bin:/usr/bin:/bin"}
    done = subprocess.run(["bash", "train.sbatch"], cwd=root, env=slurm | more, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_each_node_runs_torchrun_which_meet_on_the_first(root: Path) -> None:
    text = script(root, cluster(8, 8), "--option=--partition=gpu", "--time", "1:00:00")
    assert run(root) == [
        f"{root}, 1 threads: -m torch.distributed.run --nnodes=2 --nproc-per-node=8 --node-rank={node}"
        f" --master-addr=a3 --master-port={PORT} --module shardwright train"
        for node in (0, 1)
    ]
    asked = {line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")}
    assert "--signal=TERM@120" in asked, "time for a snapshot"
    assert {"--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=8", "--partition=gpu", "--time=1:00:00"} <= asked


def test_ranks_can_be_started_again_where_nodes_are_numbered_by_torchrun(root: Path) -> None:
    text = script(root, cluster(8, 8), restarts=3, every=100)
    assert run(root) == [
        f"{root}, 1 threads: -m torch.distributed.run --nnodes=2 --nproc-per-node=8 --max-restarts=3 --rdzv-id=41007"
        f" --rdzv-backend=c10d --rdzv-endpoint=a3:{PORT} --rdzv-conf=is_host={first} --module shardwright train"
        for first in (1, 0)
    ]
    assert "#SBATCH --requeue\n" in text and "#SBATCH --open-mode=append\n" in text
    assert "requeue" not in script(root, cluster(8, 8), restarts=3), "it would begin anew"


def test_ranks_share_the_cores_of_a_node(root: Path) -> None:
    script(root, cluster(8, 8))
    shared, asked, few = (
        run(root, **more)[0]
        for more in (
            {"SLURM_CPUS_ON_NODE": "64"},
            {"SLURM_CPUS_ON_NODE": "64", "OMP_NUM_THREADS": "3"},
            {"SLURM_CPUS_ON_NODE": "4"},
        )
    )
    assert ", 8 threads: " in shared and ", 3 threads: " in asked and ", 1 threads: " in few


def test_processes_ask_for_cores_and_one_process_for_one_node(tmp_path: Path) -> None:
    assert "#SBATCH --cpus-per-task=4\n" in script(tmp_path, cluster(4, 4, device="cpu"))
    text = script(tmp_path, cluster(8, 8), engine=TrainEngine.single)
    assert "#SBATCH --nodes=1\n" in text and "--nproc-per-node=1 " in text


def test_hosts_that_differ_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ShardwrightError, match="hosts have 4 to 8 devices"):
        script(tmp_path, cluster(8, 4))
    assert not (tmp_path / "train.sbatch").exists()


def test_an_interpreter_and_options_are_words_and_lines(root: Path) -> None:
    """Whatever they hold, they are no code of the script."""
    odd = root / 'my "env" $(touch ran) `touch ran`' / "it's python"
    odd.parent.mkdir()
    odd.symlink_to(root.parent / "bin" / "python")
    script(root, cluster(2, 2), f"--python={odd}", "--option=--account=x")
    assert all("torch.distributed.run" in line for line in run(root))
    assert not list(root.rglob("ran"))
    with pytest.raises(ShardwrightError, match="more than a line"):
        script(root, cluster(2), "--option=--account=x\nrm -r y")
