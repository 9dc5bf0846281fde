"""Going on from a snapshot: which one, and all of the state from it, whatever plan wrote it."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwright.pipeline.base.errors import TrainError
from shardwright.pipeline.runtime.programs.random import go_apart
from shardwright.stages.train.engines.engine import Engine
from shardwright.stages.train.ranks.joining import gathered
from shardwright.stages.train.snapshots import manifest
from shardwright.stages.train.snapshots.boxes import BoxedTensor, Table, TensorFiles, check_boxes, read_table
from shardwright.stages.train.snapshots.writer import SHARE, About, random_streams


@dataclass(frozen=True)
class FoundSnapshot:
    """The same on all ranks: where to go on, or nothing; and which snapshots were found to be damaged, and how."""

    path: Path | None
    about: About = field(default_factory=dict)
    tensors: Table = field(default_factory=dict)
    damaged: tuple[str, ...] = ()
    before: Path | None = None  # the one before it in the same folder


def find(folder: Path, origin: str | None, where: str) -> FoundSnapshot:
    """The newest snapshot of this run that is whole, or else the one that the run is to begin from.

    One that is damaged is passed over for an older one, and set aside. Where none of a run's is whole, or it cannot be
    told, the run ends: it would otherwise begin anew beside the work of hours.
    """
    names: list[Any] = [None, None]
    if dist.get_rank() == 0:
        manifest.sweep(folder)
        names = [[path.name for path in found(folder)] for found in (manifest.snapshots_in, manifest.damaged_in)]
    dist.broadcast_object_list(names, src=0)
    newest, aside = names
    damaged: dict[str, str] = {}
    for name, before in zip_longest(newest, newest[1:]):
        listing, tensors, problem = _checked(folder / name, where)
        if not problem:
            if dist.get_rank() == 0:
                for other in damaged:
                    manifest.set_aside(folder / other)
            told = tuple(f"{name}: {problem}" for name, problem in damaged.items())
            return FoundSnapshot(folder / name, listing["about"], tensors, told, before and folder / before)
        damaged[name] = problem
    if damaged or aside:
        damaged |= dict.fromkeys(aside, "set aside before")
        named = ", ".join(f"{name} ({problem})" for name, problem in damaged.items())
        anew = f"move them away to begin from {origin} again" if origin else "begin anew with `resume: never`"
        what = f"no snapshot of this run in {folder} is whole: {named}"
        remedy = f"bring one back from a copy of yours, or {anew}, which keeps these; nothing was changed"
        raise TrainError(what, where=where, remedy=remedy)
    if origin is None:
        return FoundSnapshot(None)
    listing, tensors, problem = _checked(Path(origin), where)
    if problem:
        raise TrainError(f"{origin} is damaged: {problem}", where=where, remedy="name another snapshot")
    return FoundSnapshot(Path(origin), listing["about"], tensors)


def _checked(snapshot: Path, where: str) -> tuple[dict[str, Any], Table, str]:
    """Its manifest, its tensors, what is wrong with it; ranks share the files. All ranks end where one cannot tell."""
    listing: dict[str, Any] = {}
    tensors: Table = {}
    unreadable, damaged, missing = "", "", ""
    part = dist.get_rank(), dist.get_world_size()
    try:
        listing = manifest.read_manifest(snapshot)
        manifest.check_files(snapshot, listing, *part)
        tensors = read_table(snapshot, listing["files"])
        check_boxes(snapshot, tensors, *part)
    except manifest.Missing as error:
        damaged, missing = str(error), error.file
    except manifest.Damaged as error:
        damaged = str(error)
    except manifest.Unreadable as error:
        unreadable = str(error)
    everyone = gathered((unreadable, damaged, missing))
    problems: list[Any] = [next((text for text, _, _ in everyone if text), "")]
    if dist.get_rank() == 0:  # files that it sees and others miss are not damaged
        unseen = [(rank, file) for rank, (*_, file) in enumerate(everyone) if file and (snapshot / file).exists()]
        told = (f"rank {rank} does not see {file}, and rank 0 does: {SHARE}" for rank, file in unseen if rank)
        problems = [problems[0] or next(told, "")]
    dist.broadcast_object_list(problems, src=0)
    if problems[0]:
        raise TrainError(f"{snapshot} cannot be used: {problems[0]}", where=where)
    return listing, tensors, next((text for _, text, _ in everyone if text), "")


def restore(engine: Engine, found: FoundSnapshot, program: str) -> None:
    """All of the state, cut as this run cuts it, and the streams of random numbers.

    A rank of the same program has its own streams back. Under another plan all go on from those of rank 0: equal on
    the ranks that draw alike, as `pipeline.runtime.programs.random` wants them; others leave it for streams of their
    own.
    """
    assert found.path is not None
    make_optimizer_state(engine.optimizer)
    drop_optimizer_state(engine, found.tensors.keys())
    same = found.about["ranks"] == dist.get_world_size() and found.about["program"] == program
    streams = random_streams(engine.device, dist.get_rank() if same else 0)
    tensors = [*map(BoxedTensor.of, engine.state()), *(each for each in streams if each.name in found.tensors)]
    if problem := _mismatch(tensors, found.tensors):
        what = f"{found.path} does not fit the model or the optimizer: {problem}"
        raise TrainError(what, remedy="begin anew with `resume: never`")
    files = TensorFiles(found.path, found.tensors)
    with torch.no_grad():
        for tensor in tensors:
            if tensor.boxes:
                files.fill(tensor)
    engine.restored()
    for stream in streams:
        try:
            if stream.name.endswith("/cpu"):
                torch.set_rng_state(stream.tensor)
            else:
                torch.cuda.set_rng_state(stream.tensor, engine.device)
        except RuntimeError as error:
            raise TrainError(
                f"{found.path} cannot be used: {stream.name} is no state of random numbers ({str(error)[:80]})",
                remedy="name another snapshot as `resume`, or begin anew with `resume: never`",
            ) from None
    if not same:
        go_apart(engine.stream)


def _mismatch(tensors: list[BoxedTensor], table: Table) -> str:
    """Why what was saved, by type and shape, cannot fill these tensors, or nothing."""
    for tensor in tensors:
        saved = table.get(tensor.name)
        if saved is None and tensor.boxes:
            return f"it has no {tensor.name}"
        if saved is not None and saved.shape != tensor.shape:
            return f"{tensor.name} has shape {list(saved.shape)} in it, and {list(tensor.shape)} here"
        if saved is not None and saved.dtype.is_complex and not tensor.tensor.is_complex():
            return f"{tensor.name} is complex in it, and not here"
    return ""


def make_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Optimizers make their state in their first step: one without a gradient makes it here.

    It may change parameters; they are overwritten, and so is the state.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    without = [p for p in parameters if p.grad is None]
    for parameter in without:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for parameter in without:
        parameter.grad = None


def drop_optimizer_state(engine: Engine, saved: Any) -> None:
    """A parameter that has never had a gradient has no state, neither then nor now."""
    shards = [shard for shard in engine.state() if shard.name.startswith("optimizer/") and shard.name not in saved]
    numbers = {id(shard.tensor) for shard in shards}
    for state in engine.optimizer.state.values():
        if any(id(value) in numbers for value in state.values()):
            state.clear()
