"""Random ops on several ranks: whole values draw alike, split ones apart, a recompute region draws the same again."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.pipeline.ir.layout import S
from shardwright.pipeline.ops.dims import strategies
from shardwright.pipeline.ops.table import rule_of, table
from shardwright.pipeline.runtime import drawn_apart, recompute
from tests.one_op import Example, example, printed, run_printed, t
from tests.op_cases import CASES
from tests.shards import values
from tests.simulated import AXIS, one_after_another

RANDOM = sorted(target for target, rule in table().items() if rule.random)


def ranks_draw(it: Example, name: str, ranks: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What each rank draws with that strategy, all of them seeded alike, and what follows in their default streams."""
    strategy = next(s for s in strategies(rule_of(it.op), it.view, ranks) if s.name == name)
    line = printed(it, strategy, ranks)
    held = [values(i.states[0], x, ranks) for i, x in zip(strategy.inputs, it.tensors, strict=True)]

    def run(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(5)
        return run_printed(line, [own[rank] for own in held])[0], torch.rand(3)

    found = one_after_another(ranks, run)
    return [x for x, _ in found], [x for _, x in found]


def alike(tensors: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, tensors[0]) for x in tensors)


def test_every_random_op_of_torch_in_the_table_is_marked() -> None:
    def is_random(target: str) -> bool:
        namespace, name, overload = target.split(".")
        found = getattr(getattr(getattr(torch.ops, namespace), name, None), overload, None)
        return found is not None and torch.Tag.nondeterministic_seeded in found.tags

    known = {target for target in table() if target.startswith("aten.") and is_random(target)}
    assert known <= set(RANDOM)
    assert {"aten.dropout.default", "aten.rand.default", "aten.scaled_dot_product_attention.default"} <= set(RANDOM)


@pytest.mark.parametrize("ranks", [2, 3])
def test_dropout_draws_alike_where_whole_and_apart_where_split(ranks: int) -> None:
    it = example("aten.dropout.default", t(12, 60), 0.5, True)
    whole, after = ranks_draw(it, "R", ranks)
    assert alike(whole) and alike(after)
    split, after = ranks_draw(it, "a", ranks)
    assert not alike([x != 0 for x in split]), "every rank has a mask of its own"
    assert alike(after), "the stream that ranks share stays in step"
    summands, _ = ranks_draw(it, "P", ranks)
    assert alike([x == 0 for x in summands]), "summands are dropped together"


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.sampled_from([2, 3, 4]), st.sampled_from([0.1, 0.5, 0.9]), st.sampled_from(["a", "b"]))
def test_a_split_dropout_is_a_dropout(ranks: int, p: float, letter: str) -> None:
    """Each value is dropped or scaled, its gradient with it, and about as many are dropped as should be."""
    it = example("aten.dropout.default", t(24, 120), p, True)
    strategy = next(s for s in strategies(rule_of(it.op), it.view, ranks) if s.name == letter)
    line = printed(it, strategy, ranks)
    own = values(strategy.inputs[0].states[0], it.tensors[0], ranks)

    def run(rank: int) -> float:
        x = own[rank].requires_grad_()
        (y,) = run_printed(line, [x])
        y.sum().backward()
        kept = y != 0
        assert torch.allclose(y, x * kept / (1 - p))
        assert torch.allclose(x.grad, kept.double() / (1 - p))
        return float(kept.double().mean())

    shares = one_after_another(ranks, run)
    assert abs(sum(shares) / ranks - (1 - p)) < 0.05


@pytest.mark.parametrize("name", ["b0", "b1", "q"])
def test_attention_drops_other_scores_on_every_rank(name: str) -> None:
    """With the identity as values the output is the matrix of scores: each is dropped, or scaled."""
    shape = (4, 4, 4, 4)
    it = example("aten.scaled_dot_product_attention.default", t(*shape), t(*shape), t(*shape), None, 0.5)
    eye = torch.eye(4, dtype=torch.float64).expand(shape).clone()
    it = Example(
        it.graph, (it.tensors[0][:1, :1].expand(shape).clone(), it.tensors[1][:1, :1].expand(shape).clone(), eye), ()
    )
    found, after = ranks_draw(it, name, 2)
    scores = F.scaled_dot_product_attention(*it.tensors)
    held = values(S({"b0": 0, "b1": 1, "q": 2}[name]), scores, 2)
    for own, expected in zip(found, held, strict=True):
        assert torch.allclose(own, expected * 2 * (own != 0))
    assert alike(after)
    if name != "q":  # the same tensors on both ranks, so equal masks would show
        assert not alike(found)


RECURRENT = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}  # with their gates


@pytest.mark.parametrize("name", RECURRENT)
def test_dropout_between_recurrent_layers_is_drawn_apart(name: str) -> None:
    """All samples are equal, so equal masks would show; a layer alone draws nothing."""
    ones = t(12, 5, 6, values=torch.ones(12, 5, 6).tolist())
    weights = tuple(t(RECURRENT[name] * 6, 6) for _ in range(4))
    state = t(2, 12, 6, values=torch.zeros(2, 12, 6).tolist())
    states = (state, state) if name == "lstm" else state
    it = example(f"aten.{name}.input", ones, states, weights, False, 2, 0.5, True, False, True)
    split, after = ranks_draw(it, "b", 2)
    assert not alike(split) and alike(after)
    whole, _ = ranks_draw(it, "R", 2)
    assert alike(whole)
    still = example(f"aten.{name}.input", ones, states, weights, False, 2, 0.5, False, False, True)
    assert {s.body for s in strategies(rule_of(still.op), still.view, 2)} == {""}


OTHERS = ("attention", "dropout", *RECURRENT)


@pytest.mark.parametrize("target", [x for x in RANDOM if not any(name in x for name in OTHERS)])
def test_shards_of_random_tensors_differ(target: str) -> None:
    args = {"bernoulli": (t(12, 50, positive=True, grad=False),), "rand": ((12, 50),), "randn": ((12, 50),)}
    name = target.split(".")[1]
    more = (0.4,) if target.endswith(".p") else ()
    it = example(target, *args.get(name, (t(12, 50, grad=False),)), *more)
    letter = next(s.name for s in strategies(rule_of(it.op), it.view, 2) if s.outputs[0].states == (S(0),))
    split, after = ranks_draw(it, letter, 2)
    assert [tuple(x.shape) for x in split] == [(6, 50)] * 2
    assert not alike(split) and alike(after)
    whole, _ = ranks_draw(it, "R", 2)
    assert alike(whole)


def test_a_recompute_region_repeats_split_draws() -> None:
    x = torch.randn(40, requires_grad=True)

    def region(x: torch.Tensor) -> torch.Tensor:
        return drawn_apart(lambda: F.dropout(x, 0.5), axis=AXIS).exp()

    def run(rank: int) -> None:
        torch.manual_seed(0)
        y = recompute(region, x)
        torch.rand(7)  # other draws between the two runs
        (gradient,) = torch.autograd.grad(y.sum(), x)
        assert torch.allclose(gradient, torch.where(y == 1, 0.0, 2 * y))

    one_after_another(2, run)


def test_a_gpu_that_is_not_used_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, where a GPU is: torch refuses a recompute region that begins to use one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: pytest.fail("the GPU is used"))
    one_after_another(2, lambda rank: drawn_apart(lambda: F.dropout(torch.ones(4)), axis=AXIS))


def test_random_cases_are_in_the_proof() -> None:
    """Whole, partial and `B` forms of random ops are proved with the others, all ranks seeded alike."""
    assert set(RANDOM) <= set(CASES)
