"""Wrong settings: `check` refuses each before anything runs, with one line per mistake that names file and key.

The command's `main` is called in this process, with the project as its folder: it prints what `shardwright check`
prints and gives its exit status, without the seconds that torch takes to be imported.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import small_project
from benchmarks.attacks.outcome import TRACEBACK, Outcome
from shardwright.stages.command_line import main

DROP = object()  # in the place of a value: the key is left out
OWN = """\
import torch

class Items:
    def __init__(self, length=8, samples=64):
        self.length, self.samples = length, samples

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        row = torch.arange(self.length) % 64
        return {"input_ids": row, "labels": row}

class Tuples(Items):
    def __getitem__(self, index):
        return torch.zeros(8), torch.zeros(8)

class Words(Items):
    def __getitem__(self, index):
        return {"input_ids": "one two", "labels": "two three"}

class Raises(Items):
    def __getitem__(self, index):
        raise OSError("the archive is gone")

class Leaves(Items):
    def __init__(self):
        raise SystemExit("bye")

class NoLength:
    def __getitem__(self, index):
        return {}

class Needs(Items):
    def __init__(self, folder, length=8):
        super().__init__(length)

class NoRate(torch.optim.SGD):
    def __init__(self, params):
        super().__init__(params, lr=0.1)
        for group in self.param_groups:
            del group["lr"]

    def step(self, closure=None):
        pass

class Falls(torch.optim.SGD):
    def __init__(self, params, lr=0.1):
        super().__init__(params, lr=lr)

    def step(self, closure=None):
        raise RuntimeError("no kernel")

class Sized(torch.nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.layer = torch.nn.Linear(width, width)

    def forward(self, input_ids, labels):
        return self.layer.weight.sum()

def number(**sizes):
    return 3
"""
BROKEN = "import no_such_package_of_anybody\n"
ADAM = {"_target_": "torch.optim.AdamW", "lr": 1e-3}


@dataclass(frozen=True)
class Attack:
    name: str
    changes: Mapping[str, Any]  # `group.key` -> value; `group` alone is the whole file, or text as it stands
    lines: tuple[tuple[str, ...], ...]  # of each line that is to be told the words in it
    files: Mapping[str, bytes] = field(default_factory=dict)


def one(name: str, changes: Mapping[str, Any], *words: str, **files: bytes) -> Attack:
    return Attack(name, changes, (words,), files)


def attacks(folder: Path, sample: bool) -> Iterator[Outcome]:
    (folder / "own").mkdir()
    (folder / "own/settings_own.py").write_text(OWN)
    (folder / "own/settings_broken.py").write_text(BROKEN)
    every = list(_attacks(folder))
    yield _attacked(folder / "valid", Attack("nothing is wrong", {}, ()))
    for number, attack in enumerate(every[:: len(every) // 5] if sample else every):
        yield _attacked(folder / str(number), attack)
    if not sample:
        yield _as_command(folder / "command")


def _attacked(root: Path, attack: Attack) -> Outcome:
    _make(root, attack)
    before = _files(root)
    status, err = _check(root)
    return _judged(attack, status, err, _files(root) == before)


def _judged(attack: Attack, status: int, err: str, untouched: bool) -> Outcome:
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    told = len(lines) == len(attack.lines) == len(err.splitlines()) and all(
        any(all(word in line for word in words) for line in lines) for words in attack.lines
    )
    held = status == (2 if attack.lines else 0) and told and untouched
    return Outcome(attack.name, held, f"status {status}: {err.strip()[-600:]}", TRACEBACK in err)


def _make(root: Path, attack: Attack) -> None:
    small_project.configure(root, {"steps": 3})
    contents: dict[str, Any] = {}
    for key, value in {"config.code": "../own", **attack.changes}.items():
        group, *path = key.split(".")
        file = root / (f"conf/{group}.yaml" if group == "config" else f"conf/{group}/small.yaml")
        if isinstance(value, str) and not path:
            file.write_text(value)
            continue
        content = contents.setdefault(group, json.loads(file.read_text()))
        for part in path[:-1]:
            content = content.setdefault(part, {})
        if value is DROP:
            del content[path[-1]]
        else:
            content[path[-1]] = value
        file.write_text(json.dumps(contents[group], indent=1))
    for name, raw in attack.files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(raw)


def _check(root: Path) -> tuple[int, str]:
    here, path, bytecode, err = os.getcwd(), list(sys.path), sys.dont_write_bytecode, io.StringIO()
    try:
        os.chdir(root)
        with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
            try:
                status = main(["check", "-q"])
            except Exception as error:
                return 1, f"{TRACEBACK}: {type(error).__name__}: {error}"
        return status, err.getvalue()
    finally:
        os.chdir(here)
        sys.path[:], sys.dont_write_bytecode = path, bytecode


def _as_command(root: Path) -> Outcome:
    """The same lines and status by the command itself."""
    attack = _together()
    _make(root, attack)
    status, err = _check(root)
    done = small_project.run(root, "check", capture_output=True)
    same = (done.returncode, done.stderr) == (status, err)
    return Outcome("by the command itself", same and status == 2, done.stderr[-400:], TRACEBACK in done.stderr)


def _files(root: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def _weights(shape: tuple[int, ...]) -> bytes:
    from safetensors.torch import save

    return save({"head.weight": torch.zeros(shape)})


def _together() -> Attack:
    return Attack(
        "mistakes of six files at once",
        {
            "config.tracking.enabled": 3,
            "model.module._target_": "shardwright.pipeline.models.gpt.built",
            "train.optimizer.lr": "fast",
            "train.stepz": 3,
            "train.seed": -1,
            "data.dataset._target_": "settings_own.Raises",
            "data.dataset.vocab_size": DROP,
            "data.dataset.seed": DROP,
            "cluster.devices": 0,
            "solve.backend": "gplk",
            "solve.gap": 7,
        },
        (
            ("conf/config.yaml", "tracking.enabled"),
            ("conf/model/small.yaml", "module", "shardwright.pipeline.models.gpt.built"),
            ("conf/train/small.yaml", "optimizer.lr", "'fast'"),
            ("conf/train/small.yaml", "train.stepz", "steps"),
            ("conf/train/small.yaml", "train.seed", "-1"),
            ("conf/data/small.yaml", "dataset", "the archive is gone"),
            ("conf/cluster/small.yaml", "devices"),
            ("conf/solve/small.yaml", "backend", "glpk"),
            ("conf/solve/small.yaml", "solve.gap"),
        ),
    )


def _attacks(folder: Path) -> Iterator[Attack]:
    yield from _of_training()
    yield from _of_model()
    yield from _of_data()
    yield from _of_cluster()
    yield from _of_planning()
    yield from _of_files()
    yield _together()


def _of_training() -> Iterator[Attack]:
    train = "conf/train/small.yaml"
    yield one("a rate that is a word", {"train.optimizer.lr": "fast"}, train, "optimizer.lr", "'fast'", "number")
    yield one("a rate below zero", {"train.optimizer.lr": -1}, train, "optimizer", "-1")
    yield one("a key that it does not take", {"train.optimizer.lrr": 1}, train, "optimizer.lrr", "'lr'")
    yield one("params, which are not the user's", {"train.optimizer.params": 1}, train, "optimizer.params")
    yield one("one beta", {"train.optimizer.betas": [0.9]}, train, "optimizer", "torch.optim.AdamW")
    for target in ("torch.optim.AdamWW", "torch.no.AdamW", "no_such.AdamW"):
        yield one(f"no {target}", {"train.optimizer._target_": target}, train, "optimizer", target)
    for target in ("torch.optim.LBFGS", "torch.nn.ParameterList", "settings_own.Falls"):
        yield one(f"{target} takes no step", {"train.optimizer": {"_target_": target}}, train, "optimizer", target)
    yield one("no target", {"train.optimizer": {"lr": 1}}, train, "optimizer._target_", "missing")
    yield one("no optimizer", {"train.optimizer": DROP}, train, "train.optimizer", "missing")
    yield one("no steps", {"train.steps": DROP}, train, "train.steps", "missing")
    yield one("steps in words", {"train.steps": "ten"}, train, "train.steps", "'ten'")
    rateless = {"train.optimizer": {"_target_": "settings_own.NoRate"}, "train.schedule": {"warm_up": 1}}
    yield one("a schedule without a rate", rateless, train, "schedule", "lr")
    yield one("a warm-up that never ends", {"train.schedule": {"warm_up": 9, "decay": "linear"}}, train, "warm_up")
    yield one("a trace of no step", {"train.trace_step": 7}, train, "trace_step")
    yield one("evaluation without data", {"train.evaluate": {"every": 1}}, train, "evaluate.every", "held_out")
    yield one("a snapshot that is not there", {"train.resume": "runs/step-000004"}, train, "resume")
    yield one("a folder that is no snapshot", {"train.resume": "conf"}, train, "resume")
    yield one("weights that are not there", {"train.init_from": "no.safetensors"}, train, "init_from")
    yield one("weights of another kind", {"train.init_from": "no.onnx"}, train, "init_from", ".safetensors")
    given = {"train.init_from": "w.safetensors"}
    yield one("weights of another model", given, train, "init_from", "head.weight", **{"w.safetensors": _weights((3,))})
    yield one("damaged weights", given, train, "init_from", "w.safetensors", **{"w.safetensors": b"\0" * 64})
    odd = {"train.engine": "ddp", "model.batch": _batch(7)}
    both = (("conf/model/small.yaml", "batch.input_ids.shape", "ddp"),)
    yield Attack("a batch that ddp cannot cut", odd, both)
    yield one(
        "deferred batch norms of ddp",
        {"train.engine": "ddp", "train.running_stats": "deferred"},
        train,
        "running_stats",
    )


def _batch(samples: int = 8, length: int = 8, dtype: str = "int64") -> dict[str, Any]:
    return {name: {"shape": [samples, length], "dtype": dtype} for name in ("input_ids", "labels")}


def _of_model() -> Iterator[Attack]:
    model = "conf/model/small.yaml"
    yield one("no such class", {"model.module._target_": "shardwright.pipeline.models.gpt.GTP"}, model, "module", "GTP")
    yield one(
        "no such module", {"model.module._target_": "shardwright.pipeline.modles.gpt.build"}, model, "module", "modles"
    )
    yield one(
        "a module that fails", {"model.module._target_": "settings_broken.Net"}, model, "module", "no_such_package"
    )
    yield one("a size that it does not take", {"model.module.widht": 3}, model, "module.widht")
    yield one("a size that it lacks", {"model.module.width": DROP}, model, "module", "width")
    sized = {"model.module": {"_target_": "settings_own.Sized", "width": "wide"}}
    yield one("a size in words", sized, model, "module.width", "'wide'", "number")
    yield one("sizes that do not fit", {"model.module.heads": 3}, model, "module", "heads")
    yield one("no module", {"model.module": {"_target_": "settings_own.number"}}, model, "module", "int")
    yield one("a name that forward does not take", {"model.batch.tokens": _batch()["labels"]}, model, "batch.tokens")
    misspelt = {"model.batch.labels": DROP, "model.batch.lables": _batch()["labels"]}
    yield one("a name that is misspelt", misspelt, model, "batch.lables", "'labels'")
    yield one("a name that is missing", {"model.batch.labels": DROP}, model, "batch", "labels")
    yield one("no shape", {"model.batch.labels.shape": []}, model, "batch.labels.shape")
    yield one("no such type", {"model.batch.labels.dtype": "int"}, model, "batch.labels.dtype", "int64")
    yield one("a rule that is there", {"model.ops": {"aten.add.Tensor": "b, b -> b"}}, model, "ops.aten.add.Tensor")
    yield one("a line that is none", {"model.ops": {"own.add.default": "b, b"}}, model, "ops.own.add.default", "->")


def _of_data() -> Iterator[Attack]:
    data = "conf/data/small.yaml"
    yield one(
        "no such data", {"data.dataset._target_": "shardwright.pipeline.models.data.Tokens"}, data, "dataset", "Tokens"
    )
    yield one("a key that data does not take", {"data.dataset.lenght": 8}, data, "dataset.lenght", "'length'")
    yield one("a key that data lacks", {"data.dataset.length": DROP}, data, "dataset.length")
    yield one("another length", {"data.dataset.length": 9}, data, "dataset", "[9]", "[8]")
    yield one("another type", {"model.batch": _batch(dtype="int32")}, data, "dataset", "torch.int64", "torch.int32")
    wanted = {"Tuples": "tuple", "Words": "str", "Raises": "the archive is gone", "NoLength": "length", "Leaves": "bye"}
    for name, word in wanted.items():
        yield one(f"data like {name}", {"data.dataset": {"_target_": f"settings_own.{name}"}}, data, "dataset", word)
    yield one("data that lacks a folder", {"data.dataset": {"_target_": "settings_own.Needs"}}, data, "dataset.folder")
    yield one("no items", {"data.dataset": {"_target_": "settings_own.Items", "samples": 0}}, data, "dataset", "items")
    few = {"_target_": "settings_own.Items", "samples": 3}
    yield one("too little is held out", {"data.held_out": few, "train.evaluate": {"every": 1}}, data, "held_out", "3")
    other = {"_target_": "settings_own.Items", "length": 5}
    yield one(
        "other data is held out", {"data.held_out": other, "train.evaluate": {"every": 1}}, data, "held_out", "[5]"
    )


def _of_cluster() -> Iterator[Attack]:
    cluster = "conf/cluster/small.yaml"
    probe = {"cluster.source": "probe", "cluster.preset": {}}
    yield one("more devices than cores", probe | {"cluster.devices": 4096}, cluster, "devices", "4096", "cores")
    gpus = probe | {"cluster.devices": 4096, "cluster.device": "cuda"}
    yield one("more devices than GPUs", gpus, cluster, "devices", "4096", "GPUs")
    yield one("a device that is meant", {"cluster.device": "gpu"}, cluster, "device", "'cuda'")
    yield one("a preset without figures", {"cluster.preset": {}}, cluster, "matmul_gflops")
    yield one("hosts that are counted twice", {"cluster.per_host": [2, 2], "cluster.nodes": 3}, cluster, "nodes")
    yield one("hosts of a probe", probe | {"cluster.nodes": 2}, cluster, "nodes", "probe")


def _of_planning() -> Iterator[Attack]:
    solve, checkpoint = "conf/solve/small.yaml", "conf/checkpoint/small.yaml"
    yield one("a mesh of other devices", {"solve.mesh": {"dp": 2, "tp": 4}}, solve, "mesh", "8 devices")
    yield one("more memory than there is", {"solve.memory_budget_gb": 90}, solve, "memory_budget_gb", "90")
    yield one("no such program", {"solve.backend": "glpk", "solve.glpsol": "/no/glpsol"}, solve, "glpsol")
    yield one("a saved plan that is not there", {"solve.plan": "mine"}, solve, "plan", "mine")
    damaged = {"conf/plan/mine.json": b'{"kind": "plan"}'}
    yield one("a damaged plan", {"solve.plan": "mine"}, "conf/plan/mine.json", **damaged)
    where = "constraints.head.weight"
    yield one("no such layout", {"solve.constraints": {"head.weight": "X(0)"}}, solve, where, "X(0)")
    yield one("no such axis", {"solve.constraints": {"head.weight": "S(0) on tp"}}, solve, where, "'tp'")
    yield one("an axis too many", {"solve.constraints": {"head.weight": "S(0) on d1"}}, solve, where, "'d1'")
    yield one("no such parameter", {"solve.constraints": {"haed.weight": "R"}}, solve, "haed.weight", "'head.weight'")
    yield one("no such module", {"solve.shard_only": "layer.0"}, solve, "shard_only", "layer.0")
    yield one("a pipeline that is off", {"solve.mesh": {"pp": 2}}, solve, "mesh.pp", "off")
    piped = {"checkpoint.pipeline": "1f1b"}
    yield one("no such boundary", piped | {"checkpoint.boundaries": ["layers.9"]}, checkpoint, "boundaries", "layers.9")
    yield one("partitions without a pipeline", {"checkpoint.partitions": 2}, checkpoint, "partitions")
    yield one("a pipeline of one device", piped | {"cluster.devices": 1}, checkpoint, "pipeline", "several devices")
    yield one("too many partitions", piped | {"checkpoint.partitions": 9}, checkpoint, "partitions", "2 devices")
    yield one("micro-batches that do not divide", {"checkpoint.micro_batches": 3}, checkpoint, "micro_batches")
    yield one("too many micro-batches", {"checkpoint.micro_batches": 99}, checkpoint, "micro_batches")


def _of_files() -> Iterator[Attack]:
    main_file, train = "conf/config.yaml", "conf/train/small.yaml"
    yield one("code that is nowhere", {"config.code": "../nope"}, main_file, "code", "../nope")
    yield one("a file that is not there", {"config.train": "smal"}, main_file, "train", "'small'")
    yield one("an unknown key", {"config.trian": "small"}, main_file, "trian", "'train'")
    yield one("tracking in words", {"config.tracking.enabled": "yes"}, main_file, "tracking.enabled")
    yield one("no YAML", {"train": "steps: [1\n"}, train, "YAML")
    yield one("a tab", {"train": "steps:\n\t1\n"}, train, "tabs")
    yield one("an empty file", {"train": ""}, train, "empty")
    twice = "steps: 3\nsteps: 4\noptimizer: {_target_: torch.optim.SGD}\n"
    yield one("a key twice", {"train": twice}, train, "train.steps", "duplicate")
    alias = "steps: &s 3\nseed: *s\noptimizer: {_target_: torch.optim.SGD}\n"
    yield one("an alias", {"train": alias}, train, "train.seed", "aliases")
    both = "steps: !!int 3\nstepz: 4\noptimizer: {_target_: torch.optim.SGD, lr: fast}\n"
    lines = ((train, "train.stepz"), (train, "optimizer.lr"))
    yield Attack("what cannot be read beside what is wrong", {"train": both.replace("!!int ", "")}, lines)
    several = "steps: -1\nhang_s: soon\nsnapshots: {every: -2, keep: no}\noptimizer: {_target_: torch.optim.SGD}\n"
    keys = ("train.steps", "train.hang_s", "snapshots.every", "snapshots.keep")
    yield Attack("four mistakes of one file", {"train": several}, tuple((train, key) for key in keys))
