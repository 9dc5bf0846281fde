"""`shardwright fit`: models of transformers without weights, against the stages that plan; adapters; mistakes."""

from __future__ import annotations

import json
import logging
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import shardwright as sw
from shardwright.pipeline.base.errors import ShardwrightError
from shardwright.pipeline.config import load_config, load_part
from shardwright.pipeline.cost.step import Workload
from shardwright.pipeline.ir.graph import Role, TensorType, Value
from shardwright.pipeline.ir.plan import Frontier
from shardwright.pipeline.ir.verify import verify_graph, verify_sharding
from shardwright.pipeline.models import from_config
from shardwright.pipeline.tracing import equal_modules, export, simplify
from shardwright.pipeline.tracing.shortened import EqualBlocks, equal_blocks, shortened
from shardwright.pipeline.tracing.trace import trace
from shardwright.stages.cluster.described import from_preset
from shardwright.stages.command_line import main
from shardwright.stages.commands import fit_stages
from shardwright.stages.fit.answer import MOST_TIMES
from shardwright.stages.fit.model import SETTINGS, FittedModel, PlanFound, hosts_by_devices
from shardwright.stages.fit.question import FitQuestion, model_of
from shardwright.stages.fit.run import fit
from shardwright.stages.solve.on_mesh import MeshProblem, price_point
from tests.asked import mostly_long
from tests.small_configs import shrink

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted(set((ROOT / "examples/fit").glob("*.json")) - {ROOT / "examples/fit/llama_70b.json"})  # as 8B, larger


@pytest.fixture
def small(tmp_path):
    """An example with small sizes, and some of its keys changed."""
    pytest.importorskip("transformers")

    def made(name, **changed):
        path = tmp_path / f"{name}.json"
        shrink(ROOT / f"examples/fit/{name}.json", path, **changed)
        return str(path)

    return made


def test_runs_of_equal_blocks_are_found():
    assert list(equal_blocks([0, 1, 2, 1, 2, 1, 2, 1, 2, 3])) == [EqualBlocks(1, 2, 4)]
    assert list(equal_blocks([5, 1, 1, 1, 1, 2, 3, 4, 3, 4, 9])) == [EqualBlocks(1, 1, 4), EqualBlocks(6, 2, 2)]
    assert list(equal_blocks([0, 1, 2])) == []


@pytest.mark.parametrize("path", mostly_long(EXAMPLES, lambda path: "llama" in path.stem), ids=lambda path: path.stem)
def test_each_example_made_small_fits_with_a_plan_that_holds(small, path, tmp_path):
    """Four blocks are planned as three; the plan is verified for all of them, and what fills the memory adds up."""
    sequence = None if path.stem == "vit_large" else 64
    question = FitQuestion(small(path.stem), ("dgx_h100",), batch=4, sequence=sequence, devices=2)
    answer = fit(question, tmp_path, fit_stages())
    (row,) = answer.rows
    assert row.fits and row.devices == 2 and row.fewest == 1, answer.text()
    assert sum(row.memory.values()) == row.peak_bytes and row.memory["optimizer state"] > 0
    assert row.mfu > 0 and "repeated for equal blocks" in answer.how
    assert (row.tokens is None) == (path.stem == "vit_large")
    assert "<svg" in answer.page() and row.cluster in answer.page() and json.loads(answer.json())["rows"]


@pytest.mark.parametrize("lora", mostly_long([0, 2], lambda rank: rank == 0))
@pytest.mark.parametrize("path", mostly_long(EXAMPLES, lambda path: "llama" in path.stem), ids=lambda path: path.stem)
def test_layers_exported_once_are_the_whole_models_graph(small, path, lora, monkeypatch):
    """And so the totals of `fit` are those of the whole trace."""
    sequence = None if path.stem == "vit_large" else 64
    file = small(path.stem, **{"num_layers" if "t5" in path.stem else "num_hidden_layers": 11})
    base = load_config(ROOT)
    question = FitQuestion(file, ("dgx_h100",), batch=4, sequence=sequence, devices=2, lora=lora)
    machine = load_part(ROOT, "cluster", "dgx_h100", devices=2)
    config = replace(base, model=model_of(question, ROOT, base, 4), cluster=machine)
    with monkeypatch.context() as exporting:
        plain, times = export._exported, []
        exporting.setattr(export, "_exported", lambda *given: times.append(0) or plain(*given))
        once = trace(config)
        assert len(times) == 1
        exporting.setattr(equal_modules, "LEAST", 99)
        whole = trace(config)
    assert len(whole.ops) > 100 and once == whole
    verify_graph(once)


def test_a_mask_is_known_however_large_the_batch_is(small, monkeypatch):
    """It is worked out for one sample: for all of these it would be larger than what is worked out."""
    monkeypatch.setattr(simplify, "LARGEST_MASK", 64 * 64)
    base = load_config(ROOT)
    question = FitQuestion(small("llama_8b", num_hidden_layers=1), ("dgx_h100",), batch=8, sequence=64)
    graph = trace(replace(base, model=model_of(question, ROOT, base, 8)))
    (op,) = (op for op in graph.ops if op.target == simplify.ATTENTION)
    assert len(op.inputs) == 3 and op.args.get(simplify.CAUSAL, "is_causal", False)


def test_equal_slices_are_one():
    rows = torch.arange(4).repeat(3, 1)
    assert simplify.thin(rows).tolist() == [[0, 1, 2, 3]] and simplify.thin(rows.T, 1).shape == (4, 3)
    assert simplify.thin(torch.ones(2, 3)).shape == (1, 1) and simplify.thin(torch.tensor(1.0)).shape == ()
    assert simplify.thin(torch.zeros(0, 2)).shape == (0, 1)


@pytest.fixture
def fitted(small):
    question = FitQuestion(small("llama_8b"), ("dgx_h100",), batch=4, sequence=64, devices=2)
    base = load_config(ROOT)
    machine = load_part(ROOT, "cluster", "dgx_h100", devices=2)
    config = replace(base, model=model_of(question, ROOT, base, 4), cluster=machine)
    return FittedModel.of(config, fit_stages(), logging.getLogger("fit-test")), machine, config


def test_a_short_graph_is_a_graph_and_its_plan_is_worth_what_the_whole_ones_is(fitted):
    model, machine, config = fitted
    traced = trace(config)
    unread = Value("unread", TensorType((4,), "float32"), Role.PARAMETER, "unread", True)  # as many models have one
    short = shortened(replace(traced, values={**traced.values, "unread": unread}))
    assert short.graph.values["unread"] is unread
    verify_graph(short.graph)
    assert len(short.graph.chain) < len(short.whole.chain) and set(short.values) == set(short.whole.values)
    kinds = [{v.type for v in graph.of_role(Role.PARAMETER)} for graph in (short.graph, short.whole)]
    assert kinds[0] == kinds[1]
    cluster = from_preset(machine)
    mesh = cluster.mesh_candidates(1)[0]
    load = Workload(model.graph, model.profile, cluster.part(mesh), model.profile.optimizer_copies)
    whole = MeshProblem(load, SETTINGS, "test", model.log)
    whole.settle(model.log)
    best = whole.points(float(cluster.memory_bytes), lambda done, note="": None)
    ours = list(model._points(cluster, mesh))
    for point in ours:
        verify_sharding(model.graph, point.sharding, mesh.sizes)
    priced = [price_point(load, point.sharding, point.proof) for point in ours]
    assert min(p.seconds for p in priced) <= 1.02 * min(p.seconds for p in best)
    assert min(p.resident_bytes for p in priced) <= 1.02 * min(p.resident_bytes for p in best)


def test_several_hosts_are_planned_for_as_hosts_by_devices_where_that_may_gain(fitted, monkeypatch):
    model, _, _ = fitted
    machine = load_part(ROOT, "cluster", "dgx_h100_infiniband", devices=2, nodes=4)  # more than the batch has samples
    cluster = from_preset(machine)
    meshes = cluster.mesh_candidates(1)[0], hosts_by_devices(cluster)
    one, two = (model._plan_on(cluster, mesh) for mesh in meshes)
    assert meshes[1].sizes == (4, 2)
    host = load_part(ROOT, "cluster", "dgx_h100", devices=8)
    islands = from_preset(replace(host, preset=replace(host.preset, island=4, cross_gbytes_per_s=50)))
    assert len(islands.group.members) == 2 and hosts_by_devices(islands) is None
    assert 0 < model.least_seconds(cluster) <= min(one.seconds, two.seconds) < math.inf
    known = dict(zip((mesh.sizes for mesh in meshes), (one, two), strict=True))
    monkeypatch.setattr(FittedModel, "_plan_on", lambda model, cluster, mesh: known[mesh.sizes])
    assert model.plan(machine) is min(one, two, key=lambda found: found.seconds)
    monkeypatch.setattr("shardwright.stages.fit.model.WORTH", 1.0)  # nothing is worth it
    assert model.plan(machine) is one


@pytest.mark.parametrize("room", mostly_long([1.05, 1.5, 2.5], lambda room: room < 1.5))
def test_the_largest_batch_fits_and_not_much_more_does(fitted, room):
    """By what the model needs that is traced with as many samples."""
    model, machine, config = fitted
    cluster = from_preset(machine)
    mesh = cluster.mesh_candidates(1)[0]
    points = tuple(model._points(cluster, mesh))
    frontier = Frontier(cluster.memory_bytes, model.profile.optimizer_copies, (mesh,), points)
    least = min(points, key=lambda point: point.resident_bytes)
    budget = round(room * model.least_bytes(cluster, mesh, least, 1))
    found = model.largest_batch(PlanFound(None, None, replace(cluster, memory_bytes=budget), frontier))
    assert found >= 4 and found % 2 == 0

    def needed(samples):
        specs = {name: replace(own, shape=[samples, 64]) for name, own in config.model.batch.items()}
        other = FittedModel.of(replace(config, model=replace(config.model, batch=specs)), fit_stages(), model.log)
        own = min(other._points(cluster, mesh), key=lambda point: point.resident_bytes)
        return other.least_bytes(cluster, mesh, own, 1)

    assert needed(found) <= 1.02 * budget < needed(2 * found)
    endless = PlanFound(None, None, replace(cluster, memory_bytes=1 << 60), frontier)
    assert model.largest_batch(endless) == MOST_TIMES * 4, "no larger one is looked for"


def test_what_does_not_fit_is_told_with_what_would(small, tmp_path):
    answer = fit(
        FitQuestion(small("llama_8b"), ("dgx_h100",), batch=4, devices=2, memory_gb=0.0001), tmp_path, fit_stages()
    )
    assert not answer.fits and "the tightest feasible budget is" in answer.text()


def test_adapters_train_alone_and_begin_as_the_model(small):
    path = small("llama_8b", num_hidden_layers=1)
    torch.manual_seed(0)
    plain = from_config.build(path).bfloat16()
    adapted = from_config.build(path, lora=2)
    trained = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert len(trained) == 2 * 7 and all(name.endswith((".up", ".down")) for name in trained)
    own = {name.replace(".base", ""): tensor for name, tensor in adapted.state_dict().items()}
    plain.load_state_dict({name: tensor for name, tensor in own.items() if name in plain.state_dict()})
    tokens = torch.arange(16).reshape(1, 16)
    assert adapted(input_ids=tokens, labels=tokens).loss == plain(input_ids=tokens, labels=tokens).loss
    adapted(input_ids=tokens, labels=tokens).loss.backward()
    assert {name for name, parameter in adapted.named_parameters() if parameter.grad is not None} == trained


def test_adapters_have_no_gradients_and_no_optimizer_state_for_what_is_frozen(small, tmp_path):
    answer = fit(FitQuestion(small("llama_8b"), ("h100",), batch=2, sequence=64, lora=2), tmp_path, fit_stages())
    memory = answer.rows[0].memory
    assert answer.frozen > 4 * answer.parameters and memory["buffers"] >= 2 * answer.frozen  # in half precision
    assert memory["values"] == memory["gradients"] == 4 * answer.parameters
    assert memory["optimizer state"] == 8 * answer.parameters


def test_the_command_prints_a_table_of_clusters_and_writes_a_page(small, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = small("llama_8b")
    assert main(["fit", path, "--clusters", "h100,a100_80", "--batch", "2", "--page", "page.html", "-q"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[1].split()[:3] == ["cluster", "devices", "fits"] and "a100_80" in out
    assert (tmp_path / "page.html").read_text().count("<svg") == 4
    assert main(["fit", "gpt_small", "--cluster", "h100", "--json", "-q"]) == 0  # a file of conf/model
    assert json.loads(capsys.readouterr().out)["rows"][0]["fewest"] == 1


def test_from_python_it_is_the_same(small):
    found = sw.fit(small("llama_8b"), ["h100", "a100_80"], batch=2)
    assert [row.cluster for row in found.rows] == ["h100", "a100_80"] and found.fits and repr(found) == found.text()
    for wrong, told in (({"batch": 0}, "batch"), ({"precision": "fp8"}, "precision"), ({"cluster": "h10"}, "h10")):
        with pytest.raises(sw.ShardwrightError, match=rf"sw\.fit: .*{told}"):
            sw.fit("config.json", **wrong)


@pytest.mark.parametrize(
    ("changed", "words", "told"),
    [
        ("{", (), "it is no JSON"),
        ("[]", (), "it names no model_type"),
        ('{"model_type": "lama"}', (), "transformers knows no model_type 'lama'; did you mean 'llama'?"),
        ('{"model_type": "llama", "hidden_size": "x"}', (), "llama cannot be configured so"),
        (
            '{"model_type": "encodec"}',
            (),
            "no class of encodec is known that takes tokens or images and returns a loss",
        ),
        ('{"model_type": "bert"}', ("--sequence", "1000"), "longer than the 512 positions"),
        ('{"model_type": "vit"}', ("--sequence", "10"), "a model of images has no sequence"),
        ('{"model_type": "bert"}', ("--cluster", "dgx_h10"), "there is no cluster 'dgx_h10'"),
        ('{"model_type": "bert"}', ("--cluster", "local_cpu"), "'local_cpu' is measured"),
        (None, (), "cannot be read: No such file"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, monkeypatch, capsys, changed, words, told):
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    if changed is not None:
        (tmp_path / "config.json").write_text(changed)
    assert main(["fit", "config.json", *words, "-q"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and told in err, err


def test_without_transformers_it_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ShardwrightError, match="shardwright\\[hf\\]"):
        fit(FitQuestion(str(tmp_path / "config.json")), tmp_path, fit_stages())


def test_a_model_that_is_nowhere_is_told(tmp_path):
    with pytest.raises(ShardwrightError, match="neither a config"):
        fit(FitQuestion("nothing"), tmp_path, fit_stages())
