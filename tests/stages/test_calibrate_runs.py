"""`shardwright calibrate` of runs: what they measured is kept, and the next prediction rests on it and says so.

Runs are recorded: reports are written as a training run would have measured them, at known factors of the prediction.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from shardwright.pipeline.base import artifacts
from shardwright.pipeline.base.measured_runs import read_runs
from shardwright.pipeline.base.stage import read
from shardwright.pipeline.config import load_config, load_part
from shardwright.pipeline.cost.corrected import basis_in_words, corrected, decisions_of, uncorrected_parts
from shardwright.pipeline.cost.step import Workload
from shardwright.pipeline.ir.correction import Correction, MeasuredPlan, MeasuredRun, StepParts, correction_of, with_run
from shardwright.pipeline.ir.report import Breakdown
from shardwright.stages.command_line import main
from shardwright.stages.train.measured import make_report
from shardwright.stages.whatif.answer import SlowerLinks
from shardwright.stages.whatif.planner import slower
from tests.flow.project import TINY
from tests.graphs import GRAPHS, frontier_of, preset, profile_of

ROOT = Path(__file__).resolve().parents[2]
MLP = {
    "module": {
        "_target_": "shardwright.pipeline.models.mlp.build",
        "features": 16,
        "width": 32,
        "classes": 4,
        "depth": 2,
    },
    "batch": {"inputs": {"shape": [64, 16], "dtype": "float32"}, "targets": {"shape": [64], "dtype": "int64"}},
}
OWN = TINY | {"model": MLP, "solve": TINY["solve"] | {"only": "data"}}  # so that gradients are summed
DATE = "2026-11-18 23:41"


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """A small project with a described cluster, up to its plan; `probed` has the same one as if it were measured."""
    roots = {}
    for name in ("described", "probed"):
        roots[name] = root = tmp_path_factory.mktemp(name)
        shutil.copytree(ROOT / "conf", root / "conf")
        (root / "pipeline").symlink_to(ROOT / "pipeline")
        config = yaml.safe_load((ROOT / "conf/config.yaml").read_text()) | dict.fromkeys(TINY, "tiny")
        config["tracking"]["enabled"] = False
        (root / "conf/config.yaml").write_text(yaml.safe_dump(config))
        for group, content in OWN.items():
            (root / f"conf/{group}/tiny.yaml").write_text(yaml.safe_dump(content))
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(root)
            run_stages("trace", "profile", "cluster")
            if name == "probed":
                as_probed(root)
            run_stages("solve", "checkpoint")
    return roots


@pytest.fixture
def project(planned, tmp_path, monkeypatch, request):
    root = tmp_path / "project"
    shutil.copytree(planned[getattr(request, "param", "probed")], root, symlinks=True)
    monkeypatch.chdir(root)
    return root


described = pytest.mark.parametrize("project", ["described"], indirect=True)


def run_stages(*names):
    for name in names:
        assert main([name, "-q"]) == 0


def edit(root, group, **changes):
    path = root / f"conf/{group}/tiny.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | changes))


def as_probed(root, speed=1.0):
    """What the probe found, as it would be written."""
    body = artifacts.load("cluster", root).body
    edit(root, "cluster", source="probe")
    rate = body.compute.memory_rate * speed
    found = replace(body, source="probe", compute=replace(body.compute, memory_rate=rate))
    artifacts.save(artifacts.make("cluster", found, (), {"cluster": load_config(root).digest("cluster")}), root)


def measure(root, compute=1.5, links=2.0, beside=2e-3, parted=True, date=DATE, **changes):
    """Training, so many times slower than the plan's figures say; the report as it would be written."""
    above = [artifacts.load(kind, root) for kind in ("graph", "plan")]
    plan, config = above[1].body, load_config(root)
    priced = uncorrected_parts(plan)
    parts = (compute * priced.compute, links * priced.communication, links * priced.hidden, priced.other + beside)
    step = parts[0] + parts[1] + parts[3]
    breakdown = Breakdown(step, *parts)
    peak = plan.prediction.peak_bytes
    measured = {
        "seconds": [step] * 20,
        "profiled_at": 19,
        "breakdown": vars(breakdown) if parted else None,
        "peak_bytes": [peak, peak],
        "losses": [2.0] * 20,
        "ranks": 2,
        "samples": 64,
        "evaluated": [],
        "engine": "planned",
    } | {key: value for key, value in changes.items() if key != "edited"}
    report = replace(make_report(measured, plan, changes.get("edited", False)), date=date)
    digests = {group: config.digest(group) for group in ("model", "data", "train")}
    artifacts.save(artifacts.make("report", report, above, digests), root)
    return step


def plan_in(root):
    return artifacts.load("plan", root).body


# ---- the machine as it was measured


def test_the_same_plan_is_predicted_at_what_its_run_took_and_says_so(project, capsys):
    before = plan_in(project)
    step = measure(project)
    assert main(["calibrate"]) == 0
    out = capsys.readouterr().out
    assert f"the run of {DATE}" in out and "conf/measured/tiny.json" in out
    assert main(["solve", "-q"]) == 0 and main(["checkpoint"]) == 0
    after = plan_in(project)
    assert decisions_of(after) == decisions_of(before)
    assert after.prediction.step_seconds == pytest.approx(step)
    assert after.prediction.communication_seconds == pytest.approx(2 * before.prediction.communication_seconds)
    assert basis_in_words(after).startswith(f"as the run of {DATE} measured this plan; priced at")
    assert basis_in_words(after) in capsys.readouterr().err
    assert after.estimate.step_seconds == pytest.approx(step, rel=0.05)  # what such plans are now priced at
    assert all(one.seconds is None or one.seconds >= step for one in after.alternatives)
    _, found = read(("graph", "profile", "cluster", "frontier", "plan"), project)
    assert found["cluster"].body.correction.compute == pytest.approx(1.5)


def test_every_place_that_tells_the_prediction_tells_its_basis(project, capsys):
    measure(project)
    assert main(["calibrate", "-q"]) == 0
    run_stages("solve", "checkpoint")
    measure(project)
    for command in (["summary"], ["explain"]):
        capsys.readouterr()
        assert main(command) == 0
        assert "as the run of" in " ".join(capsys.readouterr().out.split()), command
    assert main(["report", "-q"]) == 0
    assert f"as the run of {DATE} measured this plan" in (project / "runs/report.html").read_text()


def test_a_run_of_a_corrected_plan_leaves_the_correction_as_it_is(project):
    measure(project)
    assert main(["calibrate", "-q"]) == 0
    (first,) = read_runs(project, "tiny")
    run_stages("solve", "checkpoint")
    measure(project, date="2026-11-19 08:00")
    assert main(["calibrate", "-q"]) == 0
    (second,) = read_runs(project, "tiny")
    assert second.found.date == "2026-11-19 08:00" and second.found.plan == first.found.plan
    for part, seconds in vars(first.priced).items():
        assert getattr(second.priced, part) == pytest.approx(seconds), part


def test_another_batch_has_the_parts_corrected(project):
    measure(project)
    assert main(["calibrate", "-q"]) == 0
    batch = {name: spec | {"shape": [128, *spec["shape"][1:]]} for name, spec in MLP["batch"].items()}
    edit(project, "model", batch=batch)
    run_stages("trace", "profile", "solve", "checkpoint")
    plan = plan_in(project)
    assert plan.estimate is None and plan.correction.plans == ()
    words = f"corrected by what the run of {DATE} measured: computing x1.50, collectives x2.00, +2.00 ms beside"
    assert basis_in_words(plan) == words
    assert plan.prediction.host_seconds == pytest.approx(2e-3)
    (project / "conf/measured/tiny.json").unlink()
    run_stages("solve", "checkpoint")
    plain = plan_in(project)
    assert plain.correction is None and basis_in_words(plain) == ""
    assert uncorrected_parts(plan).compute == pytest.approx(plain.prediction.compute_seconds + _more(plain))


def _more(plan):
    return plan.prediction.recompute_seconds + plan.prediction.optimizer_seconds


def test_new_figures_of_the_machine_keep_what_runs_took_and_drop_ratios(project):
    step = measure(project)
    assert main(["calibrate", "-q"]) == 0
    as_probed(project, speed=1.01)
    run_stages("solve", "checkpoint")
    plan = plan_in(project)
    assert plan.prediction.step_seconds == pytest.approx(step) and plan.correction.dates == ()
    assert plan.correction.compute == plan.correction.links == 1


@pytest.mark.parametrize(
    ("group", "changes"),
    [("model", {"module": MLP["module"] | {"width": 48}}), ("model", {"precision": "bf16"})],
)
def test_another_model_is_not_corrected(project, group, changes):
    measure(project)
    assert main(["calibrate", "-q"]) == 0
    edit(project, group, **changes)
    run_stages("trace", "profile", "solve", "checkpoint")
    assert plan_in(project).correction is None


def test_a_total_alone_is_not_told_apart(project, capsys):
    measure(project, parted=False)
    assert main(["calibrate"]) == 0
    assert "no part of it was measured, so computing and collectives are not told apart" in capsys.readouterr().out
    run_stages("solve", "checkpoint")
    _, found = read(("graph", "profile", "cluster", "frontier"), project)
    correction = found["cluster"].body.correction
    assert not correction.parted and correction.compute == correction.links > 1 and correction.other_seconds == 0


def test_runs_of_other_folders_count_together(project):
    measure(project)
    shutil.copytree(project / "runs", project / "kept")
    measure(project, compute=2.0, date="2026-11-19 08:00")
    assert main(["calibrate", "kept", "runs/train/report.json", "-q"]) == 0
    (run,) = read_runs(project, "tiny")  # of one plan the last
    assert run.found.date == "2026-11-19 08:00"


def test_what_if_rests_on_it_too(project, capsys):
    step = measure(project)
    assert main(["calibrate", "-q"]) == 0
    capsys.readouterr()
    assert main(["whatif", "link", "latency=3", "--json", "-q"]) == 0
    as_they_are, slower_links = json.loads(capsys.readouterr().out)["rows"]
    assert as_they_are["same_layouts_ms"] == pytest.approx(1e3 * step, rel=1e-3)
    assert slower_links["same_layouts_ms"] > 1e3 * step


# ---- a described one


@described
def test_a_damaged_file_is_told_before_shares_are_written(project, capsys):
    run_stages("cluster", "solve", "checkpoint")
    measure(project)
    (project / "conf/measured/tiny.json").write_text("{")
    before = (project / "conf/cluster/tiny.yaml").read_text()
    assert main(["calibrate", "-q"]) == 2
    assert "conf/measured/tiny.json: it cannot be read" in capsys.readouterr().err
    assert (project / "conf/cluster/tiny.yaml").read_text() == before


@described
def test_a_described_cluster_reaches_what_was_measured(project, capsys):
    edit(project, "cluster", preset=TINY["cluster"]["preset"] | {"launch_us": 0.01, "latency_us": 0.01})
    run_stages("cluster", "solve", "checkpoint")
    before = uncorrected_parts(plan_in(project))
    step = measure(project)
    assert main(["calibrate"]) == 0
    assert "preset.reached: products " in capsys.readouterr().out
    reached = load_part(project, "cluster", "tiny").preset.reached
    assert reached.products == reached.memory == pytest.approx(1 / 1.5, rel=0.01)
    assert reached.links == reached.network == pytest.approx(1 / 2, rel=0.02) and reached.collective_us == 0
    run_stages("cluster", "solve", "checkpoint")
    plan = plan_in(project)
    assert plan.prediction.step_seconds == pytest.approx(step)
    assert plan.correction.compute == pytest.approx(1, rel=0.02) and plan.correction.links == pytest.approx(1, rel=0.02)
    assert uncorrected_parts(plan).compute == pytest.approx(1.5 * before.compute, rel=0.02)


@described
def test_links_whose_price_is_latency_take_longer_to_start(project):
    before = uncorrected_parts(plan_in(project))
    measure(project)
    assert main(["calibrate", "-q"]) == 0
    reached = load_part(project, "cluster", "tiny").preset.reached
    assert reached.links == 1 and reached.collective_us > 1
    run_stages("cluster", "solve", "checkpoint")
    after = uncorrected_parts(plan_in(project))
    assert after.communication == pytest.approx(2 * before.communication, rel=0.05)


@described
def test_a_card_does_not_reach_more_than_its_data_sheet(project):
    measure(project, compute=0.2, links=0.2)
    assert main(["calibrate", "-q"]) == 0
    reached = load_part(project, "cluster", "tiny").preset.reached
    assert reached.products == reached.memory == reached.links == 1


# ---- what says nothing


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"edited": True}, "runs/train/report.json: the module was edited: it says nothing of the plan"),
        ({"engine": "ddp"}, "its steps were taken by `engine: ddp`: it says nothing of the plan"),
    ],
)
def test_steps_of_another_program_are_refused(project, capsys, changes, message):
    measure(project, **changes)
    refused(project, capsys, message)


def refused(project, capsys, message, *words):
    assert main(["calibrate", *words, "-q"]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
    assert not (project / "conf/measured/tiny.json").exists()


def test_a_run_of_other_settings_is_refused(project, capsys):
    measure(project)
    edit(project, "model", module=MLP["module"] | {"width": 48})
    refused(project, capsys, "it was measured with other settings than conf/model/tiny.yaml has now")


def test_a_run_that_is_not_there_or_on_another_cluster_is_refused(project, capsys):
    refused(project, capsys, "runs/train/report.json: there is no such file; run `dvc repro train`")
    measure(project)
    refused(project, capsys, "there is no cluster 'moon'; choose one of", "--cluster", "moon")
    other = "it was measured with other settings than conf/cluster/preset_cpu.yaml has now"
    refused(project, capsys, other, "--cluster", "preset_cpu")


def test_a_damaged_file_is_one_line(project, capsys):
    measure(project)
    assert main(["calibrate", "-q"]) == 0
    path = project / "conf/measured/tiny.json"
    whole = json.loads(path.read_text())
    for content, told in ((b"{", "it cannot be read"), (json.dumps(whole | {"version": 9}).encode(), "version 9")):
        path.write_bytes(content)
        assert main(["solve", "-q"]) == 2
        err = capsys.readouterr().err
        assert err.startswith("error: conf/measured/tiny.json: ") and told in err and err.count("\n") == 1


# ---- by itself


def test_all_that_a_device_computes_and_sends_takes_as_much_longer():
    cluster, frontier = preset(), frontier_of("gpt")
    slow = corrected(cluster, Correction(compute=3.0, links=5.0))
    found = [
        Workload(GRAPHS["gpt"](), profile_of("gpt"), one, 2.0).priced(frontier.points[0].sharding).step
        for one in (cluster, slow)
    ]
    assert found[1].compute == pytest.approx(3 * found[0].compute)
    assert found[1].optimizer == pytest.approx(3 * found[0].optimizer)
    sent = [one.communication for one in found]  # copies on the way are computed
    assert sent[1] == pytest.approx(5 * sent[0], rel=0.01) and sent[0] > 0


def run_of(plan, compute, links, other=0.0, **changes):
    seen = StepParts(compute + links + other, compute, links, other=other)
    found = MeasuredPlan(plan, "profile", f"2026-11-{plan}", seen)
    return replace(MeasuredRun("machine", "figures", "model", StepParts(2.0, 1.0, 1.0), found), **changes)


def test_runs_are_taken_together_where_their_figures_are_the_same():
    runs = [run_of("01", 2.0, 1.0, 0.1), run_of("02", 8.0, 4.0, 0.3), run_of("03", 50.0, 1.0, figures="older")]
    found = correction_of(runs, "machine", "figures", "model")
    assert (found.compute, found.links, found.other_seconds) == pytest.approx((4.0, 2.0, 0.2))
    assert found.dates == ("2026-11-01", "2026-11-02") and [one.plan for one in found.plans] == ["01", "02", "03"]
    assert correction_of(runs, "another machine", "figures", "model") is None
    again = with_run(runs, run_of("02", 1.0, 1.0))
    assert [run.found.plan for run in again] == ["01", "03", "02"]


def test_what_is_hidden_counts_as_it_was_priced():
    """Beside computation a collective may wait for other ranks as long as it likes."""
    priced, seen = StepParts(2.0, 1.0, 0.5, hidden=0.5), StepParts(3.0, 1.0, 2.0, hidden=50.0)
    run = run_of("01", 1.0, 1.0, priced=priced)
    found = correction_of([replace(run, found=replace(run.found, seconds=seen))], "machine", "figures", "model")
    assert found.links == pytest.approx((2.0 + 0.5) / (0.5 + 0.5))


def test_a_ratio_of_what_was_not_there_is_one():
    found = correction_of([run_of("01", 2.0, 0.0)], "machine", "figures", "model")
    assert found.links == 1.0


def test_on_other_links_no_plan_was_measured():
    cluster = corrected(preset(), correction_of([run_of("01", 2.0, 1.0)], "machine", "figures", "model"))
    assert cluster.correction.plans and not slower(cluster, SlowerLinks(bandwidth=0.5)).correction.plans
    assert slower(cluster, SlowerLinks(bandwidth=0.5)).correction.compute == 2.0
