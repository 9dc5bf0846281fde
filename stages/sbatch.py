"""A script for Slurm that trains the plan: one torchrun on each node, which meet on the first."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

from shardwright.pipeline.base import artifacts
from shardwright.pipeline.base.errors import ShardwrightError
from shardwright.pipeline.base.files import write_atomic
from shardwright.pipeline.base.log import Log
from shardwright.pipeline.config import Config, TrainEngine, load_config
from shardwright.pipeline.ir.cluster import Cluster
from shardwright.pipeline.launch.place import PORTS

SCRIPT = """\
#!/bin/bash
# Written by `shardwright sbatch` for the plan {plan}.
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
{resources}#SBATCH --time={time}
# A warning before the job is ended: ranks finish their step and write a snapshot. Longer, if that takes longer.
#SBATCH --signal=TERM@{warning}
#SBATCH --output=slurm-%j.log
{again}set -euo pipefail
cd {root}
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
port=$(({low} + SLURM_JOB_ID % {ports}))
# Without a number torchrun gives every rank one thread.
cores=$((${{SLURM_CPUS_ON_NODE:-{devices}}} / {devices}))
# So long torchrun waits for ranks that have been warned.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${{TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-{warning}}}
export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-$((cores > 1 ? cores : 1))}}
# Quoted once more for the tasks: each node has a number of its own.
srun --kill-on-bad-exit=1 bash -c "exec {python} -m torch.distributed.run \\
  --nnodes={nodes} --nproc-per-node={devices} {meet} \\
  --module shardwright train"
"""
WARNING_S = 120
ONCE = "--node-rank=\\$SLURM_NODEID --master-addr=$first --master-port=$port"
# Over hosts ranks can be started again only where torchrun numbers the nodes itself, by the store on the first.
AGAIN = """\
--max-restarts={restarts} --rdzv-id=$SLURM_JOB_ID \\
  --rdzv-backend=c10d --rdzv-endpoint=$first:$port --rdzv-conf=is_host=\\$((SLURM_NODEID == 0))"""
# A job whose node fails is queued again, and goes on from its newest snapshot, in the same log.
REQUEUE = "#SBATCH --requeue\n#SBATCH --open-mode=append\n"


def sbatch(root: Path, given: argparse.Namespace, log: Log) -> int:
    config = load_config(root)
    cluster, plan = (artifacts.load(kind, root) for kind in ("cluster", "plan"))
    nodes, devices = nodes_of(cluster.body, config)
    restarts = config.train.max_restarts
    asked = [f"--gpus-per-node={devices}"] if cluster.body.device == "cuda" else [f"--cpus-per-task={devices}"]
    text = SCRIPT.format(
        plan=plan.digest[:12],
        name=re.sub(r"[^\w.-]", "_", f"shardwright-{config.choices['model']}", flags=re.ASCII),
        nodes=nodes,
        devices=devices,
        resources="".join(f"#SBATCH {_one_line(option)}\n" for option in (*asked, *given.option)),
        time=_one_line(given.time),
        warning=WARNING_S,
        again=REQUEUE if config.train.snapshots.every else "",
        meet=AGAIN.format(restarts=restarts) if restarts else ONCE,
        root=shlex.quote(str(root)),
        low=PORTS.start,
        ports=len(PORTS),
        python=re.sub(r'([\\"$`])', r"\\\1", shlex.quote(given.python)),  # within the double quotes of the script's
    )
    try:
        write_atomic(root / given.out, text.encode())
    except OSError as error:
        raise ShardwrightError(f"cannot be written: {error.strerror or error}", where=str(given.out)) from error
    queue = shlex.join(["sbatch", str(given.out)])
    log.info("wrote %s: %d nodes with %d ranks each; `%s` queues it", given.out, nodes, devices, queue)
    return 0


def _one_line(option: str) -> str:
    """A second line would be one of the script."""
    if not option.isprintable():
        raise ShardwrightError(
            f"the option {option!r} is more than a line", where="sbatch", remedy="give each by itself"
        )
    return option


def nodes_of(cluster: Cluster, config: Config) -> tuple[int, int]:
    """Hosts, and devices of each."""
    if config.train.engine is TrainEngine.single:
        return 1, 1
    sizes = {len(host.ranks) for host in cluster.hosts} or {cluster.devices}
    if len(sizes) > 1:
        raise ShardwrightError(
            f"hosts have {min(sizes)} to {max(sizes)} devices, and Slurm gives every node of a job as many",
            where="runs/cluster/cluster.json",
            remedy="start torchrun on each host (`shardwright docs launch`), or plan for hosts that are alike",
        )
    return max(1, len(cluster.hosts)), sizes.pop()
