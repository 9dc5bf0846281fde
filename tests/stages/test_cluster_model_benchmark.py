"""benchmarks.cluster_model on files that the model made itself, and on what was published."""

from __future__ import annotations

import csv
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import cluster_model as benchmark
from benchmarks.published import GPIPE, MEGATRON, TORCHGPIPE, predicted_speed, relative_errors
from shardwright.pipeline.layouts.calibrate import predicted
from shardwright.pipeline.layouts.measured import COLUMNS, StepsError, read_rows
from shardwright.pipeline.layouts.step import LayoutPrices
from shardwright.pipeline.layouts.work import RecomputeMode


def write(path: Path, rows: list[dict[str, float]]) -> Path:
    names = {key: name for name, key in COLUMNS.items()}
    with path.open("w", encoding="utf-8-sig", newline="") as text:
        table = csv.DictWriter(text, list(names.values()))
        table.writeheader()
        table.writerows({names[key]: value for key, value in row.items()} for row in rows)
    return path


def made(devices: int, noise: float, count: int, **shares: float) -> list[dict[str, float]]:
    """Rows of a machine with other shares than the preset's, each off by up to `noise`."""
    draw = random.Random(7)
    known = benchmark.machine(devices, benchmark.NETWORK)
    preset = known.settings.preset
    preset = replace(preset, reached=replace(preset.reached, **shares))
    true = known.with_settings(replace(known.settings, preset=preset))
    rows = []
    while len(rows) < count:
        tp, pp = draw.choice([1, 2, 4, 8]), draw.choice([1, 2, 4])
        if devices % (tp * pp):
            continue
        dp, micro = devices // (tp * pp), draw.choice([1, 2, 4, 8])
        row = {
            "devices": devices,
            "batch": dp * micro * draw.choice([2, 4, 8]),
            "micro_batch": micro,
            "hidden": draw.choice([1024, 2048, 4096]),
            "heads": 16,
            "layers": draw.choice([12, 16, 24]),
            "sequence": 1024,
            "tp": tp,
            "dp": dp,
            "pp": pp,
            "milliseconds": 1.0,
        }
        step = benchmark.measured_steps([row], devices <= true.host, None, None)[0]
        (seconds,) = predicted([step], true, benchmark.WORKS)
        rows.append({**row, "milliseconds": 1e3 * seconds * draw.uniform(1 - noise, 1 + noise)})
    return rows


def run(path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, object]]:
    status = benchmark.main(["--steps", str(path), *options])
    return status, json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.long
def test_a_card_that_reaches_less_is_found_again(tmp_path, capsys):
    rows = made(8, 0.04, 160, products=0.6, memory=0.55, kernel_us=30, links=0.8)
    status, found = run(write(tmp_path / "steps.csv", rows), capsys)
    assert status == 0 and found["met"] is True and found["rows"] == 60
    assert found["mean_error"] < 0.04 and found["rank_correlation"] > 0.99


@pytest.mark.long
def test_a_file_of_several_nodes_is_predicted_as_the_preset_stands(tmp_path, capsys):
    status, found = run(write(tmp_path / "steps.csv", made(64, 0.1, 40)), capsys)
    assert status == 0 and found["rows"] == 30 and 0.02 < found["mean_error"] < 0.1


@pytest.mark.parametrize("way", [RecomputeMode.none, RecomputeMode.full])
def test_some_rows_tell_whether_the_steps_recompute(way, tmp_path):
    node = benchmark.machine(1, benchmark.NETWORK)
    steps = benchmark.measured_steps(made(64, 0.0, 20), False, way.value, None)
    times = predicted(steps, node, benchmark.WORKS)
    steps = [replace(step, seconds=1.05 * time) for step, time in zip(steps, times, strict=True)]
    unknown = [replace(step, layout=replace(step.layout, recompute=RecomputeMode.full)) for step in steps]
    found = benchmark.as_they_recompute(unknown, node)
    assert len(found) == 15 and {step.layout.recompute for step in found} == {way}
    assert benchmark.as_they_recompute(unknown[:3], node) == unknown[:3]


@pytest.fixture
def one_published(monkeypatch):
    """What the others are predicted at is tried below."""
    monkeypatch.setattr(benchmark, "MEGATRON", MEGATRON[:1])


def test_a_missed_bar_is_status_one(tmp_path, capsys, one_published):
    rows = made(64, 0.0, 12, products=0.3)
    status, found = run(write(tmp_path / "steps.csv", rows), capsys)
    assert status == 1 and found["met"] is False and found["mean_error"] > benchmark.BEYOND


def test_steps_of_another_card_are_priced_with_its_figures(tmp_path, capsys, one_published):
    path = write(tmp_path / "steps.csv", made(64, 0.0, 12))
    status, found = run(path, capsys, "--cluster", "dgx_h100")
    assert status == 1 and found["mean_error"] > 0.2


def test_what_is_known_of_the_steps_can_be_given(tmp_path):
    rows = made(8, 0.0, 1)
    assumed, given = (benchmark.measured_steps(rows, True, *known)[0] for known in ((None, None), ("full", 32000)))
    assert (assumed.layout.recompute, assumed.model.vocabulary) == ("none", 50257)
    assert (given.layout.recompute, given.model.vocabulary) == ("full", 32000)


def test_rows_that_do_not_divide_are_left_out(tmp_path, capsys):
    good, bad = made(64, 0.0, 2)
    path = write(tmp_path / "steps.csv", [good, {**bad, "heads": 15}])
    assert len(benchmark.measured_steps(read_rows(path), False, None, None)) == 1
    assert "row 2 is left out: hidden=" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="has 0 rows that can be priced"):
        benchmark.main(["--steps", str(write(path, [{**bad, "heads": 15}]))])


@pytest.mark.parametrize("text", ["a,b\n1,2\n", ""])
def test_a_file_of_another_form_is_refused(tmp_path, text):
    path = tmp_path / "steps.csv"
    path.write_text(text)
    with pytest.raises(StepsError, match="has no column '# GPUs'"):
        benchmark.main(["--steps", str(path)])
    with pytest.raises(StepsError, match="No such file"):
        benchmark.main(["--steps", str(tmp_path / "none.csv")])


def test_megatron_rows_are_within_eight_percent():
    for row in MEGATRON:
        card = benchmark.machine(row.layout.devices)
        priced = LayoutPrices(row.model, benchmark.WORKS(row.model), card).price(row.layout)
        assert priced.flops / 1e12 == pytest.approx(row.teraflops, rel=0.08), row.name
        assert priced.fits


def test_speeds_follow_the_law_of_pipelines():
    """48 equal blocks: K stages with M micro-batches, of which 3 of 4 seconds wait for the pipeline."""
    for row in GPIPE:
        stages, micro = row.devices, row.micro_batches
        law = stages * micro / (4 * micro + 3 * (stages - 1))
        assert predicted_speed(row) == pytest.approx(law)
    assert predicted_speed(TORCHGPIPE[0]) == pytest.approx(1 / 3)
    assert sorted(relative_errors(GPIPE))[4] == 0.0


def test_rank_correlation():
    assert benchmark.rank_correlation([1.0, 2.0, 3.0], [10.0, 20.0, 25.0]) == pytest.approx(1.0)
    assert benchmark.rank_correlation([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]) == pytest.approx(-1.0)
