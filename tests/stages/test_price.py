"""`shardwright price`: words, what they name, the table, and one line for every mistake."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from shardwright.pipeline.layouts.search import Wanted
from shardwright.pipeline.layouts.words import LAYOUT
from shardwright.stages.command_line import main

ROOT = Path(__file__).resolve().parents[2]
TABLE = """\
145.6 billion parameters, batch 2304, 1536 devices of dgx_a100_infiniband with 80 GB each
   dp  tp  pp micro         schedule recompute zero seq       step  samples/s    tokens/s TFLOP/s    MFU    memory\
  bubble  comm.
   24   8   8     1             1f1b      full    0  no    25.47 s       90.5     185,251   144.2  34.7%  43.1 GB \
    6.6%  13.5%
   24   8   8     2             1f1b      full    0  no    25.98 s       88.7     181,627   141.4  34.0%  48.6 GB \
   12.4%  11.8%
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rows(text: str) -> list[list[str]]:
    """Cells of the lines under the head of the table."""
    return [line.split() for line in text.splitlines()[2:] if not line.startswith("!")]


def test_a_table_of_several_layouts(project, capsys):
    words = "model=gpt_145b dp=24 tp=8 pp=8 micro_batch=1,2 recompute=full attention=plain"
    assert main(["price", *words.split()]) == 0
    assert capsys.readouterr().out == TABLE


def test_the_models_and_the_cluster_of_the_project_are_the_default(project, capsys):
    assert main(["price", "dp=8", "tp=4", "pp=2", "micro_batch=2"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("0.9 million parameters, batch 16, 64 devices of dgx_a100_infiniband with 80 GB each\n")
    assert rows(out)[0][:5] == ["8", "4", "2", "2", "1f1b"]


def test_a_described_cluster_of_the_project_is_taken(project, capsys):
    path = project / "conf/config.yaml"
    path.write_text(path.read_text().replace("cluster: local_cpu", "cluster: dgx_h100"))
    assert main(["price", "dp=8"]) == 0
    assert "8 devices of dgx_h100" in capsys.readouterr().out


def test_the_cluster_has_as_many_nodes_as_are_needed_or_given(project, capsys):
    assert main(["price", "model=gpt_7.5b", "dp=8", "tp=4", "pp=2", "cluster=dgx_h100", "nodes=8"]) == 0
    given = capsys.readouterr().out
    assert main(["price", "model=gpt_7.5b", "dp=8", "tp=4", "pp=2", "cluster=dgx_h100"]) == 0
    assert capsys.readouterr().out == given and "64 devices of dgx_h100" in given


def test_a_second_price_of_a_model_traces_nothing(project, capsys, monkeypatch):
    words = ["price", "model=gpt_7.5b", "dp=8", "tp=4", "cluster=dgx_h100"]
    assert main(words) == 0
    first = capsys.readouterr().out
    monkeypatch.setattr("shardwright.pipeline.layouts.traced.trace", None)
    assert main(words) == 0
    assert capsys.readouterr().out == first


def test_sizes_make_a_model_and_change_one(project, capsys):
    words = "hidden=12288 layers=96 heads=96 sequence=2048 vocabulary=51200 batch=1536 tp=8 pp=16 dp=4"
    assert main(["price", *words.split()]) == 0
    own = capsys.readouterr().out
    assert main(["price", "model=gpt3_175b", "tp=8", "pp=16", "dp=4"]) == 0
    assert rows(capsys.readouterr().out)[0][8:] == rows(own)[0][8:]
    assert main(["price", "model=gpt3_175b", "layers=48", "tp=8", "pp=16", "dp=4"]) == 0
    assert capsys.readouterr().out.startswith("87.6 billion")


def test_what_does_not_fit_is_marked_and_what_cannot_be_has_its_reason(project, capsys):
    assert main(["price", "model=gpt3_175b", "tp=8,5"]) == 0
    out = capsys.readouterr().out
    assert "GB!" in out and out.endswith("! more than the 80 GB that a device has\n")
    assert "tp=5 does not divide heads=96" in out


def test_a_search_finds_ten_divisions_fastest_first(project, capsys):
    assert main(["price", "search", "model=llama2_70b", "nodes=16", "tp=4,8"]) == 0
    found = rows(capsys.readouterr().out)
    assert len(found) == 10 and len({tuple(row[:3]) for row in found}) == 10
    assert {row[1] for row in found} <= {"4", "8"}
    assert all(int(row[0]) * int(row[1]) * int(row[2]) == 128 for row in found)
    speeds = [float(row[-7].replace(",", "")) for row in found]
    assert "!" not in "".join(map("".join, found)) and speeds == sorted(speeds, reverse=True)


def test_every_word_of_a_layout_can_be_searched():
    assert set(vars(Wanted())) == set(LAYOUT)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("foo", "there is no word 'foo'; allowed are search and dp, tp, pp, micro_batch"),
        ("micro_bach=2", "there is no word 'micro_bach=2'; did you mean 'micro_batch='?"),
        ("dp=x", "'dp=x' is not possible; dp is a whole number from 1 to"),
        ("dp=0", "'dp=0' is not possible"),
        ("dp=2,", "'dp=2,' is not possible"),
        ("dp=2 dp=4", "'dp' is given twice; combine values as dp=1,2"),
        ("zero=4", "zero is 0, 1, 2 or 3"),
        ("experts=2 experts_per_token=4", "experts_per_token=4 is more than experts=2"),
        ("model=llama2_7b experts_per_token=2", "'experts_per_token' is of a model with experts, and this has none"),
        (
            "model=mlp layers=4",
            "'layers' is of a transformer by its sizes, and 'mlp' is priced as it is",
        ),
        ("model=mlp attention=plain", "'attention' is of a transformer by its sizes"),
        ("model=mlp tp=3", "tp=3 divides no matrix of mlp"),
        ("cp=2", "'cp=2' is not possible: the planner does not split a sequence inside attention; leave cp out"),
        ("ep=4", "'ep=4' is not possible: the planner does not split experts over devices of their own"),
        ("overlap=all", "overlap is none, runtime, megatron"),
        ("schedule=zero_bubble", "schedule is 1f1b, interleaved, gpipe"),
        ("model=llama2_70b tp=16", "tp=16 does not divide kv_heads=8"),
        ("recompute=some", "recompute is none, selective, full"),
        ("sequence_parallel=maybe", "sequence_parallel is yes or no"),
        ("model=gpt9", "there is no model 'gpt9'; choose one of: gpt_1.7b"),
        ("cluster=moon", "there is no cluster 'moon'; choose one of: a100_40"),
        ("cluster=local_cpu", "it is measured, and a price needs figures"),
        ("cluster=simulated", "its hosts differ"),
        ("cluster=h100 dp=16", "cluster 'h100' cannot have nodes=16"),
        ("hidden=1024", "a model without a name needs 'layers'; add layers=..."),
        ("tp=3", "tp=3 does not divide heads=4"),
        ("dp=16 nodes=1", "it needs 16 devices, and there are 8"),
        ("search model=gpt_1t nodes=2", "nothing fits 80 GB"),
    ],
)
def test_mistakes_are_one_line_and_status_two(project, capsys, words, message):
    assert main(["price", "-q", *words.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ") and message in captured.err
    assert captured.err.count("\n") == 1


def test_any_gpt_of_the_project_can_be_named(project, capsys):
    text = (project / "conf/model/gpt_small.yaml").read_text()
    (project / "conf/model/gpt_wide.yaml").write_text(text.replace("width: 128", "width: 1024"))
    assert main(["price", "model=gpt_wide"]) == 0
    assert capsys.readouterr().out.startswith("50.9 million parameters, batch 16")
