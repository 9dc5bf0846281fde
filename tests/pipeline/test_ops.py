"""Every rule of the op table is proved by execution: all its strategies, forward and backward, against the op itself.

A new rule needs a case in tests/op_cases.py, which draws its shapes and constants: without one a test fails. EXAMPLES
are forms that a draw might miss.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from shardwright.pipeline.ir.graph import Torch
from shardwright.pipeline.ir.layout import S
from shardwright.pipeline.ops.dims import read_line, strategies
from shardwright.pipeline.ops.own_names import CONSTANT, EMBEDDING_BAG
from shardwright.pipeline.ops.public import overload_of
from shardwright.pipeline.ops.shapes import broadcast
from shardwright.pipeline.ops.table import rule_of, table
from tests.one_op import Example, check_rule, example, t
from tests.op_cases import CASES
from tests.op_options import OPTIONS, PLAIN, REFUSED

RANKS = (2, 3, 4)
FLOAT32 = Torch("dtype", "float32")
FLOAT64 = Torch("dtype", "float64")
CPU = Torch("device", "cpu")

# Shapes hold dims that divide by 2, 3 and 4, dims that do not, and dims of size one.
PAIRS = [
    (t(12, 4), t(12, 4)),
    (t(12, 4), t(4)),
    (t(4, 6, 12), t(6, 1)),
    (t(1, 6), t(12, 1)),
    (t(12, 5), t()),
    (t(12), t(12, grad=False)),
    (t(12), 2.5),
]
BROADCAST_ARGS = [*PAIRS, (t(4, 6), t(4, 6), {"alpha": 3})]
CURVE_ARGS = [(t(12, 4),), (t(4, 1, 6),), (t(),)]
PRODUCT_ARGS = [(t(4, 12), t(12, 6)), (t(12, 5), t(5, 4))]

EXAMPLES = {
    "aten.add.Tensor": BROADCAST_ARGS,
    "aten.sub.Tensor": BROADCAST_ARGS,
    "aten.mul.Tensor": [*PAIRS, (t(12, 4), t(12, 4, high=7))],
    "aten.div.Tensor": PAIRS,
    "aten.neg.default": CURVE_ARGS,
    "aten.to.dtype": [
        (t(12, 4), FLOAT64),
        (t(12, dtype="float32"), FLOAT64, False, True),
        (t(12), FLOAT32),
        (t(12, 4, high=5), FLOAT64),
        (t(4, 12), Torch("dtype", "int64")),
    ],
    "aten.contiguous.default": [*CURVE_ARGS, (t(4, 6), {"memory_format": Torch("memory_format", "contiguous_format")})],
    "aten.clone.default": [*CURVE_ARGS, (t(4, 6), {"memory_format": Torch("memory_format", "preserve_format")})],
    "aten.gelu.default": [*CURVE_ARGS, (t(12, 4), {"approximate": "tanh"})],
    "aten.silu.default": CURVE_ARGS,
    "aten.relu.default": CURVE_ARGS,
    "aten.tanh.default": CURVE_ARGS,
    "aten.sigmoid.default": CURVE_ARGS,
    "aten.exp.default": CURVE_ARGS,
    "aten.embedding.default": [
        (t(5, 12), t(12, high=5)),
        (t(7, 4), t(4, 6, high=7), 3),
        (t(7, 4), t(4, 6, high=7), {"padding_idx": 0}),
        (t(3, 12), t(12, high=3), -1, True),
        (t(3, 12, grad=False), t(2, 12, high=3)),
    ],
    "aten.arange.default": [(12,), (6, {"device": CPU, "pin_memory": False}), (4, {"dtype": FLOAT32})],
    "aten.arange.start": [(2, 14), (0, 12, {"device": CPU})],
    "aten.cross_entropy_loss.default": [
        (t(12, 5), t(12, high=5)),
        (t(12, 4), t(12, high=4, sometimes=-100)),
        (t(12, 4), t(12, high=4, sometimes=2), None, 1, 2, 0.1),
        (t(12, 4), t(12, high=4), None, 0),
        (t(12, 4), t(12, high=4, sometimes=-100), None, 2),
        (t(12, 4), t(12, high=4), {"label_smoothing": 0.2}),
        (t(12, 4), t(12, high=4), t(4, grad=False)),
        (t(12, 4, 6), t(12, 6, high=4)),
        (t(12, 4), t(12, 4)),
    ],
    "aten.mse_loss.default": [
        (t(12, 4), t(12, 4, grad=False)),
        (t(12), t(12), 1),
        (t(6, 4), t(6, 4), 0),
        (t(6, 4), t(6, 4), 2),
        (t(12, 4), t(12, 4), {"reduction": 2}),
        (t(), t()),
    ],
    "aten.sum.default": [(t(12, 4),), (t(6, 5, 4),), (t(),), (t(12, grad=False), {"dtype": FLOAT32})],
    "aten.mean.default": [(t(12, 4),), (t(6, 5, 4),), (t(),), (t(12, dtype="float32"), {"dtype": FLOAT64})],
    "aten.linear.default": [
        (t(4, 12), t(6, 12), t(6)),
        (t(4, 6, 12), t(12, 12)),
        (t(12), t(4, 12), t(4)),
        (t(6, 5), t(4, 5, grad=False), t(4)),
        (t(2, 3, 4, 6), t(12, 6), t(12)),
    ],
    "aten.mm.default": PRODUCT_ARGS,
    "aten.bmm.default": [(t(12, 4, 6), t(12, 6, 4)), (t(5, 6, 12), t(5, 12, 5))],
    "aten.matmul.default": [
        *PRODUCT_ARGS,
        (t(4, 6, 12), t(4, 12, 6)),
        (t(4, 6, 12), t(12, 4)),
        (t(2, 4, 6, 12), t(12, 6)),
        (t(6, 12), t(4, 12, 6)),
        (t(12), t(12)),
        (t(4, 12), t(12)),
        (t(12), t(12, 4)),
        (t(1, 4, 6), t(12, 6, 4)),
    ],
    "aten.batch_norm.default": [
        (t(6, 4), t(4), t(4), t(4, grad=False), t(4, grad=False), True, 0.1, 1e-5, False),
        (t(2, 3, 5), None, None, None, None, True, 0.1, 1e-5, False),
    ],
    "aten.layer_norm.default": [
        (t(12, 4), (4,), t(4), t(4), 1e-5, False),
        (t(4, 6, 12), (12,)),
        (t(4, 6, 12), (6, 12), t(6, 12)),
        (t(4, 6, 12), (12,), None, t(12)),
        (t(12, 4), (4,), {"weight": t(4), "bias": t(4), "eps": 1e-3}),
    ],
    "aten.softmax.int": [(t(12, 4), -1), (t(4, 6, 12), 1), (t(12, 6), 0, FLOAT64), (t(12), 0)],
    "aten.log_softmax.int": [(t(12, 4), -1), (t(4, 6, 12), 0), (t(12, dtype="float32"), 0, FLOAT64)],
    "aten.scaled_dot_product_attention.default": [
        (t(12, 4, 3, 2), t(12, 4, 3, 2), t(12, 4, 3, 2), None, 0.0, True),
        (t(2, 12, 4, 2), t(2, 12, 6, 2), t(2, 12, 6, 4)),
        (t(4, 6, 4, 2), t(4, 6, 6, 2), t(4, 6, 6, 2), {"scale": 0.3}),
        (t(4, 6, 4, 2), t(4, 6, 6, 2), t(4, 6, 6, 2), t(4, 6)),
        (t(4, 12, 6), t(4, 12, 6), t(4, 12, 6)),
        (t(2, 6, 4, 2), t(2, 2, 4, 2), t(2, 2, 4, 2), {"enable_gqa": True}),
        (t(4, 6, 4, 2), t(1, 6, 4, 2), t(4, 6, 4, 2)),
    ],
    "aten.view.default": [
        (t(4, 6, 12), (4, 6, 6, 2)),
        (t(4, 6, 12), (24, 12)),
        (t(24, 12), (-1, 6, 12)),
        (t(4, 6), (6, 4)),
        (t(4, 1, 6), (4, 6, 1)),
        (t(12, 1, 2), (24,)),
        (t(), (1,)),
        (t(1, 1), ()),
        (t(12), (12,)),
    ],
    "aten.reshape.default": [(t(4, 6, 12), (24, 12)), (t(12, 6), (2, 6, 6)), (t(2, 6, 6), (12, 6)), (t(6, 4), (-1,))],
    "aten.flatten.using_ints": [(t(4, 6),), (t(4, 6, 12), 0, 1), (t(4, 6, 12), 1), (t(12),), (t(4, 6, 2, 2), -3, -2)],
    "aten.unsqueeze.default": [(t(4, 6), 0), (t(12, 4), 1), (t(12), -1), (t(), 0)],
    "aten.squeeze.dim": [(t(1, 12), 0), (t(12, 1, 4), 1), (t(12, 1, 4), -2), (t(2, 3, 4), 0), (t(4, 3), 1)],
    "aten.transpose.int": [(t(4, 6, 12), 1, 2), (t(4, 6, 12), -1, 0), (t(12), 0, 0)],
    "aten.permute.default": [(t(4, 6, 12), (2, 0, 1)), (t(4, 6, 2, 3), (0, -2, 1, -1))],
    "aten.t.default": [(t(4, 12),), (t(12),)],
    "aten.expand.default": [
        (t(12, 1), (12, 4)),
        (t(4, 1, 6), (-1, 12, -1)),
        (t(12), (4, 12)),
        (t(12, 4), (12, 4)),
        (t(), (6,)),
    ],
}

for _target, _forms in OPTIONS.items():
    EXAMPLES[_target] = [*EXAMPLES.get(_target, ()), *_forms]
FORMS = [(target, number) for target, examples in EXAMPLES.items() for number in range(len(examples))]


def build(target: str, args: tuple) -> Example:
    """The last argument may be a dict: the named ones."""
    *positional, last = args
    return example(target, *positional, **last) if isinstance(last, dict) else example(target, *args)


OURS = {CONSTANT}  # not an op of torch: see tests/programs.py
HARD = {  # rules with many forms: more draws
    "aten.batch_norm.default", "aten.conv2d.default", "aten.cross_entropy_loss.default", "aten.embedding.default",
    EMBEDDING_BAG,
    "aten.index.Tensor", "aten.linear.default", "aten.lstm.input", "aten.matmul.default", "aten.reshape.default",
    "aten.scaled_dot_product_attention.default", "aten.split.Tensor", "transformers.grouped_mm_fallback.default",
}  # fmt: skip


def test_every_rule_has_a_case() -> None:
    assert set(CASES) == set(table()) - OURS, "a rule without a case, or a case without a rule"


WHOLE = {  # nothing to split: numbers, sequences whose shards are a slice of the whole, a buffer that is changed
    "aten.add_.Tensor", "aten.arange.default", "aten.arange.start", "aten.arange.start_step", "aten.linspace.default",
    "aten.scalar_tensor.default",
}  # fmt: skip


@pytest.mark.parametrize("target", sorted(CASES))
def test_every_strategy_of_a_drawn_op_equals_the_unsplit_op(target: str) -> None:
    if target.startswith("transformers."):  # defines the op; not in a draw: its import takes random numbers
        pytest.importorskip("transformers.integrations.moe", reason="the extra `hf` is not installed")

    @settings(max_examples=25 if target in HARD else 5, deadline=None, derandomize=True, database=None)
    @given(st.data(), st.sampled_from(RANKS))
    def check(data, ranks: int) -> None:
        arguments = CASES[target](data.draw)
        told.update(given_options(target, arguments))
        it = build(target, arguments)
        names = check_rule(rule_of(it.op), it, ranks)
        assert names[0] == "R"
        seen.update(names)

    seen: set[str] = set()
    told = {name for form in EXAMPLES.get(target, ()) for name in given_options(target, form)}
    check()
    options = {argument.name for argument in schema(target) if argument.has_default_value()}
    forgotten = options - told - PLAIN - REFUSED.get(target, set())
    assert not forgotten, f"no form of the op gives {forgotten}: add one to tests/op_options.py"
    # A rule that only ever runs whole is not needed: an op without a rule does that.
    assert target in WHOLE or any_splits(seen) or is_ever_split(target)


def any_splits(names: Iterable[str]) -> bool:
    return bool(set(names) - {"R", "B", "P"})


def is_ever_split(target: str) -> bool:
    """Whether one of many more draws can be split; an error where none can."""

    @st.composite
    def arguments(draw):
        return CASES[target](draw)

    def is_split(args) -> bool:
        return any_splits(s.name for s in strategies(table()[target], build(target, args).view, 2))

    of_many = settings(max_examples=300, phases=[Phase.generate], deadline=None, derandomize=True, database=None)
    return bool(find(arguments(), is_split, settings=of_many))


def schema(target: str) -> list:
    return overload_of(target)._schema.arguments


def given_options(target: str, args: tuple) -> set[str]:
    """The arguments that are given, with another value than their default."""
    *positional, named = args if isinstance(args[-1], dict) else (*args, {})
    by_name = dict(zip((argument.name for argument in schema(target)), positional, strict=False)) | named
    defaults = {argument.name: argument.default_value for argument in schema(target) if argument.has_default_value()}
    return {name for name, value in by_name.items() if name not in defaults or repr(value) != repr(defaults[name])}


@pytest.mark.parametrize(("target", "number"), FORMS)
def test_every_strategy_equals_the_unsplit_op(target: str, number: int) -> None:
    it = build(target, EXAMPLES[target][number])
    for ranks in RANKS:
        names = check_rule(rule_of(it.op), it, ranks)
        assert names[0] == "R"


# ---- the strategies themselves


def names_of(it: Example, ranks: int) -> list[str]:
    options = strategies(rule_of(it.op), it.view, ranks)
    return [f"{s.name}: {'; '.join(map(str, s.inputs))} -> {s.outputs[0]}" for s in options]


def test_strategies_of_a_linear_layer() -> None:
    it = example("aten.linear.default", t(4, 6, 12), t(8, 12), t(8))
    assert names_of(it, 2) == [
        "R: R; R; R -> R",
        "B: B; B; B -> B",
        "dim0: S(0); B; B -> S(0)",
        "dim1: S(1); B; B -> S(1)",
        "n: B; S(0); S(0) -> S(2)",
        "k: S(2); S(1); P -> P",
        "P: P; B; P -> P",
        "P: B; P; P -> P",
    ]
    assert [n[0] for n in names_of(it, 3)] == ["R", "B", "d", "k", "P", "P"], "4 and 8 do not divide by 3"
    assert names_of(it, 1) == ["R: R; R; R -> R"]


def test_what_has_no_gradient_is_never_partial_in_it() -> None:
    it = example("aten.mul.Tensor", t(12), t(12, grad=False))
    assert all(s.inputs[1].states[0].kind != "B" for s in strategies(rule_of(it.op), it.view, 2))
    it = example("aten.mul.Tensor", t(12, grad=False), t(12, grad=False))
    options = strategies(rule_of(it.op), it.view, 2)
    assert "B" not in {layout.states[0].kind for s in options for layout in (*s.inputs, *s.outputs)}


def test_a_mean_over_a_split_dim_prints_the_true_divisor() -> None:
    for target, args in [
        ("aten.cross_entropy_loss.default", (t(12, 4), t(12, high=4))),
        ("aten.mse_loss.default", (t(12, 4), t(12, 4))),
        ("aten.mean.default", (t(12, 4),)),
    ]:
        it = example(target, *args)
        options = strategies(rule_of(it.op), it.view, 2)
        bodies = {s.body for s in options if any(i.states[0] == S(0) for i in s.inputs)}
        assert bodies == {"mean"}
        assert {s.body for s in options if all(i.states[0].kind != "S" for i in s.inputs)} == {""}


@pytest.mark.parametrize("line", ["a b -> a b", "a -> a, b", "a b -> a"])
def test_a_line_that_does_not_fit_the_op_is_refused(line: str) -> None:
    it = example("aten.relu.default", t(12))
    with pytest.raises(ValueError):
        read_line(line, it.view)


# ---- wrong rules: the checker must see each of them

WRONG = {
    "the bias enters once per rank": ("aten.linear.default", {"addends": ()}, (t(4, 12), t(6, 12), t(6))),
    "the normalised dim is split": ("aten.layer_norm.default", {"dims": "* n, n -> * n"}, (t(6, 12), (12,), t(12))),
    "the softmax dim is split": ("aten.softmax.int", {"dims": broadcast}, (t(6, 12), 1)),
    "a curve is called linear": ("aten.tanh.default", {"linear": ((0,),)}, (t(12),)),
    "a product is called linear in both": ("aten.mul.Tensor", {"linear": ((0, 1),)}, (t(12), t(12))),
    "a quotient is called linear below": ("aten.div.Tensor", {"linear": ((1,),)}, (t(12), t(12))),
    "a sum is called linear in one addend": ("aten.add.Tensor", {"linear": ((0,),), "addends": ()}, (t(12), t(12))),
    "a mean of means": ("aten.cross_entropy_loss.default", {"split_body": None}, (t(12, 4), t(12, high=4))),
    "a mean that is only summed": ("aten.mean.default", {"split_body": None}, (t(12, 4),)),
    "the rows of a table are split": ("aten.embedding.default", {"split_body": None}, (t(12, 4), t(6, high=12))),
    "a row of another rank counts": (
        "aten.index_select.default", {"dims": "v+ h, i -> i h"}, (t(12, 4), 0, t(6, high=6)),
    ),
    "the classes of a loss are split": (
        "aten.cross_entropy_loss.default", {"split_body": lambda view, letter: ""}, (t(12, 4), t(12, high=4), None, 2),
    ),
    "statistics of a shard of the batch": (
        "aten.batch_norm.default", {"split_body": None},
        (t(6, 4), t(4), t(4), t(4, grad=False), t(4, grad=False), True, 0.1, 1e-5, False),
    ),
    "heads of another group": (
        "aten.scaled_dot_product_attention.default",
        {"dims": "b (r h) q^ e^, b h k^ e^, b h k^ v^ -> b (r h) q^ v^"},
        (t(2, 8, 4, 2), t(2, 4, 4, 2), t(2, 4, 4, 2), {"enable_gqa": True}),
    ),
    "parts are split as one": ("aten.split.Tensor", {"dims": "b (n t^) -> b n, b n, b n"}, (t(2, 12), 4, 1)),
    "queries see the keys of their shard": (
        "aten.scaled_dot_product_attention.default",
        {"dims": "b h s e^, b h s e^, b h s v^ -> b h s v^"},
        (t(2, 2, 12, 2), t(2, 2, 12, 2), t(2, 2, 12, 2), None, 0.0, True),
    ),
    "dims are exchanged": ("aten.transpose.int", {"dims": "a b -> a b"}, (t(12, 12), 0, 1)),
}  # fmt: skip


@pytest.mark.parametrize("fault", WRONG)
def test_the_checker_sees_a_wrong_rule(fault: str) -> None:
    target, change, args = WRONG[fault]
    it = build(target, args)
    wrong = replace(table()[target], **change)
    check_rule(table()[target], it, 2)
    with pytest.raises(AssertionError):
        check_rule(wrong, it, 2)


def test_examples_are_small() -> None:
    sizes = [math.prod(x.shape) for target, n in FORMS for x in build(target, EXAMPLES[target][n]).tensors]
    assert max(sizes) <= 1000
