"""The script for Slurm: what its tasks run on each node, with stand-ins for Slurm's own programs."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from pipeline.config import TrainEngine
from pipeline.errors import ShardwrightError
from pipeline.place import PORTS
from stages import sbatch as written
from stages.__main__ import _parser
from stages.commands import COMMANDS
from tests.graphs import SILENT

FAKES = {
    "scontrol": '[ "$*" = "show hostnames a[3-4]" ] && printf "a3\\na4\\n"',
    "srun": 'shift; for node in 0 1; do SLURM_NODEID=$node "$@"; done',
    "python": 'echo "$PWD: $*"',
}


def cluster(*sizes: int, device: str = "cuda") -> Any:
    hosts = tuple(SimpleNamespace(ranks=tuple(range(size))) for size in sizes)
    return SimpleNamespace(hosts=hosts, devices=sum(sizes), device=device)


def script(root: Path, found: Any, *options: str, engine: TrainEngine = TrainEngine.planned) -> str:
    config = SimpleNamespace(train=SimpleNamespace(engine=engine), choices={"model": "gpt"})
    artifact = SimpleNamespace(body=found, digest="0123456789abcdef")
    with (
        mock.patch.object(written, "load_config", return_value=config),
        mock.patch.object(written.artifacts, "load", return_value=artifact),
    ):
        assert COMMANDS["sbatch"].run(root, _parser().parse_args(["sbatch", *options]), SILENT) == 0  # type: ignore[arg-type]
    return (root / "train.sbatch").read_text()


def test_each_node_runs_torchrun_which_meet_on_the_first(tmp_path: Path) -> None:
    root = tmp_path / "my project"
    (tmp_path / "bin").mkdir()
    root.mkdir()
    for name, body in FAKES.items():
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)
    text = script(root, cluster(8, 8), "--option=--partition=gpu", "--time", "1:00:00")
    slurm = {"SLURM_JOB_NODELIST": "a[3-4]", "SLURM_JOB_ID": "41007", "PATH": f"{tmp_path}/bin:/usr/bin:/bin"}
    done = subprocess.run(["bash", "train.sbatch"], cwd=root, env=slurm, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    port = PORTS[41007 % len(PORTS)]
    for node, line in enumerate(done.stdout.splitlines()):
        assert line == (
            f"{root}: -m torch.distributed.run --nnodes=2 --nproc-per-node=8 --node-rank={node}"
            f" --master-addr=a3 --master-port={port} --module stages train"
        )
    assert node == 1
    asked = {line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")}
    assert {"--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=8", "--partition=gpu", "--time=1:00:00"} <= asked


def test_processes_ask_for_cores_and_one_process_for_one_node(tmp_path: Path) -> None:
    assert "#SBATCH --cpus-per-task=4\n" in script(tmp_path, cluster(4, 4, device="cpu"))
    text = script(tmp_path, cluster(8, 8), engine=TrainEngine.single)
    assert "#SBATCH --nodes=1\n" in text and "--nproc-per-node=1 " in text


def test_hosts_that_differ_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ShardwrightError, match="hosts have 4 to 8 devices"):
        script(tmp_path, cluster(8, 4))
    assert not (tmp_path / "train.sbatch").exists()
