"""Which rank this process is, where a launcher outside has started one process for each: torchrun or Slurm's srun."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.errors import TrainError

PORTS = range(20000, 40000)  # in which a Slurm job finds its port by its number
_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Place:
    rank: int
    ranks: int
    local_rank: int
    address: str  # of the first rank's host
    port: int

    def environment(self) -> dict[str, str]:
        """As torch reads it."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_RANK": str(self.local_rank),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }


def find_place(environment: Mapping[str, str]) -> Place | None:
    """None where nobody outside has started ranks. A step of Slurm with one task is left to start its own."""
    try:
        if all(environment.get(name) for name in _OF_TORCHRUN):
            rank, ranks, port = (int(environment[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
            return Place(rank, ranks, int(environment.get("LOCAL_RANK", 0)), environment["MASTER_ADDR"], port)
        if int(environment.get("SLURM_STEP_NUM_TASKS", 1)) > 1 and "SLURM_PROCID" in environment:
            return _of_slurm(environment)
    except ValueError as error:
        raise TrainError(
            f"the environment of the launcher cannot be read: {error}",
            remedy="start the ranks with torchrun or srun (docs/launch.md)",
        ) from error
    return None


def _of_slurm(environment: Mapping[str, str]) -> Place:
    hosts = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    job = int(environment.get("SLURM_JOB_ID", 0))
    return Place(
        int(environment["SLURM_PROCID"]),
        int(environment["SLURM_STEP_NUM_TASKS"]),
        int(environment.get("SLURM_LOCALID", 0)),
        environment.get("MASTER_ADDR") or first_host(hosts),
        int(environment.get("MASTER_PORT") or PORTS[job % len(PORTS)]),
    )


def first_host(listed: str) -> str:
    """Of a list as Slurm shortens it: `a[003-010,12]-ib,b7` begins with a003-ib."""
    found = re.match(r"([^\[,]*)(?:\[([^\],-]+)[^\]]*\])?([^\[,]*)", listed)
    if not found or not found.group():
        raise ValueError(f"no host in the list {listed!r}")
    before, number, after = found.groups()
    return f"{before}{number or ''}{after}"
