"""Going on from a snapshot: which one, and all of the state from it, whatever plan wrote it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from pipeline.errors import TrainError
from pipeline.runtime.random import go_apart
from stages.train.engine import Engine
from stages.train.manifest import Damaged, check_files, read_manifest, set_aside, snapshots_in, sweep
from stages.train.pieces import LoadPlanner, Piece, mismatch
from stages.train.snapshots import About, random_pieces


@dataclass(frozen=True)
class Found:
    """The same on all ranks: where to go on, or nothing; and which snapshots were found to be damaged, and how."""

    path: Path | None
    about: About = field(default_factory=dict)
    damaged: tuple[str, ...] = ()


def find(folder: Path, origin: str | None, where: str) -> Found:
    """The newest snapshot of this run that is whole, or else the one that the run is to begin from."""
    names: list[Any] = [None]
    if dist.get_rank() == 0:
        sweep(folder)
        names = [[path.name for path in snapshots_in(folder)]]
    dist.broadcast_object_list(names, src=0)
    damaged: list[str] = []
    for name in names[0]:
        manifest, problem = _checked(folder / name)
        if not problem:
            return Found(folder / name, manifest["about"], tuple(damaged))
        damaged.append(f"{name}: {problem}")
        if dist.get_rank() == 0:
            set_aside(folder / name)
    if origin is None:
        return Found(None, damaged=tuple(damaged))
    manifest, problem = _checked(Path(origin))
    if problem:
        raise TrainError(f"{origin} is damaged: {problem}", where=where, remedy="name another snapshot")
    return Found(Path(origin), manifest["about"], tuple(damaged))


def _checked(snapshot: Path) -> tuple[dict[str, Any], str]:
    """Its manifest, and what is wrong with it; ranks share the files."""
    manifest: dict[str, Any] = {}
    try:
        manifest = read_manifest(snapshot)
        check_files(snapshot, manifest, dist.get_rank(), dist.get_world_size())
        problem = ""
    except Damaged as error:
        problem = str(error)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, problem)
    return manifest, next((text for text in everyone if text), "")


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
