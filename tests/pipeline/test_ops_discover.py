"""Strategies that are found by trying, for ops that no rule describes."""

from __future__ import annotations

import ctypes
import json
import os
import signal

import pytest
import torch

from shardwright.pipeline.ir.graph import Args, Op, OpGraph, Ref, Role, TensorType, Value
from shardwright.pipeline.ops.dims import strategies
from shardwright.pipeline.ops.discovery import child, discover, remembered
from shardwright.pipeline.ops.rule import OpView, plain_view
from shardwright.pipeline.ops.table import rule_of
from tests.one_op import check_rule, example, t


@torch.library.custom_op("shardwright_tests::scaled", mutates_args=())
def scaled(x: torch.Tensor, weight: torch.Tensor, power: int) -> torch.Tensor:
    return x**power * weight


def _keep(ctx, inputs, output):
    ctx.save_for_backward(inputs[0], inputs[1])
    ctx.power = inputs[2]


def _back(ctx, grad):
    x, weight = ctx.saved_tensors
    own = grad * ctx.power * x ** (ctx.power - 1) * weight
    return own, (grad * x**ctx.power).flatten(0, -2).sum(0), None


scaled.register_autograd(_back, setup_context=_keep)


@torch.library.custom_op("shardwright_tests::noisy", mutates_args=())
def noisy(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand_like(x)


@torch.library.custom_op("shardwright_tests::no_gradient", mutates_args=())
def no_gradient(x: torch.Tensor) -> torch.Tensor:
    return x * 2.0


@torch.library.custom_op("shardwright_tests::picky", mutates_args=())
def picky(x: torch.Tensor) -> torch.Tensor:
    if x.shape[0] != 4096:
        raise ValueError("only 4096 rows")
    return x.clone()


@torch.library.custom_op("shardwright_tests::thirds", mutates_args=())
def thirds(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (3, -1)).sum(-2)


@torch.library.custom_op("shardwright_tests::misbehaving", mutates_args=())
def misbehaving(x: torch.Tensor, how: str) -> torch.Tensor:
    if how == "crashes":
        ctypes.string_at(0)
    if how == "aborts":
        os.abort()
    if how == "exits":
        os._exit(0)
    if how == "leaves":
        raise SystemExit(0)
    if how == "waits":
        signal.pause()
    while how == "runs on":
        pass
    if how == "eats memory":
        return torch.zeros(1 << 34)
    return x.clone()


SCALED = "shardwright_tests.scaled.default"


def view_of(target: str, *shapes: tuple[int, ...], out: tuple[int, ...], constants=(), grad: bool = True) -> OpView:
    """An op of any size, which is never run at that size."""
    values = {f"in{i}": Value(f"in{i}", TensorType(s, "float32"), Role.INPUT, "", grad) for i, s in enumerate(shapes)}
    args = Args((*(Ref(name) for name in values), *constants))
    values["it"] = Value("it", TensorType(out, "float32"), Role.RESULT, "it", grad)
    graph = OpGraph(values, (Op("it", target, args, ("it",), "", ""),), "it", (), ())
    return plain_view(graph, graph.ops[0])


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setattr(discover, "_known", {})
    monkeypatch.setattr(remembered, "_folder", None)


def found(view: OpView) -> set[str]:
    return {f"{' '.join(map(str, f.inputs))} -> {' '.join(map(str, f.outputs))}" for f in discover.find(view)}


def test_a_custom_op_of_any_size_is_discovered() -> None:
    view = view_of(SCALED, (4096, 512, 8192), (8192,), out=(4096, 512, 8192), constants=(3,))
    assert found(view) == {
        "S(0) B -> S(0)",
        "S(1) B -> S(1)",
        "S(2) S(0) -> S(2)",
        "B P -> P",
    }
    options = strategies(None, view, 8)
    assert [s.name for s in options] == ["R", "B", *(f"{discover.NAME} {i}" for i in range(4))]


def test_what_is_discovered_is_right_as_it_is_printed() -> None:
    it = example(SCALED, t(4, 6, 12), t(12), 2)
    assert rule_of(it.op) is None
    for ranks in (2, 3, 4):
        assert any(name.startswith(discover.NAME) for name in check_rule(None, it, ranks))


def test_sizes_that_do_not_divide_are_left_out() -> None:
    view = view_of(SCALED, (5, 7, 12), (12,), out=(5, 7, 12), constants=(3,))
    split = [s for s in strategies(None, view, 3) if any(x.states[0].kind == "S" for x in s.inputs)]
    assert [[str(x) for x in s.inputs] for s in split] == [["S(2)", "S(0)"]]


def test_ratios_of_sizes_are_kept_where_the_op_needs_them() -> None:
    view = view_of("shardwright_tests.thirds.default", (4096, 3 * 512), out=(4096, 512), grad=False)
    assert found(view) == {"S(0) -> S(0)"}


@pytest.mark.parametrize("name", ["noisy", "picky", "no_gradient", "not_there"])
def test_what_cannot_be_tried_runs_whole(name: str) -> None:
    view = view_of(f"shardwright_tests.{name}.default", (4096, 4096), out=(4096, 4096))
    assert [s.name for s in strategies(None, view, 2)] == ["R", "B"]


@pytest.mark.parametrize("how", ["crashes", "aborts", "exits", "leaves", "waits", "runs on", "eats memory"])
def test_an_op_may_do_anything_when_it_is_tried(how: str, monkeypatch) -> None:
    monkeypatch.setattr(child, "PROCESSOR_SECONDS", 1)
    monkeypatch.setattr(child, "SECONDS", 2.0 if how == "waits" else 600.0)
    view = view_of("shardwright_tests.misbehaving.default", (12, 6), out=(12, 6), constants=(how,), grad=False)
    assert [s.name for s in strategies(None, view, 2)] == ["R"]


@pytest.mark.parametrize(
    ("how", "names"),
    [("aborts", ["R"]), pytest.param("works", ["R", f"{discover.NAME} 0"], marks=pytest.mark.long)],
)
def test_where_forks_have_no_backward_a_new_process_tries(how: str, names: list[str], monkeypatch, caplog) -> None:
    """As on a machine with a GPU, in a process that has run a backward pass."""
    monkeypatch.setattr(child, "_has_autograd", lambda: False)
    monkeypatch.setattr(child, "_imported", lambda: [__name__])  # of all tests together it is a great deal more
    view = view_of("shardwright_tests.misbehaving.default", (12, 6), out=(12, 6), constants=(how,), grad=False)
    assert [s.name for s in strategies(None, view, 2)][: len(names)] == names
    assert ("died of SIGABRT" in caplog.text) == (how == "aborts")


def test_indices_that_are_none_of_a_bag_end_nothing() -> None:
    """Offsets must begin with zero, and random ones do so now and then."""
    it = example("aten._embedding_bag.default", t(12, 6), t(12, high=12), t(3, values=(0, 2, 4), dtype="int64"))
    assert "R" in {s.name for s in strategies(None, it.view, 2)}


def test_what_waited_too_long_is_tried_again(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(child, "SECONDS", 1.0)
    remembered.remember_in(tmp_path / "ops")
    for how, files in (("waits", 0), ("crashes", 1)):
        found(view_of("shardwright_tests.misbehaving.default", (12, 6), out=(12, 6), constants=(how,), grad=False))
        assert len(list((tmp_path / "ops").glob("*"))) == files


def test_an_op_is_searched_once(monkeypatch) -> None:
    searched = []
    search = discover.search
    monkeypatch.setattr(discover, "search", lambda view: searched.append(view) or search(view))
    for rows in (4096, 512, 64):
        discover.find(view_of(SCALED, (rows, 16), (16,), out=(rows, 16), constants=(3,)))
    assert len(searched) == 1, "equal but for their sizes"
    discover.find(view_of(SCALED, (64, 16), (16,), out=(64, 16), constants=(5,)))
    assert len(searched) == 2


def test_a_later_run_reads_what_an_earlier_one_found(tmp_path, monkeypatch) -> None:
    view = view_of(SCALED, (64, 16), (16,), out=(64, 16), constants=(3,))
    remembered.remember_in(tmp_path / "ops")
    first = found(view)
    (file,) = (tmp_path / "ops").iterdir()
    assert json.loads(file.read_text())["found"]
    monkeypatch.setattr(discover, "_known", {})
    monkeypatch.setattr(discover, "search", lambda view: pytest.fail("searched again"))
    assert found(view) == first
    monkeypatch.setattr(discover, "search", lambda view: ((), True))
    kept = json.loads(file.read_text())
    forged = [[[["R"], ["R"]]], [[["S(7)", "R"], ["R"]]], [[["R", "R"], ["R", "R"]]]]  # not of these tensors
    for text in ("{", *(json.dumps(kept | {"found": each}) for each in forged)):
        file.write_text(text)  # one that cannot be read is as good as none
        monkeypatch.setattr(discover, "_known", {})
        assert found(view) == set()


@pytest.mark.parametrize(
    ("target", "args"),
    [
        ("aten.linear.default", (t(4, 6, 12), t(18, 12), t(18))),
        ("aten.add.Tensor", (t(12, 6), t(6))),
        ("aten.bmm.default", (t(6, 12, 18), t(6, 18, 24))),
        ("aten.softmax.int", (t(6, 12), -1)),
        ("aten.layer_norm.default", (t(6, 12), (12,))),
        ("aten.sum.default", (t(6, 12),)),
    ],
)
def test_search_finds_the_strategies_of_the_table(target: str, args: tuple) -> None:
    """The oracle and the table say the same where the op needs no local form of its own."""
    it = example(target, *args)
    ours = {(s.inputs, s.outputs) for s in strategies(rule_of(it.op), it.view, 2)}
    theirs = {(s.inputs, s.outputs) for s in strategies(None, it.view, 2)}
    assert ours == theirs


def test_discovery_leaves_the_random_stream_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    discover.search(view_of(SCALED, (64, 16), (16,), out=(64, 16), constants=(3,)))
    assert torch.equal(torch.rand(2), expected)


def test_what_is_read_below_zero_alone_is_read() -> None:
    """Above zero `prelu` is its input, whatever the weight: summands of that would do."""
    view = example("aten.prelu.default", t(12, 6), t(6)).view
    assert "S(0) B -> S(0)" in found(view) and not any("P ->" in each.split(" ", 1)[1] for each in found(view))
