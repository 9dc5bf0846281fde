"""Artifacts that were forged: edited at any depth, with digests that fit again, before the commands that read them.

Held where the command ends by itself with status 0, or with status 2 and one line, and where the program that it wrote
parses. Ranks are not started: what `train` and `verify` would start is where they end here.
"""

from __future__ import annotations

import copy
import hashlib
import json
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks import small_project
from benchmarks.attacks.outcome import TRACEBACK, Outcome
from benchmarks.in_folder import command, warm

FILES = {
    "graph": "trace/graph.json",
    "profile": "profile/profile.json",
    "cluster": "cluster/cluster.json",
    "frontier": "solve/frontier.json",
    "plan": "checkpoint/plan.json",
    "report": "train/report.json",
}
READERS = {
    "graph": ("profile", "solve", "checkpoint", "codegen", "train", "explain", "report", "verify"),
    "profile": ("solve", "checkpoint", "explain", "report"),
    "cluster": ("solve", "checkpoint", "explain", "report", "sbatch"),
    "frontier": ("checkpoint", "explain", "report", "solve saved"),
    "plan": ("codegen", "train", "explain", "report", "summary", "sbatch", "verify", "solve saved"),
    "report": ("summary", "report"),
}
TEXTS = ("summary.json", "metrics.json")  # beside the artifacts, without a digest
CASES = {"graph": 650, "profile": 350, "cluster": 300, "frontier": 300, "plan": 400, "report": 80}
SAMPLE = 6
Body = Any
Path_ = tuple[Any, ...]


def attacks(folder: Path, sample: bool) -> Iterator[Outcome]:
    draw = random.Random(7)
    roots = [made(folder, pipelined) for pipelined in ((False,) if sample else (False, True))]
    work = folder / "attacked"
    for kind, count in CASES.items():
        for number in range(SAMPLE // len(CASES) if sample else count):
            root = roots[number % len(roots)]
            forged, what = mutated(read(root, kind), draw)
            reader = draw.choice(READERS[kind])
            shutil.rmtree(work, ignore_errors=True)
            shutil.copytree(root, work)
            forge(work, kind, forged)
            yield judged(f"{kind}: {what}: {reader}", work, reader, kind)
    yield from _texts(roots[0], work, draw, 1 if sample else 60)


def judged(attack: str, root: Path, reader: str, kind: str = "plan") -> Outcome:
    module = root / "runs/codegen/module.py"
    if reader == "codegen":
        module.unlink()
    ended = command(root, *_words(root, reader, kind), before=_without_ranks)
    errors = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    traced = TRACEBACK in ended.stderr
    told = ended.returncode == 2 and len(errors) == 1
    parses = reader != "codegen" or not module.exists() or _parses(module.read_text())
    found = errors[0] if errors else f"status {ended.returncode}: {ended.stderr[-600:]}"
    found = found if parses else f"the program does not parse: {found}"
    return Outcome(attack, (ended.returncode == 0 or told) and not traced and parses, found, traced)


def _words(root: Path, reader: str, kind: str) -> list[str]:
    if reader == "solve saved":
        saved = root / "conf/plan"
        saved.mkdir(exist_ok=True)
        shutil.copy(root / "runs" / FILES[kind], saved / "forged.json")
        settings = root / "conf/solve/small.yaml"
        settings.write_text(json.dumps({**json.loads(settings.read_text()), "plan": "forged"}))
        for other in ("frontier", "plan", "report"):
            (root / "runs" / FILES[other]).unlink(missing_ok=True)
        return ["solve", "-q"]
    return [*reader.split(), "-q"]


def _without_ranks() -> None:
    from shardwright.pipeline.launch import launch
    from shardwright.pipeline.launch.work_folder import LaunchFailed

    def refuse(*_: Any, **__: Any) -> None:
        raise LaunchFailed("ranks are not started here")

    launch._run = refuse  # type: ignore[assignment]


def _parses(text: str) -> bool:
    try:
        compile(text, "module.py", "exec")
    except (SyntaxError, ValueError):
        return False
    return True


# ---- the projects


def made(folder: Path, pipelined: bool) -> Path:
    """A planned project, with the report of a training that nobody did."""
    root = folder / ("pipelined" if pipelined else "plain")
    train: dict[str, Any] = {"steps": 2, "gradient_accumulation": 4} if pipelined else {"steps": 2}
    small_project.configure(root, train)
    if pipelined:
        _settings(root, "solve", only="any")
        _settings(root, "checkpoint", recompute="full", pipeline="1f1b", partitions=2)
    warm(root, *(f"{stage} -q" for stage in small_project.BEFORE_TRAIN), "explain", "report")
    _report(root)
    return root


def _settings(root: Path, group: str, **changed: Any) -> None:
    path = root / "conf" / group / "small.yaml"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))


def _report(root: Path) -> None:
    from shardwright.pipeline.base import artifacts
    from shardwright.pipeline.ir.report import Breakdown, Compared, Evaluation, Report

    plan = artifacts.load("plan", root)
    rows = (Compared("step_ms", 2.0, 1.0, 2.0), Compared("peak_mb", 2.0, 1.0, 2.0))
    body = Report(
        2, 2, (2.0, 1.0), (0.1, 0.1), 0.1, 80.0, (1000, 1000), 0.1, 1000, False,
        (Evaluation(1, 1.5),), Breakdown(0.1, 0.1, 0.0, 0.0, 0.0), rows,
    )  # fmt: skip
    artifacts.save(artifacts.make("report", body, [plan], {}), root)


# ---- forging


def read(root: Path, kind: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((root / "runs" / FILES[kind]).read_text())
    return found


def forge(root: Path, kind: str, artifact: dict[str, Any]) -> None:
    """Written with a digest that fits, and those below with that digest."""
    changed = {kind: _written(root, kind, artifact)}
    for below, file in FILES.items():
        if below == kind or not (root / "runs" / file).exists():
            continue
        other = read(root, below)
        if set(other["inputs"]) & set(changed):
            other["inputs"] |= {name: digest for name, digest in changed.items() if name in other["inputs"]}
            changed[below] = _written(root, below, other)
    _resign_module(root / "runs/codegen/module.py", changed)


def _written(root: Path, kind: str, artifact: dict[str, Any]) -> str:
    with suppress(KeyError, RecursionError, TypeError, ValueError):  # what has no digest keeps its old one
        artifact["digest"] = _digest(artifact, artifact["body"])
    (root / "runs" / FILES[kind]).write_text(_text(artifact))
    return str(artifact.get("digest"))


def _text(artifact: dict[str, Any]) -> str:
    """What is too deep to be written is written deeper."""
    return "{" + ", ".join(f"{json.dumps(key)}: {_value(value)}" for key, value in artifact.items()) + "}"


def _value(value: Any) -> str:
    try:
        return json.dumps(value)
    except RecursionError:
        return "[" * 100_000 + "]" * 100_000


def _digest(header: dict[str, Any], body: Any) -> str:
    covered = [{key: header[key] for key in ("kind", "version", "inputs", "config")}, body]
    text = json.dumps(covered, sort_keys=True, separators=(",", ":"))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def _resign_module(path: Path, changed: dict[str, str]) -> None:
    lines = path.read_text().splitlines(keepends=True)
    head = [line.split() for line in lines if line.startswith("# shardwright ")]
    body = "".join(line for line in lines if not line.startswith("# shardwright "))
    header: dict[str, Any] = {"inputs": {}, "config": {}}
    for _, _, key, *rest in head:
        if key in ("input", "config"):
            header[{"input": "inputs"}.get(key, key)][rest[0]] = rest[1]
        else:
            header[key] = int(rest[0]) if key == "version" else rest[0]
    header["inputs"] |= {name: digest for name, digest in changed.items() if name in header["inputs"]}
    header["digest"] = _digest(header, body)
    rows = [f"{key} {header[key]}" for key in ("kind", "version", "digest")]
    rows += [f"input {name} {digest}" for name, digest in header["inputs"].items()]
    rows += [f"config {name} {digest}" for name, digest in header["config"].items()]
    path.write_text("".join(f"# shardwright {row}\n" for row in rows) + body)


# ---- what is changed


def mutated(artifact: dict[str, Any], draw: random.Random) -> tuple[dict[str, Any], str]:
    """One to three places of the body, or of the header, are changed."""
    forged = copy.deepcopy(artifact)
    told = []
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        places = list(_places(forged["body"])) if draw.random() < 0.95 and "body" in forged else []
        path = draw.choice(places) if places else None
        name, change = draw.choice(CHANGES)
        if path is None:
            key = draw.choice([key for key in forged if key != "body"] or ["body"])
            _put(forged, (key,), change(forged.get(key), draw, forged))
            told.append(f"{key} {name}")
        elif name == "deleted" and path:
            _delete(forged["body"], path)
            told.append(f"{_shown(path)} deleted")
        else:
            new = change(_at(forged["body"], path), draw, forged["body"])
            forged["body"] = _put(forged["body"], path, new)
            told.append(f"{_shown(path)} {name}")
        if name == "nested":  # too deep to be read again
            break
    return forged, ", ".join(told)


def _places(value: Body, path: Path_ = ()) -> Iterator[Path_]:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _places(item, (*path, key))


def _at(value: Body, path: Path_) -> Body:
    for key in path:
        value = value[key]
    return value


def _put(value: Body, path: Path_, new: Body) -> Body:
    if not path:
        return new
    _at(value, path[:-1])[path[-1]] = new
    return value


def _delete(value: Body, path: Path_) -> None:
    del _at(value, path[:-1])[path[-1]]


def _shown(path: Path_) -> str:
    return ".".join(map(str, path))[:80] or "body"


def _another(old: Body, draw: random.Random, body: Body) -> Body:
    """A value of the same type from elsewhere in the artifact."""
    found = [value for path in _places(body) if type(value := _at(body, path)) is type(old) and value != old]
    return copy.deepcopy(draw.choice(found)) if found else None


def _doubled(old: Body, draw: random.Random, body: Body) -> Body:
    return [*old, copy.deepcopy(draw.choice(old))] if isinstance(old, list) and old else [old, old]


def _swapped(old: Body, draw: random.Random, body: Body) -> Body:
    if isinstance(old, list):
        return draw.sample(old, len(old))
    if isinstance(old, dict):
        return dict(zip(old, draw.sample(list(old.values()), len(old)), strict=True))
    return str(old)[::-1] if isinstance(old, str) else old


def _emptied(old: Body, draw: random.Random, body: Body) -> Body:
    return type(old)() if isinstance(old, str | list | dict | int | float) else None


def _grown(old: Body, draw: random.Random, body: Body) -> Body:
    return old * draw.choice((2, 3, -1, 1000)) + draw.choice((0, 1)) if isinstance(old, int | float) else [old]


def _renamed(old: Body, draw: random.Random, body: Body) -> Body:
    if isinstance(old, dict) and old:
        key = draw.choice(list(old))
        return {("zz" if name == key else name): value for name, value in old.items()}
    return f"{old}_1" if isinstance(old, str) else old


def _nested(old: Body, draw: random.Random, body: Body) -> Body:
    for _ in range(draw.choice((3, 200, 900, 5000))):
        old = [old]
    return old


def _constant(new: Body) -> Callable[[Body, random.Random, Body], Body]:
    return lambda old, draw, body: new


STRANGE = (
    *(None, True, 0, -1, 1, 2, 3, 1 << 31, 1 << 64, 10**30, -(1 << 40), 1e308, -1e308, 1e-320, 0.5, -0.0),
    *(float("nan"), float("inf"), "", "a", "x" * 100_000, "\ud800", "\x1b[31m", "\u202ex", "\n", '"""', "\\", "{}"),
    *("S(0)", "S(9)", "R", "P", "B", "S(0),S(0)", "S(1:3)", "S(0)''", "R,R,R", "Q", "os.system", "aten.mm.default"),
    *("aten.linear.default", "no.such.op", "prim.Print.default", "float32", "int64", "no_dtype", "cpu", "cuda", "d0"),
    *([], {}, [[]], [None], {"a": 1}, {"ref": "nothing"}, {"torch": ["dtype", "os"]}, {"float": "nan"}),
)
CHANGES: tuple[tuple[str, Callable[[Body, random.Random, Body], Body]], ...] = (
    ("deleted", _emptied),
    ("emptied", _emptied),
    ("exchanged", _another),
    ("exchanged", _another),
    ("doubled", _doubled),
    ("swapped", _swapped),
    ("grown", _grown),
    ("grown", _grown),
    ("renamed", _renamed),
    ("nested", _nested),
    ("strange", lambda old, draw, body: copy.deepcopy(draw.choice(STRANGE))),
    ("strange", lambda old, draw, body: copy.deepcopy(draw.choice(STRANGE))),
)


def _texts(root: Path, work: Path, draw: random.Random, count: int) -> Iterator[Outcome]:
    """Files beside the artifacts: figures for the summary, which no digest keeps."""
    contents = ("", "[]", "null", "{", '{"a": {"b": [1]}}', '{"seconds": "x"}', '{"x": 1e999}', "\x00", "[" * 100_000)
    for number in range(count):
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(root, work)
        files = [path for name in TEXTS for path in sorted(work.glob(f"runs/*/{name}"))]
        path, content = draw.choice(files), contents[number % len(contents)]
        path.write_text(content)
        reader = draw.choice(("checkpoint", "codegen", "summary", "report", "explain"))
        yield judged(f"{path.relative_to(work)} is {content[:20]!r}: {reader}", work, reader)
