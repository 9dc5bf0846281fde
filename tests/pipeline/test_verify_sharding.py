"""Shardings that make no sense are refused by the rule that they break; those of all named plans are accepted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright.pipeline.ir.layout import Layout
from shardwright.pipeline.ir.plan import Sharding
from shardwright.pipeline.ir.verify import SHARDING_RULES, InvalidSharding, gathered, verify_sharding
from shardwright.pipeline.ops.uneven import uneven_in
from tests import plans
from tests.storage_plans import NAMED, plan_named
from tests.vocabulary import vocabulary_plan

MODEL, SIZES = "mlp8", (2, 2)
WEIGHT, BIAS, LAST = "hidden.0.weight", "hidden.0.bias", "out.bias"


def sharding(name: str) -> Sharding:
    return plan_named(MODEL, name).sharding


def stored(given: Sharding, **layouts: str) -> Sharding:
    return replace(given, storage={**given.storage, **_parsed(layouts)})


def state(given: Sharding, **layouts: str) -> Sharding:
    return replace(given, state={**given.state, **_parsed(layouts)})


def _parsed(layouts: dict[str, str]) -> dict[str, Layout]:
    return {name.replace("_", "."): Layout.parse(text) for name, text in layouts.items()}


def without(mapping: dict, name: str) -> dict:
    return {key: value for key, value in mapping.items() if key != name}


def strategy(given: Sharding, **changes: object) -> Sharding:
    name = next(iter(given.strategies))
    return replace(given, strategies={**given.strategies, name: replace(given.strategies[name], **changes)})


BROKEN = {
    "every op has a strategy": [
        lambda: replace(sharding("ddp_tp"), strategies={}),
        lambda: strategy(sharding("ddp_tp"), inputs=()),
        lambda: replace(sharding("ddp_tp"), strategies={**sharding("ddp_tp").strategies, "nothing": None}),
    ],
    "every parameter and input is stored": [
        lambda: replace(sharding("ddp_tp"), storage=without(sharding("ddp_tp").storage, WEIGHT)),
        lambda: replace(sharding("ddp_tp"), inputs={}),
        lambda: stored(sharding("ddp_tp"), nothing="R,R"),
        lambda: stored(sharding("ddp_tp"), out_bias="B,R"),
        lambda: stored(sharding("ddp_tp"), out_bias="R,P"),
        lambda: state(sharding("ddp_tp"), out_bias="S(0),B"),
    ],
    "layouts fit": [
        lambda: stored(sharding("ddp_tp"), out_bias="R"),
        lambda: stored(sharding("ddp_tp"), out_bias="S(1),R"),
        lambda: stored(sharding("ddp_tp"), out_bias="S(0:8),R"),
        lambda: state(sharding("ddp_tp"), out_bias="S(0:8),R"),
        lambda: strategy(sharding("ddp_tp"), outputs=(Layout.parse("S(4),R"),)),
    ],
    "state is finer than storage": [
        lambda: state(sharding("ddp_tp"), hidden_0_weight="S(1),R"),  # tensor parallelism on axis 1 is forgotten
        lambda: state(sharding("ddp_tp"), hidden_0_weight="S(0),S(0)"),  # ZeRO lies outside of it
        lambda: state(sharding("ddp_tp"), hidden_0_weight="S(0),S(1)"),
        lambda: state(sharding("zero2_tp"), out_bias="R,R"),
        lambda: replace(sharding("ddp_tp"), state={"nothing": Layout.parse("S(0),R")}),
    ],
    "regathered is gathered": [
        lambda: replace(sharding("zero3_tp"), regathered=("nothing",)),
        lambda: replace(sharding("zero3_tp"), regathered=("inputs",)),
        lambda: replace(sharding("ddp_tp"), regathered=(WEIGHT,)),  # split, and read so
        lambda: replace(sharding("ddp_tp"), regathered=(LAST,)),  # whole
        lambda: replace(sharding("zero3_tp"), regathered=(WEIGHT, BIAS, WEIGHT)),
    ],
}


@pytest.mark.parametrize("name", NAMED)
def test_named_plans_are_accepted(name: str) -> None:
    verify_sharding(plans.graph_of(MODEL), sharding(name), NAMED[name].sizes)


def test_every_rule_is_broken_by_some_sharding() -> None:
    assert set(BROKEN) == set(SHARDING_RULES)


@pytest.mark.parametrize(("rule", "number"), [(rule, n) for rule, cases in BROKEN.items() for n in range(len(cases))])
def test_broken_shardings_are_refused(rule: str, number: int) -> None:
    with pytest.raises(InvalidSharding, match=f"^{rule}: "):
        verify_sharding(plans.graph_of(MODEL), BROKEN[rule][number](), SIZES)


def test_a_state_may_lie_inside_of_tensor_parallelism() -> None:
    verify_sharding(plans.graph_of(MODEL), state(sharding("ddp_tp"), hidden_0_weight="S(0)',S(0)"), SIZES)
    verify_sharding(plans.graph_of(MODEL), state(sharding("ddp_tp"), hidden_0_weight="S(1),S(0)"), SIZES)


def test_uneven_shards_are_those_of_a_vocabulary_and_of_storage() -> None:
    """What ops read and write lies so where the graph allows it; a batch that is smaller than planned does not."""
    graph, sizes = plans.graph_of("uneven"), (2,)
    zero, words = plan_named("uneven", "zero3").sharding, vocabulary_plan().sharding
    verify_sharding(graph, zero, sizes)
    assert zero.storage["norm.bias"].uneven((15,), sizes)
    verify_sharding(graph, words, sizes, uneven_in(graph).spots)
    with pytest.raises(
        InvalidSharding, match=r"layouts fit: p_model_token_weight in S\(0\): \[17, 15\] does not divide"
    ):
        verify_sharding(graph, words, sizes)
    fewer = {n: replace(v, type=replace(v.type, shape=_seven_samples(v.type.shape))) for n, v in graph.values.items()}
    with pytest.raises(InvalidSharding, match="layouts fit: "):
        verify_sharding(replace(graph, values=fewer), zero, sizes, uneven_in(graph).spots)


def _seven_samples(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(7 * size // 12 if size in (12, 96) else size for size in shape)


def test_what_is_gathered() -> None:
    graph = plans.graph_of(MODEL)
    assert gathered(graph, sharding("ddp_tp"), SIZES) == set()
    assert gathered(graph, sharding("zero2_tp"), SIZES) == set(sharding("zero2_tp").storage)
