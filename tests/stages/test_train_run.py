"""What the ranks have measured, as it is passed on to the tracked run and reported."""

from __future__ import annotations

import json
from pathlib import Path

from stages.train.run import Follower


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
            print(json.dumps(line), file=file)
        file.write('{"step": 2')  # still being written
    follow(tmp_path)
    expected = {"loss": 2.5, "step_ms": 500.0, "samples_per_second": 72.0, "resident_mb": 3.0}
    assert live.logged == [(0, expected), (1, expected)]
    assert shown == [(1, "loss 2.5000"), (2, "loss 2.5000")]
