"""One rank of benchmarks.step_time: the steps of a scenario, those of our plans and of torch's own tools, in turn."""

from __future__ import annotations

import argparse
import copy
import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from benchmarks.overhead_steps import Step, ddp_step, fsdp_step, our_step, plain_step, tensor_step, timed
from benchmarks.step_time_models import SCENARIOS, batch, build
from shardwright.pipeline.runtime.compiler.compiled import use_kernels_of
from shardwright.pipeline.runtime.programs.source import load_program
from shardwright.pipeline.runtime.step.memory import Tally, keep_freed_memory

RANKS, WARM_UP, COLLECTIVE_S = 2, 3, 300
CHOSEN, DDP_LIKE_US = "chosen", "ddp, same kernels"


def mlp_tensor_step(model: Any, batch: dict[str, Tensor]) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return plain_step(model, model.parameters(), batch)


TENSOR: dict[str, Callable[..., Step]] = {"gpt": tensor_step, "mlp": mlp_tensor_step}  # where `parallelize_module` can


def peers(name: str, model: nn.Module, given: dict[str, Tensor]) -> dict[str, Callable[[], Step]]:
    found = {"ddp": partial(ddp_step, model, given), "fsdp2": partial(fsdp_step, model, given)}
    tensor = TENSOR.get(SCENARIOS[name].model)
    return found | ({"dtensor": partial(tensor, model, given)} if tensor else {})


def on_kernels_of(program: Any, make: Callable[[], Step]) -> Step:
    """The step with oneDNN or without, as the program asks; what runs in between has what torch has by default."""
    usual = torch.backends.mkldnn.enabled

    def run() -> Tensor:
        use_kernels_of(program)
        try:
            return step()
        finally:
            torch.backends.mkldnn.enabled = usual

    step = make()
    return run


def measure(name: str, programs: Mapping[str, str], rounds: int) -> dict[str, Any]:
    """Our choice beside the peers, and our plans beside each other: seconds of every round, losses, and memory."""
    model, given = build(name), batch(SCENARIOS[name])
    written = {plan: load_program(path) for plan, path in programs.items()}
    ours = {
        plan: partial(on_kernels_of, program, partial(our_step, program, model, given))
        for plan, program in written.items()
    }
    others = peers(name, model, given)
    beside = {CHOSEN: ours[CHOSEN], **others}
    if not getattr(written[CHOSEN], "ONEDNN", True):
        beside[DDP_LIKE_US] = partial(on_kernels_of, written[CHOSEN], others["ddp"])
    shared = [*model.parameters(), *model.buffers(), *given.values()]
    peaks = {who: peak_bytes(maker, shared) for who, maker in beside.items()}
    compared = in_turn({who: maker() for who, maker in beside.items()}, rounds)
    plans = in_turn({who: maker() for who, maker in ours.items()}, rounds) if len(ours) > 1 else compared
    return {"peaks": peaks, "compared": compared, "plans": plans}


def peak_bytes(make: Callable[[], Step], shared: Iterable[Tensor]) -> int:
    """Of the second step; what the step has made before is counted, what all are made from (`shared`) is not."""
    with Tally(()) as tally:
        step = make()
        step()
        for tensor in shared:  # seen where the step took its copy of it
            tally.alive.pop(StorageWeakRef(tensor.untyped_storage()).cdata, None)
        tally.peak = 0
        step()
    most = torch.tensor(tally.peak)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most)


def in_turn(steps: Mapping[str, Step], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Each round takes a step of each, beginning with another one; the seconds are those of the slower rank."""
    found: dict[str, dict[str, list[float]]] = {who: {"seconds": [], "losses": []} for who in steps}
    names = list(steps)
    for number in range(WARM_UP + rounds):
        for who in turn(names, number):
            torch.manual_seed(number)
            seconds, loss = timed(steps[who])
            slowest = torch.tensor(seconds, dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            found[who]["losses"].append(loss)
            if number >= WARM_UP:
                found[who]["seconds"].append(float(slowest))
    return found


def turn(names: list[str], number: int) -> list[str]:
    """Every name comes first as often as any other, and forwards as often as backwards."""
    start = number // 2 % len(names)
    order = [*names[start:], *names[:start]]
    return order if number % 2 else order[::-1]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scenario")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--meet", required=True, help="tcp://HOST:PORT of the first rank")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--programs", required=True, help="JSON: name to file")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    keep_freed_memory()  # as all ranks of the train stage, for the peers too
    limit = timedelta(seconds=COLLECTIVE_S)
    dist.init_process_group("gloo", init_method=given.meet, rank=given.rank, world_size=RANKS, timeout=limit)
    found = measure(given.scenario, json.loads(given.programs), given.rounds)
    if given.rank == 0:
        given.out.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
