"""Two hundred damaged configurations through the command line: one line, exit status 2, nothing under runs/ touched."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from shardwright.pipeline.base.artifacts import KINDS
from shardwright.stages.command_line import main
from tests.config_mutations import Mutation, invalid_mutations
from tests.flow.conftest import Maker
from tests.flow.project import SOURCE, STAGES, Project

pytestmark = pytest.mark.flow
COMMANDS = (*STAGES, "check", "run")
SAMPLE = 8
MANY = settings(
    max_examples=200,
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module")
def project(make_project: Maker) -> Project:
    """The shipped configuration, with files under runs/ that nobody may touch."""
    project = make_project()
    for kind in KINDS.values():
        path = kind.path(project.root)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{kind.name} of an earlier run\n")
    return project


SEEN: list[Mutation] = []


@MANY
@given(st.data())
def test_in_one_process(
    project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], data: st.DataObject
) -> None:
    mutation = data.draw(invalid_mutations(SOURCE))
    command = data.draw(st.sampled_from(COMMANDS))
    before = project.snapshot()
    monkeypatch.chdir(project.root)
    capsys.readouterr()
    with project.with_file(mutation.file, mutation.content):
        status = main([command])
    told = capsys.readouterr()
    assert status == 2, (mutation, told)
    lines = told.err.splitlines()
    assert len(lines) == 1 or mutation.what.endswith("(whole)"), (mutation, told)
    assert all(line.startswith("error: ") for line in lines), (mutation, told)
    assert "Traceback" not in told.err and told.out == ""
    assert mutation.file in told.err, (mutation, told)
    assert project.snapshot() == before
    SEEN.append(mutation)


def test_two_hundred_were_tried() -> None:
    assert len(SEEN) >= 200
    assert len({(mutation.file, mutation.content) for mutation in SEEN}) > 150


@pytest.mark.parametrize("number", range(SAMPLE))
def test_in_a_process_of_its_own(project: Project, number: int) -> None:
    chance = random.Random(number)
    mutation = chance.choice([one for one in SEEN if not one.what.endswith("(whole)")])  # the others may be several
    before = project.snapshot()
    with project.with_file(mutation.file, mutation.content):
        for command in (chance.choice(STAGES), "run"):
            done = project.stages(command)
            assert done.refused() == done.err.strip(), mutation
            assert done.out == ""
    assert project.snapshot() == before


def test_settings_that_only_the_stages_can_judge(project: Project, tmp_path: Path) -> None:
    """Valid for the schema, wrong for the machine: the same one line."""
    with project.with_file("conf/config.yaml", _replaced(project, "conf/config.yaml", "pipeline/models", "no/such")):
        assert "no/such" in project.stages("trace").refused()
    lines = project.root / "conf/model/gpt_small.yaml"
    with project.with_file(str(lines.relative_to(project.root)), lines.read_bytes().replace(b"heads: 4", b"heads: 3")):
        assert "multiple of heads" in project.stages("trace").refused()


def _replaced(project: Project, file: str, old: str, new: str) -> bytes:
    return (project.root / file).read_text().replace(old, new).encode()
