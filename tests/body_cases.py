"""Local forms of ops on a real rank, against the unsplit op."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F

from shardwright.pipeline.runtime import (
    batch_norm,
    class_split_cross_entropy,
    drawn_apart,
    expert_split,
    row_split_embedding,
)
from shardwright.pipeline.runtime.step.running_stats import DeferredStatistics
from tests.ranks import AXIS


def _mine(x: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Padded with zeros where the shards are not equal."""
    shards = x.chunk(dist.get_world_size(), dim)
    mine = torch.zeros_like(shards[0])
    mine.narrow(dim, 0, shards[dist.get_rank()].shape[dim]).copy_(shards[dist.get_rank()])
    return mine


def _summed(x: torch.Tensor) -> torch.Tensor:
    total = x.detach().clone()
    dist.all_reduce(total)
    return total


def check_class_split_cross_entropy(count: int = 12, **given: int) -> None:
    logits = torch.randn(6, count, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([3, -100, count - 1, 0, -100, 7])
    weight = torch.rand(count, dtype=torch.float64)
    for options in ({}, {"label_smoothing": 0.1}, {"weight": weight, "label_smoothing": 0.3}, {"reduction": "none"}):
        expected = F.cross_entropy(logits, target, **options)
        (full,) = torch.autograd.grad(expected.sum(), logits)
        own = _mine(logits.detach(), 1).requires_grad_()
        loss = class_split_cross_entropy(own, target, AXIS, **options, **given)
        loss.sum().backward()
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(own.grad, _mine(full, 1))


def check_uneven_classes() -> None:
    """Padding behind the last rank's classes counts for nothing, whatever it holds, and has no gradient."""
    for classes in (11, 17):
        check_class_split_cross_entropy(classes, classes=classes)
    own = _mine(torch.zeros(2, 11), 1) + 7.0
    padding = own.shape[1] * dist.get_world_size() - 11 if dist.get_rank() == dist.get_world_size() - 1 else 0
    own[:, own.shape[1] - padding :] = 1e3
    own.requires_grad_()
    loss = class_split_cross_entropy(own, torch.tensor([0, 10]), AXIS, classes=11)
    loss.backward()
    torch.testing.assert_close(loss, torch.tensor(11.0).log())
    assert not own.grad[:, own.shape[1] - padding :].any() or not padding
    with torch.autocast("cpu", torch.bfloat16):  # in which the least number of float32 is an infinity
        loss = class_split_cross_entropy(own, torch.tensor([0, 10]), AXIS, classes=11, label_smoothing=0.1)
    torch.testing.assert_close(loss, torch.tensor(11.0).log())


def check_row_split_embedding(words: int = 12, **given: int) -> None:
    table, indices = torch.randn(words, 4, dtype=torch.float64), torch.tensor([[0, 5, words - 1], [5, 2, 2]])
    whole = table.clone().requires_grad_()
    expected = F.embedding(indices, whole, padding_idx=5)
    expected.square().sum().backward()
    own = _mine(table).requires_grad_()
    rows = row_split_embedding(indices, own, AXIS, padding_idx=5, **given)
    torch.testing.assert_close(_summed(rows), expected)
    rows.backward(2 * expected.detach())
    torch.testing.assert_close(own.grad, _mine(whole.grad))


def check_batch_norm_over_ranks() -> None:
    for shape, weighted in (((12, 3, 5), True), ((12, 2, 3, 4), True), ((12, 3, 5), False)):
        channels = shape[1:2]
        x, weight, bias = (torch.randn(*s, dtype=torch.float64) for s in (shape, channels, channels))
        whole = [v.clone().requires_grad_() for v in (x, weight, bias)[: 3 if weighted else 1]]
        own = [_mine(x).requires_grad_(), *(v.detach().clone().requires_grad_() for v in whole[1:])]
        kept, ours = ([torch.zeros(channels, dtype=torch.float64), torch.ones(channels).double()] for _ in range(2))
        given, our = ((*v[1:], None, None)[:2] for v in (whole, own))
        expected = F.batch_norm(whole[0], *kept, *given, True, 0.1, 1e-5)
        expected.pow(3).sum().backward()
        found = batch_norm(own[0], *our, *ours, True, 0.1, 1e-5, axis=AXIS)
        found.pow(3).sum().backward()
        torch.testing.assert_close(found, _mine(expected))
        torch.testing.assert_close(own[0].grad, _mine(whole[0].grad))
        torch.testing.assert_close([_summed(p.grad) for p in own[1:]], [p.grad for p in whole[1:]])
        torch.testing.assert_close(ours, kept)


def check_batch_norm_in_half_precision() -> None:
    """Statistics are those of float32, whatever type the parameters have."""
    x, gradient = torch.randn(2, 12, 3, 5).bfloat16()
    weight, bias = torch.rand(2, 3).bfloat16()
    whole = [v.float().requires_grad_() for v in (x, weight, bias)]
    F.batch_norm(whole[0], None, None, *whole[1:], True, 0.1, 1e-5).backward(gradient.float())
    for kind in (torch.bfloat16, torch.float32):
        own = [_mine(x).requires_grad_(), *(v.to(kind).clone().requires_grad_() for v in (weight, bias))]
        found = batch_norm(*own, None, None, True, 0.1, 1e-5, axis=AXIS)
        found.backward(_mine(gradient))
        near = {"rtol": 0.02, "atol": 0.02}
        torch.testing.assert_close(own[0].grad.float(), _mine(whole[0].grad), **near)
        for mine, all_of_it in zip(own[1:], whole[1:], strict=True):
            assert mine.grad.dtype == kind
            torch.testing.assert_close(_summed(mine.grad.float()), all_of_it.grad, rtol=0.02, atol=0.1)


def check_deferred_batch_norm_over_ranks() -> None:
    """The statistics of a step are those of all micro-batches of all ranks."""
    batches = [torch.randn(rows, 3, 5, dtype=torch.float64) * rows for rows in (12, 6, 12)]
    kept = [torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)]
    F.batch_norm(torch.cat(batches), *kept, None, None, True, 0.1, 1e-5)
    ours = [torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)]
    with DeferredStatistics([]).step():
        for x in batches:
            found = batch_norm(_mine(x), None, None, *ours, True, 0.1, 1e-5, axis=AXIS)
            torch.testing.assert_close(found, _mine(F.batch_norm(x, None, None, None, None, True, 0.1, 1e-5)))
    torch.testing.assert_close(ours, kept)


def _grouped(rows: torch.Tensor, experts: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    parts = rows.tensor_split(ends[:-1].tolist())
    return torch.cat([part @ expert for part, expert in zip(parts, experts, strict=True)])


def check_expert_split() -> None:
    rows, experts = torch.randn(9, 4, dtype=torch.float64), torch.randn(6, 4, 2, dtype=torch.float64)
    ends = torch.tensor([0, 2, 2, 7, 8, 9])
    whole = [v.clone().requires_grad_() for v in (rows, experts)]
    expected = _grouped(*whole, ends)
    expected.square().sum().backward()
    own = [rows.clone().requires_grad_(), _mine(experts).requires_grad_()]
    found = expert_split(_grouped, *own, ends, axis=AXIS)
    torch.testing.assert_close(_summed(found), expected)
    found.backward(2 * expected.detach())
    torch.testing.assert_close(_summed(own[0].grad), whole[0].grad)
    torch.testing.assert_close(own[1].grad, _mine(whole[1].grad))


def check_draws() -> None:
    """Alike from the shared stream, apart where split, and alike again after that."""
    torch.manual_seed(3)
    for draw, equal in ((lambda: torch.rand(4), True), (lambda: drawn_apart(lambda: torch.rand(4), axis=AXIS), False)):
        found = draw()
        everyone = [torch.empty(4) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, found)
        assert all(torch.equal(x, y) for x in everyone for y in everyone) == equal
    after = torch.rand(4)
    everyone = [torch.empty(4) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, after)
    assert all(torch.equal(x, after) for x in everyone)


CHECKS = {
    "classes of a loss": check_class_split_cross_entropy,
    "uneven classes of a loss": check_uneven_classes,
    "rows of a table": check_row_split_embedding,
    "uneven rows of a table": lambda: check_row_split_embedding(11, rows=11),
    "batch norm": check_batch_norm_over_ranks,
    "deferred batch norm": check_deferred_batch_norm_over_ranks,
    "batch norm in half precision": check_batch_norm_in_half_precision,
    "experts": check_expert_split,
    "draws": check_draws,
}


def run_all() -> None:
    for check in CHECKS.values():
        torch.manual_seed(0)
        check()
