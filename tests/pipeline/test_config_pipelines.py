"""Keys of pipelines: what goes together and what does not, in one line that names the file and the key."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from shardwright.pipeline.base.errors import ConfigError
from shardwright.pipeline.config import Pipeline, Recompute, load_config

PROJECT = Path(__file__).parents[2]
CHECKPOINT, SOLVE, TRAIN = "conf/checkpoint/rotor.yaml", "conf/solve/glpk.yaml", "conf/train/adamw.yaml"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    shutil.copytree(PROJECT / "conf", tmp_path / "conf")
    return tmp_path


def write(root: Path, **changes: dict[str, object]) -> None:
    for file, more in zip((CHECKPOINT, SOLVE, TRAIN), map(changes.get, ("checkpoint", "solve", "train")), strict=True):
        path = root / file
        path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **(more or {})}))


@pytest.mark.parametrize("pipeline", [own.value for own in Pipeline if own.value != "off"])
@pytest.mark.parametrize("micro_batches", [None, "solve", 8])
def test_pipelines_that_can_be_asked_for(project: Path, pipeline: str, micro_batches: object) -> None:
    write(project, checkpoint={"pipeline": pipeline, "micro_batches": micro_batches, "boundaries": ["layers.1"]})
    settings = load_config(project).checkpoint
    assert settings.pipeline is Pipeline(pipeline) and settings.micro_batches == micro_batches
    assert settings.boundaries == ["layers.1"] and settings.partitions is None


def test_every_few_blocks(project: Path) -> None:
    write(project, checkpoint={"recompute": "every", "every_blocks": 3})
    settings = load_config(project).checkpoint
    assert settings.recompute is Recompute.every and settings.every_blocks == 3 and settings.pipeline is Pipeline("off")


def test_a_pipeline_by_its_mesh(project: Path) -> None:
    write(project, checkpoint={"pipeline": "1f1b"}, solve={"mesh": {"pp": 2, "dp": 2}})
    assert load_config(project).solve.mesh == {"pp": 2, "dp": 2}
    write(project, checkpoint={"pipeline": "interleaved", "partitions": 4})
    assert load_config(project).checkpoint.partitions == 4
    write(project, checkpoint={"pipeline": "off", "partitions": None}, solve={"mesh": {"pp": 1, "dp": 4}})
    assert load_config(project).solve.mesh == {"pp": 1, "dp": 4}


PIPED = {"pipeline": "1f1b"}


@pytest.mark.parametrize(
    ("changes", "file", "told"),
    [
        (
            {"checkpoint": {"every_blocks": 2}},
            CHECKPOINT,
            "checkpoint.every_blocks: is not read with `recompute: optimal`",
        ),
        (
            {"checkpoint": {"partitions": 2}},
            CHECKPOINT,
            "checkpoint.partitions: is for pipelines, and `pipeline` is off",
        ),
        ({"checkpoint": {"boundaries": ["a"]}}, CHECKPOINT, "checkpoint.boundaries: is for pipelines"),
        (
            {"checkpoint": PIPED | {"micro_batches": "some"}},
            CHECKPOINT,
            "expected an integer of at least 1, solve or null",
        ),
        ({"checkpoint": PIPED | {"micro_batches": 0}}, CHECKPOINT, "expected an integer of at least 1, solve or null"),
        (
            {"checkpoint": PIPED | {"micro_batches": True}},
            CHECKPOINT,
            "expected an integer of at least 1, solve or null",
        ),
        (
            {"checkpoint": PIPED | {"partitions": 1}},
            CHECKPOINT,
            "checkpoint.partitions: got 1, expected an integer from 2",
        ),
        ({"checkpoint": PIPED | {"boundaries": ["a", "b", "a"]}}, CHECKPOINT, "checkpoint.boundaries: names a twice"),
        ({"checkpoint": PIPED | {"boundaries": ["a"], "partitions": 3}}, CHECKPOINT, "got 3, and `boundaries` makes 2"),
        ({"checkpoint": {"pipeline": "1f1"}}, CHECKPOINT, "did you mean '1f1b'?"),
        ({"checkpoint": {"recompute": "some"}}, CHECKPOINT, "expected one of optimal, full, every, off, always"),
        ({"checkpoint": {"recompute": "every", "every_blocks": 0}}, CHECKPOINT, "checkpoint.every_blocks: got 0"),
        (
            {"solve": {"mesh": {"pp": 2, "dp": 2}}},
            SOLVE,
            f"solve.mesh.pp: got 2, and `pipeline` in {CHECKPOINT} is off",
        ),
        (
            {"checkpoint": PIPED | {"partitions": 4}, "solve": {"mesh": {"pp": 2, "dp": 2}}},
            SOLVE,
            f"solve.mesh.pp: got 2, and `partitions` in {CHECKPOINT} makes 4",
        ),
        (
            {"checkpoint": PIPED | {"boundaries": ["a", "b"]}, "solve": {"mesh": {"pp": 2, "dp": 2}}},
            SOLVE,
            f"solve.mesh.pp: got 2, and `boundaries` in {CHECKPOINT} makes 3",
        ),
        (
            {"checkpoint": PIPED, "solve": {"mesh": {"dp": 2}}},
            SOLVE,
            "solve.mesh: is a mesh of all devices, and `pipeline: 1f1b` asks for partitions",
        ),
        (
            {"checkpoint": PIPED, "solve": {"submeshes": 0}},
            SOLVE,
            "solve.submeshes: got 0, and `pipeline: 1f1b` needs plans of fewer devices",
        ),
        (
            {"checkpoint": {"recompute": "except_last"}, "train": {"gradient_accumulation": 4}},
            CHECKPOINT,
            "checkpoint.recompute: 'except_last' with 4 micro-batches is for pipelines",
        ),
        (
            {"checkpoint": {"recompute": "except_last", "micro_batches": 2}},
            CHECKPOINT,
            "checkpoint.recompute: 'except_last' with 2 micro-batches is for pipelines",
        ),
    ],
)
def test_what_does_not_go_together(project: Path, changes: dict, file: str, told: str) -> None:
    write(project, **changes)
    with pytest.raises(ConfigError) as refused:
        load_config(project)
    line = refused.value.line()
    assert line.startswith(f"{file}:") and told in line and "\n" not in line


def test_a_saved_plan_is_of_all_devices(project: Path) -> None:
    (project / "conf/plan/mine.json").write_text("{}")
    write(project, checkpoint=PIPED, solve={"mesh": {"pp": 2, "dp": 2}, "plan": "mine"})
    with pytest.raises(ConfigError, match=r"solve\.mesh\.pp: got 2, and `plan` names a saved plan"):
        load_config(project)
