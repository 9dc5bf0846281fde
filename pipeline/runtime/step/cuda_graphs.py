"""The passes of a step as one CUDA graph: the host issues their kernels once, and replays them from then on.

The first step runs as it is: blocks are compiled, kernels chosen, the optimizer makes its state. The second one is
captured, which computes nothing, and then replayed as all that follow are: the next batches are copied to where the
captured ones lie. Losses and gradients stay where they are; what the graph needs in between it keeps in a pool of its
own. The optimizer is not part of it: the host issues its few kernels while the card still works on the graph. One of
torch's takes what it needs for its step from the pool, where nothing else is needed by then.

Kernels and their order are those of a step that is not captured, and so are its random numbers (random_draws.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.pipeline.runtime.recompute.random_draws import StepDraws

Batch = Mapping[str, Tensor]


class NotCaptured(Exception):
    """Why the passes cannot be a graph."""


class GraphedPasses:
    """`run` takes the batches of a step and gives their losses. The current stream must not be the default one."""

    def __init__(self, run: Callable[[Iterable[Batch]], list[Tensor]], device: torch.device) -> None:
        self.run, self.device = run, device
        self.pool = torch.cuda.MemPool()
        self.draws: StepDraws | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.inputs: list[Batch] = []
        self.losses: list[Tensor] = []

    def __call__(self, batches: Iterable[Batch]) -> list[Tensor]:
        if self.draws is None:
            self.draws = StepDraws(self.device)
            with self.draws.noted():
                return self.run(batches)
        given = list(batches)
        if self.graph is None:
            self.graph = self._captured(given, self.draws)
        for number, batch in enumerate(given):
            self.place(batch, number)
        self.draws.replay(self.graph)
        return self.losses

    def place(self, batch: Batch, number: int = 0) -> Batch:
        """The batch where the graph reads it, once there is one."""
        if self.graph is None:
            return batch
        here = self.inputs[number]
        for name, tensor in batch.items():
            if tensor is not here[name]:
                here[name].copy_(tensor)
        return here

    def _captured(self, batches: list[Batch], draws: StepDraws) -> torch.cuda.CUDAGraph:
        if draws.on_host:
            raise NotCaptured("the step draws random numbers on the host")
        if dist.get_world_size() > 1 and dist.get_backend() != "nccl":
            raise NotCaptured("ranks that share a GPU talk over the host")
        self.inputs = batches
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream(self.device)
        try:
            with (
                draws.capture(graph),
                torch.cuda.graph(graph, self.pool.id, stream, capture_error_mode="thread_local"),
            ):
                self.losses = self.run(batches)
        except RuntimeError as error:  # such as that of a model that reads what it computes, or that memory is short
            raise NotCaptured(f"{type(error).__name__}: {str(error).splitlines()[0]}") from error
        torch.cuda.empty_cache()  # the gradients of the step before lay elsewhere
        return graph

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """After the passes. What torch's own optimizers keep, they make in their first step."""
        from_pool = self.graph is not None and type(optimizer).__module__.startswith("torch.optim.")
        with torch.cuda.use_mem_pool(self.pool) if from_pool else nullcontext():
            optimizer.step()

    def release(self) -> None:
        """Gives back the memory of the graph; the next step is captured anew."""
        self.graph, self.inputs, self.losses = None, [], []
        self.pool = torch.cuda.MemPool()
        torch.cuda.empty_cache()
