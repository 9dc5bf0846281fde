"""A user's model and data in a folder of their own, set up as docs/own-model.md says."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.flow.conftest import Maker
from tests.flow.project import SOURCE, STAGES, Project, worst_difference

pytestmark = pytest.mark.flow
MODEL, DATA = "conf/model/own.yaml", "conf/data/own.yaml"


@pytest.fixture(scope="module")
def project(make_project: Maker) -> Project:
    project = make_project(tiny=True)
    shutil.copytree(SOURCE / "examples/own_model", project.root.parent / "own_model")
    page = (SOURCE / "docs/own-model.md").read_text()
    blocks = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    code, model, data = blocks
    project.edit("conf/config.yaml", "code: pipeline/models\n", code)
    for file, block in ((MODEL, model), (DATA, data)):
        assert block.startswith(f"# {file}\n")
        (project.root / file).write_text(block)
    project.choose(model="own", data="own")
    return project


def net(project: Project) -> Path:
    return project.root.parent / "own_model/net.py"


@contextmanager
def edited(path: Path, old: str, new: str) -> Iterator[None]:
    before = path.read_text()
    assert before.count(old) == 1
    path.write_text(before.replace(old, new))
    try:
        yield
    finally:
        path.write_text(before)


def test_it_trains_as_in_plain_pytorch(project: Project) -> None:
    project.stages("check").ok()
    assert sorted(project.repro().ok().stages) == sorted(STAGES)
    report = project.load("report")
    assert report.ranks == 2
    assert worst_difference(report.losses, project.plain_losses(report.steps)) < 1e-5


def test_editing_the_users_file_runs_trace_again(project: Project) -> None:
    assert project.repro().ok().stages == []
    with edited(net(project), "F.gelu(", "F.relu("):
        assert project.repro("trace").ok().stages == ["trace"]
        assert any("relu" in op.target for op in project.load("graph").ops)
    done = project.repro().ok()
    assert (done.stages, done.from_cache) == ([], ["trace"])
    assert not (net(project).parent / "__pycache__").exists()


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("net.WaveClassifier", "nett.WaveClassifier", ["conf/model/own.yaml", "nett", "`code`"]),
        ("net.WaveClassifier", "net.Classifier", ["conf/model/own.yaml", "net.Classifier"]),
        ("width: 48", "widht: 48", ["conf/model/own.yaml", "widht"]),
        ("net.WaveClassifier", "collections.OrderedDict", ["conf/model/own.yaml", "OrderedDict"]),
        ("[24, 32]", "[24, 31]", ["net.py", "batch"]),
        ("  kind: {", "  sort: {", ["forward", "sort"]),
    ],
)
def test_mistakes_in_the_model_settings(project: Project, old: str, new: str, told: list[str]) -> None:
    with edited(project.root / MODEL, old, new):
        refused(project, "trace", told)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('return {"loss": F.cross_entropy(logits, kind), "logits": logits}', "return logits", ["no scalar loss"]),
        ("logits = self.tell(x)", "logits = self.tell(x) + self.nothing", ["nothing", "net.py"]),
        ("import math\n", "import mahth\n", ["mahth"]),
    ],
)
def test_mistakes_in_the_users_code(project: Project, old: str, new: str, told: list[str]) -> None:
    with edited(net(project), old, new):
        refused(project, "trace", told)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("length: 32", "length: 30", ["signal has shape [30]", "wants [32]"]),
        ("samples: 400", "sampels: 400", ["sampels", "conf/data/own.yaml"]),
    ],
)
def test_mistakes_in_the_data_settings(project: Project, old: str, new: str, told: list[str]) -> None:
    with edited(project.root / DATA, old, new):
        refused(project, "train", told)


def test_a_code_folder_that_is_not_there(project: Project) -> None:
    with edited(project.root / "conf/config.yaml", "code: ../own_model", "code: ../no_model"):
        for command in ("check", "trace", "run"):
            assert "../no_model" in project.stages(command).refused()


def test_details_of_a_failing_rank(project: Project) -> None:
    """The message tells to look with -v: there the rank's own traceback is."""
    with edited(net(project), "phase = 2 * math.pi", "phase = 1 / (index - index) * math.pi"):
        done = project.stages("train", "-v")
    assert "ZeroDivisionError" in done.refused(details=True)
    assert re.search(r"^\[train\] .*net\.py\", line \d+", done.err, re.MULTILINE), done.err


def test_ranks_that_do_not_wait_for_one_another(project: Project) -> None:
    """A plan without collectives keeps no step: a late rank must not disturb the steps that the first one notes."""
    late = (
        'import os, time\n        time.sleep(1.0 if os.environ.get("RANK") == "1" else 0)\n        return self.samples'
    )
    slow = "import time\n        time.sleep(0.02)\n        kind = index % self.kinds"
    with edited(net(project), "return self.samples", late), edited(net(project), "kind = index % self.kinds", slow):
        done = project.stages("train").ok()
    assert re.findall(r"step (\d)/4", done.err) == ["1", "2", "3", "4"]


def refused(project: Project, stage: str, told: list[str]) -> None:
    before = project.snapshot()
    line = project.stages(stage).refused()
    for word in told:
        assert word in line, line
    assert project.snapshot() == before
    assert project.all_gone() == []
