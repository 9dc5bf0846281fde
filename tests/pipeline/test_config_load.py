"""Loading conf/: what a valid configuration gives, and the exact line for each kind of mistake."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationResolutionError

from shardwright.pipeline.base.errors import ConfigError
from shardwright.pipeline.config import (
    Backend,
    ClusterSource,
    Device,
    DType,
    Precision,
    Recompute,
    Solve,
    listing,
    load_config,
)
from shardwright.pipeline.config.load import _too_deep
from shardwright.pipeline.config.source import parse

PROJECT = Path(__file__).parents[2]
SOLVE = "conf/solve/glpk.yaml"
SOLVE_KEYS = ", ".join(field.name for field in dataclasses.fields(Solve))
BACKENDS, SOLVE_FILES = ", ".join(Backend), ", ".join(listing(PROJECT, "solve"))
MAIN = "conf/config.yaml"
TRAIN = "conf/train/adamw.yaml"
CHOICES = "model: gpt_small\ndata: synthetic_tokens\ncluster: local_cpu\nsolve: glpk\ncheckpoint: rotor\ntrain: adamw\n"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    shutil.copytree(PROJECT / "conf", tmp_path / "conf")
    return tmp_path


def refusal(root: Path, file: str, content: str | bytes) -> str:
    """The line printed when a file has this content."""
    (root / file).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ConfigError) as caught:
        load_config(root)
    return str(caught.value)


# ---- valid configurations


def test_shipped_configuration_is_typed_and_defaulted() -> None:
    config = load_config(PROJECT)
    assert config.choices["checkpoint"] == "rotor"
    assert config.model.batch["input_ids"].shape == [16, 64]
    assert config.model.batch["input_ids"].dtype is DType.int64
    assert config.model.module["_target_"] == "shardwright.pipeline.models.gpt.build"
    assert config.cluster.source is ClusterSource.probe and config.cluster.probe.max_message_mb == 4.0
    assert config.cluster.device is Device.cpu and config.model.precision is Precision.fp32
    assert config.solve.backend is Backend.glpk and config.solve.memory_budget_gb is None
    assert config.train.optimizer == {"_target_": "torch.optim.AdamW", "lr": 1e-3, "weight_decay": 0.01}
    assert config.code == config.root.code == "pipeline/models"
    assert config.tracking.enabled is True and config.tracking.uri is None


GROUP_FILES = [
    (group, name)
    for group in ("model", "data", "cluster", "solve", "checkpoint", "train")
    for name in listing(PROJECT, group)
]


@pytest.mark.parametrize(("group", "name"), GROUP_FILES)
def test_every_shipped_file_loads_and_tells_how_to_choose_it(project: Path, group: str, name: str) -> None:
    lines = [line for line in CHOICES.splitlines() if not line.startswith(f"{group}:")]
    (project / MAIN).write_text("\n".join([*lines, f"{group}: {name}"]))
    assert load_config(project).choices[group] == name
    head = (project / f"conf/{group}/{name}.yaml").read_text()
    assert f"`dvc exp run -S conf/config.yaml:{group}={name}`" in head
    assert f"`{group}: {name}` in conf/config.yaml" in head


def test_words_are_read_as_dvc_reads_them(project: Path) -> None:
    (project / MAIN).write_text(CHOICES.replace("rotor", "off"))
    (project / "conf/checkpoint/off.yaml").write_text("recompute: off\n")
    config = load_config(project)
    assert config.choices["checkpoint"] == "off" and config.checkpoint.recompute is Recompute.off


def test_scalars_agree_with_ruamel() -> None:
    from ruamel.yaml import YAML

    words = "1e-3 1E+5 .5 1. +1 -2 1_000 0x10 0o17 012 off yes no on TRUE False ~ null 12:30 .inf -.INF 5e a-b 1.5.2"
    for word in words.split():
        ours = parse("f", (), f"a: {word}".encode()).data["a"]
        theirs = YAML(typ="safe", pure=True).load(f"a: {word}")["a"]
        assert (ours, type(ours)) == (theirs, type(theirs)), word


def test_plain_is_json_and_digest_sees_meaning_only(project: Path) -> None:
    before = load_config(project)
    assert before.plain("cluster")["source"] == "probe"
    assert before.plain("train.optimizer.lr") == 1e-3
    (project / SOLVE).write_text("# all else by default\ntime_limit_s: 20.0\ngap: 0.001\nbackend: 'glpk'\n")
    after = load_config(project)
    assert after.digest("solve") == before.digest("solve")
    (project / SOLVE).write_text("backend: glpk\ngap: 1e-5\n")
    assert load_config(project).digest("solve") != before.digest("solve")
    assert load_config(project).digest("train.optimizer") == before.digest("train.optimizer")


def test_interpolation_within_a_file_and_of_the_environment_under_tracking(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORE_FOR_TEST", "sqlite:///elsewhere.db")
    (project / MAIN).write_text(CHOICES + "tracking: {uri: '${oc.env:STORE_FOR_TEST}'}\n")
    optimizer = "optimizer: {_target_: torch.optim.AdamW, lr: 0.1, eps: '${.lr}', note: '\\${kept}'}\n"
    (project / "conf/train/adamw.yaml").write_text("steps: 3\ngradient_accumulation: 1\nseed: ${steps}\n" + optimizer)
    config = load_config(project)
    assert config.tracking.uri == "sqlite:///elsewhere.db"
    assert config.train.seed == 3
    assert config.train.optimizer["eps"] == 0.1 and config.train.optimizer["note"] == "${kept}"


def test_what_is_remembered_of_a_file_is_nobody_elses_and_that_of_its_content(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load_config(project)
    first.train.optimizer["lr"] = 7.0
    first.model.batch["input_ids"].shape[0] = 7
    again = load_config(project)
    assert again == load_config(PROJECT) and again.train.optimizer["lr"] == 1e-3
    text = (project / TRAIN).read_text()
    (project / TRAIN).write_text(text.replace("lr: 1e-3", "lr: 2e-3"))
    assert load_config(project).train.optimizer["lr"] == 2e-3
    (project / TRAIN).write_text(text)
    main = (project / MAIN).read_text()
    (project / MAIN).write_text(main.replace("run_name: null", "run_name: ${oc.env:NAME_OF_RUN}"))
    for name in ("one", "other"):
        monkeypatch.setenv("NAME_OF_RUN", name)
        assert load_config(project).tracking.run_name == name


def test_a_mistake_that_was_mended_is_not_told_again(project: Path) -> None:
    """Beside one that is still there, in a file that was read before."""
    solve, train = (project / "conf/solve/glpk.yaml"), project / TRAIN
    solve.write_text(f"{solve.read_text()}\nbackend: glpk\n")
    text = train.read_text()
    train.write_text(f"{text}\nbogus: 1\n")
    for mistakes in (2, 2):
        with pytest.raises(ConfigError) as told:
            load_config(project)
        assert len(told.value.lines()) == mistakes and "bogus" in " ".join(told.value.lines())
    train.write_text(text)
    with pytest.raises(ConfigError) as told:
        load_config(project)
    assert len(told.value.lines()) == 1 and "bogus" not in told.value.line()


def test_changed_contents_are_tried_without_being_written(project: Path) -> None:
    before = (project / SOLVE).read_bytes()
    assert load_config(project, changed={SOLVE: b"backend: highs\n"}).solve.backend is Backend.highs
    assert (project / SOLVE).read_bytes() == before


# ---- mistakes in keys and values

VALUES = {
    "unknown key, near": (
        SOLVE,
        "backend: glpk\n\nfrontier_point: 3\n",
        "conf/solve/glpk.yaml:3:1: solve.frontier_point: unknown key; did you mean 'frontier_points'?",
    ),
    "unknown key, far": (
        SOLVE,
        "backend: glpk\nxyz: 3\n",
        f"conf/solve/glpk.yaml:2:1: solve.xyz: unknown key; allowed: {SOLVE_KEYS}",
    ),
    "unknown nested key": (
        "conf/cluster/local_cpu.yaml",
        "source: probe\ndevice: cpu\ndevices: 2\nprobe:\n  repeat: 3\n",
        "conf/cluster/local_cpu.yaml:5:3: cluster.probe.repeat: unknown key; did you mean 'repeats'?",
    ),
    "unknown key in config.yaml": (
        MAIN,
        CHOICES + "sovle: glpk\n",
        "conf/config.yaml:7:1: sovle: unknown key; did you mean 'solve'?",
    ),
    "unprintable key": (
        SOLVE,
        'backend: glpk\n"\\e[31m": 1\n',
        f"conf/solve/glpk.yaml:2:1: solve.'\\x1b[31m': unknown key; allowed: {SOLVE_KEYS}",
    ),
    "mandatory key": (
        SOLVE,
        "gap: 0.1\n",
        f"conf/solve/glpk.yaml:1:1: solve.backend: mandatory key is missing; give one of {BACKENDS}",
    ),
    "mandatory value": (
        SOLVE,
        "backend: ???\n",
        f"conf/solve/glpk.yaml:1:1: solve.backend: mandatory value is missing; give one of {BACKENDS}",
    ),
    "choice, near": (
        SOLVE,
        "backend: glpkk\n",
        f"conf/solve/glpk.yaml:1:1: solve.backend: got 'glpkk', expected one of {BACKENDS}; did you mean 'glpk'?",
    ),
    "choice, another word": (
        "conf/cluster/local_cpu.yaml",
        "source: probe\ndevice: gpu\ndevices: 2\n",
        "conf/cluster/local_cpu.yaml:2:1: cluster.device: got 'gpu', expected one of cpu, cuda; did you mean 'cuda'?",
    ),
    "choice, far": (
        SOLVE,
        "backend: 7\n",
        f"conf/solve/glpk.yaml:1:1: solve.backend: got 7, expected one of {BACKENDS}",
    ),
    "text for a number": (
        SOLVE,
        "backend: glpk\ntime_limit_s: soon\n",
        "conf/solve/glpk.yaml:2:1: solve.time_limit_s: got 'soon', expected a number > 0 and <= 10000000",
    ),
    "out of range": (
        SOLVE,
        "backend: glpk\ngap: 1\n",
        "conf/solve/glpk.yaml:2:1: solve.gap: got 1, expected a number >= 0 and < 1",
    ),
    "fraction for an integer": (
        SOLVE,
        "backend: glpk\nfrontier_points: 2.5\n",
        "conf/solve/glpk.yaml:2:1: solve.frontier_points: got 2.5, expected an integer from 1 to 64",
    ),
    "boolean for an integer": (
        SOLVE,
        "backend: glpk\nfrontier_points: true\n",
        "conf/solve/glpk.yaml:2:1: solve.frontier_points: got true, expected an integer from 1 to 64",
    ),
    "not a number": (
        SOLVE,
        "backend: glpk\ngap: .nan\n",
        "conf/solve/glpk.yaml:2:1: solve.gap: got nan, expected a number >= 0 and < 1",
    ),
    "infinite": (
        SOLVE,
        "backend: glpk\nmemory_budget_gb: .inf\n",
        "conf/solve/glpk.yaml:2:1: solve.memory_budget_gb: got inf, expected a number > 0 and <= 1000000 or null",
    ),
    "word for a boolean": (
        "conf/data/synthetic_tokens.yaml",
        "dataset: {_target_: a.b}\nshuffle: yes\n",
        "conf/data/synthetic_tokens.yaml:2:1: data.shuffle: got 'yes', expected true or false",
    ),
    "number for a text": (
        SOLVE,
        "backend: glpk\nglpsol: 3\n",
        "conf/solve/glpk.yaml:2:1: solve.glpsol: got 3, expected text or null; put it in quotes",
    ),
    "null": (
        SOLVE,
        "backend: glpk\ngap:\n",
        "conf/solve/glpk.yaml:2:1: solve.gap: got null, expected a number >= 0 and < 1",
    ),
    "scalar for a mapping": (
        "conf/cluster/local_cpu.yaml",
        "source: probe\ndevice: cpu\ndevices: 2\nprobe: 3\n",
        "conf/cluster/local_cpu.yaml:4:1: cluster.probe: got 3, expected a mapping",
    ),
    "size of a dim": (
        "conf/model/gpt_small.yaml",
        "module: {_target_: a.b}\nbatch:\n  x:\n    dtype: int64\n    shape: [16, 0]\n",
        "conf/model/gpt_small.yaml:5:17: model.batch.x.shape[1]: got 0, expected an integer >= 1",
    ),
    "no dims": (
        "conf/model/gpt_small.yaml",
        "module: {_target_: a.b}\nbatch:\n  x: {dtype: int64, shape: []}\n",
        "conf/model/gpt_small.yaml:3:21: model.batch.x.shape: got nothing in it,"
        " expected a non-empty list of integers >= 1",
    ),
    "no tensors": (
        "conf/model/gpt_small.yaml",
        "module: {_target_: a.b}\nbatch: {}\n",
        "conf/model/gpt_small.yaml:2:1: model.batch: got nothing in it,"
        " expected a non-empty mapping from a name to a mapping",
    ),
    "tensor's name": (
        "conf/model/gpt_small.yaml",
        "module: {_target_: a.b}\nbatch:\n  input ids: {dtype: int64, shape: [1]}\n",
        "conf/model/gpt_small.yaml:3:3: model.batch.input ids: is not an argument name; use letters, digits and '_'",
    ),
    "a key that has another name now": (
        "conf/train/adamw.yaml",
        "steps: 1\nmicro_batches: 2\nseed: 0\noptimizer: {_target_: a.b}\n",
        "conf/train/adamw.yaml:2:1: train.micro_batches: unknown key; it is called `gradient_accumulation` now",
    ),
    "no micro-batches": (
        "conf/train/adamw.yaml",
        "steps: 1\ngradient_accumulation: 0\nseed: 0\noptimizer: {_target_: a.b}\n",
        "conf/train/adamw.yaml:2:1: train.gradient_accumulation: got 0, expected an integer from 1 to 1000000",
    ),
    "parts of micro-batches": (
        "conf/train/adamw.yaml",
        "steps: 1\ngradient_accumulation: 1.5\nseed: 0\noptimizer: {_target_: a.b}\n",
        "conf/train/adamw.yaml:2:1: train.gradient_accumulation: got 1.5, expected an integer from 1 to 1000000",
    ),
    "no target": (
        "conf/train/adamw.yaml",
        "steps: 1\ngradient_accumulation: 1\nseed: 0\noptimizer:\n  lr: 1\n",
        "conf/train/adamw.yaml:4:1: train.optimizer._target_: mandatory key is missing;"
        " give the dotted name of what is called",
    ),
    "target's form": (
        "conf/train/adamw.yaml",
        "steps: 1\ngradient_accumulation: 1\nseed: 0\noptimizer:\n  _target_: AdamW\n",
        "conf/train/adamw.yaml:5:3: train.optimizer._target_: got 'AdamW',"
        " expected a dotted importable name such as torch.optim.AdamW",
    ),
    "nested target's form": (
        "conf/train/adamw.yaml",
        "steps: 1\ngradient_accumulation: 1\nseed: 0\noptimizer:\n  _target_: a.b\n  inner: [{_target_: c}]\n",
        "conf/train/adamw.yaml:6:12: train.optimizer.inner[0]._target_: got 'c',"
        " expected a dotted importable name such as torch.optim.AdamW",
    ),
    "argument's name": (
        "conf/train/adamw.yaml",
        "steps: 1\ngradient_accumulation: 1\nseed: 0\noptimizer:\n  _target_: a.b\n  _partial_: true\n",
        "conf/train/adamw.yaml:6:3: train.optimizer._partial_: unknown key; allowed: _target_ and keyword arguments",
    ),
    "argument not finite": (
        "conf/train/adamw.yaml",
        "steps: 1\ngradient_accumulation: 1\nseed: 0\noptimizer:\n  _target_: a.b\n  betas: [0.9, .inf]\n",
        "conf/train/adamw.yaml:6:16: train.optimizer.betas[1]: got inf, expected a finite number",
    ),
    "precision": (
        "conf/model/gpt_small.yaml",
        "module: {_target_: a.b}\nbatch: {x: {dtype: int64, shape: [1]}}\nprecision: fp8\n",
        f"conf/model/gpt_small.yaml:3:1: model.precision: got 'fp8', expected one of {', '.join(Precision)}",
    ),
    "precision as a number": (
        "conf/model/gpt_small.yaml",
        "module: {_target_: a.b}\nbatch: {x: {dtype: int64, shape: [1]}}\nprecision: 16\n",
        f"conf/model/gpt_small.yaml:3:1: model.precision: got 16, expected one of {', '.join(Precision)}",
    ),
    "device": (
        "conf/cluster/local_cpu.yaml",
        "source: probe\ndevice: mps\ndevices: 2\n",
        "conf/cluster/local_cpu.yaml:2:1: cluster.device: got 'mps', expected one of cpu, cuda",
    ),
    "no device": (
        "conf/cluster/local_cpu.yaml",
        "source: probe\ndevices: 2\n",
        "conf/cluster/local_cpu.yaml:1:1: cluster.device: mandatory key is missing; give one of cpu, cuda",
    ),
    "incomplete preset": (
        "conf/cluster/local_cpu.yaml",
        "device: cpu\ndevices: 2\nsource: preset\npreset: {matmul_gflops: 5, latency_us: 0}\n",
        "conf/cluster/local_cpu.yaml:3:1: cluster.source: 'preset' needs memory_gb, preset.memory_gbytes_per_s,"
        " preset.link_gbytes_per_s; give a number, or set `source: probe` to measure",
    ),
}


@pytest.mark.parametrize(("file", "content", "line"), VALUES.values(), ids=VALUES.keys())
def test_wrong_keys_and_values(project: Path, file: str, content: str, line: str) -> None:
    assert refusal(project, file, content) == line


# ---- mistakes in the text of a file

TEXTS = {
    "empty": ("", ":1:1: the file is empty; write `key: value` lines"),
    "only a comment": ("# later\n", ":1:1: the file is empty; write `key: value` lines"),
    "a list": ("- backend: glpk\n", ":1:1: the top level must be a mapping; write `key: value` lines"),
    "a number": ("\n3\n", ":2:1: the top level must be a mapping; write `key: value` lines"),
    "duplicate key": (
        "backend: glpk\ngap: 0\nbackend: highs\n",
        ":3:1: solve.backend: duplicate key, first on line 1; keep one of them",
    ),
    "key not text": ("backend: glpk\n3: 4\n", ":2:1: solve: key '3' is not text; put it in quotes"),
    "key a list": ("? [a]\n: 4\n", ":1:3: solve: key a list or mapping is not text; put it in quotes"),
    "tab": (
        "backend: glpk\n\tgap: 0\n",
        ":2:1: bad YAML: found character '\\t' that cannot start any token; indent with spaces, not tabs",
    ),
    "open bracket": ("backend: [glpk\n", ":2:1: bad YAML: expected ',' or ']', but got '<stream end>'"),
    "two documents": ("a: 1\n---\nb: 2\n", ":2:1: bad YAML: but found another document"),
    "not UTF-8": (b"backend: glpk\n# \xe9\n", ":2:3: byte 0xe9 is not UTF-8; save it as UTF-8"),
    "control character": (b"backend: glpk\n\x00", ":2:1: bad YAML: character 0 is not allowed"),
    "escape out of range": ('backend: "\\UFFFFFFFF"\n', None),
    "surrogate": ('backend: "\\uD800"\n', ":1:10: solve.backend: the text has a character that is not allowed"),
    "alias": (
        "backend: &a glpk\nglpsol: *a\n",
        ":1:10: solve.glpsol: YAML aliases are not allowed; write the value out",
    ),
    "endless alias": (
        "backend: &a [*a]\n",
        ":1:10: solve.backend[0]: YAML aliases are not allowed; write the value out",
    ),
    "tag": (
        "backend: !!python/name:os.system\n",
        ":1:10: solve.backend: YAML tag 'tag:yaml.org,2002:python/name:os.system' is not allowed; remove the tag",
    ),
    "wrong tag": ("backend: glpk\ngap: !!int x\n", ":2:6: solve.gap: 'x' cannot be read as int"),
    "too many digits": (f"gap: {'9' * 5000}\n", f":1:6: solve.gap: '{'9' * 56}... cannot be read as int"),
    "deep": (f"gap: {'[' * 50}{']' * 50}\n", ":1:46: solve.gap: nested deeper than 40 levels"),
    "deeper": ("gap: " + "[" * 1500, ": bad YAML: nested too deeply"),
    "large": ("#" * 2**19, ": is larger than 256 KiB"),
    "interpolation to nothing": (
        "backend: ${programme}\n",
        ":1:1: solve.backend: Interpolation key 'programme' not found; an interpolation is ${key.in.this.file}",
    ),
    "interpolation to itself": (
        "backend: ${backend}\n",
        ":1:1: solve.backend: Recursive interpolation detected; an interpolation is ${key.in.this.file}",
    ),
    "open interpolation": (
        "backend: ${back\n",
        ":1:1: solve.backend: no viable alternative at input '${back'; an interpolation is ${key.in.this.file}",
    ),
    "nested interpolations": (
        f"backend: '{'${' * 400}a{'}' * 400}'\n",
        ":1:1: '${...}' is nested too deeply; write the value out",
    ),
    "environment": (
        "backend: ${oc.env:HOME}\n",
        ":1:1: solve.backend: resolver in '${oc.env:HOME}' is not allowed; DVC cannot see its value change",
    ),
    "interpolation to a wrong value": (
        "backend: glpk\ntime_limit_s: ${backend}\n",
        ":2:1: solve.time_limit_s: got 'glpk', expected a number > 0 and <= 10000000",
    ),
}


@pytest.mark.parametrize(("content", "rest"), TEXTS.values(), ids=TEXTS.keys())
def test_wrong_text(project: Path, content: str | bytes, rest: str | None) -> None:
    line = refusal(project, SOLVE, content)
    if rest is None:  # Python's own words, which may change
        assert line.startswith(f"{SOLVE}: bad YAML: ")
    else:
        assert line == SOLVE + rest


def test_wherever_the_stack_ends_nested_interpolations_are_told_as_that(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OmegaConf makes errors of its own of what its parts raise, the end of the stack among them."""
    _, rest = TEXTS["nested interpolations"]
    usual = OmegaConf.to_container

    def ends(cfg: object, **named: bool) -> object:
        if "${${" not in str(usual(cfg, resolve=False)):
            return usual(cfg, **named)
        try:
            raise RecursionError
        except RecursionError as error:
            raise InterpolationResolutionError("RecursionError raised while resolving") from error

    monkeypatch.setattr(OmegaConf, "to_container", ends)
    assert refusal(project, SOLVE, "backend: '${${a}}'\n") == SOLVE + str(rest)


def test_the_file_of_initial_weights(project: Path) -> None:
    text = (project / TRAIN).read_text()
    given = text.replace("init_from: null", "init_from: model.safetensors")
    assert "there is no file model.safetensors; give a path from the project's folder" in refusal(project, TRAIN, given)
    (project / "model.safetensors").write_bytes(b"")
    (project / TRAIN).write_text(given)
    assert load_config(project).train.init_from == "model.safetensors"
    other = text.replace("init_from: null", "init_from: model.onnx")
    assert "got 'model.onnx', expected a file ending in .safetensors" in refusal(project, TRAIN, other)


# ---- mistakes in the choice of files

CHOSEN = {
    "no such file": (
        "solve: cplex",
        f"conf/config.yaml:7:1: solve: there is no conf/solve/cplex.yaml; choose one of: {SOLVE_FILES}",
    ),
    "no such file, near": (
        "solve: high",
        "conf/config.yaml:7:1: solve: there is no conf/solve/high.yaml;"
        f" did you mean 'highs'? choose one of: {SOLVE_FILES}",
    ),
    "path": (
        "solve: ../solve/glpk",
        "conf/config.yaml:7:1: solve: got '../solve/glpk', expected a name without folders or '.yaml'",
    ),
    "number": (
        "solve: 3",
        "conf/config.yaml:7:1: solve: got 3, expected the name of a file in the group's folder; put it in quotes",
    ),
    "interpolation": (
        "solve: ${model}",
        "conf/config.yaml:7:1: solve: '${...}' is not allowed here; DVC reads this value as it stands: write it out",
    ),
    "missing": (
        "# solve",
        "conf/config.yaml:1:1: solve: mandatory key is missing; give the name of a file in the group's folder",
    ),
}


@pytest.mark.parametrize(("text", "line"), CHOSEN.values(), ids=CHOSEN.keys())
def test_wrong_choices(project: Path, text: str, line: str) -> None:
    assert refusal(project, MAIN, CHOICES.replace("solve: glpk\n", "code: x\n") + text) == line


def failure(root: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(root)
    return str(caught.value)


def test_no_project_here(tmp_path: Path) -> None:
    remedy = "run from the project's folder; `shardwright init` makes one"
    assert failure(tmp_path) == f"conf/config.yaml: there is no such file; {remedy}"
    with pytest.raises(ConfigError, match=remedy):
        listing(tmp_path, "sweep")


def test_folder_instead_of_file(project: Path) -> None:
    (project / MAIN).unlink()
    (project / MAIN).mkdir()
    assert failure(project) == "conf/config.yaml: is not a file"


def test_group_without_folder_or_files(project: Path) -> None:
    shutil.rmtree(project / "conf/solve")
    assert failure(project) == "conf/solve: cannot be listed: No such file or directory"
    (project / "conf/solve").mkdir()
    assert failure(project) == "conf/config.yaml:8:1: solve: there is no conf/solve/glpk.yaml; add one"


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable_file_and_folder(project: Path) -> None:
    (project / SOLVE).chmod(0)
    assert failure(project) == "conf/solve/glpk.yaml: cannot be read: Permission denied"
    (project / "conf/solve").chmod(0)
    try:
        assert failure(project) == "conf/solve: cannot be listed: Permission denied"
    finally:
        (project / "conf/solve").chmod(0o755)


def test_errors_of_the_system_are_one_line(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *arguments: object, **named: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refuse)
        assert failure(project) == "conf/config.yaml: cannot be read: Permission denied"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", refuse)
        assert failure(project) == "conf/model: cannot be listed: Permission denied"


def test_errors_that_lead_in_a_circle_come_to_an_end() -> None:
    one, other = ValueError("one"), ValueError("other")
    one.__context__, other.__context__ = other, one
    assert not _too_deep(one)
    other.__cause__ = RecursionError()
    assert _too_deep(one)
