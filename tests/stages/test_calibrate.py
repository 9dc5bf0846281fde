"""`shardwright calibrate`: what steps say of a card is found again, written, and taken by the next price."""

from __future__ import annotations

import argparse
import csv
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest

from shardwright.pipeline.config import load_config, load_part
from shardwright.pipeline.layouts.calibrate import predicted, with_shares
from shardwright.pipeline.layouts.machine import machine_of
from shardwright.pipeline.layouts.measured import COLUMNS, step_of, works_known
from shardwright.pipeline.layouts.work import RecomputeMode
from shardwright.stages.calibrate import read_steps
from shardwright.stages.command_line import main
from shardwright.stages.commands import planner_stages

ROOT = Path(__file__).resolve().parents[2]
SHARES = {"products": 0.6, "unaligned": 0.3, "memory": 0.65, "kernel_us": 25.0, "links": 0.5, "collective_us": 30.0}
STEPS = [
    {"devices": 8, "batch": 64, "micro_batch": micro, "hidden": hidden, "heads": 16, "layers": 12, "sequence": 1024,
     "tp": tp, "dp": 8 // tp, "pp": 1, "milliseconds": 1.0}
    for hidden in (1024, 4096) for tp in (1, 4) for micro in (1, 4, 8)
]  # fmt: skip


@pytest.fixture
def project(tmp_path, monkeypatch):
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path, rows):
    names = {key: name for name, key in COLUMNS.items()}
    with path.open("w", newline="") as text:
        table = csv.DictWriter(text, list(names.values()))
        table.writeheader()
        table.writerows({names[key]: value for key, value in row.items()} for row in rows)


def test_shares_are_found_written_and_taken(project, capsys):
    planner = planner_stages()
    known = machine_of(load_part(ROOT, "cluster", "dgx_h100"), planner, "here")
    true = with_shares(known, np.log(list(SHARES.values())))
    steps = [step_of(row, RecomputeMode.full, 51200) for row in STEPS]
    times = predicted(steps, true, works_known(load_config(ROOT), planner))
    write(project / "steps.csv", [{**row, "milliseconds": 1e3 * t} for row, t in zip(STEPS, times, strict=True)])
    price = ["price", "dp=8", "model=gpt_1.7b", "cluster=dgx_h100", "recompute=full"]
    assert main(price) == 0
    before = capsys.readouterr().out
    assert main(["calibrate", "steps.csv", "--cluster", "dgx_h100", "--recompute", "full"]) == 0
    out = capsys.readouterr().out
    assert "12 steps, 12 of them fitted: mean error" in out and "conf/cluster/dgx_h100.yaml, preset.reached" in out
    text = (project / "conf/cluster/dgx_h100.yaml").read_text()
    assert "# NVIDIA DGX H100 data sheet" in text and "memory_gbytes_per_s: 3350" in text
    reached = load_part(project, "cluster", "dgx_h100").preset.reached
    for name in ("products", "memory", "links"):
        assert getattr(reached, name) == pytest.approx(SHARES[name], rel=0.15), name
    assert main(price) == 0
    assert capsys.readouterr().out != before


def test_errors_are_those_of_all_steps_and_three_digits_are_written(project, capsys, monkeypatch):
    """Of three steps one is fitted; they took as long as is predicted, twice and four times as long."""
    planner = planner_stages()
    here = machine_of(load_part(ROOT, "cluster", "dgx_h100"), planner, "here")
    steps, works = (
        [step_of(row, RecomputeMode.full, 51200) for row in STEPS[:3]],
        works_known(load_config(ROOT), planner),
    )
    times = predicted(steps, here, works)
    rows = [{**row, "milliseconds": 1e3 * n * t} for n, row, t in zip((1, 2, 4), STEPS, times, strict=False)]
    write(project / "steps.csv", rows)
    monkeypatch.setattr("shardwright.stages.calibrate.MOST", 1)
    found = with_shares(here, np.log([0.654321, 0.31415, 0.777777, 12.3456, 0.55555, 9.87654]))
    monkeypatch.setattr("shardwright.stages.calibrate.calibrated", lambda steps, *_: found if len(steps) == 1 else here)
    assert main(["calibrate", "steps.csv", "--cluster", "dgx_h100", "--recompute", "full"]) == 0
    assert "3 steps, 1 of them fitted: mean error 41.7% before" in capsys.readouterr().out
    reached = load_part(project, "cluster", "dgx_h100").preset.reached
    assert [getattr(reached, name) for name in SHARES] == [0.654, 0.314, 0.778, 12.3, 0.556, 9.88]


def test_steps_are_of_the_recompute_and_the_overlap_that_are_named(project):
    write(project / "steps.csv", STEPS[:1])
    given = argparse.Namespace(
        files=[project / "steps.csv"], recompute="selective", vocabulary=1000, overlap="megatron"
    )
    ((model, layout),) = [(step.model, step.layout) for step in read_steps(given, logging.getLogger())]
    assert (layout.recompute, layout.overlap, model.vocabulary) == ("selective", "megatron", 1000)
    assert (layout.dp, layout.tp, layout.pp, layout.micro_batch, layout.batch) == (8, 1, 1, 1, 64)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("none.csv --cluster dgx_a100", "none.csv: No such file or directory; name a file of steps"),
        ("steps.csv --cluster moon", "there is no cluster 'moon'; choose one of"),
        ("steps.csv --cluster local_cpu", "it is measured, and a price needs figures"),
        ("steps.csv --cluster dgx_a100", "steps.csv: has no step that can be priced"),
    ],
)
def test_mistakes_are_one_line_and_nothing_is_written(project, capsys, words, message):
    before = (project / "conf/cluster/dgx_a100.yaml").read_text()
    write(project / "steps.csv", [{**STEPS[0], "heads": 15}])
    assert main(["calibrate", *words.split(), "-q"]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
    assert (project / "conf/cluster/dgx_a100.yaml").read_text() == before
