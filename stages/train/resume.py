"""Going on from a snapshot: which one, and all of the state from it, whatever plan wrote it."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from pipeline.errors import TrainError
from pipeline.runtime.random import go_apart
from stages.train.engine import Engine
from stages.train.manifest import (
    Damaged,
    Missing,
    Unreadable,
    check_files,
    read_manifest,
    set_aside,
    snapshots_in,
    sweep,
)
from stages.train.pieces import LoadPlanner, Piece, mismatch
from stages.train.snapshots import SHARE, About, random_pieces


@dataclass(frozen=True)
class Found:
    """The same on all ranks: where to go on, or nothing; and which snapshots were found to be damaged, and how."""

    path: Path | None
    about: About = field(default_factory=dict)
    damaged: tuple[str, ...] = ()
    before: Path | None = None  # the one before it in the same folder


def find(folder: Path, origin: str | None, where: str) -> Found:
    """The newest snapshot of this run that is whole, or else the one that the run is to begin from.

    Only one that is damaged is passed over. Where it cannot be told whether one is, the run ends: it would otherwise
    begin anew beside the work of hours.
    """
    names: list[Any] = [None]
    if dist.get_rank() == 0:
        sweep(folder)
        names = [[path.name for path in snapshots_in(folder)]]
    dist.broadcast_object_list(names, src=0)
    damaged: list[str] = []
    for name, before in zip_longest(names[0], names[0][1:]):
        manifest, problem = _checked(folder / name, where)
        if not problem:
            return Found(folder / name, manifest["about"], tuple(damaged), before and folder / before)
        damaged.append(f"{name}: {problem}")
        if dist.get_rank() == 0:
            set_aside(folder / name)
    if origin is None:
        return Found(None, damaged=tuple(damaged))
    manifest, problem = _checked(Path(origin), where)
    if problem:
        raise TrainError(f"{origin} is damaged: {problem}", where=where, remedy="name another snapshot")
    return Found(Path(origin), manifest["about"], tuple(damaged))


def _checked(snapshot: Path, where: str) -> tuple[dict[str, Any], str]:
    """Its manifest, and what is wrong with it; ranks share the files. All ranks end where one cannot tell."""
    manifest: dict[str, Any] = {}
    unreadable, damaged, missing = "", "", ""
    try:
        manifest = read_manifest(snapshot)
        check_files(snapshot, manifest, dist.get_rank(), dist.get_world_size())
    except Missing as error:
        damaged, missing = str(error), error.file
    except Damaged as error:
        damaged = str(error)
    except Unreadable as error:
        unreadable = str(error)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (unreadable, damaged, missing))
    unseen = [_unseen(snapshot, [file for _, _, file in everyone])]
    dist.broadcast_object_list(unseen, src=0)
    problem = next((text for text, _, _ in everyone if text), unseen[0])
    if problem:
        raise TrainError(f"{snapshot} cannot be used: {problem}", where=where)
    return manifest, next((text for _, text, _ in everyone if text), "")


def _unseen(snapshot: Path, missing: list[str]) -> str:
    """Asked by all, answered by rank 0: whether it sees files that others miss. Then nothing is damaged."""
    for rank, file in enumerate(missing):
        if rank and file and dist.get_rank() == 0 and (snapshot / file).exists():
            return f"rank {rank} does not see {file}, and rank 0 does: {SHARE}"
    return ""


def restore(engine: Engine, snapshot: Path, about: About, program: str) -> None:
    """All of the state, cut as this run cuts it, and the streams of random numbers.

    A rank of the same program has its own streams back. Under another plan all go on from those of rank 0: equal on
    the ranks that draw alike, as `pipeline.runtime.random` wants them; others leave it for streams of their own.
    """
    make_optimizer_state(engine.optimizer)
    metadata = dcp.FileSystemReader(snapshot).read_metadata().state_dict_metadata
    drop_optimizer_state(engine, metadata.keys())
    same = about["ranks"] == dist.get_world_size() and about["program"] == program
    streams = random_pieces(engine.device, dist.get_rank() if same else 0)
    pieces = {piece.name: piece for piece in map(Piece.of, engine.state())}
    problem = mismatch(pieces, metadata)
    if problem:
        raise TrainError(
            f"{snapshot} does not fit the model or the optimizer: {problem}", remedy="begin anew with `resume: never`"
        )
    pieces |= {piece.name: piece for piece in streams if piece.name in metadata}
    with torch.no_grad():
        dcp.load(pieces, storage_reader=dcp.FileSystemReader(snapshot), planner=LoadPlanner())  # type: ignore[arg-type]
    engine.restored()
    for piece in streams:
        if piece.name.endswith("/cpu"):
            torch.set_rng_state(piece.tensor)
        else:
            torch.cuda.set_rng_state(piece.tensor, engine.device)
    if not same:
        go_apart(engine.stream)


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
    unknown = [h.piece for h in engine.state() if h.name.startswith("optimizer/") and h.name not in saved]
    numbers = {id(tensor) for tensor in unknown}
    for state in engine.optimizer.state.values():
        if any(id(value) in numbers for value in state.values()):
            state.clear()
