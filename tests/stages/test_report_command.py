"""`shardwright report`, and the page that is written after a stage."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from shardwright.pipeline.base import artifacts
from shardwright.pipeline.base.stage import Inputs, Result
from shardwright.pipeline.config import load_config
from shardwright.stages.command_line import main
from shardwright.stages.report.priced import read_sources
from shardwright.stages.report.run import PAGE, page_after, with_page
from tests.graphs import SILENT
from tests.report_sources import measured_of, sources_of

PROJECT = Path(__file__).parents[2]


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A project without a run, whose configuration is the one that ships."""
    for folder in ("conf", "pipeline"):
        (tmp_path / folder).symlink_to(PROJECT / folder)
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def save(root: Path, *kinds: str) -> dict[str, artifacts.Artifact]:
    """The artifacts of a small run, of which these kinds are written."""
    sources = sources_of("mlp")
    made: dict[str, artifacts.Artifact] = {}
    for kind in ("graph", "profile", "cluster", "frontier", "plan"):
        made[kind] = artifacts.make(kind, getattr(sources, kind), tuple(made.values()), {})
    made["report"] = artifacts.make("report", measured_of(sources.plan), tuple(made.values()), {})
    for kind in kinds:
        artifacts.save(made[kind], root)
    return made


def facts_in(path: Path) -> dict:
    return json.loads(re.search(r'id="facts">(.*?)</script>', path.read_text(), re.DOTALL)[1])


ALL = ("graph", "profile", "cluster", "frontier", "plan", "report")


def test_the_page_of_a_whole_run(root):
    save(root, *ALL)
    assert main(["report", "-q"]) == 0
    facts = facts_in(root / PAGE)
    assert facts["model"]["links"] and facts["report"]["steps"] == 3 and facts["notes"] == []


def test_the_page_goes_where_it_is_asked_to(root):
    save(root, *ALL)
    assert main(["report", "-q", "--out", "elsewhere.html"]) == 0
    assert (root / "elsewhere.html").is_file() and not (root / PAGE).exists()


def test_without_a_plan_there_is_one_line(root, capsys):
    save(root, "graph", "profile")
    assert main(["report", "-q"]) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1 and "plan.json" in told[0] and "dvc repro checkpoint" in told[0]


def test_what_is_missing_is_left_out(root):
    save(root, "plan")
    assert main(["report", "-q"]) == 0
    facts = facts_in(root / PAGE)
    assert facts["model"] is None and facts["report"] is None
    assert [mark["kind"] for mark in facts["marks"]].count("chosen") == 1


def test_an_artifact_of_another_run_is_left_out_and_named(root):
    save(root, *ALL)
    other = artifacts.make("report", measured_of(sources_of("mlp").plan), (), {})
    artifacts.save(other, root)
    sources = read_sources(root, load_config(root))
    assert sources.report is None and "report.json is of another run" in sources.notes[0]


def inputs_of(root: Path, log: logging.Logger = SILENT) -> Inputs:
    return Inputs(root, {}, log, SimpleNamespace())  # type: ignore[arg-type]


def test_a_stage_logs_the_page_with_what_it_measured(root):
    made = save(root, *ALL[:-1])
    run = with_page(lambda inputs, config: Result(made["report"].body, {"loss": 1.0}, (Path("trace"),)), "train")
    result = run(inputs_of(root), load_config(root))
    page = root / "runs/train/report.html"
    assert result.files == (Path("trace"), page) and result.figures == {"loss": 1.0}
    assert facts_in(page)["report"]["losses"] == [3.0, 2.5, 2.25] and not (root / PAGE).exists()


def test_the_page_of_codegen_follows_from_the_plan_alone(root):
    """DVC takes it from its cache with the program: what was measured meanwhile has no place in it."""
    save(root, *ALL[:-1])
    artifacts.save(artifacts.make("report", measured_of(sources_of("mlp").plan), (), {}), root)  # of an earlier run
    page = root / "runs/codegen/report.html"
    assert page_after(inputs_of(root), load_config(root), Result("source", {}), page) == page
    facts = facts_in(page)
    assert facts["report"] is None and facts["notes"] == [] and facts["model"]["links"]


def test_a_page_that_cannot_be_made_says_why(root, caplog):
    """DVC wants a file in any case, and the stage has done its work."""
    log = logging.getLogger("tests.report")
    run = with_page(lambda inputs, config: Result("source", {}), "codegen")
    with caplog.at_level(logging.WARNING, log.name):
        (page,) = run(inputs_of(root, log), load_config(root)).files
    assert "runs/codegen/report.html shows nothing" in caplog.text
    assert "could not be made" in page.read_text() and "plan.json" in page.read_text()


def test_a_folder_that_cannot_be_written_costs_the_page_alone(root, caplog):
    save(root, *ALL[:-1])
    log = logging.getLogger("tests.report")
    (root / "runs/codegen").write_text("not a folder")
    run = with_page(lambda inputs, config: Result("source", {}), "codegen")
    with caplog.at_level(logging.WARNING, log.name):
        assert run(inputs_of(root, log), load_config(root)).files == ()
    assert "cannot be written" in caplog.text
