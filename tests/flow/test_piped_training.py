"""A pipeline from the configuration to trained weights: the losses of the plain loop, on ranks of its partitions."""

from __future__ import annotations

import pytest
import torch

from shardwright.pipeline.models import gpt
from shardwright.stages.command_line import main
from tests.flow import plain_loop
from tests.flow.conftest import Maker
from tests.flow.project import STAGES, TINY, Project, worst_difference

pytestmark = [pytest.mark.flow, pytest.mark.usefixtures("warm_python")]
MICRO_BATCHES = {1: 4, 5: 10}  # by the slices of a pass: twelve samples are 3, 3, 2, 2 and 2
TIED = {"module": TINY["model"]["module"] | {"tie": True}}
FORCED = {"pipeline": "1f1b", "partitions": 2}


@pytest.fixture(scope="module", params=[1, 5], ids=["whole passes", "slices"])
def slices(request: pytest.FixtureRequest) -> int:
    """Into which a pass is cut."""
    return request.param


@pytest.fixture(scope="module")
def project(make_project: Maker, slices: int) -> Project:
    return make_project(
        tiny=True,
        model=TIED,
        solve={"submeshes": 1},
        checkpoint=FORCED | ({"micro_batches": MICRO_BATCHES[slices]} if slices > 1 else {}),
        train={"gradient_accumulation": MICRO_BATCHES[slices] // slices, "clip_norm": 0.5, "export": True},
    )


def test_two_partitions_train_as_a_plain_loop_does(
    project: Project, slices: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """That of whole passes."""
    monkeypatch.chdir(project.root)
    for name in STAGES:
        assert main([name, "-q"]) == 0, name
    plan, report = project.load("plan"), project.load("report")
    assert len(plan.partitions) == 2 and plan.schedule == "1f1b" and len(plan.slices) == slices
    assert report.ranks == plan.ranks == 2
    assert report.peak_bytes == pytest.approx(plan.rank_peak_bytes, rel=0.06)
    rows = {row.what: row for row in report.compared}
    told = [rows[f"peak_mb_rank_{rank}"].predicted for rank in range(2)]
    assert told == [peak / 1e6 for peak in plan.rank_peak_bytes] and told[0] != told[1]
    capsys.readouterr()
    plain_loop.main(project.root, report.steps)
    plain = [float(line) for line in capsys.readouterr().out.split()]
    assert worst_difference(report.losses, plain) < 2e-5
    assert report.samples_per_second == pytest.approx(12 * MICRO_BATCHES[slices] // slices / report.median_step_seconds)


def test_the_weights_of_all_partitions_are_exported(project: Project) -> None:
    from safetensors.torch import load_file

    settings = {key: value for key, value in TIED["module"].items() if key != "_target_"}
    model = gpt.build(**settings)
    model.load_state_dict(load_file(project.root / "runs/train/weights/model.safetensors"))
    assert torch.equal(model.token.weight, model.head.weight)


def test_the_summary_shows_the_pipeline(
    project: Project, slices: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project.root)
    assert main(["summary"]) == 0
    assert f"1f1b of 2 partitions, {MICRO_BATCHES[slices]} micro-batches" in capsys.readouterr().out


@pytest.mark.long
def test_only_the_last_micro_batch_keeps_everything(
    make_project: Maker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As GPipe: the losses are those of the plain loop, and the peak is the predicted one, which `always` has not."""
    made = make_project(
        tiny=True,
        model={"module": TINY["model"]["module"] | {"width": 64, "layers": 4}},
        solve={"submeshes": 1},
        checkpoint={"pipeline": "gpipe", "boundaries": ["layers.2"], "recompute": "always"},
        train={"gradient_accumulation": 4},
    )
    monkeypatch.chdir(made.root)
    predicted, settings = {}, made.root / "conf/checkpoint/tiny.yaml"
    planning = STAGES.index("checkpoint")
    for how, stages in {"always": STAGES[: planning + 1], "except_last": STAGES[planning:]}.items():
        settings.write_text(settings.read_text().replace("recompute: always", f"recompute: {how}"))
        for name in stages:
            assert main([name, "-q"]) == 0, name
        predicted[how] = made.load("plan").rank_peak_bytes
    assert made.load("plan").keeps_last and predicted["always"][0] < 0.9 * predicted["except_last"][0]
    assert "recompute_except_last(" in (made.root / "runs/codegen/module.py").read_text()
    report = made.load("report")
    assert report.peak_bytes == pytest.approx(predicted["except_last"], rel=0.06)
    capsys.readouterr()
    plain_loop.main(made.root, report.steps)
    plain = [float(line) for line in capsys.readouterr().out.split()]
    assert worst_difference(report.losses, plain) < 2e-5


def test_verify_finds_it_equal(
    project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project.root)
    assert main(["verify", "-q", "--steps", "2"]) == 0
    assert "\nequal: loss, " in capsys.readouterr().out
