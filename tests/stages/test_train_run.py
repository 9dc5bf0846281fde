"""What the ranks have measured, as it is passed on to the tracked run and reported."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from pipeline.errors import ShardwrightError
from stages.commands import COMMANDS
from stages.train.run import Follower, keep_weights, weights_path
from tests.graphs import SILENT


class Live:
    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []

    def log(self, step: int, values: dict[str, float]) -> None:
        self.logged.append((step, values))


def test_samples_are_those_of_all_micro_batches(tmp_path: Path) -> None:
    live, shown = Live(), []
    follow = Follower(live, lambda done, note="": shown.append((done, note)))  # type: ignore[arg-type]
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
