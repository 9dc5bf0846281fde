"""Artifacts under runs/: versioned JSON or Python source with a digest, and the digests of all they were made from.

The header of an artifact lists the digest of every artifact above it (not just the nearest) and of the configuration
groups each was made with. So a set of artifacts belongs together just when no two of them name different digests of
one kind, and they belong to the configuration when its digests are the ones they name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.base.errors import ArtifactError
from pipeline.base.files import write_atomic
from pipeline.ir.cluster import Cluster
from pipeline.ir.codec import decode, encode
from pipeline.ir.graph import OpGraph
from pipeline.ir.invariants import verify_beside, verify_body
from pipeline.ir.plan import Frontier, Plan
from pipeline.ir.profile import Profile
from pipeline.ir.report import Report
from pipeline.ir.verify import verify_graph


@dataclass(frozen=True)
class Kind:
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
        Kind("graph", "trace", "graph.json", OpGraph, version=3),
        Kind("profile", "profile", "profile.json", Profile, version=5),
        Kind("cluster", "cluster", "cluster.json", Cluster, version=3),
        Kind("frontier", "solve", "frontier.json", Frontier, version=2),
        Kind("plan", "checkpoint", "plan.json", Plan, version=7),
        Kind("module", "codegen", "module.py", str, version=4),
        Kind("report", "train", "report.json", Report, version=2),
    )
}
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
    write_atomic(path, _to_bytes(artifact))
    return path


def load(kind: str, root: Path, *, accept_edited: bool = False) -> Artifact:
    """The artifact of that kind under runs/, whole and unchanged, or an error that says what to run."""
    known = KINDS[kind]
    path = known.path(root)
    return _read(path, str(path.relative_to(root)), {kind: known}, _again(known), accept_edited=accept_edited)


def digest_of(kind: str, content: bytes) -> str:
    """Of what a file of that kind holds, which somebody has read already; source may have been edited."""
    known = KINDS[kind]
    return _parse(content, str(known.path(Path())), {kind: known}, _again(known), accept_edited=True).digest


def load_saved(file: str, root: Path, kinds: Iterable[str]) -> Artifact:
    """An artifact of one of these kinds that somebody keeps elsewhere, whole and unchanged."""
    known = {kind: KINDS[kind] for kind in kinds}
    sources = " or ".join(f"runs/{kind.stage}/{kind.file}" for kind in known.values())
    return _read(root / file, file, known, f"copy {sources} to it again")


def _read(path: Path, where: str, known: Mapping[str, Kind], again: str, *, accept_edited: bool = False) -> Artifact:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise ArtifactError("there is no such file", where=where, remedy=again) from None
    except OSError as error:
        raise ArtifactError(f"it cannot be read ({error})", where=where, remedy=again) from error
    return _parse(content, where, known, again, accept_edited=accept_edited)


def _parse(content: bytes, where: str, known: Mapping[str, Kind], again: str, *, accept_edited: bool) -> Artifact:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ArtifactError(f"it cannot be read ({error})", where=where, remedy=again) from error
    source = any(kind.body is str for kind in known.values())
    header, body = _split_source(text, where, again) if source else _split_json(text, where, again)
    kind = _check_header(header, known, where, again)
    try:
        digest = _digest(header, body)
    except (
        RecursionError,
        ValueError,
    ) as error:  # numbers that JSON does not have, half of a letter, no end of brackets
        raise ArtifactError(f"it is not valid ({error})", where=where, remedy=again) from error
    edited = header["digest"] != digest
    if edited and not (accept_edited and source):
        hint = ", or set accept_edited_module: true in your conf/train file to run it as edited" if source else ""
        raise ArtifactError(
            "its content does not match its digest (edited or damaged)", where=where, remedy=again + hint
        )
    value = _decode_body(kind, body, where, again)
    return Artifact(kind.name, header["inputs"], header["config"], value, digest, edited)


def check_together(artifacts: Iterable[Artifact], config: Mapping[str, str]) -> None:
    """Refuses artifacts that were made from different inputs, or with another configuration than the one given."""
    found: dict[str, tuple[str, str]] = {}
    for artifact in artifacts:
        for kind, digest in {**artifact.inputs, artifact.kind: artifact.digest}.items():
            other, other_digest = found.setdefault(kind, (artifact.kind, digest))
            if digest != other_digest and not (artifact.edited and kind == artifact.kind):
                raise ArtifactError(
                    f"{_name(artifact.kind)} and {_name(other)} belong to different runs: "
                    f"they name different digests of {_name(kind)}",
                    where=f"runs/{KINDS[artifact.kind].stage}",
                    remedy=f"run `dvc repro {KINDS[artifact.kind].stage}`",
                )
        for key, digest in artifact.config.items():
            if key in config and config[key] != digest:
                raise ArtifactError(
                    f"it was made with other settings of {key} than conf/ has now",
                    where=f"runs/{KINDS[artifact.kind].stage}/{KINDS[artifact.kind].file}",
                    remedy=f"run `dvc repro {KINDS[artifact.kind].stage}`",
                )


def check_beside(artifacts: Iterable[Artifact]) -> None:
    """Refuses artifacts of which one names what another does not have."""
    for kind, problem in verify_beside({artifact.kind: artifact.body for artifact in artifacts}):
        raise ArtifactError(f"its body is not valid ({problem})", where=_path(kind), remedy=_again(KINDS[kind]))


def _path(kind: str) -> str:
    return f"runs/{KINDS[kind].stage}/{KINDS[kind].file}"


def _name(kind: str) -> str:
    return KINDS[kind].file


def _again(kind: Kind) -> str:
    return f"run `dvc repro {kind.stage}`"


def _header(kind: str, inputs: dict[str, str], config: dict[str, str]) -> dict[str, Any]:
    return {"kind": kind, "version": KINDS[kind].version, "inputs": inputs, "config": config}


def _digest(header: Mapping[str, Any], body: Any) -> str:
    covered = [{k: header[k] for k in ("kind", "version", "inputs", "config")}, body]
    text = json.dumps(covered, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def _to_bytes(artifact: Artifact) -> bytes:
    header = _header(artifact.kind, artifact.inputs, artifact.config) | {"digest": artifact.digest}
    if KINDS[artifact.kind].body is str:
        return f"{_source_header(header)}{artifact.body}".encode()
    return (json.dumps({**header, "body": encode(artifact.body)}, indent=1, allow_nan=False) + "\n").encode()


def _split_json(text: str, where: str, again: str) -> tuple[dict[str, Any], Any]:
    try:
        data = json.loads(text)
        if "\\ud" in text.lower():  # half of a letter can neither be printed nor written
            json.dumps(data, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits, and brackets without end
        raise ArtifactError(f"it is not whole JSON ({error})", where=where, remedy=again) from error
    if not isinstance(data, dict) or "body" not in data:
        raise ArtifactError("it is not an artifact of ours", where=where, remedy=again)
    return data, data["body"]


def _source_header(header: Mapping[str, Any]) -> str:
    """The header as comments, one entry a line: `# shardwright input plan sha256:...`"""
    rows = [f"{key} {header[key]}" for key in ("kind", "version", "digest")]
    rows += [f"input {kind} {digest}" for kind, digest in header["inputs"].items()]
    rows += [f"config {key} {digest}" for key, digest in header["config"].items()]
    return "".join(f"{_SOURCE_MARK}{row}\n" for row in rows)


def _split_source(text: str, where: str, again: str) -> tuple[dict[str, Any], str]:
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
                raise ArtifactError("its header is damaged", where=where, remedy=again)
    return header, "".join(lines[count:])


def _check_header(header: Any, known: Mapping[str, Kind], where: str, again: str) -> Kind:
    ok = isinstance(header, dict) and all(
        isinstance(header.get(key), kind)
        for key, kind in {"kind": str, "version": int, "inputs": dict, "config": dict, "digest": str}.items()
    )
    named = [*header["inputs"].items(), *header["config"].items()] if ok else []
    ok = ok and all(isinstance(digest, str) for _, digest in named) and set(header["inputs"]) <= set(KINDS)
    if not ok or header["kind"] not in known:
        raise ArtifactError(f"it is not a {' or '.join(known)} artifact", where=where, remedy=again)
    kind = known[header["kind"]]
    if header["version"] != kind.version:
        raise ArtifactError(
            f"it has version {header['version']}, this program reads version {kind.version}",
            where=where,
            remedy=again,
        )
    return kind


def _decode_body(known: Kind, body: Any, where: str, again: str) -> Any:
    if known.body is str:
        return body
    try:
        value: Any = decode(known.body, body)
        if isinstance(value, OpGraph):
            verify_graph(value)
        verify_body(value)
        return value
    except (ArithmeticError, LookupError, RecursionError, ValueError) as error:  # ours are ValueErrors
        raise ArtifactError(f"its body is not valid ({error})", where=where, remedy=again) from error
