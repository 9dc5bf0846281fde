"""Whether the passes of a step are captured as a CUDA graph: where that can be, and where it pays.

A captured step is replayed without its host, so it is planned as if there were none. Where blocks are compiled it is
always taken: as a replay makes no calls of kernels, they need not be compiled to C++, and the first step of Qwen3 0.6B
on an H200 came after 37 s instead of 101 (`python -m benchmarks.gpu_path --only qwen3,compiled`). On several GPUs
collectives over NCCL are captured with the rest; that is left to a user who asks for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from shardwright.pipeline.base.errors import SolveError
from shardwright.pipeline.ir.cluster import NO_HOST, Cluster
from shardwright.pipeline.ir.plan import Plan

GAIN = 0.02  # of the step, below which capturing does not pay for the memory that it makes unmovable


def captured_or_not(planned: Callable[[Cluster], Plan], cluster: Cluster, wish: bool | str, where: str) -> Plan:
    """The best plan on the cluster; `wish` is the setting at `where`."""
    if wish is False or (wish is not True and (cluster.device != "cuda" or cluster.devices > 1)):
        return planned(cluster)
    alone = replace(cluster, compute=replace(cluster.compute, host=NO_HOST))
    captured = replace(planned(alone), cuda_graphs=True)
    why = why_not(captured)
    if wish is True:
        if why:
            raise SolveError(f"the step cannot be captured as a CUDA graph: {why}", where=where, remedy="use auto")
        return captured
    if captured.compiled and not why:
        return captured
    issued = planned(cluster)
    gains = captured.prediction.step_seconds < (1 - GAIN) * issued.prediction.step_seconds
    return captured if gains and not why else issued


def why_not(plan: Plan) -> str:
    if plan.device != "cuda":
        return "the plan is for CPUs"
    return "the partitions of a pipeline take turns by messages" if plan.pipelined else ""
