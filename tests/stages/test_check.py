"""`shardwright check`: what later stages would refuse is told before anything runs, all of it at once."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shardwright.pipeline.base.errors import ClusterError, ConfigError
from shardwright.pipeline.config import load_config, load_part, read_draft
from shardwright.stages.cluster import measure
from shardwright.stages.command_line import main
from shardwright.stages.train.run import tell_shared_gpus

PROJECT = Path(__file__).parents[2]
TRAIN = "conf/train/adamw.yaml"
SHORT = "steps: 3\noptimizer: {_target_: torch.optim.SGD, lr: 0.1}\n"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    shutil.copytree(PROJECT / "conf", tmp_path / "conf")
    (tmp_path / "pipeline/models").mkdir(parents=True)  # what `code` names; the package is this project's
    monkeypatch.chdir(tmp_path)
    yield tmp_path


def edit(root: Path, file: str, old: str, new: str) -> None:
    text = (root / file).read_text()
    assert text.count(old) == 1, (file, old)
    (root / file).write_text(text.replace(old, new))


def told(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 2) -> list[str]:
    assert main([*arguments, "-q"]) == status
    return capsys.readouterr().err.splitlines()


def test_mistakes_of_all_files_are_told_at_once(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(project, "conf/config.yaml", "enabled: true", "enabled: 3")
    edit(project, TRAIN, "lr: 1e-3", "lr: fast")
    edit(project, TRAIN, "seed: 0", "sed: 0\nclip_norm: -1")
    edit(project, TRAIN, "clip_norm: null", "#")
    edit(project, "conf/model/gpt_small.yaml", "heads: 4", "heads: 3")
    edit(project, "conf/cluster/local_cpu.yaml", "devices: 2", "devices: 4096")
    of_files = [
        "error: conf/config.yaml:16:3: tracking.enabled: got 3, expected true or false",
        "error: conf/train/adamw.yaml:7:1: train.sed: unknown key; did you mean 'seed'?",
        "error: conf/train/adamw.yaml:8:1: train.clip_norm: got -1, expected a number > 0 or null",
    ]
    assert told(capsys, "trace") == of_files  # before its own imports
    lines = told(capsys, "check")
    assert lines[:3] == of_files and len(lines) == 6
    assert lines[3].startswith("error: conf/model/gpt_small.yaml: module: ") and "multiple of heads 3" in lines[3]
    assert lines[4] == "error: conf/train/adamw.yaml: optimizer.lr: got 'fast', and torch.optim.AdamW takes a number"
    assert lines[5].startswith("error: conf/cluster/local_cpu.yaml: devices: got 4096, and this machine has ")
    assert not (project / "runs").exists()
    with pytest.raises(ConfigError) as caught:
        load_config(project)
    assert [error.line() for error in caught.value.every()] == [line.removeprefix("error: ") for line in of_files]


def test_a_train_file_needs_steps_and_an_optimizer(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / TRAIN).write_text(SHORT)
    assert told(capsys, "check", status=0) == []
    assert told(capsys, "settings", status=0) == []
    written = json.loads((project / "runs/settings/train.json").read_text())
    assert written == {"gradient_accumulation": 1} and load_config(project).train.seed == 0
    (project / TRAIN).write_text("seed: 1\n")
    assert [line.split(": ")[2] for line in told(capsys, "check")] == ["train.steps", "train.optimizer"]


@pytest.mark.parametrize("cluster", ["dgx_h100_infiniband", "simulated"])
def test_a_cluster_that_is_elsewhere_is_planned_for(project: Path, cluster: str) -> None:
    edit(project, "conf/config.yaml", "cluster: local_cpu", f"cluster: {cluster}")
    assert main(["check"]) == 0


def test_sound_keys_of_a_faulty_file_are_judged_and_guess_nothing(project: Path) -> None:
    edit(project, TRAIN, "steps: 20", "steps: 20\nstepz: 1")
    edit(project, "conf/solve/glpk.yaml", "backend: glpk", "")
    draft = read_draft(project)
    assert len(draft.mistakes.found) == 2 and not draft.has("train") and not draft.has("solve")
    assert draft.sound.train.steps == 20 and draft.sound.solve is None


# ---- the stages themselves


@pytest.mark.parametrize(("device", "named"), [("cpu", "cores"), ("cuda", "GPUs")])
def test_devices_that_are_not_there_are_not_waited_for(
    device: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "run_probe", lambda *_: pytest.fail("started"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    file = "local_cpu" if device == "cpu" else "local_gpu"
    settings = load_part(PROJECT, "cluster", file, devices=4096)
    with pytest.raises(ClusterError, match=rf"{file}.yaml: devices: got 4096, .* {named}"):
        measure.measure(settings, file, None)  # type: ignore[arg-type]


def test_two_processes_are_measured_on_any_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    measure.check_devices(load_part(PROJECT, "cluster", "local_cpu"), "conf")


def test_train_says_that_ranks_share_a_gpu(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    plan = SimpleNamespace(device="cuda")
    log = logging.getLogger("shared")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("RANK", raising=False)
    tell_shared_gpus(plan, 2, log)  # type: ignore[arg-type]
    assert not caplog.messages
    tell_shared_gpus(plan, 3, log)  # type: ignore[arg-type]
    assert "3 ranks share 2 GPUs" in caplog.text
    caplog.clear()
    outside = {"RANK": 0, "WORLD_SIZE": 4, "MASTER_ADDR": "a", "MASTER_PORT": 1, "LOCAL_WORLD_SIZE": 2}
    for name, value in outside.items():
        monkeypatch.setenv(name, str(value))
    tell_shared_gpus(plan, 4, log)  # type: ignore[arg-type]
    assert not caplog.messages
