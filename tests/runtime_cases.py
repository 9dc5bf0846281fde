"""What the ranks of test_runtime run: each case compares a rank's own tensors with the unsplit truth.

Every rank draws the same numbers, so each knows what all hold; `gathered` fetches what they really hold.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline import runtime
from pipeline.cost.conversions import TABLE, conversion
from pipeline.ir.layout import B, Layout, P, R, S, State
from pipeline.runtime.losses import mean_cross_entropy, mean_of_pieces
from pipeline.runtime.mesh import axis_of, set_mesh
from pipeline.runtime.parameters import GradientSum, piece_of, scope
from pipeline.runtime.recompute import recompute
from tests import pieces
from tests.ranks import AXIS

SHAPES = {"matrix": (6, 12), "cube": (6, 5, 12), "scalar": ()}
SPLITS = {"matrix": (S(0), S(1)), "cube": (S(0), S(2)), "scalar": ()}


def conversions() -> dict[str, tuple[str, State, State]]:
    """Every pair of the table, on tensors with two dims that may be split, and on one with none."""
    found = {}
    for shape, splits in SPLITS.items():
        states = (R, B, P, *splits)
        for source in states:
            for target in states:
                if source != target and source.kind + target.kind in TABLE:
                    found[f"{shape} {source} -> {target}"] = (shape, source, target)
    return found


def gathered(tensor: Tensor) -> list[Tensor]:
    everyone = [torch.empty_like(tensor.contiguous()) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, tensor.contiguous())
    return everyone


def convert(x: Tensor, source: State, target: State) -> Tensor:
    dims = {"dim": source.dim} if source.kind == "S" else {}
    if target.kind == "S":
        dims["to" if source.kind == "S" else "dim"] = target.dim
    return getattr(runtime, conversion(source, target).function)(x, axis=AXIS, **dims)


def check_conversion(shape: str, source: State, target: State) -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    whole = torch.randn(SHAPES[shape], dtype=torch.float64)
    gradient = torch.randn(SHAPES[shape], dtype=torch.float64)
    x = pieces.values(source, whole, ranks)[rank].requires_grad_()
    given = pieces.gradients(target, gradient, ranks)[rank]
    kept = x.detach().clone(), given.clone()
    y = convert(x, source, target)
    pieces.check_values(target, gathered(y.detach()), whole, "the value")
    y.backward(given)
    pieces.check_gradients(source, gathered(x.grad), gradient, "the source")
    assert torch.equal(x.detach(), kept[0]) and torch.equal(given, kept[1]), "a conversion wrote into its argument"


def check_order_in_memory() -> None:
    """Tensors and gradients that are transposed or expanded in memory are converted by value."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for source, target in [(a, b) for a in (R, B, P, S(0), S(1)) for b in (R, B, P, S(0), S(1)) if a != b]:
        if source.kind + target.kind not in TABLE:
            continue
        whole = torch.randn(12, 6, dtype=torch.float64).t()
        x = pieces.values(source, whole, ranks)[rank].t().contiguous().t().requires_grad_()
        y = convert(x, source, target)
        pieces.check_values(target, gathered(y.detach()), whole, "the value")
        if target.kind != "B":  # an expanded gradient cannot be different summands
            y.backward(torch.ones((), dtype=torch.float64).expand(y.shape))
            pieces.check_gradients(source, gathered(x.grad), torch.ones_like(whole), f"{source} -> {target}")


def check_integers() -> None:
    """Labels, positions and masks are converted too; they have no gradient."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for whole in (torch.arange(72).view(6, 12), torch.arange(72).view(6, 12) % 3 == 0):
        for source, target in [(R, S(1)), (S(0), R), (S(1), S(0)), (S(1), B), (B, S(0)), (R, B), (B, R)]:
            y = convert(pieces.values(source, whole, ranks)[rank], source, target)
            pieces.check_values(target, gathered(y), whole, f"{source} -> {target}")
            assert not y.requires_grad


def check_cross_entropy() -> None:
    """Ranks hold different numbers of valid targets, the last none at all."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    rows = 4
    for ignored, smoothing in [(-100, 0.0), (2, 0.3)]:
        logits = torch.randn(rows * ranks, 5, dtype=torch.float64, requires_grad=True)
        target = torch.randint(5, (rows * ranks,))
        target[rows * (ranks - 1) :] = ignored
        target[0] = ignored
        target[1] = 4
        options = {"ignore_index": ignored, "label_smoothing": smoothing}
        expected = F.cross_entropy(logits, target, **options)
        expected.backward()
        own = logits.detach().chunk(ranks)[rank].clone().requires_grad_()
        loss = mean_cross_entropy(own, target.chunk(ranks)[rank], AXIS, **options)
        pieces.check_values(P, gathered(loss.detach()), expected.detach(), "the loss")
        loss.backward()
        pieces.check_gradients(S(0), gathered(own.grad), logits.grad, "the logits")


def check_mean_of_pieces() -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    whole = torch.randn(12, 6, dtype=torch.float64)
    own = whole.chunk(ranks)[rank].clone().requires_grad_()
    mean = mean_of_pieces(own.mean(), AXIS)
    pieces.check_values(P, gathered(mean.detach()), whole.mean(), "the mean")
    mean.backward()
    pieces.check_gradients(S(0), gathered(own.grad), torch.full_like(whole, 1 / whole.numel()), "the tensor")


def parameters(*sizes: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(size, 2, dtype=torch.float64)) for size in sizes]


TINY = {"first_mb": 1e-6, "bucket_mb": 1e-6}  # a bucket for each parameter


def check_sums() -> None:
    """Gradients are summed over the ranks, step after step, and stay views of their bucket."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for sizes in ({}, TINY, {"first_mb": 1e-4, "bucket_mb": 3e-4}):
        params = parameters(3, 5, 7, 2)
        sums = GradientSum(params, AXIS, **sizes)
        assert sums.buckets[0].parameters[0] is params[-1], "backward finishes the last parameter first"
        for _ in range(2):
            weights = torch.randn(ranks, 4, dtype=torch.float64)
            sums.start()
            total = sum((w * (p**2).sum() for w, p in zip(weights[rank], params, strict=True)), torch.zeros(()))
            total.backward()
            sums.wait()
            for number, p in enumerate(params):
                torch.testing.assert_close(p.grad, 2 * weights[:, number].sum() * p.detach())
            inside_of_buckets(sums)
            assert sums.order == list(range(len(sums.buckets)))


def inside_of_buckets(sums: GradientSum) -> None:
    for bucket in sums.buckets:
        start, end = bucket.flat.data_ptr(), bucket.flat.data_ptr() + bucket.flat.numel() * bucket.flat.element_size()
        assert all(start <= p.grad.data_ptr() < end for p in bucket.parameters), "a gradient left its bucket"
        assert bucket.work is None


def check_send_order() -> None:
    """Ranks that finish their gradients in opposite orders still send their buckets in one order."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    params = parameters(2, 3, 4, 5)
    sums = GradientSum(params, AXIS, **TINY)
    arrived: list[int] = []
    for number, p in enumerate(params):
        p.register_post_accumulate_grad_hook(lambda _, number=number: arrived.append(number))
    order = list(range(4)) if rank % 2 else list(reversed(range(4)))
    sums.start()
    for number in order:
        (params[number].sum() * (number + 1)).backward()
    sent_before_wait = list(sums.order)
    sums.wait()
    assert arrived == order
    assert sums.order == sent_before_wait == [0, 1, 2, 3]
    for number, p in enumerate(params):
        torch.testing.assert_close(p.grad, torch.full_like(p, float(ranks * (number + 1))))


def check_tied() -> None:
    """A parameter that is used twice is sent once, when both its gradients are in it."""
    ranks = dist.get_world_size()
    tied, other = parameters(3, 4)
    sums = GradientSum([tied, other], AXIS, **TINY)
    calls: list[int] = []
    tied.register_post_accumulate_grad_hook(lambda _: calls.append(len(sums.order)))
    for _ in range(2):
        sums.start()
        (tied.sum() + (other.sum() * 2) + tied.sum() * 3).backward()
        sums.wait()
        torch.testing.assert_close(tied.grad, torch.full_like(tied, 4.0 * ranks))
        torch.testing.assert_close(other.grad, torch.full_like(other, 2.0 * ranks))
    assert len(calls) == 2


def check_missing() -> None:
    """Parameters that no gradient reaches, on all ranks or on some, do not hold up the others."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    nowhere, somewhere, everywhere = params = parameters(3, 4, 5)
    for sizes in (TINY, {}):
        sums = GradientSum(params, AXIS, **sizes)
        for _ in range(2):
            sums.start()
            loss = everywhere.sum() + (somewhere.sum() if rank == 0 else 0.0)
            loss.backward()
            sums.wait()
            torch.testing.assert_close(nowhere.grad, torch.zeros_like(nowhere))
            torch.testing.assert_close(somewhere.grad, torch.ones_like(somewhere))
            torch.testing.assert_close(everywhere.grad, torch.full_like(everywhere, float(ranks)))
            inside_of_buckets(sums)


def check_dtypes() -> None:
    """A bucket has one dtype; no parameters make no bucket."""
    ranks = dist.get_world_size()
    params = [*parameters(2, 3), nn.Parameter(torch.ones(4)), *parameters(5)]
    sums = GradientSum(params, AXIS)
    assert [len(b.parameters) for b in sums.buckets] == [1, 1, 2]
    sums.start()
    sum(p.sum().double() for p in params).backward()
    sums.wait()
    assert all(torch.equal(p.grad, torch.full_like(p, float(ranks))) for p in params)
    empty = GradientSum([], AXIS)
    empty.start()
    empty.wait()


def check_recompute() -> None:
    """Conversions inside nested recompute regions give the same gradients; a summed parameter is summed once."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    (weight,) = parameters(6)
    sums = GradientSum([weight], AXIS)
    whole = torch.randn(ranks, 6, dtype=torch.float64)

    def inner(x: Tensor) -> Tensor:
        return runtime.all_reduce(torch.tanh(x), axis=AXIS)

    def outer(x: Tensor) -> Tensor:
        return recompute(inner, torch.sin(x @ weight)).exp()

    def program(x: Tensor, region: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        sums.start()
        x = x.clone().requires_grad_()
        region(x).sum().backward()
        sums.wait()
        return x.grad, weight.grad.clone()

    plain = program(whole[rank], lambda x: runtime.all_reduce(torch.tanh(torch.sin(x @ weight)), axis=AXIS).exp())
    again = program(whole[rank], lambda x: recompute(outer, x))
    for a, b in zip(plain, again, strict=True):
        torch.testing.assert_close(a, b)


def check_pieces_of_parameters() -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    whole = torch.arange(72.0).view(6, 12)
    for text in ("R", "S(0)", "S(1)"):
        layout = Layout.parse(text)
        piece = piece_of(whole, layout, [AXIS])
        assert piece.shape == layout.local_shape((6, 12), (ranks,))
        assert torch.equal(piece, pieces.values(layout.states[0], whole, ranks)[rank])
        assert piece.is_contiguous() and piece.data_ptr() != whole.data_ptr()


def check_meshes() -> None:
    """Two axes, one of size one, give the same groups; a mesh of another size is refused."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    try:
        for sizes in ({"a": ranks, "b": 1}, {"a": 1, "b": ranks}):
            set_mesh(sizes)
            for name, size in sizes.items():
                axis = axis_of(name)
                assert (axis.size, axis.rank) == (size, rank if size > 1 else 0)
                x = torch.ones(2, requires_grad=True)
                y = runtime.all_reduce(x, axis=name)
                assert torch.equal(y.detach(), torch.full((2,), float(size)))
        refused = ""
        try:
            set_mesh({"a": ranks + 1})
        except ValueError as error:
            refused = str(error)
        assert f"has {ranks + 1} ranks, this run has {ranks}" in refused
    finally:
        set_mesh({AXIS: ranks})


def check_scope() -> None:
    tensors = {name: torch.zeros(1) for name in ("a.w", "a.b.w", "ab.w", "c")}
    assert set(scope(tensors, "a")) == {"w", "b.w"}
    assert set(scope(tensors, "a.b")) == {"w"}
    assert scope(tensors, "") == tensors


CHECKS: dict[str, Callable[[], None]] = {
    "order in memory": check_order_in_memory,
    "integers and booleans": check_integers,
    "mean cross entropy": check_cross_entropy,
    "mean of pieces": check_mean_of_pieces,
    "gradients are summed": check_sums,
    "one send order": check_send_order,
    "tied parameter": check_tied,
    "parameters without a gradient": check_missing,
    "dtypes": check_dtypes,
    "recompute": check_recompute,
    "pieces of parameters": check_pieces_of_parameters,
    "meshes": check_meshes,
    "scope": check_scope,
}


def run_all() -> dict[str, str]:
    """Case -> the error it ended with on this rank, or ''."""
    cases = {name: lambda c=case: check_conversion(*c) for name, case in conversions().items()} | CHECKS
    errors = {}
    for number, (name, case) in enumerate(cases.items()):
        torch.manual_seed(number)
        try:
            case()
            errors[name] = ""
        except Exception:  # shown by the test of that case
            errors[name] = traceback.format_exc()
    return errors
