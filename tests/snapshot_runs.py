"""Small training runs with snapshots, on ranks that tests start."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from shardwright.pipeline.models.data import TokenSequences
from shardwright.stages.codegen.partitions import write_partitions
from shardwright.stages.train.loop import Loop
from shardwright.stages.train.worker import make_engine
from tests import plans
from tests.jobs import train_settings
from tests.piped_training import Case, plan_of
from tests.storage_plans import NAMED, Named, plan_named

MODEL, BATCH = "gpt8", 8
SIZES = plans.GPT8
NAMED.setdefault("one", Named((1,), (0,)))


def write_programs(folder: Path, names: tuple[str, ...]) -> None:
    """`piped` is a pipeline of two partitions, others are named in tests/storage_plans.py."""
    for name in names:
        (folder / f"{name}.py").write_text(_piped() if name == "piped" else _text(name))


def _text(name: str) -> str:
    return plans.lowered(MODEL, plan_named(MODEL, name))[1]


def _piped() -> str:
    case = Case(MODEL, "gpipe", (1, 1), 1, 1, "random", 0)
    return write_partitions(plans.graph_of(MODEL), plan_of(case))


def job(folder: Path, program: str, steps: int, /, **safety: Any) -> dict[str, Any]:
    """Of a run whose snapshots lie in `folder`/runs/train/snapshots/run, where `safety` has an `every`."""
    shape = {"shape": [BATCH, SIZES["context"]], "dtype": "int64"}
    data = {"vocab_size": SIZES["vocab_size"], "length": SIZES["context"], "samples": 60}
    optimizer = {"_target_": "torch.optim.AdamW", "lr": 0.01, "weight_decay": 0.1}
    given = {
        "folder": str(folder / "runs" / "train" / "snapshots" / "run"),
        "settings": {},
        "origin": None,
        "every": 0,
        "keep": 2,
        "background": True,
        "hang_s": None,
        "compare_every": 0,
    }
    return {
        "device": "cpu",
        "module_path": str(folder / f"{program}.py"),
        "weights_path": str(folder / "weights.safetensors"),
        "model": {
            "precision": "fp32",
            "module": {"_target_": "shardwright.pipeline.models.gpt.build", **SIZES},
            "batch": {"input_ids": shape, "labels": shape},
        },
        "data": {
            "dataset": {"_target_": "shardwright.pipeline.models.data.TokenSequences", **data},
            "shuffle": True,
            "seed": 4,
        },
        "train": train_settings(steps=steps, seed=3, wait_s=600, optimizer=optimizer),
        "digests": {},
        "where": {"model": "model", "data": "data", "train": "train"},
        "safety": {**given, **safety},
    }


def train(given: dict[str, Any], work: Path) -> dict[str, Any]:
    """On a rank: what the loop reports."""
    work.mkdir(exist_ok=True)
    return Loop(make_engine(given), given, work).run()


class Faulty(TokenSequences):
    """Data that once kills the rank that reads it, and once keeps it waiting for ever."""

    def __init__(self, marks: str, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.marks = Path(marks)
        self.read = 0

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        if self.read == 10 and self._first("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.read == 14 and self._first("hang"):
            time.sleep(1000)
        return super().__getitem__(index)

    def _first(self, fault: str) -> bool:
        """Of all processes that ask."""
        try:
            (self.marks / f"{fault}.mark").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True
