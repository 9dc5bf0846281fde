"""`shardwright whatif`: every answer fits, and one more does not; by layouts, by the planner, and in words."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from shardwright.pipeline.base.artifacts import load
from shardwright.pipeline.config import load_config, load_part
from shardwright.pipeline.ir.cluster import Group, LinkCost
from shardwright.pipeline.layouts.machine import machine_of
from shardwright.pipeline.layouts.measured import works_known
from shardwright.pipeline.layouts.search import search
from shardwright.pipeline.layouts.sizes import KNOWN, LayoutError
from shardwright.pipeline.layouts.step import LayoutPrices
from shardwright.stages.command_line import main
from shardwright.stages.commands import planner_stages
from shardwright.stages.whatif.answer import STOPPED, SlowerLinks, table
from shardwright.stages.whatif.planned import ByPlanner, signature
from shardwright.stages.whatif.planner import slower
from shardwright.stages.whatif.search import FitLimit, changes, fewest, largest, least
from tests.flow.project import TINY

ROOT = Path(__file__).resolve().parents[2]
SMALL = {
    "module": {
        "_target_": "shardwright.pipeline.models.mlp.build",
        "features": 16,
        "width": 32,
        "classes": 4,
        "depth": 2,
    },
    "batch": {"inputs": {"shape": [64, 16], "dtype": "float32"}, "targets": {"shape": [64], "dtype": "int64"}},
}
BUDGET = 0.0001  # GB: less than the batch of SMALL needs with all of its activations


# ---- searches


NEEDS = {  # of a number, where so many are what fits
    "nothing but whether it fits": lambda n, limit: 0.5 if n <= limit else math.inf,
    "in a straight line": lambda n, limit: (n + 20) / (limit + 20.5),
    "with steps": lambda n, limit: (n - n % 3 + 1) / (limit - limit % 3 + 1.5) if n > limit else n / (limit + 1),
    "the same for all that fail": lambda n, limit: 0.1 if n <= limit else 1.5,
}


@pytest.mark.parametrize("grows", NEEDS)
@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 60), st.integers(0, 70))
def test_the_largest_is_found_whatever_the_start(grows, start, step, most, limit):
    tried = []

    def needs(n):
        tried.append(n)
        found = NEEDS[grows](n, limit)
        return max(found, 1.001) if n > limit else min(found, 1.0)

    *before, edge = largest(start, step, most, needs)
    every = [n for n in range(step, max(step, most) + 1, step)]
    fitting = [n for n in every if n <= limit]
    assert edge.fits == (max(fitting) if fitting else None)
    assert edge.fails == next((n for n in every if n > limit), None)
    assert len(tried) == len(set(tried)) == len(before) + 1 and set(tried) <= set(every)
    assert all(one.fits is None or one.fits <= limit for one in before)


def test_where_needs_grow_in_a_line_the_largest_of_millions_is_found_in_a_few_tries():
    tried = []
    *_, edge = largest(16, 2, 1 << 30, lambda n: tried.append(n) or (n + 1000) / 7_000_001)
    assert edge == FitLimit(6_999_000, 6_999_002) and len(tried) <= 10


def test_where_fitting_comes_and_goes_the_two_sides_of_the_answer_were_tried():
    *_, edge = largest(1, 1, 64, lambda n: 0.5 if (n % 8 == 0 and n < 60) or n < 5 else math.inf)
    assert edge.fails == edge.fits + 1 and edge.fits < 60


def test_the_fewest_is_the_first_that_fits():
    assert list(fewest([1, 2, 4, 8], lambda n: n >= 3))[-2:] == [FitLimit(None, 2), FitLimit(4, 2)]
    assert list(fewest([1, 2], lambda n: False))[-1] == FitLimit(None, 2)


@given(st.integers(1, 10**9))
def test_the_least_lies_within_what_was_asked(limit):
    *_, edge = least(0, 10**9, 0.01, lambda n: n >= limit)
    assert edge.fails < limit <= edge.fits and edge.fits - edge.fails <= max(1, 0.01 * edge.fits)


def test_every_change_between_the_points_is_found_with_both_sides():
    none, first, both, *_, found = changes([100, 1000, 10000], 0.001, lambda n: (n >= 250) + (n >= 2500) + (n >= 2600))
    assert (none, first, both) == ([], [(100, 1000)], [(100, 1000), (1000, 10000)])  # coarse first
    assert [(low < edge <= high) for (low, high), edge in zip(found, (250, 2500, 2600), strict=True)] == [True] * 3


# ---- slower links


def test_every_link_of_a_cluster_is_scaled():
    link = LinkCost(1e-5, 1e9, ((1e3, 2e-5), (1e6, 1e-3)))
    found = slower((link, Group("host", (0, 1), 4e9, 1e-6, uplink=8e9)), SlowerLinks(bandwidth=0.5, latency=3))
    assert (found[0].latency, found[0].bandwidth) == pytest.approx((3e-5, 5e8))
    assert [seconds for _, seconds in found[0].points] == pytest.approx([6e-5, 6e-5 + 2 * (1e-3 - 2e-5)])
    assert (found[1].bandwidth, found[1].latency, found[1].uplink) == pytest.approx((2e9, 3e-6, 4e9))
    assert slower(link, SlowerLinks()).seconds(5e5) == pytest.approx(link.seconds(5e5))


# ---- by layouts


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """The project's conf/ with a very small perceptron on two described CPU processes; `gpt` is a very small GPT."""
    root = tmp_path_factory.mktemp("whatif")
    shutil.copytree(ROOT / "conf", root / "conf")
    (root / "pipeline").symlink_to(ROOT / "pipeline")
    config = yaml.safe_load((ROOT / "conf/config.yaml").read_text()) | dict.fromkeys(TINY, "tiny")
    config["tracking"]["enabled"] = False
    (root / "conf/config.yaml").write_text(yaml.safe_dump(config))
    for group, content in {**TINY, "model": SMALL}.items():
        (root / f"conf/{group}/tiny.yaml").write_text(yaml.safe_dump(content))
    gpt = TINY["model"] | {"module": TINY["model"]["module"] | {"layers": 1}}
    (root / "conf/model/gpt.yaml").write_text(yaml.safe_dump(gpt))
    return root


@pytest.fixture
def ask(project, monkeypatch, capsys):
    monkeypatch.chdir(project)

    def asked(*words):
        assert main(["whatif", *words, "--json", "-q", "--seconds", "100000"]) == 0
        return json.loads(capsys.readouterr().out)

    return asked


@pytest.fixture
def refused(project, monkeypatch, capsys):
    monkeypatch.chdir(project)

    def line(*words):
        assert main(["whatif", *words, "-q"]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1
        return err

    return line


MODEL = KNOWN["gpt_7.5b"]
ONE_HOST = ("model=gpt_7.5b", "cluster=dgx_a100")


@pytest.fixture(scope="module")
def prices():
    works = works_known(load_config(ROOT), planner_stages())(MODEL)
    return LayoutPrices(MODEL, works, machine_of(load_part(ROOT, "cluster", "dgx_a100"), works.stages, "dgx_a100"))


def with_memory(prices, nbytes):
    """The same on devices that have so much."""
    return replace(
        prices, machine=prices.machine.with_settings(replace(prices.machine.settings, memory_gb=nbytes / 1e9))
    )


def fits(prices):
    try:
        return bool(search(prices))
    except LayoutError:
        return False


def of_sequence(prices, sequence):
    model = replace(MODEL, sequence=sequence)
    return replace(prices, model=model, works=works_known(load_config(ROOT), prices.works.stages)(model))


@pytest.mark.long
def test_the_longest_sequence_by_layouts(ask, prices):
    found = ask("sequence", *ONE_HOST, "--step", "131072")
    assert found["by"] == "layouts" and found["found"]["fails"] == found["found"]["fits"] + 131072
    assert fits(of_sequence(prices, found["found"]["fits"]))
    assert not fits(of_sequence(prices, found["found"]["fails"]))


def test_sequences_by_layouts_are_of_1024_unless_a_step_is_given(ask):
    assert ask("sequence", *ONE_HOST, "--most", "1024")["found"] == {"fits": 1024, "fails": None, "step": 1024}


def test_the_fewest_devices_by_layouts(ask, prices):
    found = ask("devices", *ONE_HOST)["found"]
    assert fits(replace(prices, machine=prices.machine.sized(found["fits"])))
    assert not any(fits(replace(prices, machine=prices.machine.sized(count))) for count in range(1, found["fits"]))
    many = ask("devices", "model=gpt_76b", "cluster=dgx_a100_infiniband")["found"]  # more than a host has
    assert many["fits"] % 8 == 0 and many["fails"] in (many["fits"] - 8, 8)


def test_the_largest_micro_batch_by_layouts_with_a_layout_given(ask):
    found = ask("batch", *ONE_HOST, "tp=2", "recompute=full", "zero=1")
    fitting = [row["micro_batch"] for row in found["rows"] if row["step_ms"]]
    assert max(fitting) == found["found"]["fits"] < found["found"]["fails"]
    assert all("tp=2" in row["layout"] and "recompute=full" in row["layout"] for row in found["rows"] if row["step_ms"])
    rows = ask("batch", *ONE_HOST, "tp=2", "recompute=full", "zero=1", "--step", "2", "--most", "4")["rows"]
    assert [row["micro_batch"] for row in rows] == [2, 4]


def test_budgets_by_layouts_are_where_the_fastest_layout_changes(ask, prices):
    found = ask("budget", *ONE_HOST)
    assert not fits(with_memory(prices, found["found"]["least_gb"] * 1e9 - 1))
    edges = [change["from_gb"] for change in found["found"]["changes"] if change["from_gb"] < 80]
    assert edges
    for edge in edges[:4]:
        below, above = (search(with_memory(prices, edge * 1e9 + more))[0] for more in (-1, 1))
        assert above[0] != below[0] and above[1].seconds < below[1].seconds


def test_slower_links_by_layouts(ask, prices):
    now, slow = ask("link", *ONE_HOST, "bandwidth=0.5")["rows"]
    best = search(prices)[0]
    halved = replace(prices, machine=prices.machine.with_links(0.5, 1.0))
    assert now["step_ms"] == pytest.approx(best[1].seconds * 1e3)
    assert slow["same_layout_ms"] == pytest.approx(halved.price(best[0]).seconds * 1e3)
    assert now["step_ms"] < slow["step_ms"] <= slow["same_layout_ms"]


def test_clusters_by_layouts(ask):
    found = ask("clusters", "dgx_a100,dgx_h100", "model=gpt_7.5b", "nodes=1")
    assert [row["cluster"] for row in found["rows"]] == ["dgx_a100", "dgx_h100"]
    assert found["found"]["fastest"] == "dgx_h100"


# ---- by the planner


def plan(root, name, content):
    """The real stages on the answer: the plan, or None where it was refused."""
    group, key, value = name
    path = root / f"conf/{group}/tiny.yaml"
    before = path.read_text()
    path.write_text(yaml.safe_dump({**yaml.safe_load(before), key: value}))
    try:
        status = [main([stage, "-q"]) for stage in content]
    finally:
        path.write_text(before)
    return load("plan", root).body if not any(status) else None


STAGES = ("trace", "profile", "cluster", "solve", "checkpoint")


def test_the_largest_batch_is_what_the_stages_accept(ask, project, capsys):
    found = ask("batch", f"solve.memory_budget_gb={BUDGET}", "--step", "32")
    assert found["by"] == "the planner" and not (project / "runs/checkpoint").exists()  # nothing of it is written
    edge = found["found"]
    assert edge["fails"] == edge["fits"] + 32
    tight = project / "conf/solve/tiny.yaml"
    tight.write_text(yaml.safe_dump(TINY["solve"] | {"memory_budget_gb": BUDGET}))
    try:
        for size, possible in ((edge["fits"], True), (edge["fails"], False)):
            batch = {name: spec | {"shape": [size, *spec["shape"][1:]]} for name, spec in SMALL["batch"].items()}
            made = plan(project, ("model", "batch", batch), STAGES)
            assert (made is not None) is possible
    finally:
        tight.write_text(yaml.safe_dump(TINY["solve"]))
    assert "no plan fits" in capsys.readouterr().err


@pytest.mark.long
def test_at_each_budget_the_plan_differs_on_both_sides(ask, project):
    found = ask("budget")["found"]
    sides = [(change["below_gb"], change["from_gb"]) for change in found["changes"]]
    assert sides and found["too_small_gb"] < found["least_gb"] <= sides[0][0]
    assert all(low < high <= 1.011 * low for low, high in sides)
    assert all(main([stage, "-q"]) == 0 for stage in STAGES)
    low, high = sides[0]
    plans = [plan(project, ("solve", "memory_budget_gb", size), STAGES[3:]) for size in (low, high)]
    assert signature(plans[0]) != signature(plans[1])
    assert plan(project, ("solve", "memory_budget_gb", found["too_small_gb"]), STAGES[3:]) is None
    assert plan(project, ("solve", "memory_budget_gb", found["least_gb"]), STAGES[3:]) is not None


def test_longer_sequences_take_the_context_along(ask):
    found = ask("sequence", "model=gpt", "--step", "8", "--most", "16")
    assert found["found"]["fits"] == 16 and found["found"]["fails"] is None
    short, long = found["rows"]
    assert long["step_ms"] > short["step_ms"] and long["peak_gb"] > short["peak_gb"]


def test_devices_links_and_clusters_of_the_configured_model(ask):
    assert ask("devices")["found"] == {"fits": 1, "fails": None}
    now, half, late = ask("link", "bandwidth=0.5", "latency=1,100", "solve.only=data")["rows"]
    assert now["step_ms"] < half["step_ms"] < late["step_ms"] and half["step_ms"] <= half["same_layouts_ms"]
    found = ask("clusters", "tiny,preset_cpu", "solve.memory_budget_gb=3.5")
    assert [row["devices"] for row in found["rows"]] == [2, 2] and found["found"]["fastest"] in ("tiny", "preset_cpu")


# ---- stopped before the end


def test_with_no_time_the_first_answer_is_told_and_says_so(project, monkeypatch, capsys):
    monkeypatch.chdir(project)
    assert main(["whatif", "clusters", "tiny,preset_cpu", "--seconds", "0", "--json", "-q"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert not found["complete"] and [row["cluster"] for row in found["rows"]] == ["tiny"]


def test_layouts_stop_after_the_first_answer_too(project, monkeypatch, capsys):
    monkeypatch.chdir(project)
    assert main(["whatif", "clusters", "dgx_a100,dgx_h100", *ONE_HOST, "--seconds", "0", "--json", "-q"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert not found["complete"] and [row["cluster"] for row in found["rows"]] == ["dgx_a100"]
    assert main(["whatif", "sequence", *ONE_HOST, "--seconds", "0", "--json", "-q"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["answer"] == f"a sequence of {MODEL.sequence} fits, and no larger one was tried (--most)"


def test_ctrl_c_tells_what_is_known(project, monkeypatch, capsys):
    monkeypatch.chdir(project)
    planned, seen = ByPlanner.plan, []

    def plan(self, *given, **how):
        if seen:
            raise KeyboardInterrupt
        seen.append(given)
        return planned(self, *given, **how)

    monkeypatch.setattr(ByPlanner, "plan", plan)
    assert main(["whatif", "clusters", "tiny,preset_cpu", "--seconds", "100000", "-q"]) == 130
    out, err = capsys.readouterr()
    assert "tiny is the fastest" in out and STOPPED in out and err == "interrupted\n"


# ---- mistakes, and the table


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["clusters", "dgx_a1000"], "there is no cluster 'dgx_a1000'; choose from: a100_40"),
        (["link", "bandwidth=0"], "'bandwidth=0' is not possible; give factors above 0"),
        (["batch", "bandwidth=0.5"], "'bandwidth=0.5' is for `whatif link`"),
        (["budget", "--step", "2"], "--step says nothing here"),
        (["batch", "model=gpt_7.5b", "solve.gap=1"], "keep words of one kind"),
        (["batch", "solve.memory=2"], "'solve.memory=2'"),
        (["batch", "nonsense"], "expected `group=file` or `group.key=value`"),
        (["devices", "model=gpt_7.5b", "tp=0"], "'tp=0' is not possible"),
        (["batch", "model=gpt_1t", "cluster=dgx_a100"], "no micro-batch fits"),
        (["sequence", "model=mlp"], "there is no one sequence among dims 1"),
        (["batch", "solve.memory_budget_gb=0.000001", "--most", "2"], "not even a batch of 2 fits: no plan fits"),
    ],
)
def test_a_question_that_cannot_be_is_one_line(refused, words, told):
    assert told in refused(*words)


@pytest.mark.parametrize(
    "words",
    [
        ["sequence", "model=gpt", "model.module.no_such=3"],
        ["clusters", "tiny,preset_cpu", "model.module.no_such=3"],
        ["sequence", "model=gpt", "solve.constraints={no_such: R}"],
        ["link", "latency=2", "solve.constraints={no_such: R}"],
    ],
)
def test_what_fails_for_every_value_is_told_once(project, monkeypatch, capsys, words):
    """Not also in the line of each value that was tried."""
    monkeypatch.chdir(project)
    assert main(["whatif", *words]) == 2
    out, err = capsys.readouterr()
    begun, *told = err.splitlines()
    assert out == "" and begun.startswith("[whatif] planning "), err
    assert len(told) == 1 and told[0].startswith("error: ") and "no_such" in told[0], err


def test_the_table_aligns_figures_and_cuts_long_reasons():
    rows = [{"batch": 16, "step_ms": 1234.5, "plan": "d0=2"}, {"batch": 2048, "step_ms": None, "plan": "x" * 200}]
    assert table(rows)[:2] == ["batch  step_ms  plan", "   16    1,234  d0=2"]
    assert table(rows)[2].startswith("2,048        -  xxx") and table(rows)[2].endswith("...")
