"""What `explain --diff` and `sweep` take from a git revision: artifacts from DVC's cache, settings, summaries."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shardwright.stages.solve.explain.priced_run import ExplainError
from shardwright.stages.solve.explain.revision import lay_out
from shardwright.stages.sweep.experiments import metrics_of

pytestmark = pytest.mark.filterwarnings("ignore:_NoneStep.value:DeprecationWarning")  # of DVC

ARTIFACT = "runs/trace/graph.json"
GIT = ("git", "-c", "user.name=x", "-c", "user.email=x@x")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of its own in a repository, as `shardwright init training` makes it; committed with its run."""
    top = tmp_path_factory.mktemp("repository")
    root = top / "training"
    (root / "conf").mkdir(parents=True)
    (root / "conf/config.yaml").write_text("model: mine\n")
    (root / ARTIFACT).parent.mkdir(parents=True)
    (root / ARTIFACT).write_text("{}")
    (root / "runs/trace/summary.json").write_text('{"ops": 3}')
    subprocess.run((*GIT, "init", "-q", str(top)), check=True)
    for words in (("init", "-q", "--subdir"), ("add", "-q", ARTIFACT, "runs/trace/summary.json")):
        subprocess.run((sys.executable, "-m", "dvc", *words), cwd=root, check=True)
    subprocess.run((*GIT, "add", "--all"), cwd=top, check=True)
    subprocess.run((*GIT, "commit", "-qm", "a run"), cwd=top, check=True)
    (root / ARTIFACT).write_text("[]")
    (root / "conf/config.yaml").write_text("model: another\n")
    return root


def test_a_project_below_the_root_of_git(project, tmp_path):
    lay_out(project, "HEAD", [ARTIFACT], tmp_path)
    assert (tmp_path / ARTIFACT).read_text() == "{}"
    assert (tmp_path / "conf/config.yaml").read_text() == "model: mine\n"


def test_summaries_of_an_experiment(project):
    (project / "runs/trace/summary.json").write_text('{"ops": 4}')
    assert metrics_of(project, "HEAD", ["trace"]) == {"trace": {"ops": 3}}


@pytest.mark.parametrize("revision", ["no-such", "HEAD~7"])
def test_no_revision_of_that_name(project, tmp_path, revision):
    with pytest.raises(ExplainError, match=r"no such folder, revision or experiment"):
        lay_out(project, revision, [ARTIFACT], tmp_path)


def test_no_run_of_a_revision(project, tmp_path):
    with pytest.raises(ExplainError, match=r"its run is not in DVC's cache.*dvc repro checkpoint"):
        lay_out(project, "HEAD", ["runs/solve/frontier.json"], tmp_path)


@pytest.mark.parametrize("with_git", [True, False])
def test_where_nothing_was_committed(project, tmp_path, with_git):
    root = tmp_path / "new"
    shutil.copytree(project, root)
    if with_git:
        subprocess.run((*GIT, "init", "-q", str(root)), check=True)
    else:
        shutil.rmtree(root / ".dvc")
    for revision in ("HEAD", "main"):
        with pytest.raises(ExplainError, match=r"no such folder, revision or experiment"):
            lay_out(root, revision, [ARTIFACT], tmp_path / "out")
