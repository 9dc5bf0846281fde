"""Products that contract a dim."""

from __future__ import annotations

from collections.abc import Callable

from pipeline.ops.rule import OpRule, OpView, Rendered, call
from pipeline.ops.shapes import nothing_split


def _linear_flops(view: OpView) -> float:
    return 2.0 * view.inputs[0].numel * view.inputs[1].shape[0]


def _product_flops(view: OpView) -> float:
    return 2.0 * view.output.numel * view.inputs[0].shape[-1]


def _added_flops(view: OpView) -> float:
    return 2.0 * view.output.numel * view.inputs[1].shape[-1]


def _broadcast_batch(view: OpView) -> str:
    """`matmul` in all its forms: batch dims broadcast, a vector is a row on the left and a column on the right."""
    a, b = (t.shape for t in view.inputs)
    batch = view.output.shape[: len(view.output.shape) - (len(a) > 1) - (len(b) > 1)]

    def leading(shape: tuple[int, ...]) -> str:
        sizes = shape[:-2]
        offset = len(batch) - len(sizes)
        return " ".join(
            f"b{offset + i}" if size == batch[offset + i] and size > 1 else f"one{offset + i}^"
            for i, size in enumerate(sizes)
        )

    left = f"{leading(a)} m k+" if len(a) > 1 else "k+"
    right = f"{leading(b)} k+ n" if len(b) > 1 else "k+"
    whole = " ".join(f"b{i}" if size > 1 else f"one{i}^" for i, size in enumerate(batch))
    return f"{left}, {right} -> {whole} {'m' if len(a) > 1 else ''} {'n' if len(b) > 1 else ''}"


def _added(names: tuple[str, ...], line: str) -> Callable[[OpView], str]:
    """The line of a product with something added, which broadcasts over the product's dims."""

    def dims(view: OpView) -> str:
        shape, added = view.output.shape, view.inputs[0].shape
        offset = len(shape) - len(added)
        own = [
            names[offset + i] if size == shape[offset + i] and size > 1 else f"one{i}^" for i, size in enumerate(added)
        ]
        return f"{' '.join(own)}, {line}"

    return dims


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


def _each(view: OpView) -> tuple[tuple[int, ...], ...]:
    return tuple((i,) for i in range(len(view.inputs)))


def _einsum_flops(view: OpView) -> float:
    """Two tensors: every letter of the equation is a loop."""
    equation = str(view.constant(0, "equation", "")).replace(" ", "")
    sizes = {
        x: n
        for term, tensor in zip(equation.partition("->")[0].split(","), view.inputs, strict=False)
        for x, n in zip(term, tensor.shape, strict=False)
    }
    total = 2.0
    for size in sizes.values():
        total *= size
    return total


def _render_einsum(r: Rendered) -> str:
    return f"torch.einsum({r.positional[0]}, {', '.join(r.tensors)})"


def _grouped_flops(view: OpView) -> float:
    return 2.0 * view.inputs[0].numel * view.output.shape[-1]


def _grouped(function: str) -> Callable[[Rendered], str]:
    def render(r: Rendered) -> str:
        if not r.bodies:
            return call(function)(r)
        return f"expert_split({function}, {', '.join(r.tensors)}, axis={r.axes('experts')})"

    return render


def _grouped_line(view: OpView) -> str:
    """Rows are sorted by expert and stay whole; experts may be split (expert parallelism), or each of them inside."""
    if [len(t.shape) for t in view.inputs] == [2, 3, 1]:
        return "t^ k+, e+ k+ n, e0^ -> t^ n"
    return nothing_split(view)


def _grouped_rule(target: str, function: str, reads_values: bool = False) -> OpRule:
    return OpRule(
        target, _grouped_line, _grouped(function), linear=((0,), (1,)), saves_inputs=(0, 1), crosswise=True,
        flops=_grouped_flops, split_body=lambda view, letter: "experts" if letter == "e" else "",
        reads_values=reads_values,
    )  # fmt: skip


RULES = [
    OpRule(
        "aten.linear.default", "* k+, n k+, n -> * n", call("F.linear"),
        linear=((0,), (1,)), addends=(2,), saves_inputs=(0, 1), crosswise=True, flops=_linear_flops,
    ),
    OpRule(
        "aten.mm.default", "m k+, k+ n -> m n", call("torch.mm"),
        linear=((0,), (1,)), saves_inputs=(0, 1), crosswise=True, flops=_product_flops,
    ),
    OpRule(
        "aten.addmm.default", _added(("m", "n"), "m k+, k+ n -> m n"), call("torch.addmm"),
        linear=((1,), (2,)), addends=(0,), saves_inputs=(1, 2), crosswise=True, flops=_added_flops,
    ),
    OpRule(
        "aten.bmm.default", "b m k+, b k+ n -> b m n", call("torch.bmm"),
        linear=((0,), (1,)), saves_inputs=(0, 1), crosswise=True, flops=_product_flops,
    ),
    OpRule(
        "aten.baddbmm.default", _added(("b", "m", "n"), "b m k+, b k+ n -> b m n"), call("torch.baddbmm"),
        linear=((1,), (2,)), addends=(0,), saves_inputs=(1, 2), crosswise=True, flops=_added_flops,
    ),
    OpRule(
        "aten.matmul.default", _broadcast_batch, call("torch.matmul"),
        linear=((0,), (1,)), saves_inputs=(0, 1), crosswise=True, flops=_product_flops,
    ),
    OpRule(
        "aten.mv.default", "m k+, k+ -> m", call("torch.mv"),
        linear=((0,), (1,)), saves_inputs=(0, 1), crosswise=True, flops=_product_flops,
    ),
    OpRule(
        "aten.dot.default", "k+, k+ ->", call("torch.dot"),
        linear=((0,), (1,)), saves_inputs=(0, 1), crosswise=True, flops=_product_flops,
    ),
    OpRule(
        "aten.einsum.default", _einsum, _render_einsum,
        linear=_each, saves_inputs=(0, 1), crosswise=True, flops=_einsum_flops,
    ),
    # A loop over the experts, whose rows it counts on the host.
    _grouped_rule("transformers.grouped_mm_fallback.default", "torch.ops.transformers.grouped_mm_fallback", True),
    _grouped_rule("aten._grouped_mm.default", "torch._grouped_mm"),
]  # fmt: skip
