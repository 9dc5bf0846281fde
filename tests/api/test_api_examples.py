"""The examples, and the Python of docs/python.md, as they stand."""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import run_ranks

ROOT = Path(__file__).parents[2]
LOOP, NOTEBOOK = ROOT / "examples/own_loop/train.py", ROOT / "examples/plan.ipynb"


def trained(folder: str) -> Any:
    """What the script's `train` returns on a rank whose group is there."""
    os.chdir(folder)
    return runpy.run_path(str(LOOP))["train"]()


def test_a_loop_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", "plan"])
    script = runpy.run_path(str(LOOP), run_name="__main__")
    assert "Model on preset_cpu, 2 devices" in capsys.readouterr().out
    first, second = run_ranks(2, trained, str(tmp_path))
    torch.manual_seed(0)
    model = script["Model"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, script["STEPS"])
    losses = []
    for step in range(script["STEPS"]):
        loss = model(**script["batch_of"](step))
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert first == second == pytest.approx(losses, rel=1e-4) and losses[-1] < losses[0] / 2
    model.load_state_dict(torch.load(tmp_path / "weights.pt"))


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Cell by cell, with one layer of the two; what stands last in one is shown."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = ["".join(c["source"]) for c in json.loads(NOTEBOOK.read_text())["cells"] if c["cell_type"] == "code"]
    assert sum(cell.count("n_layer=2") for cell in cells) == 1
    for cell in (cell.replace("n_layer=2", "n_layer=1") for cell in cells):
        *lines, last = ast.parse(cell).body
        if isinstance(last, ast.Expr):
            exec(compile(ast.Module(lines, []), "cell", "exec"), names)
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
            assert repr(value) and (not hasattr(value, "_repr_html_") or value._repr_html_())
        else:
            exec(compile(cell, "cell", "exec"), names)
    assert names["plan"].ranks == 8 and (tmp_path / "plan.json").is_file()
    assert "GPT2LMHeadModel on dgx_h100" in capsys.readouterr().out


def test_the_python_of_the_page_runs(tmp_path: Path) -> None:
    """In one process, which trains alone."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/python.md").read_text(), re.DOTALL)
    assert len(blocks) > 5
    run_ranks(1, run_blocks, blocks, str(tmp_path))


def run_blocks(blocks: list[str], folder: str) -> None:
    os.chdir(folder)
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks:
        exec(compile(block, "docs/python.md", "exec"), names)
