"""Real processes in one gloo group: each runs the same function, and what it returns comes back by rank."""

from __future__ import annotations

import gc
import multiprocessing
import pickle
import tempfile
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardwright.pipeline.runtime.programs.mesh import set_mesh

AXIS = "d0"
COLLECTIVE_S = 800  # a rank may have to wait for a core; one that failed closes its connections
# Imported once for all ranks of all tests: what most modules of tests import takes a rank longer than its work.
PRELOADED = (
    *("torch", "torch._dynamo", "torch._inductor.compile_fx", "shardwright.pipeline.runtime.compiler.partitioner"),
    *("pytest", "hypothesis", "tests.plans", "tests.storage_plans", "tests.mesh_plans"),
)


def run_ranks(
    ranks: int,
    function: Callable[..., Any],
    *arguments: Any,
    limit_s: float = 900,  # on a machine with ten times as many processes as cores, too
    collective_s: float = COLLECTIVE_S,
) -> list[Any]:
    """Calls `function(*arguments)` on that many ranks of the axis `d0`; the function must be importable."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
        processes = [
            context.Process(
                target=_rank, args=(rank, ranks, store, collective_s, send, function, arguments), daemon=True
            )
            for rank, (_, send) in enumerate(pipes)
        ]
        try:
            for process, (_, send) in zip(processes, pipes, strict=True):
                process.start()
                send.close()
            return [_receive(rank, receive, limit_s) for rank, (receive, _) in enumerate(pipes)]
        finally:
            for process, (receive, _) in zip(processes, pipes, strict=True):
                receive.close()
                process.join(5)
                if process.is_alive():
                    process.kill()
                    process.join()
                process.close()


def _receive(rank: int, pipe: Any, limit_s: float) -> Any:
    assert pipe.poll(limit_s), f"rank {rank} did not answer within {limit_s} s"
    try:
        result, error = pickle.loads(pipe.recv_bytes())
    except EOFError:
        raise AssertionError(f"rank {rank} died without a word") from None
    assert not error, f"rank {rank}:\n{error}"
    return result


def _rank(
    rank: int,
    ranks: int,
    store: str,
    collective_s: float,
    pipe: Any,
    function: Callable[..., Any],
    arguments: Any,
) -> None:
    gc.freeze()  # what the fork has from its server
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=collective_s)
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            set_mesh({AXIS: ranks})
            _send(pipe, function(*arguments), "")
        dist.barrier()
    except Exception:  # whatever a test raises is shown by the process that waits for it
        _send(pipe, None, traceback.format_exc())
    finally:
        dist.destroy_process_group()
        pipe.close()


def _send(pipe: Any, result: Any, error: str) -> None:
    """By value: `pipe.send` would share tensors, and ask a rank for them that may have ended by then."""
    pipe.send_bytes(pickle.dumps((result, error)))
