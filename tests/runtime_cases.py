"""What the ranks of test_runtime run: each case compares a rank's own tensors with the unsplit truth.

Every rank draws the same numbers, so each knows what all hold; `gathered` fetches what they really hold.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.pipeline import runtime
from shardwright.pipeline.ir.layout import B, Layout, P, R, S, State
from shardwright.pipeline.runtime import context
from shardwright.pipeline.runtime.compiler.compiled import compiled
from shardwright.pipeline.runtime.programs.collectives import SHORT, all_reduce, own_sum
from shardwright.pipeline.runtime.programs.local_ops import count_targets, mean_cross_entropy, mean_of_shards
from shardwright.pipeline.runtime.programs.mesh import axis_of, set_mesh, take_first
from shardwright.pipeline.runtime.programs.parameters import scope, shard_of, whole_of
from shardwright.pipeline.runtime.recompute.regions import recompute
from shardwright.pipeline.runtime.step.gradients import Gradients
from shardwright.pipeline.runtime.step.memory import storage_bytes
from shardwright.pipeline.runtime.step.passes import run_passes
from shardwright.pipeline.sharding.conversions import TABLE, conversion
from tests import shards
from tests.compiling import without_kernels
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
    x = shards.values(source, whole, ranks)[rank].requires_grad_()
    given = shards.gradients(target, gradient, ranks)[rank]
    kept = x.detach().clone(), given.clone()
    y = convert(x, source, target)
    shards.check_values(target, gathered(y.detach()), whole, "the value")
    y.backward(given)
    shards.check_gradients(source, gathered(x.grad), gradient, "the source")
    assert torch.equal(x.detach(), kept[0]) and torch.equal(given, kept[1]), "a conversion wrote into its argument"


def check_order_in_memory() -> None:
    """Tensors and gradients that are transposed or expanded in memory are converted by value."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for source, target in [(a, b) for a in (R, B, P, S(0), S(1)) for b in (R, B, P, S(0), S(1)) if a != b]:
        if source.kind + target.kind not in TABLE:
            continue
        whole = torch.randn(12, 6, dtype=torch.float64).t()
        x = shards.values(source, whole, ranks)[rank].t().contiguous().t().requires_grad_()
        y = convert(x, source, target)
        shards.check_values(target, gathered(y.detach()), whole, "the value")
        if target.kind != "B":  # an expanded gradient cannot be different summands
            y.backward(torch.ones((), dtype=torch.float64).expand(y.shape))
            shards.check_gradients(source, gathered(x.grad), torch.ones_like(whole), f"{source} -> {target}")


def check_integers() -> None:
    """Labels, positions and masks are converted too; they have no gradient."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for whole in (torch.arange(72).view(6, 12), torch.arange(72).view(6, 12) % 3 == 0):
        for source, target in [(R, S(1)), (S(0), R), (S(1), S(0)), (S(1), B), (B, S(0)), (R, B), (B, R)]:
            y = convert(shards.values(source, whole, ranks)[rank], source, target)
            shards.check_values(target, gathered(y), whole, f"{source} -> {target}")
            assert not y.requires_grad


def check_scattered_sums() -> None:
    """Short and long ones, and those of a GPU that ranks share, which here is a tensor that says it is on one."""
    axis = axis_of(AXIS)
    for nbytes in (64, SHORT - 8, SHORT, 3 * SHORT):
        for dtype in (torch.float64, torch.bfloat16, torch.int64):
            rows = torch.randint(-9, 9, (axis.size, nbytes // 8 // axis.size)).to(dtype) * (axis.rank + 1)
            wanted = rows.clone()
            dist.all_reduce(wanted)
            found = own_sum(rows.clone(), axis)
            assert found.dtype == dtype and torch.equal(found, wanted[axis.rank])
            with patch.object(Tensor, "is_cuda", property(lambda self: True)):
                assert torch.equal(own_sum(rows, axis), found) and torch.equal(rows, wanted)


def check_axes_of_several() -> str:
    """On two axes of two: long sums and what the first rank has stay within the ranks of an axis."""
    set_mesh({"a": 2, "b": 2})
    rank = dist.get_rank()
    for name, first in (("a", rank % 2), ("b", rank - rank % 2)):
        axis = axis_of(name)
        rows = torch.arange(2 * (SHORT // 8), dtype=torch.float64).view(2, -1) * (rank + 1)
        wanted = rows.clone()
        dist.all_reduce(wanted, group=axis.group)
        assert torch.equal(own_sum(rows, axis), wanted[axis.rank]), name
        own = torch.tensor(rank)
        take_first([own], [name])
        assert own == first, name
    return "done"


def check_cross_entropy() -> None:
    """Ranks hold different numbers of valid targets, the last none at all."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    rows = 4
    for ignored, smoothing, early in [(-100, 0.0, False), (2, 0.3, False), (2, 0.3, True)]:
        logits = torch.randn(rows * ranks, 5, dtype=torch.float64, requires_grad=True)
        target = torch.randint(5, (rows * ranks,))
        target[rows * (ranks - 1) :] = ignored
        target[0] = ignored
        target[1] = 4
        options = {"ignore_index": ignored, "label_smoothing": smoothing}
        expected = F.cross_entropy(logits, target, **options)
        expected.backward()
        own = logits.detach().chunk(ranks)[rank].clone().requires_grad_()
        mine = target.chunk(ranks)[rank]
        if early:
            count_targets(mine, AXIS, ignored)
        loss = mean_cross_entropy(own, mine, AXIS, **options)
        shards.check_values(P, gathered(loss.detach()), expected.detach(), "the loss")
        loss.backward()
        shards.check_gradients(S(0), gathered(own.grad), logits.grad, "the logits")


def check_mean_of_shards() -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    whole = torch.randn(12, 6, dtype=torch.float64)
    own = whole.chunk(ranks)[rank].clone().requires_grad_()
    mean = mean_of_shards(own.mean(), AXIS)
    shards.check_values(P, gathered(mean.detach()), whole.mean(), "the mean")
    mean.backward()
    shards.check_gradients(S(0), gathered(own.grad), torch.full_like(whole, 1 / whole.numel()), "the tensor")


def parameters(*sizes: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(size, 2, dtype=torch.float64)) for size in sizes]


def summed(parameters: list[nn.Parameter], **sizes: float) -> Gradients:
    """All replicated, their gradients summed over the axis."""
    return Gradients(parameters, [("R", AXIS, "R")] * len(parameters), [AXIS], **sizes)


TINY = {"first_mb": 1e-6, "bucket_mb": 1e-6}  # a bucket for each parameter


def check_sums() -> None:
    """Gradients are summed over the ranks, step after step, and stay views of their bucket."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for sizes in ({}, TINY, {"first_mb": 1e-4, "bucket_mb": 3e-4}):
        params = parameters(3, 5, 7, 2)
        sums = summed(params, **sizes)
        assert sums.buckets[0].members[0].parameter is params[-1], "backward finishes the last parameter first"
        for _ in range(2):
            weights = torch.randn(ranks, 4, dtype=torch.float64)
            sums.start()
            total = sum((w * (p**2).sum() for w, p in zip(weights[rank], params, strict=True)), torch.zeros(()))
            total.backward()
            sums.wait()
            for number, p in enumerate(params):
                torch.testing.assert_close(p.grad, 2 * weights[:, number].sum() * p.detach())
            inside_of_buckets(sums)
            assert sums.next == len(sums.buckets)


def check_old_values() -> None:
    """What a bucket holds from the step before does not count: the first gradient takes its place."""
    ranks = dist.get_world_size()
    first, second, unread = params = parameters(3, 4, 5)
    sums = summed(params)
    for passes in (1, 2):
        for flat in sums.buffers():
            flat.fill_(float("nan"))
        sums.start(armed=passes == 1)
        for left in reversed(range(passes)):
            if not left:
                sums.arm()
            (first.sum() + 2 * second.sum()).backward()
        sums.wait()
        for p, factor in ((first, 1.0), (second, 2.0), (unread, 0.0)):
            torch.testing.assert_close(p.grad, torch.full_like(p, passes * factor * ranks))
        inside_of_buckets(sums)


def inside_of_buckets(sums: Gradients) -> None:
    for bucket in sums.buckets:
        start, end = bucket.flat.data_ptr(), bucket.flat.data_ptr() + bucket.flat.numel() * bucket.flat.element_size()
        places = [m.parameter.grad.data_ptr() for m in bucket.members]
        assert all(start <= place < end for place in places), "a gradient left its bucket"
        assert bucket.work is None


def check_send_order() -> None:
    """Ranks that finish their gradients in opposite orders still send their buckets in one order."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    params = parameters(2, 3, 4, 5)
    sums = summed(params, **TINY)
    arrived: list[int] = []
    for number, p in enumerate(params):
        p.register_post_accumulate_grad_hook(lambda _, number=number: arrived.append(number))
    order = list(range(4)) if rank % 2 else list(reversed(range(4)))
    sums.start()
    for number in order:
        (params[number].sum() * (number + 1)).backward()
    sent_before_wait = sums.next
    sums.wait()
    assert arrived == order
    assert sums.next == sent_before_wait == 4
    for number, p in enumerate(params):
        torch.testing.assert_close(p.grad, torch.full_like(p, float(ranks * (number + 1))))


def check_tied() -> None:
    """A parameter that is used twice is sent once, when both its gradients are in it."""
    ranks = dist.get_world_size()
    tied, other = parameters(3, 4)
    sums = summed([tied, other], **TINY)
    calls: list[int] = []
    tied.register_post_accumulate_grad_hook(lambda _: calls.append(sums.next))
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
        sums = summed(params, **sizes)
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
    sums = summed(params)
    assert [len(b.members) for b in sums.buckets] == [1, 3]
    sums.start()
    sum(p.sum().double() for p in params).backward()
    sums.wait()
    assert all(torch.equal(p.grad, torch.full_like(p, float(ranks))) for p in params)
    empty = summed([])
    empty.start()
    empty.wait()


SPLIT = {"S(0)": (6, 2), "S(1)": (5, 6), "S(0:2)": (12, 3), "S(2)": (3, 2, 6)}  # a state's layout, and a shape to split


def check_shards() -> None:
    """ZeRO-1: of each parameter the optimizer has a shard, and what it does is what it would do to the whole."""
    ranks = dist.get_world_size()
    for sizes in ({}, TINY, {"first_mb": 1e-4, "bucket_mb": 3e-4}):
        for is_sum in (True, False):
            whole = [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in SPLIT.values()]
            params = [nn.Parameter(p.detach().clone()) for p in whole]
            rows = [("R", AXIS if is_sum else "", state) for state in SPLIT]
            split = Gradients(params, rows, [AXIS], **sizes)
            optimizers = [torch.optim.AdamW(ps, lr=0.1, weight_decay=0.1) for ps in (whole, split.updated)]
            for step in range(3):
                weights = torch.rand(ranks if is_sum else 1, len(whole), dtype=torch.float64) + step
                unsplit_step(whole, weights.sum(0), optimizers[0])
                shard_step(params, weights[dist.get_rank() if is_sum else 0], split, optimizers[1])
                torch.testing.assert_close([p.detach() for p in params], [p.detach() for p in whole])
                check_state(split.updated, optimizers[1], params)


def unsplit_step(params: list[nn.Parameter], weights: Tensor, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    losses_of(params, weights).backward()
    optimizer.step()


def losses_of(params: list[nn.Parameter], weights: Tensor) -> Tensor:
    return sum((w * (p**2).sum() for w, p in zip(weights, params, strict=True)), torch.zeros(()))


def shard_step(params: list[nn.Parameter], weights: Tensor, split: Gradients, optimizer: torch.optim.Optimizer) -> None:
    split.start()
    losses_of(params, weights).backward()
    assert all(p.grad is None for p in params), "a gradient lies in its bucket alone"
    split.wait()
    assert split.next == len(split.buckets)
    assert all(p.is_contiguous() and p.grad.is_contiguous() for p in split.updated), "fused optimizers need this"
    optimizer.step()
    split.publish()


def check_state(shards: list[nn.Parameter], optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
    """Two tensors of AdamW, each a rank's part of the parameters; shards take no memory beside their parameters."""
    ranks = dist.get_world_size()
    held = [t for shard in shards for t in optimizer.state[shard].values() if t.dim()]
    assert storage_bytes(held) == 2 * sum(p.numel() * p.element_size() for p in params) // ranks
    own = storage_bytes(params)
    assert storage_bytes([*params, *shards]) == own


def check_shards_among_others() -> None:
    """Parameters that are summed, sharded or complete come one after another; a bucket waits for its last gradient."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    params = [nn.Parameter(torch.randn(6, 2, dtype=torch.float64)) for _ in range(7)]
    rows = [("R", AXIS, "R"), ("R", AXIS, "S(0)"), ("R", "", "R")] * 2 + [("R", AXIS, "S(0)")]
    mixed = Gradients(params, rows, [AXIS])
    sets = [[next(n for n, p in enumerate(params) if p is m.parameter) for m in b.members] for b in mixed.buckets]
    assert sets == [[6, 4, 1], [3, 0]], "in the order of the last gradient"
    before = [p.detach().clone() for p in params]
    mixed.start()
    losses_of(params[:4] + params[5:], torch.full((6,), float(rank + 1))).backward()  # none reaches the fifth
    mixed.wait()
    total = ranks * (ranks + 1)  # twice the sum of 1..ranks
    for number, (shard, value) in enumerate(zip(mixed.updated, before, strict=True)):
        sharded, is_sum = rows[number][2] == "S(0)", rows[number][1] == AXIS
        expected = (total if is_sum else 2 * (rank + 1)) * value * (number != 4)
        torch.testing.assert_close(shard.grad, expected.chunk(ranks)[rank] if sharded else expected)
    torch.optim.SGD(mixed.updated, lr=1.0).step()
    mixed.publish()
    for number in (1, 4, 6):
        torch.testing.assert_close(params[number].detach(), before[number] * (1 - total * (number != 4)))


def check_micro_batches() -> None:
    """Over three backward passes gradients add up on the rank; buckets are sent in the last, step after step."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    params = [nn.Parameter(torch.randn(6, 2, dtype=torch.float64)) for _ in range(4)]
    rows = [("R", AXIS, "R"), ("R", AXIS, "S(0)"), ("R", "", "R"), ("R", "", "S(0)")]
    mixed = Gradients(params, rows, [AXIS], **TINY)
    kept = []
    for _ in range(2):
        weights = torch.rand(ranks, 3, 4, dtype=torch.float64)
        weights[:, :, 2:] = weights[0, :, 2:]  # where nothing is summed the ranks agree
        mixed.start(armed=False)
        for number in range(3):
            if number == 2:
                mixed.arm()
            losses_of(params, weights[rank, number]).backward()
            assert bool(mixed.next) is (number == 2), "sent before the last pass"
        mixed.wait()
        assert mixed.next == 3
        kept.append(params[2].grad.data_ptr())
        for number, (row, shard) in enumerate(zip(rows, mixed.updated, strict=True)):
            total = weights[:, :, number].sum() if row[1] else weights[0, :, number].sum()
            expected = 2 * total * params[number].detach()
            torch.testing.assert_close(shard.grad, expected.chunk(ranks)[rank] if row[2] == "S(0)" else expected)
        torch.optim.SGD(mixed.updated, lr=0.1).step()
        mixed.publish()
    assert kept[0] == kept[1], "a gradient that is not summed keeps its memory"


class Copying:
    """A program with a copy for the whole step, of a parameter that is read as it is stored too."""

    def __init__(self, shard: nn.Parameter) -> None:
        self.shard, self.made = shard, 0

    def copies(self) -> dict[str, Tensor]:
        self.made += 1
        return {"whole": runtime.all_gather(self.shard, axis=AXIS, dim=0)}

    def forward(self, weight: Tensor, whole: Tensor) -> Tensor:
        return recompute(lambda w: (w**2).sum(), whole) * weight + (self.shard * weight).sum() + whole.sum()


def check_copies_of_a_step() -> None:
    """A copy that all passes read is made once, and its gradient goes back to the parameter once."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    whole = torch.randn(2 * ranks, 3, dtype=torch.float64)
    shard = nn.Parameter(whole.chunk(ranks)[rank].clone())
    program, reached = Copying(shard), []
    shard.register_post_accumulate_grad_hook(reached.append)
    gradients = Gradients([shard], [("S(0)", "", "S(0)")], [AXIS])
    for step in range(2):
        weights = [torch.tensor(float(w), dtype=torch.float64) for w in (1, 2, 5 + step)]
        losses = run_passes(program, gradients, ({"weight": w} for w in weights), 3)
        for loss, weight in zip(losses, weights, strict=True):
            own = (shard.detach() * weight).sum()
            torch.testing.assert_close(loss, (whole**2).sum() * weight + own + whole.sum())
        mean = sum(weights) / 3
        torch.testing.assert_close(shard.grad, ranks * (2 * mean * shard.detach() + 1) + mean)
        assert program.made == step + 1
        assert len(reached) == 3 * (step + 1), "by the passes that read it as it is stored"


class Gathering:
    """Two layers whose weights are gathered for each, the first of them in a region that runs again."""

    def __init__(self, shards: list[nn.Parameter]) -> None:
        self.shards = shards

    def forward(self, x: Tensor) -> Tensor:
        with runtime.keep_shards():
            return self.layer(recompute(lambda x: self.layer(x, 0), x), 1).sum()

    def layer(self, x: Tensor, number: int) -> Tensor:
        weight, bias = self.shards[2 * number : 2 * number + 2]
        whole, added = runtime.regather_together((weight, 0), (bias, 0), axis=AXIS)
        return torch.tanh(torch.nn.functional.linear(x, whole, added))


def check_ahead() -> None:
    """From the second step on every gather but the first has begun before it is asked for; new values are gathered."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    size = 2 * ranks
    whole = [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in ((size, size), (size,)) * 2]
    shards = [nn.Parameter(p.detach().chunk(ranks)[rank].clone()) for p in whole]
    program = Gathering(shards)
    gradients = Gradients(shards, [("S(0)", "", "S(0)")] * 4, [AXIS])
    optimizers = [torch.optim.SGD(ps, lr=0.1) for ps in (whole, gradients.updated)]
    inputs = torch.randn(3, ranks, 3, size, dtype=torch.float64, requires_grad=True)
    for step, passes in enumerate((1, 1, 2)):
        expected = torch.zeros((), dtype=torch.float64)
        for x in inputs[:passes].flatten(0, 1):
            y = torch.tanh(torch.nn.functional.linear(x, whole[0], whole[1]))
            expected = expected + torch.tanh(torch.nn.functional.linear(y, whole[2], whole[3])).sum() / passes
        optimizers[0].zero_grad()
        expected.backward()
        run_passes(program, gradients, [{"x": inputs[n, rank]} for n in range(passes)], passes)
        asked, used = len(gradients.prefetch.seen), gradients.prefetch.used
        assert asked == passes * 5, "for two layers forward, for one of them again, for two layers backward"
        assert used == (0, asked - 1, 4)[step], "of a step that is longer than the last, as much as it"
        for p, shard in zip(whole, shards, strict=True):
            torch.testing.assert_close(shard.grad, p.grad.chunk(ranks)[rank])
        for optimizer in optimizers:
            optimizer.step()


def check_ahead_of_another_order() -> None:
    """What was begun and is not asked for is left; the values are right whatever order a step takes."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    shards = [nn.Parameter(torch.full((2,), 1.0 * rank + 10 * n)) for n in range(3)]
    gradients = Gradients(shards, [("S(0)", "", "S(0)")] * 3, [AXIS])
    for order, used in (((0, 1, 2), 0), ((0, 1, 2), 2), ((0, 2, 1), 0), ((0, 2), 1), ((2, 0, 1), 0)):
        gradients.start()
        for n in order:
            found = runtime.regather(shards[n], axis=AXIS, dim=0).detach()
            assert found.tolist() == [1.0 * r + 10 * n for r in range(ranks) for _ in range(2)]
        assert gradients.prefetch.used == used
        gradients.wait()
        assert gradients.prefetch.begun is None
    outside = runtime.regather(shards[0], axis=AXIS, dim=0)
    assert len(gradients.prefetch.seen) == 3 and outside.shape == (2 * ranks,), "outside of a step nothing begins"


def check_later() -> None:
    """The sum of a loss rides in a bucket, a second one goes alone; both are there when the gradients are.

    What is of another type than the gradients goes alone too. Outside of a step it is summed at once.
    """
    ranks, rank = dist.get_world_size(), dist.get_rank()
    (weight,) = parameters(3)
    gradients, other = summed([weight]), summed(parameters(2))
    value, total = weight.detach().sum(), ranks * (ranks + 1) / 2
    for dtype, riding in ((weight.dtype, 1), (torch.float16, 0)):
        gradients.start()
        other.start()
        losses = [runtime.all_reduce((weight.sum() * (rank + 1)).to(dtype), axis=AXIS, is_last=True) for _ in range(3)]
        assert sum(slot.value is not None for slot in (*gradients.slots, *other.slots)) == 2 * riding
        assert len(context.step.sums) == 3 - 2 * riding
        sum(losses).backward()
        other.wait()
        gradients.wait()
        for loss in losses:
            torch.testing.assert_close(loss.detach(), (value * total).to(dtype))
        torch.testing.assert_close(weight.grad, torch.full_like(weight, 3 * total))
        assert not context.step.slots and not context.step.sums
    gradients.start()
    loss = runtime.all_reduce(weight.sum() * (rank + 1), axis=AXIS, is_last=True)
    context.step.settle()
    torch.testing.assert_close(loss.detach(), value * total)
    gradients.wait()
    torch.testing.assert_close(loss.detach(), value * total)
    torch.testing.assert_close(runtime.all_reduce(value, axis=AXIS, is_last=True), value * ranks)


def check_recompute() -> None:
    """Conversions inside nested recompute regions give the same gradients; a summed parameter is summed once."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    (weight,) = parameters(6)
    sums = summed([weight])
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


def moving_block(x: Tensor, p: dict[str, Tensor]) -> Tensor:
    h = torch.tanh(x @ p["w"])
    h = all_reduce(h, axis=AXIS)
    return torch.sin(h) * 2


def check_compiled() -> None:
    """A compiled block moves what it would move, and its gradients are those of the plain one."""
    shape = torch.rand(4, 3), torch.rand(3, 3)
    found = []
    with warnings.catch_warnings(), without_kernels():
        warnings.simplefilter("ignore")  # torch's own, when it compiles
        for block in (moving_block, compiled(moving_block, keeps=1.0)):
            x, w = (tensor.clone().requires_grad_() for tensor in shape)
            result = block(x * (dist.get_rank() + 1), {"w": w})
            result.square().sum().backward()
            found.append((result.detach(), x.grad, w.grad))
    for plain, own in zip(*found, strict=True):
        torch.testing.assert_close(own, plain)


def check_shards_of_parameters() -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    whole = torch.arange(72.0).view(6, 12)
    for text in ("R", "S(0)", "S(1)"):
        layout = Layout.parse(text)
        shard = shard_of(whole, layout, [AXIS])
        assert shard.shape == layout.local_shape((6, 12), (ranks,))
        assert torch.equal(shard, shards.values(layout.states[0], whole, ranks)[rank])
        assert shard.is_contiguous() and shard.data_ptr() != whole.data_ptr()
    for shape in ((7, 12), (12, 5), (1, 3)):
        whole = torch.arange(1.0, 1 + shape[0] * shape[1]).view(shape)
        for text in ("R", "S(0)", "S(1)"):
            layout = Layout.parse(text)
            shard = shard_of(whole, layout, [AXIS])
            assert shard.shape == layout.local_shape(shape, (ranks,))
            (rows, columns) = (sum(n for _, n in runs) for runs in layout.runs(shape, (ranks,), (rank,)))
            assert shard.count_nonzero() == rows * columns, "all else is padding"
            assert torch.equal(whole_of(shard, shape, layout, [AXIS]), whole)


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
    "scattered sums": check_scattered_sums,
    "mean cross entropy": check_cross_entropy,
    "mean of shards": check_mean_of_shards,
    "gradients are summed": check_sums,
    "old values of buckets": check_old_values,
    "one send order": check_send_order,
    "tied parameter": check_tied,
    "parameters without a gradient": check_missing,
    "dtypes": check_dtypes,
    "shards of the optimizer's state": check_shards,
    "shards among other parameters": check_shards_among_others,
    "micro-batches": check_micro_batches,
    "copies of a step": check_copies_of_a_step,
    "gathers ahead": check_ahead,
    "gathers ahead in another order": check_ahead_of_another_order,
    "the loss comes later": check_later,
    "recompute": check_recompute,
    "compiled": check_compiled,
    "shards of parameters": check_shards_of_parameters,
    "meshes": check_meshes,
    "scope": check_scope,
}


def run_all() -> dict[str, str]:
    """Case -> the error it ended with on this rank, or ''."""
    cases = {name: lambda c=case: check_conversion(*c) for name, case in conversions().items()} | CHECKS
    errors = {}
    for number, (name, case) in enumerate(cases.items()):
        torch.default_generator.manual_seed(number)
        try:
            case()
            errors[name] = ""
        except Exception:  # shown by the test of that case
            errors[name] = traceback.format_exc()
    return errors
