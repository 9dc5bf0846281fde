"""A user's own op, with a line in YAML as docs/how-to-add-an-op.md says, registered in code, or with no rule at all."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.flow.conftest import Maker
from tests.flow.project import SOURCE, Project, worst_difference

pytestmark = pytest.mark.flow

NET = """\
import torch
import torch.nn.functional as F
from torch import Tensor, nn


@torch.library.custom_op("own::soft_clip", mutates_args=())
def soft_clip(x: Tensor, limit: Tensor) -> Tensor:
    return limit * torch.tanh(x / limit)


@soft_clip.register_fake
def _(x: Tensor, limit: Tensor) -> Tensor:
    return torch.empty_like(x)


def keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def back(ctx, gradient):
    x, limit = ctx.saved_tensors
    y = torch.tanh(x / limit)
    return gradient * (1 - y * y), (gradient * (y - (1 - y * y) * x / limit)).sum(0)


soft_clip.register_autograd(back, setup_context=keep)


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.limit = nn.Parameter(torch.ones(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.down(soft_clip(self.up(x), self.limit)), x)


class Data:
    def __init__(self, width: int) -> None:
        self.width = width

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.randn(self.width, generator=torch.Generator().manual_seed(index))}
"""
MODEL = {"module": {"_target_": "net.Net", "width": 24}, "batch": {"x": {"shape": [12, 24], "dtype": "float32"}}}
SLOW = {  # devices on which splitting pays even for this model
    "source": "preset", "devices": 2, "memory_gb": 4,
    "preset": {"matmul_gflops": 0.01, "memory_gbytes_per_s": 0.01, "launch_us": 0, "latency_us": 1,
               "link_gbytes_per_s": 10},
}  # fmt: skip
OP = "own.soft_clip.default"


@pytest.fixture(scope="module")
def project(make_project: Maker) -> Project:
    project = make_project(
        tiny=True,
        model=MODEL,
        data={"dataset": {"_target_": "net.Data", "width": 24}, "shuffle": False, "seed": 0},
        cluster=SLOW,
    )
    (project.root.parent / "own").mkdir()
    (project.root.parent / "own/net.py").write_text(NET)
    project.edit("conf/config.yaml", "code: pipeline/models\n", "code: ../own\n")
    return project


def lines_of_the_page() -> tuple[str, str]:
    page = (SOURCE / "docs/how-to-add-an-op.md").read_text()
    (yaml_block,) = re.findall(r"```yaml\n# conf/model/own.yaml\n(.*?)```", page, re.DOTALL)
    (code_block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    return yaml_block, code_block


def strategy_of_the_op(project: Project) -> str:
    """In the fastest plan."""
    graph, frontier = project.load("graph"), project.load("frontier")
    (op,) = (op for op in graph.ops if op.target == OP)
    return frontier.points[0].sharding.strategies[op.name].name


@contextmanager
def described(project: Project, how: str) -> Iterator[None]:
    """The op with a line in YAML, with one in code, or without any."""
    block, code = lines_of_the_page()
    model, net = project.root / "conf/model/tiny.yaml", project.root.parent / "own/net.py"
    before = model.read_text()
    model.write_text(before + (block if how == "yaml" else ""))
    net.write_text(NET + (code if how == "register" else ""))
    try:
        yield
    finally:
        model.write_text(before)
        net.write_text(NET)


def test_it_is_planned_and_trained_on_two_ranks(project: Project) -> None:
    with described(project, "yaml"):
        project.stages("run").ok()
        report = project.load("report")
        assert report.ranks == 2
        assert worst_difference(report.losses, project.plain_losses(report.steps)) < 1e-5
    assert strategy_of_the_op(project) in ("b", "n")
    assert f"torch.ops.{OP}(" in (project.root / "runs/codegen/module.py").read_text()


@pytest.mark.parametrize("how", ["register", "discovered"])
def test_other_ways_give_strategies_too(project: Project, how: str) -> None:
    with described(project, how):
        for stage in ("trace", "profile", "cluster", "solve"):
            project.stages(stage).ok()
    name = strategy_of_the_op(project)
    assert name.startswith("discovered") if how == "discovered" else name in ("b", "n"), name
    assert (project.root / "runs/ops").exists() == (how == "discovered")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("b n n -> b n", ["ops.own.soft_clip.default", "does not fit"]),
        ("b n, n", ["ops.own.soft_clip.default", "'->'"]),
        ("b {}, n -> b n", ["ops.own.soft_clip.default", "is not a dim"]),
        ("b n, b -> b n", ["ops.own.soft_clip.default", "b is both"]),
    ],
)
def test_a_line_that_is_wrong_is_told_with_its_file_and_key(project: Project, line: str, told: list[str]) -> None:
    model = project.root / "conf/model/tiny.yaml"
    before = model.read_text()
    try:
        model.write_text(f'{before}ops:\n  {OP}: "{line}"\n')
        project.stages("trace")
        error = project.stages("profile").refused()
    finally:
        model.write_text(before)
    assert "conf/model/tiny.yaml" in error
    for word in told:
        assert word in error, error
