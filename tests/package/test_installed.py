"""A wheel of this repository in an environment of its own: `init`, `dvc repro`, an edit, in repositories of users."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

import shardwright

SOURCE = Path(__file__).parents[2]
TINY = {
    "conf/config.yaml": (("local_cpu", "preset_cpu"), ("glpk\n", "highs\n"), ("enabled: true", "enabled: false")),
    "conf/model/my_model.yaml": (("width: 128", "width: 32"), ("layers: 4", "layers: 2")),
    "conf/solve/highs.yaml": (("frontier_points: 6", "frontier_points: 2"),),
    "conf/train/adamw.yaml": (("steps: 20", "steps: 2"),),
}  # fmt: skip


@dataclass(frozen=True)
class Installed:
    """An environment; what our wheel needs is that of the tests."""

    folder: Path

    def run(self, *words: str, within: Path, status: int = 0) -> str:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SHARDWRIGHT", "DVC", "PYTHON", "MLFLOW"))}
        path = os.pathsep.join([str(self.folder / "bin"), kept["PATH"]])
        done = subprocess.run(
            words, cwd=within, env={**kept, "PATH": path}, capture_output=True, text=True, check=False
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    def stages(self, within: Path, *targets: str) -> list[str]:
        """Those that `dvc repro` runs."""
        return re.findall(
            r"Running stage '([\w-]+)'", self.run("python", "-m", "dvc", "repro", *targets, within=within)
        )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the files that git has, so that nothing of this machine is in it."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    listed = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    names = subprocess.run(listed, cwd=SOURCE, capture_output=True, check=True, text=True).stdout
    there = "\0".join(name for name in names.split("\0") if name and os.path.lexists(SOURCE / name))
    copying = ("tar", "-c", "--null", "-T", "-")
    packed = subprocess.run(copying, cwd=SOURCE, input=there.encode(), capture_output=True, check=True).stdout
    subprocess.run(("tar", "-x", "-C", str(copy)), input=packed, check=True)
    building = (
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(out),
        str(copy),
    )
    subprocess.run(building, check=True, capture_output=True)
    (found,) = out.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "tests_environment.pth").write_text(sysconfig.get_path("purelib") + "\n")  # of which no .pth is read
    pip = (
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(folder / "bin/python"),
        "install",
        "-q",
        "--no-deps",
        str(wheel),
    )
    subprocess.run(pip, check=True, capture_output=True)
    return Installed(folder)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Of a user who has packages called `pipeline` and `stages`."""
    subprocess.run(("git", "init", "-q", str(tmp_path)), check=True)
    for name in ("pipeline", "stages"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise SystemExit('the {name} of the user was imported')\n")
    return tmp_path


def tiny(project: Path) -> None:
    for name, edits in TINY.items():
        text = (project / name).read_text()
        for old, new in edits:
            assert text.count(old) == 1, (name, old)
            text = text.replace(old, new)
        (project / name).write_text(text)


def test_the_wheel_holds_our_packages_below_one_name(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"shardwright", f"shardwright-{shardwright.__version__}.dist-info"}
    data = {"stages/report/page.js", "conf/cluster/dgx_h100.yaml", "seven_stages.yaml", "py.typed"}
    assert {f"shardwright/{name}" for name in {"pipeline/ir/graph.py", *data}} <= set(names)
    pages = {f"shardwright/docs/{page.name}" for page in (SOURCE / "docs").glob("*.md")}
    assert {name for name in names if "/docs/" in name} == pages
    assert not [name for name in names if "/conf/" in name and name.endswith(".json")]


@pytest.mark.flow
def test_two_projects_side_by_side(installed: Installed, repository: Path) -> None:
    where = installed.run("python", "-c", "import shardwright; print(shardwright.__file__)", within=repository)
    assert where.startswith(str(installed.folder))
    told = installed.run("shardwright", "init", within=repository)
    assert "shardwright check" in told
    tiny(repository)
    first = installed.stages(repository)
    assert first[0] == "trace" and first[-1] == "train" and len(first) == 8
    program = (repository / "runs/codegen/module.py").read_text()
    assert "from shardwright.pipeline.runtime import" in program
    assert "loss" in installed.run("shardwright", "summary", within=repository)
    train = repository / "conf/train/adamw.yaml"
    train.write_text(train.read_text().replace("steps: 2", "steps: 3"))
    assert installed.stages(repository) == ["train-settings", "train"]
    installed.run("shardwright", "init", "other", within=repository)
    tiny(repository / "other")
    assert installed.stages(repository / "other", "trace") == ["trace"]
    assert installed.stages(repository) == [], "nothing has changed, another project is no reason"


def test_a_mistake_in_the_project_is_one_line(installed: Installed, repository: Path) -> None:
    installed.run("shardwright", "init", within=repository)
    config = repository / "conf/config.yaml"
    config.write_text(config.read_text().replace("solve: glpk", "solve: glkp"))
    error = installed.run("shardwright", "check", within=repository, status=2)
    assert "conf/config.yaml" in error and "did you mean 'glpk'" in error and "Traceback" not in error


LOOP = """
import json
import os

import torch

import shardwright as sw


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(16, 32), torch.nn.Linear(32, 4)

    def forward(self, x, y):
        return torch.nn.functional.cross_entropy(self.down(self.up(x).relu()), y)


torch.manual_seed(0)
model, draw = Net().double(), torch.Generator().manual_seed(1)
batches = [
    {"x": torch.randn(8, 16, generator=draw, dtype=torch.float64), "y": torch.arange(8) % 4} for _ in range(3)
]
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
if "RANK" in os.environ:
    model, optimizer = sw.parallelize(model, optimizer, sw.load("plan.json"))
else:
    wishes = {"up.weight": "S(0)", "down.weight": "zero3"}
    sw.plan(model, batches[0], "preset_cpu", constraints=wishes, frontier_points=1).save("plan.json")
losses = []
for batch in batches:
    loss = model(**batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
if os.environ.get("RANK") in (None, "0"):
    print(json.dumps(losses))
"""


@pytest.mark.flow
def test_a_loop_of_the_users_own_is_equal_on_two_ranks(installed: Installed, repository: Path) -> None:
    """The same script without a launcher, where it plans, and under torchrun."""
    (repository / "loop.py").write_text(LOOP)
    unsplit = installed.run("python", "loop.py", within=repository)
    assert {path.name for path in repository.iterdir()} >= {"plan.json"} and not (repository / "runs").exists()
    split = installed.run(
        *["python", "-m", "torch.distributed.run", "--nproc-per-node=2", "loop.py"], within=repository
    )
    alone, on_two = (json.loads(re.findall(r"\[[^\]]*\]$", text, re.MULTILINE)[-1]) for text in (unsplit, split))
    assert len(alone) == 3 and on_two == pytest.approx(alone, rel=1e-10)
