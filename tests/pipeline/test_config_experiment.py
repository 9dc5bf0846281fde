"""Experiments: settings made in the files, comments kept, nothing written unless all of it is valid."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from shardwright.pipeline.base.errors import ConfigError
from shardwright.pipeline.config import Backend, apply_experiment, experiments, listing, load_config

PROJECT = Path(__file__).parents[2]
SOLVE_FILES = ", ".join(listing(PROJECT, "solve"))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    shutil.copytree(PROJECT / "conf", tmp_path / "conf")
    return tmp_path


def snapshot(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def write(root: Path, *settings: str) -> None:
    lines = "".join(f"  - {text}\n" for text in settings)
    (root / "conf/experiment/mine.yaml").write_text(f"description: a test\nsettings:\n{lines}")


def refusal(root: Path, *settings: str) -> str:
    """The line for an experiment with these settings, after which no file differs."""
    write(root, *settings)
    before = snapshot(root)
    with pytest.raises(ConfigError) as caught:
        apply_experiment(root, "mine")
    assert snapshot(root) == before
    return str(caught.value)


def test_shipped_experiments_apply_and_are_described(project: Path) -> None:
    assert list(experiments(project)) == ["highs", "images", "mlp", "text", "tight_memory"]
    assert all(experiments(project).values())
    for name in listing(project, "experiment"):
        assert apply_experiment(project, name)
        load_config(project)


def test_values_go_to_the_file_chosen_by_then_and_comments_stay(project: Path) -> None:
    assert apply_experiment(project, "highs") == [
        "conf/config.yaml: solve: glpk -> highs",
        "conf/solve/highs.yaml: gap: 1e-06 -> 1e-07",
    ]
    config = load_config(project)
    assert config.solve.backend is Backend.highs and config.solve.gap == 1e-7
    before = (PROJECT / "conf/config.yaml").read_text()
    assert (project / "conf/config.yaml").read_text() == before.replace("solve: glpk", "solve: highs")
    assert (project / "conf/solve/glpk.yaml").read_text() == (PROJECT / "conf/solve/glpk.yaml").read_text()
    assert "# relative" in (project / "conf/solve/highs.yaml").read_text()
    assert apply_experiment(project, "highs") == []


def test_settings_of_every_form(project: Path) -> None:
    write(
        project,
        "checkpoint=off",
        "tracking.run_name=first",
        "cluster.memory_gb=null",
        "cluster.probe.repeats=5",
        "model.batch.input_ids.shape=[8, 64]",
        "train.optimizer.betas=[0.9, 0.99]",
    )
    lines = apply_experiment(project, "mine")
    assert lines == [
        "conf/config.yaml: checkpoint: rotor -> off",
        "conf/config.yaml: tracking.run_name: null -> first",
        "conf/cluster/local_cpu.yaml: probe.repeats: 7 -> 5",
        "conf/model/gpt_small.yaml: batch.input_ids.shape: a list -> a list",
        "conf/train/adamw.yaml: optimizer.betas: default -> a list",
    ]
    config = load_config(project)
    assert config.choices["checkpoint"] == "off" and config.tracking.run_name == "first"
    assert config.model.batch["input_ids"].shape == [8, 64]
    assert config.train.optimizer["betas"] == [0.9, 0.99] and config.train.optimizer["lr"] == 1e-3


def test_file_that_lacks_the_section_gets_it(project: Path) -> None:
    (project / "conf/cluster/local_cpu.yaml").write_text("source: probe  # measured\ndevice: cpu\ndevices: 2\n")
    write(project, "cluster.probe.repeats=5")
    assert apply_experiment(project, "mine") == ["conf/cluster/local_cpu.yaml: probe.repeats: default -> 5"]
    text = (project / "conf/cluster/local_cpu.yaml").read_text()
    assert text == "source: probe  # measured\ndevice: cpu\ndevices: 2\nprobe:\n  repeats: 5\n"


def test_links_and_modes_survive(project: Path) -> None:
    target = project / "shared.yaml"
    (project / "conf/solve/glpk.yaml").rename(target)
    target.chmod(0o640)
    (project / "conf/solve/glpk.yaml").symlink_to(target)
    write(project, "solve.gap=0.5")
    apply_experiment(project, "mine")
    assert (project / "conf/solve/glpk.yaml").is_symlink()
    assert target.stat().st_mode & 0o777 == 0o640 and "gap: 0.5" in target.read_text()


def test_unknown_experiment(project: Path) -> None:
    for name, line in {
        "other": "conf/experiment: there is no experiment 'other';"
        " choose one of: highs, images, mlp, text, tight_memory",
        "tight": "conf/experiment: there is no experiment 'tight';"
        " did you mean 'tight_memory'? choose one of: highs, images, mlp, text, tight_memory",
        "mpl": "conf/experiment: there is no experiment 'mpl';"
        " did you mean 'mlp'? choose one of: highs, images, mlp, text, tight_memory",
        "../solve/glpk": "conf/experiment: there is no experiment '../solve/glpk';"
        " choose one of: highs, images, mlp, text, tight_memory",
    }.items():
        with pytest.raises(ConfigError) as caught:
            apply_experiment(project, name)
        assert str(caught.value) == line


SETTINGS = {
    "no equals sign": (
        "solve",
        "experiment.settings[1]: got 'solve', expected `group=file` or `group.key=value`",
    ),
    "empty part": (
        "solve..gap=1",
        "experiment.settings[1]: got 'solve..gap=1', expected `group=file` or `group.key=value`",
    ),
    "no value": ("solve.gap=", "experiment.settings[1]: there is no value after '='"),
    "bad value": ("'solve.gap=[1'", "experiment.settings[1]: bad YAML: expected ',' or ']', but got '<stream end>'"),
    "no such group": ("sovle.gap=1", "experiment.settings[1]: 'sovle' is not a group; did you mean 'solve'?"),
    "no such file": (
        "solve=cplex",
        f"experiment.settings[1]: there is no conf/solve/cplex.yaml; choose one of: {SOLVE_FILES}",
    ),
    "a path": (
        "solve=../solve/glpk",
        "experiment.settings[1]: got solve '../solve/glpk', expected a name without folders or '.yaml'",
    ),
    "no such key": ("solve.gaap=1", "solve.gaap: unknown key; did you mean 'gap'?"),
    "wrong value": ("solve.gap=2", "solve.gap: got 2, expected a number >= 0 and < 1"),
    "whole section": ("cluster.probe=3", "cluster.probe: got 3, expected a mapping"),
    "inside a value": (
        "solve.gap.x=3",
        "experiment.settings[1]: 'gap' in conf/solve/glpk.yaml is not a mapping; set it as a whole",
    ),
    "key of config.yaml": (
        "code=3",
        "code: got 3, expected text; put it in quotes",
    ),
}


@pytest.mark.parametrize(("setting", "rest"), SETTINGS.values(), ids=SETTINGS.keys())
def test_wrong_settings_are_reported_where_they_stand(project: Path, setting: str, rest: str) -> None:
    line = refusal(project, "solve.time_limit_s=5", setting)
    assert line == f"conf/experiment/mine.yaml:4:5: {rest}"


def test_checks_across_keys_point_at_the_settings(project: Path) -> None:
    line = refusal(project, "cluster.memory_gb=1", "cluster.source=preset")
    assert line == (
        "conf/experiment/mine.yaml:4:5: cluster.source: 'preset' needs preset.matmul_gflops,"
        " preset.memory_gbytes_per_s, preset.latency_us, preset.link_gbytes_per_s;"
        " give a number, or set `source: probe` to measure"
    )


def test_mistake_in_a_file_the_experiment_does_not_touch(project: Path) -> None:
    (project / "conf/train/adamw.yaml").write_text("steps: 0\n")
    line = refusal(project, "solve.gap=0.5")
    assert line == ("conf/train/adamw.yaml:1:1: train.steps: got 0, expected an integer from 1 to 1000000000000")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("description: x\n", ":1:1: experiment.settings: mandatory key is missing; give a non-empty list of texts"),
        (
            "description: x\nsettings: []\n",
            ":2:1: experiment.settings: got nothing in it, expected a non-empty list of texts",
        ),
        ("description: x\nsettings: [{solve: glpk}]\n", ":2:12: experiment.settings[0]: got a mapping, expected text"),
        ("settings: [solve=glpk]\n", ":1:1: experiment.description: mandatory key is missing; give text"),
        (
            "description: x\nsettings: [a=b]\nsteps: 3\n",
            ":3:1: experiment.steps: unknown key; allowed: description, settings",
        ),
    ],
)
def test_experiment_file_is_checked(project: Path, text: str, line: str) -> None:
    (project / "conf/experiment/mine.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        apply_experiment(project, "mine")
    assert str(caught.value) == f"conf/experiment/mine.yaml{line}"


def test_failed_write_changes_nothing(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = snapshot(project)

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError) as caught:
        apply_experiment(project, "highs")
    assert str(caught.value) == "conf/config.yaml: cannot be written: No space left on device"
    assert snapshot(project) == before
