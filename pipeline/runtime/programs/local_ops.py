"""Local forms of ops: what a rank computes where the batch, the classes, a table's rows or the experts are split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypedDict, Unpack

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shardwright.pipeline.runtime.context import step
from shardwright.pipeline.runtime.programs.collectives import all_reduce, own_part, shards_of_all, summing_few
from shardwright.pipeline.runtime.programs.mesh import combine, combining, position

# ------------------------------------------------------------------------------------------------------------- losses
# Over a split batch each rank returns its summand of the loss of the whole batch. Over split classes (Megatron's
# parallel loss) the logits are never gathered: the ranks exchange one largest logit, one sum of exponentials and one
# target's logit for each row, and every rank returns the whole loss.


def count_targets(target: Tensor, axis: str, ignore_index: int = -100) -> None:
    """Begins to sum over the ranks what the loss of these targets divides by: it is there by the time of the loss."""
    step.target_counts[target] = axis, ignore_index, combining(_weight_of(target, None, ignore_index), axis)


def _target_count(target: Tensor, axis: str, weight: Tensor | None, ignore_index: int) -> Callable[[], Tensor]:
    *begun, count = step.target_counts.get(target, (None,))
    if weight is None and begun == [axis, ignore_index]:
        return count  # type: ignore[no-any-return]
    return combining(_weight_of(target, weight, ignore_index), axis)


def _weight_of(target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """What the mean divides by: the valid targets, or their classes' weights; exact, whatever the logits' type."""
    if target.is_floating_point():  # probabilities: the mean counts rows
        return torch.tensor(target.numel() // target.shape[1], dtype=torch.float64, device=target.device)
    valid = target != ignore_index
    if weight is None:
        return valid.sum().to(torch.float64)
    return weight.to(torch.float64)[target.where(valid, 0)].where(valid, 0.0).sum()


def mean_cross_entropy(
    logits: Tensor,
    target: Tensor,
    axis: str,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Divides by the count of valid targets of all ranks: a mean of means is wrong where the counts differ."""
    options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    count = _target_count(target, axis, weight, ignore_index)
    loss = F.cross_entropy(logits, target, weight, reduction="sum", **options)  # type: ignore[arg-type]
    return loss / count().to(logits.dtype)


def mean_of_shards(mean: Tensor, axis: str) -> Tensor:
    """A mean over this rank's shard as its summand of the mean over all shards, which are of equal size."""
    return mean / position(axis)[1]


class _HidePadding(torch.autograd.Function):
    """What lies behind the first columns becomes the least number there is, in place: its exponential is zero.

    So is its gradient then, and what comes back is passed on as it is.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, columns: int) -> Tensor:
        x[:, columns:] = torch.finfo(x.dtype).min
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


class CrossEntropySettings(TypedDict, total=False):
    """As torch.nn.functional.cross_entropy has them."""

    reduction: str
    ignore_index: int
    label_smoothing: float


def class_split_cross_entropy(
    logits: Tensor,
    target: Tensor,
    axis: str,
    rows: str = "",
    weight: Tensor | None = None,
    classes: int | None = None,
    **settings: Unpack[CrossEntropySettings],
) -> Tensor:
    """Cross entropy of logits whose classes (dim 1) lie on `axis`; target and class weights are whole.

    `rows` is an axis over which the batch is split too, for the mean. `classes` says how many there are where they do
    not divide: behind the last rank's own is padding, which counts for nothing.
    """
    ignore_index, label_smoothing = settings.get("ignore_index", -100), settings.get("label_smoothing", 0.0)
    reduction = settings.get("reduction", "mean")
    classes = logits.shape[1] * position(axis)[1] if classes is None else classes
    first, own = own_part(classes, *position(axis))
    valid = target != ignore_index
    largest = combine(logits.detach()[:, :own].amax(1), axis, dist.ReduceOp.MAX)
    shifted = logits - largest.unsqueeze(1)
    if shifted.shape[1] != own:
        shifted = _HidePadding.apply(shifted, own)  # type: ignore[no-untyped-call]
    log_sum = all_reduce(shifted.exp().sum(1), axis).log()
    place = target.where(valid, 0) - first
    mine = (place >= 0) & (place < own) & valid
    picked = shifted.gather(1, place.where(mine, 0).unsqueeze(1)).squeeze(1).where(mine, 0.0)
    scale = 1.0 if weight is None else weight[target.where(valid, 0)]
    loss = (log_sum - all_reduce(picked, axis)) * scale
    if label_smoothing:
        owned = logits.new_ones(own) if weight is None else weight[first : first + own]
        every = torch.tensordot(shifted[:, :own], owned, dims=([1], [0]))
        total = float(classes) if weight is None else weight.sum()
        smooth = (log_sum * total - all_reduce(every, axis)) / classes
        loss = loss * (1 - label_smoothing) + smooth * label_smoothing
    loss = loss.where(valid, 0.0)
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    return loss.sum() / _target_count(target, rows, weight, ignore_index)().to(logits.dtype)


# --------------------------------------------------------------------------------------------------- tables of rows
# Each rank looks up the indices it holds and gives zeros for the others. `rows` says how many there are where they do
# not divide: what lies behind the last rank's own is padding.


def row_split_embedding(
    indices: Tensor, table: Tensor, axis: str, padding_idx: int | None = None, rows: int | None = None
) -> Tensor:
    """This rank's summand of the rows; the row `padding_idx` is read but takes no gradient."""
    place, mine = _own_rows(indices, table, axis, rows)
    found = F.embedding(place.where(mine, 0), table)
    if padding_idx is not None:
        found = found.detach().where((indices == padding_idx).unsqueeze(-1), found)
    return found.where(mine.unsqueeze(-1), 0.0)


def _own_rows(indices: Tensor, table: Tensor, axis: str, rows: int | None) -> tuple[Tensor, Tensor]:
    """Of each index: its row in this rank's table, and whether it has it."""
    first, own = own_part(table.shape[0] * position(axis)[1] if rows is None else rows, *position(axis))
    place = indices - first
    return place, (place >= 0) & (place < own)


class BagSettings(TypedDict, total=False):
    """As torch.nn.functional.embedding_bag has them."""

    per_sample_weights: Tensor | None
    include_last_offset: bool
    padding_idx: int | None


def row_split_embedding_bag(
    indices: Tensor,
    table: Tensor,
    axis: str,
    mode: str,
    offsets: Tensor | None = None,
    rows: int | None = None,
    **settings: Unpack[BagSettings],
) -> Tensor:
    """This rank's summand of the sums or means of bags; of the largest (`max`) the whole.

    Bags are the rows of `indices`, or begin at `offsets`. What equals `padding_idx` is in no bag.
    """
    per_sample_weights, padding_idx = settings.get("per_sample_weights"), settings.get("padding_idx")
    include_last_offset = settings.get("include_last_offset", False)
    place, mine = _own_rows(indices, table, axis, rows)
    counts = torch.ones_like(indices, dtype=torch.bool) if padding_idx is None else indices != padding_idx
    mine = mine & counts
    place = place.where(mine, 0)
    if offsets is None:
        bags = indices.shape[0]
        bag = torch.arange(bags, device=indices.device).repeat_interleave(indices.shape[1])
    else:
        bags = offsets.shape[0] - include_last_offset
        number = torch.arange(indices.shape[0], device=indices.device, dtype=offsets.dtype)
        bag = torch.searchsorted(offsets, number, right=True) - 1
    if mode == "max":
        return _largest(F.embedding(place.flatten(), table), mine.flatten(), bag, bags, axis)
    weights = mine.to(table.dtype) if per_sample_weights is None else per_sample_weights.where(mine, 0.0)
    if mode == "mean":
        sizes = table.new_zeros(bags).index_add(0, bag, counts.flatten().to(table.dtype))
        weights = weights / sizes.clamp(min=1)[bag].view(weights.shape)
    options = {"mode": "sum", "per_sample_weights": weights, "include_last_offset": include_last_offset}
    return F.embedding_bag(place, table, offsets, **options)  # type: ignore[arg-type]


def _largest(found: Tensor, mine: Tensor, bag: Tensor, bags: int, axis: str) -> Tensor:
    """Of every bag and column; of equal ones the first has the gradient, on the rank that holds it."""
    none, last = float("-inf"), found.shape[0]
    if not last:  # no bag has an index
        return found.sum(0).expand(bags, -1)
    values = found.detach().masked_fill(~mine.unsqueeze(1), none)
    at = bag.unsqueeze(1).expand_as(values)
    most = values.new_full((bags, values.shape[1]), none).scatter_reduce(0, at, values, "amax")
    whole = combine(most, axis, dist.ReduceOp.MAX)
    number = torch.arange(last, device=bag.device).unsqueeze(1)
    is_it = (values == whole[bag]) & mine.unsqueeze(1)
    place = torch.full_like(whole, last, dtype=torch.int64).scatter_reduce(0, at, number.where(is_it, last), "amin")
    held = place == combine(place, axis, dist.ReduceOp.MIN)
    own = found.gather(0, place.clamp(max=last - 1))
    return own.where(held & (place < last), whole.where(whole != none, 0.0))


# ------------------------------------------------------------------------------------------------------------ experts


def expert_split(product: Callable[..., Tensor], rows: Tensor, experts: Tensor, ends: Tensor, axis: str) -> Tensor:
    """This rank's summand of a product of groups of rows, each with its own matrix: zeros for others' experts.

    Rows are sorted by expert, `ends` says where each expert's rows end.
    """
    own = experts.shape[0]
    first = position(axis)[0] * own
    start = int(ends[first - 1]) if first else 0
    end = int(ends[first + own - 1])
    found = product(rows[start:end], experts, ends[first : first + own] - start)
    before, after = found.new_zeros(start, found.shape[1]), found.new_zeros(len(rows) - end, found.shape[1])
    return torch.cat((before, found, after))


# --------------------------------------------------------------------------------------------------------- batch norm


class BatchNormSettings(TypedDict, total=False):
    axis: str
    again: bool


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    *given: Any,
    **settings: Unpack[BatchNormSettings],
) -> Tensor:
    """Batch norm, whose running statistics change once a micro-batch, also where a recompute region runs it twice.

    Given are whether it trains, its momentum and its epsilon. `axis` is the one over which the batch is split: the
    statistics are those of the whole batch. Where a step collects statistics (pipeline/runtime/step/running_stats.py),
    the running ones are left to it. `again` is the second run of a region, for those who know.
    """
    training, momentum, eps = given
    axis, again = settings.get("axis", ""), settings.get("again", step.thread.replaying)
    if training and running_mean is not None and running_var is not None:
        if step.statistics is not None:
            running_mean, running_var = step.statistics.scratch(running_mean, running_var, momentum, _count(x, axis))
            momentum = 1.0
        elif again:
            running_mean, running_var = running_mean.clone(), running_var.clone()  # these take the change
    if not training or not axis:
        return F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
    running = None if running_mean is None or running_var is None else (running_mean, running_var, momentum)
    result: Tensor = _BatchNorm.apply(x, weight, bias, eps, axis, running)  # type: ignore[no-untyped-call]
    return result


def _count(x: Tensor, axis: str) -> int:
    """How many numbers of a channel there are on all ranks of the axis."""
    return int(x.numel() // x.shape[1]) * position(axis)[1]


class _BatchNorm(torch.autograd.Function):
    """With the statistics of the batch of all ranks: one collective forward, of each rank's, and one backward.

    Both ways the kernel for given statistics does the work on whole tensors: it scales, and it adds up gradients of
    weight and bias, which are what the gradient of the statistics is made of. In the input's gradient

        dx = dy * a  -  a / n * (sum dy  +  (x - mean) / deviation * sum(dy * (x - mean) / deviation))

    with a = weight / deviation and sums over all ranks, the kernel has the sums, and the rest is a line in x and dy. An
    op on a few numbers takes a CPU as long as one on thousands, so these stay together, and are as few as can be.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        axis: str,
        running: tuple[Tensor, Tensor, float] | None,
    ) -> Tensor:
        wide = torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype  # of all but the images
        own = torch.stack(torch.batch_norm_update_stats(x.to(wide), None, None, 0.0))
        means, variances = shards_of_all(own, axis).unbind(1)
        between, mean = torch.var_mean(means, 0, correction=0)
        var = variances.mean(0).add_(between)
        count = _count(x, axis)
        if running is not None:
            running_mean, running_var, momentum = running
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            running_var.lerp_(var.mul(count / (count - 1)).to(running_var.dtype), momentum)
        scale, shift = (None if given is None else given.to(wide) for given in (weight, bias))
        ctx.save_for_backward(x, scale, mean, var)
        ctx.eps, ctx.axis, ctx.count = eps, axis, count
        ctx.dtypes = [None if given is None else given.dtype for given in (weight, bias)]
        return torch.native_batch_norm(x, scale, shift, mean, var, False, 0.0, eps)[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight, mean, var = ctx.saved_tensors
        given = (gradients[0].contiguous(), x, weight, mean, var, None, None, False, ctx.eps, [True, True, True])
        of_x, *of_both = torch.ops.aten.native_batch_norm_backward(*given)
        sums = summing_few(torch.stack(of_both), ctx.axis)
        inverse = (var + ctx.eps).rsqrt()  # while the sums are under way
        factor = inverse / -ctx.count if weight is None else weight * inverse / -ctx.count
        slope, offset = (sums() * torch.stack((factor * inverse, factor))).to(x.dtype).unbind()
        offset = offset.addcmul(slope, mean.to(x.dtype), value=-1)
        shape = (1, -1, *(1,) * (x.dim() - 2))
        of_x.addcmul_(x, slope.view(shape)).add_(offset.view(shape))
        return of_x, *(g.to(d) if d else None for g, d in zip(of_both, ctx.dtypes, strict=True)), None, None, None
