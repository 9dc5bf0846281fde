"""conf/measured/: what runs on a cluster measured, a file for each; written by `calibrate`, read before solving."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwright.pipeline.base.artifacts import Artifact
from shardwright.pipeline.base.errors import ArtifactError
from shardwright.pipeline.base.files import write_atomic
from shardwright.pipeline.config import ClusterSource, Config
from shardwright.pipeline.cost.corrected import corrected
from shardwright.pipeline.ir.codec import decode, encode
from shardwright.pipeline.ir.correction import Correction, MeasuredRun, correction_of

VERSION = 1


@dataclass(frozen=True)
class MeasuredFile:
    version: int
    runs: tuple[MeasuredRun, ...]


def file_of(cluster: str) -> str:
    return f"conf/measured/{cluster}.json"


def read_runs(root: Path, cluster: str) -> tuple[MeasuredRun, ...]:
    file, remedy = file_of(cluster), "remove it, and run `shardwright calibrate` after a run"
    try:
        found = decode(MeasuredFile, json.loads((root / file).read_text()), "file")
    except FileNotFoundError:
        return ()
    except (OSError, RecursionError, ValueError) as error:
        raise ArtifactError(f"it cannot be read ({error})", where=file, remedy=remedy) from error
    if found.version != VERSION:
        what = f"it has version {found.version}, this program reads version {VERSION}"
        raise ArtifactError(what, where=file, remedy=remedy)
    return found.runs


def write_runs(root: Path, cluster: str, runs: tuple[MeasuredRun, ...]) -> None:
    text = json.dumps(encode(MeasuredFile(VERSION, runs)), indent=1, allow_nan=False) + "\n"
    write_atomic(root / file_of(cluster), text.encode())


# ---- what is the same


@dataclass(frozen=True)
class RunIdentity:
    """By what a run is found again: all digests."""

    machine: str
    figures: str
    model: str


def known(config: Config, cluster: Artifact) -> RunIdentity:
    """A described machine is its figures of data sheets, whatever they are said to reach; a measured one its hosts."""
    settings = config.plain("cluster")
    if config.cluster.source is ClusterSource.probe:
        machine = {name: settings[name] for name in ("device", "devices")}
        figures = cluster.digest
    else:
        preset = {name: value for name, value in settings["preset"].items() if name != "reached"}
        machine = {**settings, "preset": preset}
        figures = config.digest("cluster")
    hosts = [[host.name, host.device, *host.ranks] for host in cluster.body.hosts]  # what memory is free changes
    model = [config.plain("model.module"), config.plain("model.precision")]
    return RunIdentity(_digest([machine, hosts]), figures, _digest(model))


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def as_measured_here(cluster: Artifact, config: Config, root: Path) -> Artifact:
    """The cluster as runs of this model on it say that it is; nothing else of the artifact changes."""
    runs = read_runs(root, config.choices["cluster"])
    if not runs:
        return cluster
    own = known(config, cluster)
    return with_correction(cluster, correction_of(runs, own.machine, own.figures, own.model))


def with_correction(cluster: Artifact, correction: Correction | None) -> Artifact:
    return replace(cluster, body=corrected(cluster.body, correction))
