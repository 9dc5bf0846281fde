"""Which rank this process is, where a launcher outside has started one process for each: torchrun or Slurm's srun."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import astuple, dataclass

from shardwright.pipeline.base.errors import TrainError

PORTS = range(20000, 40000)  # in which a Slurm job finds its port by its number
_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class RankPlace:
    rank: int
    ranks: int
    local_rank: int
    address: str  # of the first rank's host
    port: int
    local_ranks: int  # those of this host, who share its cores

    def environment(self) -> dict[str, str]:
        """As torch reads it."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE")
        return dict(zip(names, map(str, astuple(self)), strict=True))


def find_place(environment: Mapping[str, str]) -> RankPlace | None:
    """None where nobody outside has started ranks. A step of Slurm with one task is left to start its own."""
    try:
        if all(environment.get(name) for name in _OF_TORCHRUN):
            rank, ranks, port = (int(environment[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
            local, here = int(environment.get("LOCAL_RANK", 0)), int(environment.get("LOCAL_WORLD_SIZE") or ranks)
            return RankPlace(rank, ranks, local, environment["MASTER_ADDR"], port, here)
        if int(environment.get("SLURM_STEP_NUM_TASKS", 1)) > 1 and "SLURM_PROCID" in environment:
            hosts = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
            job, ranks = int(environment.get("SLURM_JOB_ID", 0)), int(environment["SLURM_STEP_NUM_TASKS"])
            counts = tasks_of_nodes(environment.get("SLURM_STEP_TASKS_PER_NODE") or str(ranks))
            return RankPlace(
                int(environment["SLURM_PROCID"]),
                ranks,
                int(environment.get("SLURM_LOCALID", 0)),
                environment.get("MASTER_ADDR") or first_host(hosts),
                int(environment.get("MASTER_PORT") or PORTS[job % len(PORTS)]),
                counts[min(int(environment.get("SLURM_NODEID", 0)), len(counts) - 1)],
            )
    except ValueError as error:
        what = f"the environment of the launcher cannot be read: {error}"
        raise TrainError(what, remedy="start the ranks with torchrun or srun (`shardwright docs launch`)") from error
    return None


def tasks_of_nodes(listed: str) -> list[int]:
    """As Slurm shortens it: `8(x2),4` are 8, 8 and 4."""
    found = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part) for part in listed.split(",")]
    if not all(found):
        raise ValueError(f"no numbers of tasks in {listed!r}")
    return [int(part[1]) for part in found if part for _ in range(int(part[2] or 1))]


def first_host(listed: str) -> str:
    """Of a list as Slurm shortens it: `a[003-010,12]-ib,b7` begins with a003-ib."""
    found = re.match(r"([^\[,]*)(?:\[([^\],-]+)[^\]]*\])?([^\[,]*)", listed)
    if not found or not found.group():
        raise ValueError(f"no host in the list {listed!r}")
    before, number, after = found.groups()
    return f"{before}{number or ''}{after}"
