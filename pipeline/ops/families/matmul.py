"""Products that contract a dim."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from shardwright.pipeline.ops.rule import Dims, Flops, OpRule, OpView, Rendered, call
from shardwright.pipeline.ops.shapes import aligned, nothing_split


def _product(
    target: str,
    dims: Dims,
    flops: Flops,
    function: str = "",
    factors: tuple[int, int] = (0, 1),
    addend: int | None = None,
) -> OpRule:
    """A product of two tensors, to which a third may be added; called as torch has it, or as that function."""
    render = call(function or f"torch.{target.split('.')[1]}")
    return OpRule(
        target, dims, render, linear=tuple((i,) for i in factors), addends=() if addend is None else (addend,),
        saves_inputs=factors, crosswise=True, flops=flops,
    )  # fmt: skip


def _linear_flops(view: OpView) -> float:
    return 2.0 * view.inputs[0].numel * view.inputs[1].shape[0]


def _product_flops(view: OpView) -> float:
    """Each number of the result is a sum over the last dim of the left factor, the input before the last one."""
    return 2.0 * view.output.numel * view.inputs[-2].shape[-1]


def _broadcast_batch(view: OpView) -> str:
    """`matmul` in all its forms: batch dims broadcast, a vector is a row on the left and a column on the right."""
    a, b = (t.shape for t in view.inputs)
    batch = view.output.shape[: len(view.output.shape) - (len(a) > 1) - (len(b) > 1)]
    left, right, whole = (
        " ".join(aligned(sizes, batch, [f"b{i}" for i in range(len(batch))])) for sizes in (a[:-2], b[:-2], batch)
    )
    left = f"{left} m k+" if len(a) > 1 else "k+"
    right = f"{right} k+ n" if len(b) > 1 else "k+"
    return f"{left}, {right} -> {whole} {'m' if len(a) > 1 else ''} {'n' if len(b) > 1 else ''}"


def _added(names: str, line: str) -> Callable[[OpView], str]:
    """The line of a product with something added, which broadcasts over the product's dims."""
    return lambda view: f"{' '.join(aligned(view.inputs[0].shape, view.output.shape, names))}, {line}"


def _einsum(view: OpView) -> str:
    """The equation is the line, unless it repeats a letter, broadcasts, or leaves the output to be guessed."""
    equation = str(view.constant(0, "equation", "")).replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    repeated = any(len(set(term)) < len(term) for term in (*terms, right))
    shapes = [t.shape for t in view.inputs]
    sizes = [(x, n) for term, shape in zip(terms, shapes, strict=False) for x, n in zip(term, shape, strict=False)]
    if not arrow or "." in equation or repeated or any(dict(sizes)[x] != n for x, n in sizes):
        return nothing_split(view)
    summed = set(left) - set(right)
    inputs = ", ".join(" ".join(f"{x}+" if x in summed else x for x in term) for term in terms)
    return f"{inputs} -> {' '.join(right)}"


def _einsum_flops(view: OpView) -> float:
    """Two tensors: every letter of the equation is a loop."""
    terms = str(view.constant(0, "equation", "")).replace(" ", "").partition("->")[0].split(",")
    sizes = {x: n for term, t in zip(terms, view.inputs, strict=False) for x, n in zip(term, t.shape, strict=False)}
    return 2.0 * prod(sizes.values())


def _grouped_line(view: OpView) -> str:
    """Rows are sorted by expert and stay whole; experts may be split (expert parallelism), or each of them inside."""
    if [len(t.shape) for t in view.inputs] == [2, 3, 1]:
        return "t^ k+, e+ k+ n, e0^ -> t^ n"
    return nothing_split(view)


def _grouped_rule(target: str, function: str, reads_values: bool = False) -> OpRule:
    def render(r: Rendered) -> str:
        if not r.bodies:
            return call(function)(r)
        return f"expert_split({function}, {', '.join(r.tensors)}, axis={r.axes('experts')})"

    return OpRule(
        target, _grouped_line, render, linear=((0,), (1,)), saves_inputs=(0, 1), crosswise=True,
        flops=lambda view: 2.0 * view.inputs[0].numel * view.output.shape[-1],
        split_body=lambda view, letter: "experts" if letter == "e" else "", reads_values=reads_values,
    )  # fmt: skip


RULES = [
    _product("aten.linear.default", "* k+, n k+, n -> * n", _linear_flops, "F.linear", addend=2),
    _product("aten.mm.default", "m k+, k+ n -> m n", _product_flops),
    _product("aten.addmm.default", _added("mn", "m k+, k+ n -> m n"), _product_flops, factors=(1, 2), addend=0),
    _product("aten.bmm.default", "b m k+, b k+ n -> b m n", _product_flops),
    _product(
        "aten.baddbmm.default", _added("bmn", "b m k+, b k+ n -> b m n"), _product_flops, factors=(1, 2), addend=0
    ),
    _product("aten.matmul.default", _broadcast_batch, _product_flops),
    _product("aten.mv.default", "m k+, k+ -> m", _product_flops),
    _product("aten.dot.default", "k+, k+ ->", _product_flops),
    OpRule(
        "aten.einsum.default", _einsum, lambda r: f"torch.einsum({r.positional[0]}, {', '.join(r.tensors)})",
        linear=lambda view: tuple((i,) for i in range(len(view.inputs))), saves_inputs=(0, 1), crosswise=True,
        flops=_einsum_flops,
    ),
    # A loop over the experts, whose rows it counts on the host.
    _grouped_rule("transformers.grouped_mm_fallback.default", "torch.ops.transformers.grouped_mm_fallback", True),
    _grouped_rule("aten._grouped_mm.default", "torch._grouped_mm"),
]  # fmt: skip
