"""What the ranks have measured, as it is passed on to the tracked run and reported."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest

from shardwright.pipeline.base import artifacts
from shardwright.pipeline.base.artifacts import Artifact
from shardwright.pipeline.base.errors import ShardwrightError, TrainError
from shardwright.pipeline.base.stage import Inputs
from shardwright.pipeline.config import load_config
from shardwright.pipeline.ir.graph import Role
from shardwright.stages.commands import COMMANDS
from shardwright.stages.train import run as training
from shardwright.stages.train.engines.engine import program_of
from shardwright.stages.train.engines.pipelined import PipelinedEngine
from shardwright.stages.train.engines.planned import PlannedEngine
from shardwright.stages.train.journal import Follower
from shardwright.stages.train.run import keep_weights, weights_path
from shardwright.stages.train.snapshots.manifest import is_finished, snapshots_in
from tests.graphs import SILENT, mlp_graph
from tests.plans import graph_of
from tests.programs import plan_for, uniform


class Live:
    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []

    def log(self, step: int, values: dict[str, float]) -> None:
        self.logged.append((step, values))


def test_samples_are_those_of_all_micro_batches(tmp_path: Path) -> None:
    live, shown = Live(), []
    follow = Follower(live.log, lambda done, note="": shown.append((done, note)))  # type: ignore[arg-type]
    follow(tmp_path)
    with open(tmp_path / "steps.jsonl", "w") as file:
        for step in range(2):
            line = {"step": step, "loss": 2.5, "seconds": 0.5, "samples": 36, "resident_bytes": 3_000_000}
            line |= {"learning_rate": 0.1} | ({"eval_loss": 2.0} if step else {})
            print(json.dumps(line), file=file)
        file.write('{"step": 2')  # still being written
    follow(tmp_path)
    expected = {"loss": 2.5, "step_ms": 500.0, "samples_per_second": 72.0, "resident_mb": 3.0}
    expected["learning_rate"] = 0.1
    assert live.logged == [(0, expected), (1, expected | {"eval_loss": 2.0})]
    assert shown == [(1, "loss 2.5000"), (2, "loss 2.5000")]


def test_a_run_that_goes_on_is_whole_in_the_tracked_run(tmp_path: Path) -> None:
    """Losses from before it was started come from the snapshot; steps that are taken again are passed on once."""
    live, told = Live(), []
    follow = Follower(live.log, lambda done, note="": None, told.append)  # type: ignore[arg-type]
    step = {"loss": 2.5, "seconds": 0.5, "samples": 36, "resident_bytes": 0}
    resumed = {"resumed": 2, "restart": 0, "losses": [4.0, 3.0]}
    lines = [resumed, {**step, "step": 2}, {**step, "step": 3}, {"snapshot": 4}, {**resumed, "restart": 1}]
    lines += [{**step, "step": number} for number in (2, 3, 4)]
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    follow(tmp_path)
    assert [(number, values["loss"]) for number, values in live.logged] == [
        (0, 4),
        (1, 3),
        (2, 2.5),
        (3, 2.5),
        (4, 2.5),
    ]
    assert [note.get("restart") for note in told] == [0, None, 1]


def test_a_run_is_finished_once_its_report_is_on_the_disk(tmp_path: Path, monkeypatch) -> None:
    """Until then a kill, or a page that cannot be made, leaves snapshots to go on from."""
    folder = tmp_path / "runs" / "train" / "snapshots" / "run"
    (folder / "step-000004").mkdir(parents=True)
    measured = {"ranks": 2, "engine": "planned", "losses": [2.0], "seconds": [0.5], "evaluated": [], "samples": 4}
    measured |= {"peak_bytes": [8, 8], "held_whole": "", "profiled_at": -1, "breakdown": None}
    monkeypatch.setattr(training, "make_job", lambda *_: {"safety": {"folder": str(folder)}})
    monkeypatch.setattr(training, "launch", lambda *_: measured)
    graph = graph_of("mlp")
    plan = Artifact("plan", {}, {}, plan_for(graph, uniform(graph, 2), 2), "")
    module = Artifact("module", {}, {}, "", "")
    monkeypatch.setattr(training, "check", lambda *_: None)
    inputs = Inputs(tmp_path, {"plan": plan, "module": module}, SILENT, None)  # type: ignore[arg-type]
    result = training.run(inputs, load_config(Path(__file__).parents[2]))
    assert not is_finished(folder) and snapshots_in(folder)
    result.settle()
    assert is_finished(folder) and snapshots_in(folder)


@pytest.mark.parametrize("edited", [False, True])
def test_a_rank_trains_the_program_that_the_run_was_started_with(tmp_path: Path, edited: bool) -> None:
    """Edited before that or not; what is written over it later is not run, whether it has a fitting header or none."""
    path = artifacts.save(artifacts.make("module", "PARTITIONS = {}\n", (), {}), tmp_path)
    if edited:
        path.write_text(path.read_text() + "# by hand\n")
    found = artifacts.load("module", tmp_path, accept_edited=True)
    inputs = Inputs(tmp_path, {"module": found}, SILENT, None)  # type: ignore[arg-type]
    digests = training._digests(inputs, load_config(Path(__file__).parents[2]))
    job = {"module_path": str(path), "digests": digests}
    assert found.edited == edited and hasattr(program_of(job), "PARTITIONS")
    before = path.read_text()
    other = artifacts.make("module", "PARTITIONS = {1: 2}\n", (), {})
    for write in (lambda: path.write_text(before + "x = 1\n"), lambda: artifacts.save(other, tmp_path)):
        write()
        for begin in (program_of, PlannedEngine, PipelinedEngine):
            with pytest.raises(TrainError, match=r"module\.py: it has changed since the run was started; start"):
                begin(job)
    path.write_text("x = 1\n")
    with pytest.raises(ShardwrightError, match=r"module\.py"):
        program_of(job)


def test_weights_of_an_earlier_run_do_not_stay(tmp_path: Path) -> None:
    path = weights_path(tmp_path)
    keep_weights(path, exported=False)
    path.write_bytes(b"weights")
    keep_weights(path, exported=True)
    assert path.read_bytes() == b"weights"
    assert json.loads((path.parent / "about.json").read_text()) == {"weights": path.name}
    keep_weights(path, exported=False)
    assert not path.exists() and json.loads((path.parent / "about.json").read_text()) == {"weights": None}


def test_export_copies_what_training_wrote(tmp_path: Path) -> None:
    target = tmp_path / "copy.safetensors"
    arguments = argparse.Namespace(out=target)
    with pytest.raises(ShardwrightError, match="`export: true`"):
        COMMANDS["export"].run(tmp_path, arguments, SILENT)  # type: ignore[arg-type]
    weights_path(tmp_path).parent.mkdir(parents=True)
    weights_path(tmp_path).write_bytes(b"weights")
    assert COMMANDS["export"].run(tmp_path, arguments, SILENT) == 0  # type: ignore[arg-type]
    assert target.read_bytes() == b"weights"
    with pytest.raises(ShardwrightError, match="cannot be written"):
        COMMANDS["export"].run(tmp_path, argparse.Namespace(out=tmp_path), SILENT)  # type: ignore[arg-type]


def test_what_cannot_be_exported_is_refused_before_training() -> None:
    graph = mlp_graph()
    name, value = next((n, v) for n, v in graph.values.items() if v.role is Role.PARAMETER)
    odd = replace(value, type=replace(value.type, dtype="complex128"))
    forged = replace(graph, values={**graph.values, name: odd})
    config = load_config(Path(__file__).parents[2])
    training.check_export(forged, config)
    exporting = replace(config, train=replace(config.train, export=True))
    training.check_export(graph, exporting)
    with pytest.raises(TrainError, match=rf"adamw.yaml: export: {value.origin} is complex128"):
        training.check_export(forged, exporting)
