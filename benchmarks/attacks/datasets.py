"""Data sets that raise, lie, change their mind or hang: one line names the sample, the rank and the line of code."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks import small_project
from benchmarks.attacks.outcome import Outcome, refusal
from benchmarks.small_project import Training
from shardwright.pipeline.base.errors import ShardwrightError
from shardwright.pipeline.ir.layout import Layout
from shardwright.pipeline.user.batches import Batches

SOURCE = """
import os, sys, time
import torch

AT, KIND = 100, os.environ.get("FAULT", "none")

class Faulty:
    def __init__(self, context):
        self.context = context

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        good = torch.arange(self.context) % 64
        if index < AT:
            return {"input_ids": good, "labels": good}
        return FAULTS[KIND](good)

def raising(error):
    def fault(good):
        raise error
    return fault

def hanging(good):
    time.sleep(3600)

FAULTS = {
    "value": raising(ValueError("the record\\nis broken")),
    "key": raising(KeyError("x")),
    "index": raising(IndexError("list index out of range")),
    "stop": raising(StopIteration()),
    "exit": raising(SystemExit(0)),
    "io": raising(OSError(5, "Input/output error", "shard-3.bin")),
    "memory": raising(MemoryError()),
    "shape": lambda good: {"input_ids": good[1:], "labels": good},
    "type": lambda good: {"input_ids": good.float(), "labels": good},
    "missing": lambda good: {"input_ids": good},
    "text": lambda good: {"input_ids": "words", "labels": good},
    "none": lambda good: None,
    "list": lambda good: [good, good],
    "hang": hanging,
    "dies": lambda good: os._exit(3),
}
"""
TOLD = {  # what the line says beside the sample and the rank
    "value": ["ValueError: the record is broken", "faulty.py:"],
    "key": ["KeyError", "faulty.py:"],
    "index": ["IndexError", "of 1000"],
    "stop": ["StopIteration"],
    "exit": ["SystemExit"],
    "io": ["Input/output error", "shard-3.bin"],
    "memory": ["MemoryError"],
    "shape": ["input_ids has shape [7]"],
    "type": ["torch.float32"],
    "missing": ["labels"],
    "text": ["no tensor"],
    "none": ["NoneType"],
    "list": ["list"],
    "hang": ["hangs at", "reading", "faulty.py:"],
    "dies": ["status 3"],
}


def attacks(folder: Path, sample: bool) -> Iterator[Outcome]:
    if sample:
        yield from read_here()
        return
    root = folder / "project"
    small_project.make(root, {"steps": 200, "hang_s": 300})
    (root / "faulty.py").write_text(SOURCE)
    data = {"dataset": {"_target_": "faulty.Faulty", "context": 8}, "shuffle": False}
    (root / "conf/data/small.yaml").write_text(json.dumps(data))
    path = root / "conf/train/small.yaml"
    for kind, names in TOLD.items():
        path.write_text(json.dumps({**json.loads(path.read_text()), "hang_s": 5 if kind == "hang" else 300}))
        run = Training(root, FAULT=kind)
        found = refusal(f"a data set: {kind}", run.ended(300), *names)
        sample_named = kind == "dies" or re.search(r"sample 1\d\d", found.found)
        named = bool(sample_named and re.search(r"rank [01]", found.found))
        yield Outcome(found.attack, found.held and named and not run.left(), found.found, found.traceback)


class Lying:
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.zeros(3)[: 3 - index // 9]} if index < 6 or index == 9 else [][index]


def read_here() -> Iterator[Outcome]:
    """Without ranks: what a batch says."""
    job = {
        "model": {"batch": {"x": {"shape": [3, 3], "dtype": "float32"}}},
        "data": {"shuffle": False, "seed": 0},
        "where": {"data": "conf/data/own.yaml"},
    }
    batches = Batches(Lying(), job, {"x": Layout(())}, [])  # type: ignore[arg-type]
    for number, names in ((2, ("sample 6 of 10", "IndexError", "datasets.py:")), (3, ("sample 9", "[2]"))):
        try:
            batches[number]
            told = "nothing"
        except ShardwrightError as error:
            told = error.line()
        yield Outcome(f"batch {number} of a data set that lies", all(name in told for name in names), told)
