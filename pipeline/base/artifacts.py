"""Artifacts under runs/: versioned JSON or Python source with a digest, and the digests of all they were made from.

The header of an artifact lists the digest of every artifact above it (not just the nearest) and of the configuration
groups each was made with. So a set of artifacts belongs together just when no two of them name different digests of
one kind, and they belong to the configuration when its digests are the ones they name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from shardwright.pipeline.base.errors import ArtifactError
from shardwright.pipeline.base.files import write_atomic
from shardwright.pipeline.ir.cluster import Cluster
from shardwright.pipeline.ir.codec import decode, encode, lines_of
from shardwright.pipeline.ir.graph import OpGraph
from shardwright.pipeline.ir.invariants import verify_beside, verify_body
from shardwright.pipeline.ir.plan import Frontier, Plan
from shardwright.pipeline.ir.profile import Profile
from shardwright.pipeline.ir.report import Report
from shardwright.pipeline.ir.verify import verify_graph


@dataclass(frozen=True)
class ArtifactKind:
    """A kind of artifact: the stage that makes it, its file, the type of its body and the version of its form."""

    name: str
    stage: str
    file: str
    body: type
    version: int = 1

    def path(self, root: Path) -> Path:
        return root / "runs" / self.stage / self.file


KINDS = {
    kind.name: kind
    for kind in (
        ArtifactKind("graph", "trace", "graph.json", OpGraph, version=4),
        ArtifactKind("profile", "profile", "profile.json", Profile, version=5),
        ArtifactKind("cluster", "cluster", "cluster.json", Cluster, version=6),
        ArtifactKind("frontier", "solve", "frontier.json", Frontier, version=4),
        ArtifactKind("plan", "checkpoint", "plan.json", Plan, version=9),
        ArtifactKind("module", "codegen", "module.py", str, version=4),
        ArtifactKind("report", "train", "report.json", Report, version=3),
    )
}
Refuse = Callable[[str], ArtifactError]  # with where the file is, and what to do
ACCEPT_EDITED = "set accept_edited_module: true in your conf/train file to run it as edited"
_SOURCE_MARK = "# shardwright "  # begins each line of the header of a source artifact


@dataclass(frozen=True)
class Artifact:
    kind: str
    inputs: dict[str, str]  # kind -> digest of every artifact above this one
    config: dict[str, str]  # configuration key -> digest it was made with, above and here
    body: Any
    digest: str
    edited: bool = False  # source that a person changed after it was written


def make(kind: str, body: Any, parents: Iterable[Artifact], config: Mapping[str, str]) -> Artifact:
    inputs: dict[str, str] = {}
    settings = dict(config)
    for parent in parents:
        inputs |= {**parent.inputs, parent.kind: parent.digest}
        settings |= parent.config
    header = _header(kind, dict(sorted(inputs.items())), dict(sorted(settings.items())))
    return Artifact(kind, header["inputs"], header["config"], body, _digest(header, encode(body)))


def save(artifact: Artifact, root: Path) -> Path:
    path = KINDS[artifact.kind].path(root)
    write_atomic(path, text_of(artifact).encode())
    return path


def text_of(artifact: Artifact) -> str:
    """JSON; of source the header is comments, one entry a line: `# shardwright input plan sha256:...`"""
    header = _header(artifact.kind, artifact.inputs, artifact.config) | {"digest": artifact.digest}
    if KINDS[artifact.kind].body is str:
        rows = [f"{key} {header[key]}" for key in ("kind", "version", "digest")]
        rows += [f"input {kind} {digest}" for kind, digest in artifact.inputs.items()]
        rows += [f"config {key} {digest}" for key, digest in artifact.config.items()]
        text: str = "".join(f"{_SOURCE_MARK}{row}\n" for row in rows) + artifact.body
        return text
    return lines_of({**header, "body": encode(artifact.body)}) + "\n"


def load(kind: str, root: Path, *, accept_edited: bool = False) -> Artifact:
    """The artifact of that kind under runs/, whole and unchanged, or an error that says what to run."""
    refuse = _refusal_of(kind)
    return _parse(_read(KINDS[kind].path(root), refuse), (kind,), refuse, accept_edited)


def digest_of(kind: str, content: bytes) -> str:
    """Of what a file of that kind holds, which somebody has read already; source may have been edited."""
    return _parse(content, (kind,), _refusal_of(kind), accept_edited=True).digest


def load_saved(file: str, root: Path, kinds: Iterable[str]) -> Artifact:
    """An artifact of one of these kinds that somebody keeps elsewhere, or the project's own; whole and unchanged."""
    kinds, place = tuple(kinds), (root / file).resolve()
    own = next((kind for kind in kinds if place == KINDS[kind].path(root).resolve()), None)
    elsewhere = partial(ArtifactError, where=file, remedy=f"copy {' or '.join(map(_path, kinds))} to it again")
    refuse = elsewhere if own is None else _refusal_of(own)
    return _parse(_read(root / file, refuse), kinds, refuse)


def parse(text: str, kind: str, refuse: Refuse) -> Artifact:
    """The artifact of that kind that `text_of` wrote, whole and unchanged."""
    return _parse(text.encode(), (kind,), refuse)


def _read(path: Path, refuse: Refuse) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise refuse("there is no such file") from None
    except OSError as error:
        raise refuse(f"it cannot be read ({error})") from error


def _parse(content: bytes, kinds: tuple[str, ...], refuse: Refuse, accept_edited: bool = False) -> Artifact:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise refuse(f"it cannot be read ({error})") from error
    source = any(KINDS[kind].body is str for kind in kinds)
    header, body = _split_source(text, refuse) if source else _split_json(text, refuse)
    _check_header(header, kinds, refuse)
    try:
        digest = _digest(header, body)
    except (RecursionError, ValueError) as error:  # numbers that JSON does not have, half of a letter, endless brackets
        raise refuse(f"it is not valid ({error})") from error
    edited = header["digest"] != digest
    if edited and not (accept_edited and source):
        refused = refuse("its content does not match its digest (edited or damaged)")
        if source:
            refused.remedy = f"{refused.remedy}, or {ACCEPT_EDITED}"
        raise refused
    if not source:
        try:
            body = decode(KINDS[header["kind"]].body, body)
            if isinstance(body, OpGraph):
                verify_graph(body)
            verify_body(body)
        except (ArithmeticError, LookupError, RecursionError, ValueError) as error:  # ours are ValueErrors
            raise refuse(f"its body is not valid ({error})") from error
    return Artifact(header["kind"], header["inputs"], header["config"], body, digest, edited)


def check_together(artifacts: Iterable[Artifact], config: Mapping[str, str]) -> None:
    """Refuses artifacts that were made from different inputs, or with another configuration than the one given."""
    found: dict[str, tuple[str, str]] = {}
    for artifact in artifacts:
        own = KINDS[artifact.kind]
        for kind, digest in {**artifact.inputs, artifact.kind: artifact.digest}.items():
            other, other_digest = found.setdefault(kind, (artifact.kind, digest))
            if digest != other_digest and not (artifact.edited and kind == artifact.kind):
                raise ArtifactError(
                    f"{own.file} and {KINDS[other].file} belong to different runs: "
                    f"they name different digests of {KINDS[kind].file}",
                    where=f"runs/{own.stage}",
                    remedy=f"run `dvc repro {own.stage}`",
                )
        for key, digest in artifact.config.items():
            if key in config and config[key] != digest:
                raise _refusal_of(artifact.kind)(f"it was made with other settings of {key} than conf/ has now")


def check_beside(artifacts: Iterable[Artifact]) -> None:
    """Refuses artifacts of which one names what another does not have."""
    for kind, problem in verify_beside({artifact.kind: artifact.body for artifact in artifacts}):
        raise _refusal_of(kind)(f"its body is not valid ({problem})")


def _refusal_of(kind: str) -> Refuse:
    return partial(ArtifactError, where=_path(kind), remedy=f"run `dvc repro {KINDS[kind].stage}`")


def _path(kind: str) -> str:
    return str(KINDS[kind].path(Path()))


def _header(kind: str, inputs: dict[str, str], config: dict[str, str]) -> dict[str, Any]:
    return {"kind": kind, "version": KINDS[kind].version, "inputs": inputs, "config": config}


def _digest(header: Mapping[str, Any], body: Any) -> str:
    covered = [{k: header[k] for k in ("kind", "version", "inputs", "config")}, body]
    text = json.dumps(covered, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def _split_json(text: str, refuse: Refuse) -> tuple[dict[str, Any], Any]:
    try:
        data = json.loads(text)
        if "\\ud" in text.lower():  # half of a letter can neither be printed nor written
            json.dumps(data, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits, and brackets without end
        raise refuse(f"it is not whole JSON ({error})") from error
    if not isinstance(data, dict) or "body" not in data:
        raise refuse("it is not an artifact of ours")
    return data, data["body"]


def _split_source(text: str, refuse: Refuse) -> tuple[dict[str, Any], str]:
    header: dict[str, Any] = {"inputs": {}, "config": {}}
    lines = text.splitlines(keepends=True)
    count = next((i for i, line in enumerate(lines) if not line.startswith(_SOURCE_MARK)), len(lines))
    for line in lines[:count]:
        match line.removeprefix(_SOURCE_MARK).split():
            case ["version", number] if number.isdecimal():
                header["version"] = int(number)
            case ["input", kind, digest]:
                header["inputs"][kind] = digest
            case ["config", key, digest]:
                header["config"][key] = digest
            case ["kind" | "digest" as key, value]:
                header[key] = value
            case _:
                raise refuse("its header is damaged")
    return header, "".join(lines[count:])


def _check_header(header: dict[str, Any], kinds: tuple[str, ...], refuse: Refuse) -> None:
    types = {"kind": str, "version": int, "inputs": dict, "config": dict, "digest": str}
    ok = all(isinstance(header.get(key), kind) for key, kind in types.items())
    named = [*header["inputs"].values(), *header["config"].values()] if ok else []
    ok = ok and all(isinstance(digest, str) for digest in named) and set(header["inputs"]) <= set(KINDS)
    if not ok or header["kind"] not in kinds:
        raise refuse(f"it is not a {' or '.join(kinds)} artifact")
    known = KINDS[header["kind"]].version
    if header["version"] != known:
        raise refuse(f"it has version {header['version']}, this program reads version {known}")
