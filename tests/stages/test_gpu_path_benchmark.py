"""The GPU path's benchmark without a GPU: its projects are projects, it goes on where it stopped, and how it judges."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_equality import described, difference, lines_of_refusal
from benchmarks.gpu_path import GPU, PROJECTS, measure
from benchmarks.gpu_path_models import MODELS, WAY, Drawn, Recomputed, build
from benchmarks.gpu_path_project import FORMS, Failed, Project
from benchmarks.gpu_path_report import BARS, EAGER_FORMS, figures, judged, met, report
from shardwright.pipeline.config import load_config

GB = 10**9


def peer(peak: float, ms: float, first: float = 20.0) -> dict[str, float]:
    return {"peak": peak * GB, "ms": ms, "loss": 1.0, "first_s": first}


PEERS: dict[str, Any] = {
    "plain": peer(10.0, 100.0),
    "per block": peer(4.0, 130.0),
    "compile": peer(8.0, 80.0, first=60.0),
    "compile, reduce-overhead": {"error": "it does not work"},
}


def point(form: str, budget: float, peak: float, ms: float, recomputes: bool = True, **more: Any) -> dict[str, Any]:
    predicted = {"ms": more.pop("predicted", ms), "peak": more.pop("told", peak) * GB}
    measured = {"peak": peak * GB, "ms": ms, "loss": 1.0, "first_s": more.pop("first", 20.0)}
    about = {"project": "m amp", "form": form, "share": budget / 10, "budget": budget * GB}
    return about | {"predicted": predicted, "recomputes": recomputes, "measured": measured}


def test_eager_plans_are_held_against_eager_peers_that_fit():
    assert judged(point("eager", 9.0, 8.9, 104.0), PEERS)["best"] == "per block"
    assert judged(point("eager", 10.0, 9.9, 104.0), PEERS)["ratio"] == pytest.approx(1.04)
    for form in ("graphs", "compiled"):
        assert judged(point(form, 9.0, 8.9, 76.0), PEERS)["ratio"] == pytest.approx(0.95)
    nothing = judged(point("compiled", 3.0, 2.9, 99.0), PEERS)
    assert nothing["best"] is None and nothing["ratio"] is None


def test_the_first_step_is_held_against_the_peer_that_is_alike():
    assert judged(point("compiled", 9.0, 8.9, 76.0, first=75.0), PEERS)["first_over"] == pytest.approx(15.0)
    assert judged(point("eager", 9.0, 8.9, 76.0, first=25.0), PEERS)["first_over"] == pytest.approx(5.0)


def test_the_figures_of_all_points():
    ones = [
        point("eager", 10.0, 9.99, 100.0, recomputes=False, predicted=98.0, told=9.98),
        point("eager", 5.0, 5.1, 120.0, predicted=150.0),
        point("compiled", 8.0, 7.0, 84.0, first=75.0),
    ]
    found = figures([judged(one, PEERS) for one in ones], failed=1)
    assert found["points"] == 3 and found["failed"] == 1 and found["over_budget"] == 1
    assert found["step_error_worst"] == pytest.approx(0.25) and found["step_error_median"] == pytest.approx(0.02)
    assert found["peak_error_worst"] == pytest.approx(0.001, abs=1e-4) and found["least_used"] == pytest.approx(0.875)
    assert found["slower_than_best_peer"] == 1 and found["geomean_compiled"] == pytest.approx(1.05)
    assert found["geomean_eager"] == pytest.approx((120 / 130) ** 0.5, abs=1e-4)
    assert found["first_step_over_peer_s"] == pytest.approx(15.0) and not met(found)
    good = figures([judged(point("eager", 5.0, 4.9, 120.0), PEERS)], failed=0)
    assert met(good) and set(BARS) <= set(good)
    assert not met(good | {"least_used": 0.9})


def test_the_optimizer_of_fused_plans_is_held_against_what_was_predicted():
    one = point("fused", 10.0, 9.9, 100.0)
    one["measured"]["optimizer_ms"], one["predicted"]["optimizer_ms"] = 10.0, 12.0
    assert judged(one, PEERS)["ratio"] is None  # no peer steps so
    found = figures([judged(one, PEERS)], failed=0)
    assert found["optimizer_error_fused"] == pytest.approx(0.2) and not met(found)
    one["predicted"]["optimizer_ms"] = 10.5
    assert met(figures([judged(one, PEERS)], failed=0))


def test_what_fits_nothing_is_told_and_what_failed_counts():
    refused = {"project": "m amp", "form": "eager", "share": 0.1, "budget": GB, "refused": "no plan fits 1 GB"}
    failed = {**refused, "share": 0.2, "error": "it broke"}
    del failed["refused"]
    good = point("eager", 5.0, 4.9, 120.0)
    told = report({"peers": {"m amp": PEERS}, "points": {"a": refused, "b": failed, "c": good}})
    assert "no plan fits 1 GB" in told and "FAILED: it broke" in told and "per block (0.923)" in told
    assert "not met: failed" in told
    assert json.loads(told.splitlines()[-1])["points"] == 1


@pytest.mark.parametrize("form", FORMS)
def test_every_project_is_one_that_the_stages_read(tmp_path: Path, form: str):
    for model, precision in PROJECTS:
        project = Project(tmp_path / model, f"{model} {precision}", form, GPU)
        project.configure(24 * GB)
        config = load_config(project.root)
        assert config.solve.memory_budget_gb == 24 and config.model.precision.value == precision
        assert config.model.compile is (form not in EAGER_FORMS)


class Walked:
    """In the place of a project's commands: which ran in which folder, and what they say."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.commands: list[tuple[str, str]] = []
        self.fails: dict[tuple[str, str], str] = {}
        walked = self

        def run(project: Project, *stages: str) -> None:
            for stage in stages:
                walked.commands.append((project.root.name, stage))
                if (project.root.name, stage) in walked.fails:
                    raise Failed(stage, walked.fails[project.root.name, stage])
                (project.root / "runs" / stage).mkdir(parents=True, exist_ok=True)
                project._mark(stage).write_text("1.0")

        def train(project: Project, way: str = "plain") -> dict[str, float]:
            walked.commands.append((project.root.name, f"train {way}"))
            budget = json.loads((project.root / "conf/solve/gpu.yaml").read_text())["memory_budget_gb"]
            return peer(budget or 10.0, 100.0)

        monkeypatch.setattr(Project, "run", run)
        monkeypatch.setattr(Project, "train", train)
        monkeypatch.setattr(Project, "predicted", lambda project: ({"ms": 99.0, "peak": 5.0 * GB}, True))

    def trained(self) -> list[tuple[str, str]]:
        return [(root, what) for root, what in self.commands if what.startswith("train")]


TINY = {("gpt2-tiny", "amp"): {"eager": (100, 50), "graphs": (50,)}}


def test_it_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    walked = Walked(monkeypatch)
    assert measure(TINY, GPU, tmp_path, ["eager"], -1.0, ("plain",))["points"] == 0 and walked.commands == []
    assert measure(TINY, GPU, tmp_path, ["eager", "50"], 60.0, ("plain",))["points"] == 1
    assert walked.trained() == [("gpt2-tiny-amp-eager", "train plain"), ("gpt2-tiny-amp-eager-50", "train plain")]
    assert measure(TINY, GPU, tmp_path, [""], 60.0, ("plain",))["points"] == 3
    again = [root for root, _ in walked.trained()[2:]]
    assert again == ["gpt2-tiny-amp-eager-100", "gpt2-tiny-amp-graphs-50"], "what was measured was measured again"
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["points"] == 3
    for stage in ("trace", "profile"):
        roots = [root for root, what in walked.commands if what == stage]
        assert sorted(roots) == ["gpt2-tiny-amp-eager", "gpt2-tiny-amp-graphs"], f"{stage} depends on no budget"
    assert [what for _, what in walked.commands].count("cluster") == 1


def test_a_stage_that_fails_is_told_with_its_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    walked = Walked(monkeypatch)
    walked.fails["gpt2-tiny-amp-graphs", "profile"] = walked.fails["gpt2-tiny-amp-graphs-50", "profile"] = "it broke"
    walked.fails["gpt2-tiny-amp-eager-50", "checkpoint"] = "raise memory_budget_gb"
    found = measure(TINY, GPU, tmp_path, [""], 60.0, ("plain",))
    assert found["points"] == 1 and found["failed"] == 1
    points = json.loads((tmp_path / "state.json").read_text())["points"]
    assert points["gpt2-tiny amp graphs 50"]["error"] == "profile: it broke"
    assert points["gpt2-tiny amp eager 50"]["refused"] == "checkpoint: raise memory_budget_gb"


def test_peers_are_ways_to_run_the_same_module(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    batch = {
        name: torch.stack([Drawn("gpt2-tiny")[n][name] for n in range(4)]) for name in MODELS["gpt2-tiny"]["batch"]
    }
    losses = {}
    for way in ("plain", "per block"):
        monkeypatch.setenv(WAY, way)
        torch.manual_seed(0)
        model = build("gpt2-tiny").train()
        torch.manual_seed(1)
        losses[way] = model(**batch).loss.item()
        recomputed = [module for module in model.modules() if isinstance(module, Recomputed)]
        assert len(recomputed) == (3 if way == "per block" else 0)
    assert losses["plain"] == losses["per block"]


def test_equality_is_of_every_loss_and_only_the_right_refusal_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert difference([4.0, 2.0], [4.0, 2.5]) == pytest.approx(0.2)
    assert difference([4.0, float("nan")], [4.0, 2.0]) == float("inf")
    Walked(monkeypatch)
    project = Project(tmp_path, "gpt2-tiny fp32", "eager", described("cuda", 2))
    project.configure()
    assert lines_of_refusal(project) == float("inf")  # it trained
    for told, lines in (
        ("[train] starting\nerror: the step cannot be captured: ranks that share a GPU talk over the host", 1),
        ("Traceback\n  a[0] line\nerror: ranks that share a GPU", 3),
        ("error: out of memory", float("inf")),
    ):

        def refused(project: Project, told: str = told) -> dict[str, float]:
            raise Failed("train", told)

        monkeypatch.setattr(Project, "train", refused)
        assert lines_of_refusal(project) == lines
    assert load_config(project.root).model.cuda_graphs is True
