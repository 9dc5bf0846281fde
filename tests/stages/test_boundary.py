"""What nobody expected is one line with status 2; -v shows where it happened, for a report."""

from __future__ import annotations

import pytest

from shardwright.stages import command_line as line
from shardwright.stages import commands


@pytest.mark.parametrize("error", [KeyError("x"), ValueError("a\nb \x1b[31m"), RecursionError(), AssertionError("no")])
@pytest.mark.parametrize("loud", [[], ["-v"]])
def test_an_unforeseen_exception_is_one_line(monkeypatch, capsys, tmp_path, error, loud):
    def fail(*_: object) -> int:
        raise error

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(commands.COMMANDS, "check", commands.Command("", fail))
    assert line.main(["check", *loud]) == 2
    said = capsys.readouterr().err
    told = [text for text in said.splitlines() if text.startswith("error: ")]
    assert len(told) == 1 and told[0].isprintable()
    assert f"check failed unexpectedly ({type(error).__name__}" in told[0]
    assert "test_boundary.py:" in told[0] and "dvc repro -f" in told[0]
    assert ("Traceback" in said) == bool(loud)
