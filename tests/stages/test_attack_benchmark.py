"""A sample of every group of attacks, and how the benchmark counts."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.attacks.__main__ import groups, summary
from benchmarks.attacks.outcome import Outcome, refusal


@pytest.mark.parametrize("group", groups())
def test_a_sample_of_the_attacks_is_held(group: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if group == "locks":  # its commands are sent no signals
        request.getfixturevalue("warm_python")
    module = __import__(f"benchmarks.attacks.{group}", fromlist=["attacks"])
    outcomes = list(module.attacks(tmp_path, True))
    assert outcomes
    assert not [outcome for outcome in outcomes if not outcome.held]


def test_a_refusal_is_one_line_with_its_names_and_status_2() -> None:
    def ended(status: int, text: str) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], status, "", text)

    assert refusal("a", ended(2, "error: conf/x.yaml: no\n"), "conf/x.yaml").held
    assert not refusal("a", ended(0, "error: conf/x.yaml: no\n"), "conf/x.yaml").held
    assert not refusal("a", ended(2, "error: it failed\n"), "conf/x.yaml").held
    assert not refusal("a", ended(2, "error: one\nerror: two\n")).held
    broken = refusal("a", ended(2, "Traceback (most recent call last)\nerror: one\n"))
    assert broken.traceback and not broken.held


def test_what_is_counted() -> None:
    found = {
        "planted_faults": [Outcome("a", True), Outcome("b", False)],
        "disks": [Outcome("c", False, lost=True), Outcome("d", False, traceback=True, code_run=True)],
    }
    assert summary(found) == {
        "cases": 4,
        "held": 1,
        "tracebacks": 1,
        "lost": 1,
        "code_run": 1,
        "verify_planted": 2,
        "verify_caught": 1,
    }
