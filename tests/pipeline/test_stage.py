"""How a stage ends: its artifact, its summary, and only then what says that it is done; or one line."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import yaml

from shardwright.pipeline.base import artifacts
from shardwright.pipeline.base.artifacts import KINDS
from shardwright.pipeline.base.errors import ShardwrightError
from shardwright.pipeline.base.files import NotWritten, told, write_atomic
from shardwright.pipeline.base.stage import STAGES, Result, _record, execute, summary_path
from shardwright.pipeline.config import load_config
from shardwright.pipeline.user.weights import write_weights
from tests.graphs import SILENT
from tests.plans import graph_of

PROJECT = Path(__file__).parents[2]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A project without tracking."""
    shutil.copytree(PROJECT / "conf", tmp_path / "conf")
    (tmp_path / "pipeline" / "models").mkdir(parents=True)  # the user's code
    chosen = yaml.safe_load((tmp_path / "conf/config.yaml").read_text())
    chosen["tracking"] = {**chosen["tracking"], "enabled": False}
    (tmp_path / "conf/config.yaml").write_text(yaml.safe_dump(chosen))
    return tmp_path


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """A limit on the size of files stands for it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_stage_is_done_when_all_it_made_is_on_the_disk(root: Path) -> None:
    seen: list[bool] = []

    def settle() -> None:
        artifacts.load("graph", root)
        seen.append(summary_path("trace", root).exists())

    execute(STAGES["trace"], lambda *_: Result(graph_of("mlp"), {}, settle=settle), root, SILENT)
    assert seen == [True]


def test_pictures_are_drawn_before_a_stage_is_done(root: Path) -> None:
    seen: list[bool] = []

    def draw() -> None:
        seen.append(KINDS["graph"].path(root).exists())

    execute(STAGES["trace"], lambda *_: Result(graph_of("mlp"), {}, draw=draw), root, SILENT)
    assert seen == [False]


def test_a_stage_whose_artifact_cannot_be_written_is_not_done(root: Path) -> None:
    seen: list[bool] = []
    result = Result(graph_of("mlp"), {}, settle=lambda: seen.append(True))
    with full_disk(100), pytest.raises(ShardwrightError) as error:
        execute(STAGES["trace"], lambda *_: result, root, SILENT)
    assert error.value.line() == (
        "runs/trace/graph.json: it cannot be written (File too large);"
        " make room on the disk or in your quota, and run again"
    )
    assert seen == [] and list(KINDS["graph"].path(root).parent.iterdir()) == []


def test_a_password_does_not_stand_in_the_tracked_run(root: Path) -> None:
    chosen = yaml.safe_load((root / "conf/config.yaml").read_text())
    path = root / "conf/model" / f"{chosen['model']}.yaml"
    model = yaml.safe_load(path.read_text())
    model["module"]["weights"] = "https://user:word@host/weights"
    path.write_text(yaml.safe_dump(model))
    config = load_config(root)
    params = _record(STAGES["trace"], config, {}, ()).params
    assert params["model.module.weights"] == "https://***@host/weights"


def test_files_are_whole_or_absent(tmp_path: Path) -> None:
    path, tensor = tmp_path / "model.safetensors", torch.zeros(100)
    with full_disk(300), pytest.raises(NotWritten) as error:
        write_weights(path, {"a": (tensor.dtype, (100,))}, [tensor], {})
    assert error.value.filename == str(path) and list(tmp_path.iterdir()) == []


def test_other_reasons_are_told_as_well(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("no folder")
    line = r"^runs/a: it cannot be written \(.*\); see that it may be written, and run again"
    with pytest.raises(ShardwrightError, match=line), told(tmp_path):
        write_atomic(tmp_path / "runs" / "a", b"")
    with pytest.raises(FileNotFoundError), told(tmp_path):  # reading is another matter
        (tmp_path / "nothing").read_bytes()


def test_the_command_says_so_in_one_line(root: Path) -> None:
    """Of a file that it copies itself, as it does so: the command of a stage takes longer to start."""
    weights = root / "runs/train/weights/model.safetensors"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(bytes(9000))
    command = ["bash", "-c", 'ulimit -f 4; "$@"', "-", sys.executable, "-m", "stages", "export", "--out", "copy"]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: copy: cannot be written: File too large\n"
    assert not [path for path in root.iterdir() if "copy" in path.name]
