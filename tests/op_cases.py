"""Arguments for every rule of the op table, with shapes and constants drawn at random.

A case is a function from hypothesis' `draw` to the op's arguments; a dict at the end holds the named ones. Sizes divide
by 2, 3 and 4 or by none of them, and some are one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import strategies as st

from shardwright.pipeline.ir.graph import Torch
from shardwright.pipeline.ops.families.complex_numbers import TRANSFORMS
from shardwright.pipeline.ops.families.elementwise import BY_OUTPUT, CURVES, STEPS
from shardwright.pipeline.ops.own_names import EMBEDDING_BAG
from tests.one_op import Draw, t

Pick = Callable[[st.SearchStrategy], Any]
Case = Callable[[Pick], tuple]

SIZES = st.sampled_from([1, 2, 3, 4, 4, 5, 6, 6, 12, 12])
SHAPES = st.lists(SIZES, min_size=1, max_size=3).map(tuple)
FLAG = st.booleans()
FLOAT32, FLOAT64, INT64 = (Torch("dtype", name) for name in ("float32", "float64", "int64"))
COMPLEX = "complex128"
CPU, STRIDED = Torch("device", "cpu"), Torch("layout", "strided")


def shape(draw: Pick, least: int = 1, most: int = 3) -> tuple[int, ...]:
    return tuple(draw(st.lists(SIZES, min_size=least, max_size=most)))


def dim(draw: Pick, rank: int) -> int:
    return draw(st.integers(-rank, rank - 1))


def some_dims(draw: Pick, rank: int) -> tuple[int, ...]:
    return tuple(draw(st.sets(st.integers(0, rank - 1), min_size=1)))


def broadcast_with(draw: Pick, whole: tuple[int, ...], **options) -> Draw:
    cut = draw(st.integers(0, len(whole)))
    return t(*(1 if draw(FLAG) and draw(FLAG) else n for n in whole[cut:]), **options)


def either(*cases: Case) -> Case:
    return lambda draw: cases[draw(st.integers(0, len(cases) - 1))](draw)


def in_complex(case: Case) -> Case:
    """The same on complex numbers."""

    def drawn(draw: Pick) -> tuple:
        return tuple(_complex(arg) for arg in case(draw))

    return drawn


def _complex(arg: Any) -> Any:
    if isinstance(arg, tuple):
        return tuple(map(_complex, arg))
    return replace(arg, dtype=COMPLEX) if isinstance(arg, Draw) and arg.dtype == "float64" and not arg.high else arg


def any_numbers(case: Case) -> Case:
    return either(case, in_complex(case))


# ---- element by element


def one(draw: Pick, **options) -> tuple:
    return (t(*shape(draw, 0), grad=draw(FLAG), **options),)


def positive(draw: Pick) -> tuple:
    return one(draw, positive=True)


def two(draw: Pick, **options) -> tuple:
    whole = shape(draw, 0)
    return (broadcast_with(draw, whole, **options), broadcast_with(draw, whole, grad=draw(FLAG), **options))


def mixed(draw: Pick) -> tuple:
    """A real and a complex tensor."""
    a, b = two(draw)
    return (a, replace(b, dtype=COMPLEX)) if draw(FLAG) else (replace(a, dtype=COMPLEX), b)


def with_number(draw: Pick, **options) -> tuple:
    return (*one(draw, **options), draw(st.sampled_from([2, 0.5, -1.0])))


def integers(draw: Pick) -> tuple:
    whole = shape(draw, 0)
    return (broadcast_with(draw, whole, high=9), broadcast_with(draw, whole, high=9))


def truths(draw: Pick) -> tuple:
    whole = shape(draw, 0)
    return (broadcast_with(draw, whole, dtype="bool"), broadcast_with(draw, whole, dtype="bool"))


def added(draw: Pick) -> tuple:
    return (*two(draw), *(({"alpha": 3},) if draw(FLAG) else ()))


def choice(draw: Pick) -> tuple:
    whole = shape(draw, 0)
    return (broadcast_with(draw, whole, dtype="bool"), broadcast_with(draw, whole), broadcast_with(draw, whole))


def filled(draw: Pick) -> tuple:
    whole = shape(draw)
    return (t(*whole), broadcast_with(draw, whole, dtype="bool"), draw(st.sampled_from([0, 0.0, -3.5])))


def cast(draw: Pick) -> tuple:
    return draw(st.sampled_from([
        (t(12, 4), FLOAT64), (t(12, dtype="float32"), FLOAT64, False, True), (t(6, 1), FLOAT32),
        (t(12, 4, high=5), FLOAT64), (t(4, 12), INT64),
    ]))  # fmt: skip


ELEMENTWISE: dict[str, Case] = {
    **{f"aten.{name}": one for name in (*CURVES, *BY_OUTPUT)},
    **{f"aten.{name}": two if name.endswith("Tensor") else with_number for name in STEPS},
    **{f"aten.{name}": one for name in STEPS if name.endswith("default")},
    **{f"aten.{name}.default": positive for name in ("log", "log1p", "log2", "sqrt", "rsqrt")},
    **{f"aten.{name}.default": any_numbers(one) for name in ("abs", "exp", "square")},
    **{f"aten.{name}.default": two for name in ("maximum", "minimum", "atan2")},
    **{f"aten.logical_{name}.default": truths for name in ("and", "or")},
    "aten.logical_not.default": lambda draw: one(draw, dtype="bool"),
    "aten.bitwise_and.Tensor": either(truths, integers),
    "aten.bitwise_or.Tensor": either(truths, integers),
    "aten.bitwise_not.default": lambda draw: one(draw, dtype="bool"),
    "aten.floor_divide.default": lambda draw: (t(*shape(draw), high=30), draw(st.sampled_from([2, 3]))),
    "aten.max.other": two,
    "aten.min.other": either(two, integers),
    "aten.gelu.default": lambda draw: (*one(draw), *(({"approximate": "tanh"},) if draw(FLAG) else ())),
    "aten.pow.Tensor_Scalar": lambda draw: (*one(draw), draw(st.sampled_from([2, 3.0]))),
    "aten.pow.Tensor_Tensor": lambda draw: two(draw, positive=True),
    "aten.pow.Scalar": lambda draw: (1.5, *one(draw)),
    "aten.clamp.default": lambda draw: (*one(draw), -0.5, draw(st.sampled_from([None, 0.5]))),
    "aten.clamp.Tensor": lambda draw: (*two(draw), None),
    "aten.clamp_min.default": with_number,
    "aten.clamp_max.default": with_number,
    "aten.add.Tensor": either(added, in_complex(added), with_number, integers),
    "aten.sub.Tensor": either(added, with_number),
    "aten.rsub.Scalar": with_number,
    "aten.add.Scalar": with_number,
    "aten.mul.Scalar": with_number,
    "aten.mul.Tensor": either(two, with_number, in_complex(two), mixed, lambda draw: (t(12, 4), t(12, 4, high=7))),
    "aten.div.Tensor": either(any_numbers(two), with_number),
    "aten.div.Tensor_mode": lambda draw: (*two(draw), {"rounding_mode": draw(st.sampled_from([None, "floor"]))}),
    "aten.neg.default": any_numbers(one),
    "aten.to.dtype": cast,
    "aten._to_copy.default": lambda draw: (*one(draw), {"dtype": draw(st.sampled_from([FLOAT32, FLOAT64, INT64]))}),
    "aten.to.device": lambda draw: (*one(draw), CPU, draw(st.sampled_from([FLOAT32, FLOAT64]))),
    "aten.to.dtype_layout": lambda draw: (
        *one(draw),
        {"dtype": draw(st.sampled_from([FLOAT32, FLOAT64])), "layout": STRIDED, "device": CPU},
    ),
    "aten.to.other": lambda draw: (*one(draw), t(2, 3, dtype="float32")),
    "aten.type_as.default": lambda draw: (*one(draw), t(2, 3, dtype="float32")),
    "aten.contiguous.default": one,
    "aten.clone.default": one,
    "aten.detach.default": one,
    "aten.where.self": choice,
    "aten.where.ScalarOther": lambda draw: (*choice(draw)[:2], -2.5),
    "aten.where.ScalarSelf": lambda draw: (lambda c: (c[0], -2.5, c[1]))(choice(draw)),
    "aten.where.Scalar": lambda draw: (t(*shape(draw), dtype="bool"), 0.5, -1.0),
    "aten.masked_fill.Scalar": filled,
    "aten.masked_fill.Tensor": lambda draw: (*filled(draw)[:2], t()),
    "aten.fill.Scalar": with_number,
    "aten.fill.Tensor": lambda draw: (*one(draw), t()),
    "aten.lerp.Scalar": lambda draw: (*two(draw), 0.3),
    "aten.addcmul.default": lambda draw: (lambda w: tuple(broadcast_with(draw, w) for _ in range(3)))(shape(draw)),
    "aten.dropout.default": lambda draw: (t(*shape(draw)), 0.3, draw(FLAG)),
    "aten.add_.Tensor": lambda draw: (t(*shape(draw, 0), grad=False), 1),
}

# ---- products


def product(draw: Pick) -> tuple[int, int, int]:
    return draw(SIZES), draw(SIZES), draw(SIZES)


def linear(draw: Pick) -> tuple:
    m, k, n = product(draw)
    bias = (t(n),) if draw(FLAG) else ()
    return (t(*shape(draw, 0, 2), m, k), t(n, k, grad=draw(FLAG)), *bias)


def mm(draw: Pick) -> tuple:
    m, k, n = product(draw)
    return (t(m, k), t(k, n))


def addmm(draw: Pick) -> tuple:
    m, k, n = product(draw)
    named = ({"alpha": 2, "beta": 3},) if draw(FLAG) else ()
    return (broadcast_with(draw, (m, n)), t(m, k), t(k, n), *named)


def bmm(draw: Pick) -> tuple:
    b, (m, k, n) = draw(SIZES), product(draw)
    return (t(b, m, k), t(b, k, n))


def baddbmm(draw: Pick) -> tuple:
    a, b = bmm(draw)
    return (broadcast_with(draw, (*a.shape[:2], b.shape[2])), a, b)


def matmul(draw: Pick) -> tuple:
    m, k, n = product(draw)
    batch = shape(draw, 0, 2)
    left = t(k) if draw(st.integers(0, 4)) == 0 else t(*broadcast_with(draw, batch).shape, m, k)
    right = t(k) if draw(st.integers(0, 4)) == 0 else t(*broadcast_with(draw, batch).shape, k, n)
    return (left, right)


def einsum(draw: Pick) -> tuple:
    equation = draw(
        st.sampled_from(["bhqd,bhkd->bhqk", "bqk,bkd->bqd", "ij,jk->ki", "ab,ab->", "abc->ca", "ij,ij,i->j"])
    )
    sizes = {x: draw(SIZES) for x in "abcdhijkq"}
    return (equation, tuple(t(*(sizes[x] for x in term)) for term in equation.split("->")[0].split(",")))


def ends(draw: Pick) -> tuple[int, ...]:
    """Where the rows of each expert end; some experts have none."""
    counts = [draw(st.integers(0, 4)) for _ in range(draw(st.sampled_from([2, 3, 4, 6])))]
    counts[draw(st.integers(0, len(counts) - 1))] += 1
    return tuple(sum(counts[: i + 1]) for i in range(len(counts)))


def grouped(draw: Pick) -> tuple:
    pytest.importorskip("transformers.integrations.moe", reason="the extra `hf` is not installed")  # defines the op
    (_, k, n), until = product(draw), ends(draw)
    return (t(until[-1], k), t(len(until), k, n), t(len(until), values=until, dtype="int32"))


def grouped_fast(draw: Pick) -> tuple:
    """The kernel takes rows of a multiple of 16 bytes."""
    until = ends(draw)
    rows, experts = t(until[-1], 48, dtype="float32"), t(len(until), 48, 48, dtype="float32")
    return (rows, experts, t(len(until), values=until, dtype="int32"))


def convolution(rank: int) -> Case:
    def case(draw: Pick) -> tuple:
        groups = draw(st.sampled_from([1, 1, 2, 4]))
        channels, outputs = groups * draw(st.sampled_from([1, 2, 3, 4])), groups * draw(st.sampled_from([1, 3, 4]))
        kernel, stride = draw(st.sampled_from([(1, 1), (2, 2), (3, 1), (3, 2), (2, 1)]))
        image = tuple(draw(st.sampled_from([4, 6, 8, 12])) for _ in range(rank))
        padding = draw(st.sampled_from([0, 0, 1]))
        bias = t(outputs) if draw(FLAG) else None
        return (
            t(draw(SIZES), channels, *image), t(outputs, channels // groups, *(kernel,) * rank), bias,
            (stride,) * rank, (padding,) * rank, (1,) * rank, groups,
        )  # fmt: skip

    return case


def general_convolution(draw: Pick) -> tuple:
    *first, groups = convolution(2)(draw)
    return (*first, False, (0, 0), groups)


def transposed(rank: int) -> Case:
    def case(draw: Pick) -> tuple:
        channels, outputs = draw(st.sampled_from([2, 3, 4])), draw(st.sampled_from([1, 4, 6]))
        image = tuple(draw(st.sampled_from([3, 4])) for _ in range(rank))
        return (t(draw(SIZES), channels, *image), t(channels, outputs, *(2,) * rank), t(outputs), (2,) * rank)

    return case


def recurrent(gates: int, states: int) -> Case:
    """Layers, directions, projections (of an LSTM), dropout, with and without biases, the batch as dim 0 or 1."""

    def case(draw: Pick) -> tuple:
        batch, steps, given, hidden = draw(SIZES), draw(st.sampled_from([1, 3])), 2, draw(st.sampled_from([2, 3]))
        layers, directions = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2]))
        projected = hidden - 1 if states == 2 and draw(FLAG) else 0
        biases, batch_first = draw(FLAG), draw(FLAG)
        made = projected or hidden
        weights: list[Draw] = []
        for layer in range(layers):
            for _ in range(directions):
                width = given if layer == 0 else made * directions
                weights += [t(gates * hidden, width), t(gates * hidden, made)]
                weights += [t(gates * hidden), t(gates * hidden)] if biases else []
                weights += [t(projected, hidden)] if projected else []
        count = layers * directions
        hx = (
            (t(count, batch, made), t(count, batch, hidden))[:states]
            if draw(FLAG)
            else (t(count, batch, made, grad=False), t(count, batch, hidden, grad=False))[:states]
        )
        shape_of = (batch, steps, given) if batch_first else (steps, batch, given)
        dropout = draw(st.sampled_from([0.0, 0.0, 0.3]))
        further = (biases, layers, dropout, draw(FLAG), directions == 2, batch_first)
        return (t(*shape_of, grad=draw(FLAG)), hx if states == 2 else hx[0], tuple(weights), *further)

    return case


def recurrent_cell(gates: int, states: int) -> Case:
    def case(draw: Pick) -> tuple:
        batch, given, hidden = draw(SIZES), draw(st.sampled_from([2, 3])), draw(st.sampled_from([2, 3]))
        hx = (t(batch, hidden), t(batch, hidden))[:states]
        weights = (t(gates * hidden, given), t(gates * hidden, hidden))
        biases = (t(gates * hidden), t(gates * hidden)) if draw(FLAG) else ()
        return (t(batch, given), hx if states == 2 else hx[0], *weights, *biases)

    return case


RECURRENT: dict[str, Case] = {
    f"aten.{name}{kind}": case(gates, states)
    for name, gates, states in (("lstm", 4, 2), ("gru", 3, 1), ("rnn_tanh", 1, 1), ("rnn_relu", 1, 1))
    for kind, case in ((".input", recurrent), ("_cell.default", recurrent_cell))
}

PRODUCTS: dict[str, Case] = {
    **RECURRENT,
    "aten.linear.default": any_numbers(linear),
    "aten.mm.default": mm,
    "aten.addmm.default": addmm,
    "aten.bmm.default": bmm,
    "aten.baddbmm.default": baddbmm,
    "aten.matmul.default": any_numbers(matmul),
    "aten.mv.default": lambda draw: (lambda m: (m[0], t(m[0].shape[1])))(mm(draw)),
    "aten.dot.default": lambda draw: (lambda n: (t(n), t(n)))(draw(SIZES)),
    "aten.einsum.default": any_numbers(einsum),
    "transformers.grouped_mm_fallback.default": grouped,
    "aten._grouped_mm.default": grouped_fast,
    "aten.conv1d.default": convolution(1),
    "aten.conv2d.default": convolution(2),
    "aten.conv3d.default": convolution(3),
    "aten.convolution.default": general_convolution,
    "aten.conv_transpose1d.default": transposed(1),
    "aten.conv_transpose2d.input": transposed(2),
    "aten.conv_transpose3d.input": transposed(3),
}

# ---- attention and normalisation


def attention(draw: Pick) -> tuple:
    b, h, r, q, k = (draw(st.sampled_from([1, 2, 3, 4, 6])) for _ in range(5))
    grouped_heads, causal = draw(FLAG), draw(FLAG)
    r = r if grouped_heads else 1
    k = q if causal else k
    queries, keys, values = t(b, h * r, q, 2), t(b, h, k, 2), t(b, h, k, 4)
    mask, dropout = None, draw(st.sampled_from([0.0, 0.0, 0.2]))
    if not causal and draw(FLAG):
        leading = tuple(n if draw(FLAG) else 1 for n in (b, h * r))[draw(st.integers(0, 2)) :]
        mask = t(*leading, q, k) if draw(FLAG) else t(*leading, q, k, dtype="bool", values=None)
    if mask is not None and mask.dtype == "bool":
        mask = t(*mask.shape)  # a row without any key has no softmax; a float mask has no such rows
    return (queries, keys, values, mask, dropout, causal, {"scale": 0.3, "enable_gqa": grouped_heads})


def layer_norm(draw: Pick) -> tuple:
    own = shape(draw, 1, 2)
    weights = draw(st.sampled_from([(), (t(*own),), (t(*own), t(*own)), (None, t(*own))]))
    return (t(*shape(draw, 0, 2), *own), own, *weights)


def rms_norm(draw: Pick) -> tuple:
    own = shape(draw, 1, 2)
    return (t(*shape(draw, 0, 2), *own), own, *((t(*own), 1e-5) if draw(FLAG) else ()))


def batch_norm(draw: Pick) -> tuple:
    c, training = draw(SIZES), draw(st.sampled_from([True, True, False]))
    weights = (t(c), t(c)) if draw(FLAG) else (None, None)
    running = not training or draw(FLAG)
    kept = (t(c, grad=False), t(c, grad=False, positive=True)) if running else (None, None)
    image = shape(draw, 0, 2)
    return (t(draw(st.sampled_from([2, 3, 4, 6, 12])), c, *image), *weights, *kept, training, 0.1, 1e-5, False)


def group_norm(draw: Pick) -> tuple:
    groups, own = draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from([2, 3]))
    c = groups * own
    return (t(draw(SIZES), c, *shape(draw, 1, 2)), groups, *((t(c), t(c), 1e-5) if draw(FLAG) else ()))


def softmax(draw: Pick) -> tuple:
    own = shape(draw)
    return (t(*own), dim(draw, len(own)))


NORMS: dict[str, Case] = {
    "aten.scaled_dot_product_attention.default": attention,
    "aten.layer_norm.default": layer_norm,
    "aten.rms_norm.default": rms_norm,
    "aten.batch_norm.default": batch_norm,
    "aten.group_norm.default": group_norm,
    "aten.softmax.int": softmax,
    "aten.log_softmax.int": softmax,
    "aten._softmax.default": lambda draw: (*softmax(draw), False),
    "aten._log_softmax.default": lambda draw: (*softmax(draw), False),
}

# ---- losses and reductions


def cross_entropy(draw: Pick) -> tuple:
    n, c, image = draw(SIZES), draw(st.sampled_from([2, 3, 4, 6, 12])), shape(draw, 0, 1)
    weight = t(c, grad=False, positive=True) if draw(FLAG) else None
    reduction, smoothing = draw(st.sampled_from([0, 1, 2])), draw(st.sampled_from([0.0, 0.2]))
    if draw(st.integers(0, 4)) == 0:
        return (t(n, c, *image), t(n, c, *image, positive=True), weight, reduction, -100, smoothing)
    ignored = draw(st.sampled_from([-100, 1]))
    # At least one target must be valid: the first is never the ignored one.
    target = t(n, *image, high=c, sometimes=ignored) if n > 2 else t(n, *image, high=c)
    return (t(n, c, *image), target, weight, reduction, ignored if n > 2 else -100, smoothing)


def nll(draw: Pick) -> tuple:
    n, c = draw(SIZES), draw(st.sampled_from([2, 3, 5]))
    return (t(n, c), t(n, high=c), t(c, grad=False) if draw(FLAG) else None, draw(st.sampled_from([0, 1, 2])))


def pointwise(*further) -> Case:
    def case(draw: Pick) -> tuple:
        own = shape(draw, 0)
        options = {"positive": True} if further[:1] == ("probabilities",) else {}
        extra = [a for a in further if a != "probabilities"]
        return (t(*own, **options), t(*own, grad=False, **options), *extra, draw(st.sampled_from([0, 1, 2])))

    return case


def weighted_logits(draw: Pick) -> tuple:
    own = shape(draw)
    weight = t(*own, grad=False) if draw(FLAG) else None
    return (t(*own), t(*own, grad=False, positive=True), weight, None, draw(st.sampled_from([0, 1, 2])))


def over_dims(draw: Pick) -> tuple:
    own = shape(draw)
    return (t(*own, grad=draw(FLAG)), some_dims(draw, len(own)), draw(FLAG))


def over_dim(draw: Pick) -> tuple:
    own = shape(draw)
    return (t(*own), dim(draw, len(own)), draw(FLAG))


def spread(draw: Pick) -> tuple:
    """Two numbers at least along the dim whose spread is taken."""
    own = tuple(max(n, 2) for n in shape(draw))
    return (t(*own), some_dims(draw, len(own)))


def topk(draw: Pick) -> tuple:
    own = shape(draw)
    along = dim(draw, len(own))
    return (t(*own), draw(st.integers(1, own[along])), along)


REDUCTIONS: dict[str, Case] = {
    "aten.cross_entropy_loss.default": cross_entropy,
    "aten.nll_loss_nd.default": nll,
    "aten.mse_loss.default": pointwise(),
    "aten.l1_loss.default": pointwise(),
    "aten.smooth_l1_loss.default": pointwise(),
    "aten.huber_loss.default": pointwise(),
    "aten.binary_cross_entropy.default": pointwise("probabilities", None),
    "aten.binary_cross_entropy_with_logits.default": weighted_logits,
    "aten.sum.default": either(any_numbers(one), lambda draw: (*one(draw, high=9),)),
    "aten.mean.default": one,
    "aten.sum.dim_IntList": either(over_dims, lambda draw: (t(*shape(draw), high=9), (0,))),
    "aten.mean.dim": any_numbers(over_dims),
    **{f"aten.{n}.default": over_dims for n in ("amax", "amin", "logsumexp")},
    **{f"aten.{n}.default": over_dim for n in ("argmax", "argmin")},
    **{f"aten.{n}.dim": over_dim for n in ("max", "min")},
    **{f"aten.{n}.dim": lambda draw: (*softmax(draw),) for n in ("any", "all")},
    "aten.prod.dim_int": over_dim,
    **{
        f"aten.{n}.correction": lambda draw: (*spread(draw), {"correction": 1, "keepdim": draw(FLAG)})
        for n in ("var", "std")
    },
    **{f"aten.{n}.dim": spread for n in ("var", "std")},
    "aten.linalg_vector_norm.default": lambda draw: (lambda c: (c[0], 2, *c[1:]))(over_dims(draw)),
    "aten.cumsum.default": softmax,
    "aten.cumprod.default": softmax,
    "aten.sort.default": softmax,
    "aten.argsort.default": softmax,
    "aten.topk.default": topk,
    "aten.histc.default": lambda draw: (t(*shape(draw, 1, 2), grad=False), 4, *draw(st.sampled_from([(-1, 1), ()]))),
}

# ---- views, joins, indices


def reshape(draw: Pick) -> tuple:
    """Two shapes of one size: products of the same factors, grouped in two ways, with ones in between."""
    factors = draw(st.lists(st.sampled_from([1, 2, 2, 3, 4, 5]), min_size=1, max_size=5))

    def grouped_factors() -> tuple[int, ...]:
        found = [1]
        for factor in factors:
            if draw(FLAG):
                found.append(factor)
            else:
                found[-1] *= factor
        return tuple(found if draw(FLAG) or found[0] != 1 else found[1:])

    before, after = grouped_factors(), grouped_factors()
    return (t(*before), tuple(draw(st.permutations(after))) if draw(st.integers(0, 3)) == 0 else after)


def expand(draw: Pick) -> tuple:
    own = tuple(draw(st.sampled_from([1, 1, 2, 4, 6])) for _ in range(draw(st.integers(0, 3))))
    grown = tuple(draw(SIZES) if n == 1 else n for n in own)
    return (t(*own), (*shape(draw, 0, 1), *grown))


def cat(draw: Pick) -> tuple:
    own = list(shape(draw))
    along = draw(st.integers(0, len(own) - 1))
    parts = []
    for _ in range(draw(st.integers(1, 3))):
        own[along] = draw(SIZES)
        parts.append(t(*own, grad=draw(FLAG)))
    return (tuple(parts), along)


def equal_parts(draw: Pick) -> tuple:
    own = list(shape(draw))
    along = draw(st.integers(0, len(own) - 1))
    part, count = draw(SIZES), draw(st.integers(1, 3))
    own[along] = part * count
    return (t(*own), part, along)


def uneven_parts(draw: Pick) -> tuple:
    own = list(shape(draw))
    along = draw(st.integers(0, len(own) - 1))
    sizes = tuple(draw(st.lists(st.sampled_from([2, 3, 4, 4]), min_size=1, max_size=3)))
    own[along] = sum(sizes)
    return (t(*own), sizes, along)


def sliced(draw: Pick) -> tuple:
    own = shape(draw)
    along = draw(st.integers(0, len(own) - 1))
    start = draw(st.integers(-own[along], own[along] - 1))
    end = draw(st.sampled_from([own[along], 2**63 - 1, start % own[along] + 1, None]))
    return (t(*own), draw(st.sampled_from([along, along - len(own)])), start, end, draw(st.sampled_from([1, 2])))


def narrowed(draw: Pick) -> tuple:
    own = shape(draw)
    along = draw(st.integers(0, len(own) - 1))
    start = draw(st.integers(0, own[along] - 1))
    return (t(*own), along, start, draw(st.integers(1, own[along] - start)))


def selected(draw: Pick) -> tuple:
    own = shape(draw)
    along = draw(st.integers(0, len(own) - 1))
    return (t(*own), along, draw(st.integers(0, own[along] - 1)))


def slice_scatter(draw: Pick) -> tuple:
    own, along, start, length = (lambda c: (c[0].shape, *c[1:]))(narrowed(draw))
    source = tuple(length if i == along else n for i, n in enumerate(own))
    return (t(*own), t(*source), along, start, start + length)


def select_scatter(draw: Pick) -> tuple:
    whole, along, index = selected(draw)
    return (whole, t(*(n for i, n in enumerate(whole.shape) if i != along)), along, index)


def padded(draw: Pick) -> tuple:
    own = shape(draw)
    widths = tuple(draw(st.sampled_from([0, 0, 1])) for _ in range(2 * draw(st.integers(1, len(own)))))
    return (t(*own), widths)


def indexed(draw: Pick) -> tuple:
    own = shape(draw)
    count = draw(st.integers(1, len(own)))
    run = shape(draw, 0, 2)
    places = draw(st.sets(st.integers(0, len(own) - 1), min_size=count, max_size=count))
    indices = tuple(
        t(*(run if draw(FLAG) else (1,) * len(run)), high=own[i]) if i in places else None
        for i in range(max(places) + 1)
    )
    return (t(*own), indices)


def index_put(draw: Pick) -> tuple:
    own = shape(draw)
    count = draw(st.integers(1, own[0]))
    values = (count, *own[1:]) if draw(FLAG) else (1, *(1 if draw(FLAG) else n for n in own[1:]))
    return (t(*own), (t(count, high=own[0], distinct=True),), t(*values), draw(FLAG))


def gather(draw: Pick) -> tuple:
    own = shape(draw)
    along = draw(st.integers(0, len(own) - 1))
    picked = tuple(
        draw(SIZES) if i == along else draw(st.sampled_from([n, n, max(n // 2, 1)])) for i, n in enumerate(own)
    )
    return (t(*own), along, t(*picked, high=own[along]))


def scatter(draw: Pick) -> tuple:
    own = shape(draw)
    along = len(own) - 1
    picked = (*(draw(st.sampled_from([n, n, max(n // 2, 1)])) for n in own[:-1]), draw(st.integers(1, own[-1])))
    return (t(*own), along, t(*picked, high=own[-1], distinct=True), t(*picked))


def row_picked(draw: Pick) -> tuple:
    own = shape(draw)
    along = draw(st.integers(0, len(own) - 1))
    return (t(*own), along, t(draw(SIZES), high=own[along]))


def row_added(draw: Pick) -> tuple:
    whole, along, index = row_picked(draw)
    source = tuple(index.shape[0] if i == along else n for i, n in enumerate(whole.shape))
    return (whole, along, index, t(*source))


def row_copied(draw: Pick) -> tuple:
    own = shape(draw)
    along = draw(st.integers(0, len(own) - 1))
    count = draw(st.integers(1, own[along]))
    source = tuple(count if i == along else n for i, n in enumerate(own))
    return (t(*own), along, t(count, high=own[along], distinct=True), t(*source))


def embedding(draw: Pick) -> tuple:
    rows = draw(st.sampled_from([4, 5, 6, 12]))
    further = draw(st.sampled_from([(), (2,), (-1, False), (-1, True), (0,)]))
    return (t(rows, draw(SIZES), grad=draw(FLAG)), t(*shape(draw, 0, 2), high=rows), *further)


def bags(draw: Pick) -> tuple:
    """Rows of indices, or indices with offsets: bags of any length, and none; whole numbers, so that some are equal."""
    rows, mode = draw(st.sampled_from([4, 5, 6, 12])), draw(st.sampled_from([0, 0, 1, 2]))
    table = t(rows, draw(SIZES)) if draw(FLAG) else t(rows, 4, values=_equal_rows(rows))
    further = (draw(FLAG), draw(st.sampled_from([None, 1])), draw(st.sampled_from([False, False, mode != 2])))
    if draw(FLAG):
        own, offsets = (draw(SIZES), draw(SIZES)), None
        further = (False, *further[1:])
    else:
        lengths = draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
        ends = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        own, begins = (ends[-1],), tuple(ends if further[0] else ends[:-1])
        offsets = t(len(begins), values=begins, dtype="int64")
    weights = t(*own, grad=draw(FLAG)) if mode == 0 and draw(FLAG) else None
    indices = t(*own, high=rows) if 0 not in own else t(*own, values=(), dtype="int64")
    return (table, indices, offsets, mode, weights, *further)


def _equal_rows(rows: int) -> tuple:
    return tuple(tuple(float((r * c) % 3) for c in range(4)) for r in range(rows))


def squeezed(draw: Pick) -> tuple:
    own = shape(draw)
    return (t(*own), dim(draw, len(own)))


def repeated(draw: Pick) -> tuple:
    own = shape(draw)
    return (t(*own), (*draw(st.sampled_from([(), (2,)])), *(draw(st.integers(1, 3)) for _ in own)))


def repeated_in_a_row(draw: Pick) -> tuple:
    return (t(*shape(draw)), draw(st.integers(1, 3)), draw(st.sampled_from([None, 0, -1])))


def unflattened(draw: Pick) -> tuple:
    sizes = (draw(SIZES), draw(SIZES))
    return (t(draw(SIZES), sizes[0] * sizes[1], draw(SIZES)), 1, sizes)


def rolled(draw: Pick) -> tuple:
    own = shape(draw)
    return (t(*own), (1,), (dim(draw, len(own)),)) if draw(FLAG) else (t(*own), (2,))


VIEWS: dict[str, Case] = {
    "aten.view.default": reshape,
    "aten._unsafe_view.default": reshape,
    "aten.reshape.default": reshape,
    "aten.flatten.using_ints": lambda draw: (lambda s: (t(*s), draw(st.integers(0, len(s) - 1)), -1))(shape(draw)),
    "aten.unflatten.int": unflattened,
    "aten.unsqueeze.default": lambda draw: (lambda s: (t(*s), draw(st.integers(0, len(s)))))(shape(draw, 0)),
    "aten.squeeze.dim": squeezed,
    "aten.squeeze.default": lambda draw: (t(*shape(draw)),),
    "aten.squeeze.dims": lambda draw: (lambda s: (t(*s), some_dims(draw, len(s))))(shape(draw)),
    "aten.transpose.int": lambda draw: (lambda s: (t(*s), dim(draw, len(s)), dim(draw, len(s))))(shape(draw)),
    "aten.permute.default": lambda draw: (lambda s: (t(*s), tuple(draw(st.permutations(range(len(s)))))))(shape(draw)),
    "aten.movedim.int": lambda draw: (lambda s: (t(*s), dim(draw, len(s)), dim(draw, len(s))))(shape(draw)),
    "aten.t.default": lambda draw: (t(*shape(draw, 1, 2)),),
    "aten.expand.default": expand,
    "aten.expand_as.default": lambda draw: (lambda e: (e[0], t(*e[1], grad=False)))(expand(draw)),
    "aten.repeat.default": repeated,
    "aten.repeat_interleave.self_int": repeated_in_a_row,
    "aten.cat.default": cat,
    "aten.stack.default": lambda draw: (lambda s: ((t(*s), t(*s)), draw(st.integers(0, len(s)))))(shape(draw, 0)),
    "aten.split.Tensor": equal_parts,
    "aten.split_with_sizes.default": uneven_parts,
    "aten.chunk.default": lambda draw: (lambda s: (t(*s), draw(st.integers(1, 3)), dim(draw, len(s))))(shape(draw)),
    "aten.unbind.int": lambda draw: squeezed(draw),
    "aten.slice.Tensor": sliced,
    "aten.narrow.default": narrowed,
    "aten.select.int": selected,
    "aten.slice_scatter.default": slice_scatter,
    "aten.select_scatter.default": select_scatter,
    "aten.roll.default": rolled,
    "aten.flip.default": lambda draw: (lambda s: (t(*s), some_dims(draw, len(s))))(shape(draw)),
    "aten.pad.default": lambda draw: (*padded(draw), *draw(st.sampled_from([(), ("constant", 1.5), ("constant", 0)]))),
    "aten.constant_pad_nd.default": lambda draw: (*padded(draw), *draw(st.sampled_from([(), (0,), (2.5,)]))),
    "aten.tril.default": lambda draw: (t(*shape(draw, 2, 3)), draw(st.integers(-1, 1))),
    "aten.triu.default": lambda draw: (t(*shape(draw, 2, 3)),),
    "aten.index.Tensor": indexed,
    "aten.index_put.default": index_put,
    "aten.index_select.default": row_picked,
    "aten.index_add.default": row_added,
    "aten.index_copy.default": row_copied,
    "aten.gather.default": gather,
    "aten.scatter.src": scatter,
    "aten.scatter.value": lambda draw: (*scatter(draw)[:3], 1.5),
    "aten.scatter_add.default": scatter,
    "aten.embedding.default": embedding,
    EMBEDDING_BAG: bags,
}  # fmt: skip

# ---- pooling and tensors out of nothing


def image(rank: int, *constants, size: int = 6) -> Case:
    return lambda draw: (t(draw(SIZES), draw(SIZES), *(size,) * rank), *constants)


def resized(rank: int, *corners: st.SearchStrategy) -> Case:
    """To a size, or by factors."""

    def case(draw: Pick) -> tuple:
        aims = draw(st.sampled_from([((4, 5, 3)[:rank], None), (None, (2.0, 1.5, 2.0)[:rank])]))
        return (t(draw(SIZES), draw(SIZES), *(4,) * rank), aims[0], *map(draw, corners), aims[1])

    return case


AA = ("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa")


def made(draw: Pick) -> tuple:
    return (shape(draw, 0), {"device": CPU, "pin_memory": False})


MADE: dict[str, Case] = {
    "aten.max_pool1d.default": image(1, (2,), (2,)),
    "aten.max_pool2d.default": image(2, (3, 3), (2, 2), (1, 1)),
    "aten.avg_pool1d.default": image(1, (2,)),
    "aten.avg_pool2d.default": image(2, (2, 2), (2, 2)),
    "aten.adaptive_avg_pool1d.default": image(1, (1,)),
    "aten.adaptive_avg_pool2d.default": image(2, (2, 2)),
    **{
        f"aten.{name}{n}d.vec": resized(n)
        for name in ("upsample_nearest", "_upsample_nearest_exact")
        for n in (1, 2, 3)
    },
    **{
        f"aten.upsample_{name}{n}d.vec": resized(n, FLAG)
        for name, n in (("linear", 1), ("bilinear", 2), ("trilinear", 3))
    },
    **{f"aten.{name}.vec": resized(2, FLAG) for name in ("upsample_bicubic2d", *AA)},
    "aten.arange.default": lambda draw: (draw(SIZES), {"device": CPU, "pin_memory": False}),
    "aten.arange.start": lambda draw: (2, 2 + draw(SIZES)),
    "aten.arange.start_step": lambda draw: (0, 2 * draw(SIZES), 2),
    "aten.linspace.default": lambda draw: (0.0, 1.0, draw(SIZES)),
    "aten.scalar_tensor.default": lambda draw: (2.5,),
    **{f"aten.{name}.default": made for name in ("zeros", "ones", "rand", "randn")},
    "aten.full.default": lambda draw: (shape(draw, 0), 2.5),
    "aten.empty.memory_format": made,
    "aten.new_zeros.default": lambda draw: (t(3, 2), shape(draw, 0), {"pin_memory": False}),
    "aten.new_ones.default": lambda draw: (t(3, 2), shape(draw, 0)),
    "aten.new_full.default": lambda draw: (t(3, 2), shape(draw, 0), 1.5),
    **{f"aten.{name}_like.default": one for name in ("zeros", "ones", "empty", "rand", "randn")},
    "aten.full_like.default": lambda draw: (*one(draw), 2.5),
    "aten.bernoulli.default": lambda draw: (t(*shape(draw), positive=True, grad=False),),
    "aten.bernoulli.p": lambda draw: (t(*shape(draw), grad=False), 0.4),
}

# ---- complex numbers


def pairs(draw: Pick) -> tuple:
    return (t(*shape(draw, 0), 2),)


def matrix(draw: Pick) -> tuple:
    return (t(*shape(draw, 2, 3), dtype=COMPLEX),)


def transform(name: str) -> Case:
    """The line along one dim has two elements at least; real ones where the transform begins with them."""

    def case(draw: Pick) -> tuple:
        own = tuple(max(n, 2) for n in shape(draw, 2))
        x = t(*own, dtype="float64" if name.startswith("rfft") or name == "ihfft" else COMPLEX)
        norm = draw(st.sampled_from([None, "ortho"]))
        if name.endswith("shift"):
            return (x, draw(st.sampled_from([None, (-1,), (0, 1)])))
        if name.endswith("2"):
            return (x, None, draw(st.sampled_from([(-2, -1), (0, 1)])), norm)
        if name.endswith("n"):
            return (x, *draw(st.sampled_from([(None, None), (None, (0,)), ((4,), None)])), norm)
        return (x, draw(st.sampled_from([None, 4])), dim(draw, len(own)), norm)

    return case


COMPLEX_NUMBERS: dict[str, Case] = {
    "aten.view_as_complex.default": pairs,
    **{f"aten.{name}.default": in_complex(one) for name in ("view_as_real", "real", "imag", "_conj", "resolve_conj")},
    **{f"aten.{name}.default": in_complex(one) for name in ("conj_physical", "angle", "sgn")},
    "aten.resolve_neg.default": one,
    **{f"aten.{name}.default": matrix for name in ("mH", "adjoint")},
    **{f"aten.{name}.default": two for name in ("complex", "polar")},
    **{f"aten.fft_{name}.default": transform(name) for name in TRANSFORMS},
}

CASES: dict[str, Case] = {
    **ELEMENTWISE, **PRODUCTS, **NORMS, **REDUCTIONS, **VIEWS, **MADE, **COMPLEX_NUMBERS,
}  # fmt: skip
