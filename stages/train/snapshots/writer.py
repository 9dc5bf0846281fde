"""Snapshots of the training state, written while training goes on.

A snapshot is 1. copied to the host between two steps, into memory that is used again, 2. written by a thread, every
rank the boxes that fall to it, each replica once (`boxes.py`), 3. read back for its digests, 4.
given its name by rank 0 when all are done. Steps 2 to 4 talk over a process group of their own. Only then is it
acknowledged. What goes wrong on one rank is known to all; then nothing is left of the snapshot, those before it stay,
and training goes on.

Weights may be so large that the next loss is no number: a snapshot is proven by the loss of the step after it. When one
is taken, all before it are proven, and it is not: so two stay until then, also where one is to be kept.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.pipeline.base.errors import TrainError
from shardwright.pipeline.runtime.programs.mesh import is_first
from shardwright.stages.train.engines.engine import Engine
from shardwright.stages.train.ranks.joining import gathered
from shardwright.stages.train.snapshots import manifest
from shardwright.stages.train.snapshots.boxes import (
    BoxedTensor,
    Place,
    SavedTensor,
    file_of,
    shared_out,
    write_boxes,
    write_table,
)

About = dict[str, Any]  # the numbers beside the tensors
Outcome = tuple[int, str]  # the same on all ranks: its step, and what went wrong; nothing: it is on the disk
Saved = tuple[dict[str, dict[str, Any]], str]  # of one rank: its files' digests, and what went wrong, or nothing
SHARE = "put runs/ on a file system that all hosts share, or set `snapshots.every: 0` (`shardwright docs launch`)"
SEEN_S = 10.0  # within which a file system that hosts share shows what another host wrote


class SnapshotWriter:
    def __init__(self, folder: Path, keep: int, background: bool, timeout_s: float) -> None:
        self.folder, self.keep, self.background = folder, keep, background
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self.staging = _Staging()
        self.thread: threading.Thread | None = None
        self.outcome: Outcome | None = None

    def take(self, engine: Engine, step: int, about: About) -> None:
        """All ranks do this together, between the same two steps; the snapshot before must have been asked for."""
        assert self.thread is None and self.outcome is None
        refuse_plain_state(engine.optimizer)
        shards = (shard for shard in engine.state() if not shard.drifts or is_first(shard.axes))
        tensors = self.staging.copied([*map(BoxedTensor.of, shards), *random_streams(engine.device)])
        if self.background:
            self.thread = threading.Thread(target=self._write, args=(tensors, step, about), daemon=True)
            self.thread.start()
        else:
            self._write(tensors, step, about)

    def done(self, *, wait: bool = False) -> Outcome | None:
        """What became of the snapshot that was taken, once."""
        if self.thread is not None:
            self.thread.join(None if wait else 0)
            if self.thread.is_alive():
                return None
            self.thread = None
        outcome, self.outcome = self.outcome, None
        return outcome

    def _write(self, tensors: dict[str, BoxedTensor], step: int, about: About) -> None:
        """Whatever happens there is an outcome: a thread that dies takes its error with it."""
        temporary = manifest.unfinished(self.folder, step)
        try:
            if dist.get_rank() == 0:
                with contextlib.suppress(OSError):  # what cannot be removed stays: that is no fault of the snapshot
                    manifest.keep_newest(self.folder, self.keep)
            problem = self._name(temporary, step, about, gathered(self._save(tensors, temporary), self.group))
        except Exception as error:  # of talking to the others
            problem = _text(error)
        if problem:  # every rank: what it wrote may be seen by nobody else
            shutil.rmtree(temporary, ignore_errors=True)
        self.outcome = step, problem

    def _save(self, tensors: dict[str, BoxedTensor], temporary: Path) -> Saved:
        """This rank's files, written and read back."""
        mine, shared = self._share_out(tensors)
        self.staging.wrote(tensors, mine.keys())
        rank = dist.get_rank()
        own = [temporary / file_of(rank), *([temporary / manifest.TENSORS] if rank == 0 else [])]
        try:
            if mine:
                write_boxes(own[0], tensors.values(), mine)
            if shared:
                write_table(temporary, shared)
            held = {name: sum(prod(sizes) for _, sizes in saved.boxes) for name, saved in shared.items()}
            missing = (f"nobody has all of {name}" for name in held if held[name] != prod(shared[name].shape))
            digests = {path.name: manifest.digest_of(path) for path in own if path.exists()}
            return digests, next(missing, self.staging.not_finite())
        except Exception as error:
            return {}, _text(error)

    def _share_out(self, tensors: dict[str, BoxedTensor]) -> tuple[dict[str, set[Place]], dict[str, SavedTensor]]:
        """The boxes that this rank is to write, by tensor; and on rank 0 the table of all."""
        ranks, first = dist.get_world_size(self.group), dist.get_rank() == 0
        offers: list[Any] = [None] * ranks
        dist.gather_object([each.offer() for each in tensors.values()], offers if first else None, group=self.group)
        shared = shared_out(offers) if first else {}
        parts: dict[str, dict[str, set[Place]]] = {file_of(rank): {} for rank in range(ranks)}
        for name, saved in shared.items():
            for place, file in saved.boxes.items():
                parts[file].setdefault(name, set()).add(place)
        own: list[Any] = [None]
        dist.scatter_object_list(own, list(parts.values()) if first else None, src=0, group=self.group)
        return own[0], shared

    def _name(self, temporary: Path, step: int, about: About, everyone: list[Saved]) -> str:
        """Digests of all ranks together, in a manifest; then the name. What went wrong, or nothing."""
        problem = [next((text for _, text in everyone if text), "")]
        if dist.get_rank() == 0 and not problem[0]:
            files = {name: digest for found, _ in everyone for name, digest in found.items()}
            try:
                problem = [not_seen(temporary, files)]
                if not problem[0]:
                    manifest.write_manifest(temporary, about, files)
                    manifest.publish(temporary, step)
                    with contextlib.suppress(OSError):
                        manifest.remove_replaced(self.folder)
                        manifest.keep_newest(self.folder, max(self.keep, 2))
            except Exception as error:
                problem = [_text(error)]
        dist.broadcast_object_list(problem, src=0, group=self.group)
        return str(problem[0])


class _Staging:
    """Copies on the host. Of replicas only one is written, the same ones every time: the others need no copy again."""

    def __init__(self) -> None:
        self.buffers: dict[str, Tensor] = {}
        self.known: set[str] = set()  # names of which it is settled who writes them
        self.mine: set[str] = set()
        self.trained: set[str] = set()  # parameters that the optimizer keeps a state of

    def copied(self, tensors: Sequence[BoxedTensor]) -> dict[str, BoxedTensor]:
        self.trained |= {each.name.split("/")[1] for each in tensors if each.name.startswith("optimizer/")}
        kept = [each for each in tensors if each.name in self.mine or each.name not in self.known]
        copies = {each.name: replace(each, tensor=self._copy(each.name, each.tensor)) for each in kept}
        if any(each.tensor.is_cuda for each in kept):
            torch.cuda.synchronize()
        self.buffers = {name: each.tensor for name, each in copies.items()}
        return copies

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        buffer = self.buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        return buffer.copy_(tensor, non_blocking=True)

    def wrote(self, tensors: dict[str, BoxedTensor], written: Iterable[str]) -> None:
        self.known |= tensors.keys()
        self.mine.update(written)
        self.buffers = {name: buffer for name, buffer in self.buffers.items() if name in self.mine}

    def not_finite(self) -> str:
        """A buffer of the model may well hold an infinity, such as a mask; what the optimizer trains may not."""
        for name, tensor in self.buffers.items():
            if bool(tensor.isnan().any()):
                return f"{name} is not a number"
            if name.split("/")[1] in self.trained and bool(tensor.isinf().any()):
                return f"{name} is infinite"
        return ""


def not_seen(folder: Path, files: dict[str, dict[str, Any]]) -> str:
    """On rank 0: which file of another rank it does not see as that wrote it; hosts may have folders of their own."""
    end = time.monotonic() + SEEN_S
    for name, wanted in files.items():
        while True:
            # hosts that share a folder agree on a file once it is opened
            with contextlib.suppress(OSError), open(folder / name, "rb") as file:
                if os.fstat(file.fileno()).st_size == wanted["bytes"]:
                    break
            if time.monotonic() > end:
                return f"the first host does not see {name}, which another one wrote; {SHARE}"
            time.sleep(0.1)
    return ""


def random_streams(device: torch.device, rank: int | None = None) -> list[BoxedTensor]:
    """Where this rank stands in its streams of random numbers, under the name of a rank: its own or another."""
    number = dist.get_rank() if rank is None else rank
    found = [BoxedTensor.whole(f"random/{number}/cpu", torch.get_rng_state())]
    if device.type == "cuda":
        found.append(BoxedTensor.whole(f"random/{number}/cuda", torch.cuda.get_rng_state(device)))
    return found


def refuse_plain_state(optimizer: torch.optim.Optimizer) -> None:
    """State that is no tensor would be lost without a word."""
    for state in optimizer.state.values():
        for key, value in state.items():
            if value is not None and not isinstance(value, Tensor):
                name, kind = type(optimizer).__name__, type(value).__name__
                what = f"{name} keeps its {key} as a {kind}, and only tensors can be saved"
                raise TrainError(what, remedy="set `snapshots.every: 0`, or name an optimizer of torch.optim")


def _text(error: Exception) -> str:
    """What can be told to the other ranks."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(f"{type(error).__name__}: {error}".split())
