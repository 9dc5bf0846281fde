"""What one rank measures while all are at work: `python -m shardwright.stages.cluster.probe WORK` under torchrun.

WORK/job.json says what to do and WORK/result.json is what was found. It needs torch alone, so that it can be started by
hand on a machine that has nothing else (docs/clusters.md).
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwright.pipeline.ir.cluster import LinkCost
from shardwright.pipeline.launch.rank import end_after_cause, follow_parent, report_error, write_result
from shardwright.pipeline.launch.rendezvous import init_process_group
from shardwright.pipeline.runtime.step.memory import keep_freed_memory
from shardwright.stages.cluster.compute_probe import measure_compute
from shardwright.stages.cluster.link_probe import (
    axis_groups,
    measure_axis,
    measure_crossing,
    measure_overlap,
    measure_pairs,
)
from shardwright.stages.cluster.meeting import Voice
from shardwright.stages.cluster.meshes import candidate_meshes
from shardwright.stages.cluster.rounds import crossing_pairs, farthest, pair_rounds
from shardwright.stages.cluster.timing import Clock
from shardwright.stages.cluster.topology import device_order, find_groups, pair_matrices

Links = dict[str, LinkCost]

PAIRS = 0.3  # of the time for links; the axes share the rest
MOST_AXES = 8  # all that the meshes of up to eight devices have


def main(work: Path) -> None:
    follow_parent()
    job = json.loads((work / "job.json").read_text())
    rank = int(os.environ["RANK"])
    voice = Voice(job, rank)
    cuda = job["device"] == "cuda"
    try:
        voice.doing = "joining the others"
        if cuda:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timedelta(seconds=job["timeout_s"]))
        keep_freed_memory()  # as ranks that train do
        result = measure(job, voice)
        if int(os.environ["LOCAL_RANK"]) == 0:  # each host has a folder of its own
            write_result(work, result)
        dist.barrier()
    except Exception as error:  # one line for the user instead of a rank's traceback
        report_error(work, rank, f"rank {rank} on host {job['host']}: {type(error).__name__}: {error}")
        end_after_cause(error)
        raise
    finally:
        voice.stop()
        if dist.is_initialized():
            dist.destroy_process_group()


def measure(job: dict[str, Any], voice: Voice) -> dict[str, Any]:
    clock = Clock(job["device"], job["repeats"])
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, {"host": job["host"], **_own_device(job["device"])})
    voice.doing = "measuring computation"
    found: dict[str, Any] = {"ranks": ranks, "compute": measure_compute(clock)}
    links: dict[str, Any] = {"pairs": [], "crossing": None, "rounds": 0, "axes": []}
    if len(ranks) > 1:
        links = _measure_links(job, voice, clock, [rank["host"] for rank in ranks])
    found |= links | {"spread": statistics.median(clock.spreads), "outliers": clock.outliers}
    return {**found, "seconds": clock.elapsed()}


def _measure_links(job: dict[str, Any], voice: Voice, clock: Clock, hosts: list[str]) -> dict[str, Any]:
    budget = max(job["budget_s"] / 2, job["budget_s"] - clock.elapsed())  # computation takes what it takes
    largest = job["max_message_bytes"]
    voice.doing = "measuring pairs"
    rounds = pair_rounds(hosts)
    pairs = measure_pairs(clock, rounds, largest, PAIRS * budget)
    across = crossing_pairs(hosts)
    least = min(pair["bandwidth"] for pair in pairs)
    crossing = measure_crossing(clock, across, least, largest) if len(across) > 1 else None
    chosen: list[Any] = [_axes_of(pairs, hosts) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(chosen, 0)
    order, axes = chosen[0]
    found, share = [], (1 - PAIRS) * budget / len(axes)
    for (stride, size), links in axes.items():
        voice.doing = f"measuring groups of {size}"
        last = farthest(links, largest, share, 2 + clock.repeats)
        axis = axis_groups(order, stride, size)
        found.append({"stride": stride, "size": size, **measure_axis(clock, axis, last, share)})
    voice.doing = "measuring overlap"
    overlap = measure_overlap(clock, max(m["bytes"] for m in found[0]["fitted"]["all_reduce"]))
    return {"pairs": pairs, "crossing": crossing, "rounds": len(rounds), "axes": found, "overlap": overlap}


def _axes_of(pairs: list[dict[str, float]], hosts: list[str]) -> tuple[list[int], dict[tuple[int, int], Links]]:
    """The order of the ranks, and the axes to measure: as stride and size, with what their links cost by formula.

    Those of the best mesh of one, two and three axes, and of the others as far as there are not too many.
    """
    group = find_groups(*pair_matrices(pairs, len(hosts)), hosts)
    meshes = candidate_meshes(group)
    best = {len(mesh.axes): mesh for mesh in reversed(meshes)}
    found: dict[tuple[int, int], Links] = {}
    for mesh in (*(best[count] for count in sorted(best)), *meshes):
        for number, axis in enumerate(mesh.axes):
            found.setdefault((prod(mesh.sizes[number + 1 :]), axis.size), axis.links)
    return list(device_order(group) or range(len(hosts))), dict(list(found.items())[:MOST_AXES])


def _own_device(device: str) -> dict[str, Any]:
    if device == "cuda":
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        free, _ = torch.cuda.mem_get_info()
        return {"device": properties.name, "memory_bytes": free}
    import psutil

    beside = int(os.environ["LOCAL_WORLD_SIZE"])
    return {"device": platform.processor() or "cpu", "memory_bytes": psutil.virtual_memory().available // beside}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
