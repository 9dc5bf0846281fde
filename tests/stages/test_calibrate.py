"""`python -m stages calibrate`: what steps say of a card is found again, written, and taken by the next price."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import numpy as np
import pytest

from pipeline.config import load_config, load_part
from pipeline.layouts.calibrate import predicted, with_shares
from pipeline.layouts.machine import machine_of
from pipeline.layouts.measured import COLUMNS, AllWorks, step_of
from pipeline.layouts.work import RecomputeMode
from stages.__main__ import main
from stages.commands import planner_stages

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
    times = predicted(steps, true, AllWorks(load_config(ROOT), planner))
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
