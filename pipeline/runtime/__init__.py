"""What generated programs import: conversions between layouts, losses over split batches, recompute, parameters."""

from shardwright.pipeline.runtime.compiler.compiled import channels_last, compiled
from shardwright.pipeline.runtime.programs.autocast import without_autocast
from shardwright.pipeline.runtime.programs.collectives import (
    all_gather,
    all_reduce,
    all_reduce_both,
    all_to_all,
    gather,
    mask,
    mask_both,
    mask_gradient,
    narrow,
    pad,
    reduce_scatter,
    shard,
    sum_gradient,
)
from shardwright.pipeline.runtime.programs.local_ops import (
    batch_norm,
    class_split_cross_entropy,
    count_targets,
    expert_split,
    mean_cross_entropy,
    mean_of_shards,
    row_split_embedding,
    row_split_embedding_bag,
)
from shardwright.pipeline.runtime.programs.parameters import scope
from shardwright.pipeline.runtime.programs.random import drawn_apart
from shardwright.pipeline.runtime.recompute.regather import (
    again,
    all_gather_together,
    keep_shards,
    regather,
    regather_together,
)
from shardwright.pipeline.runtime.recompute.regions import kept, recompute, recompute_except_last

__all__ = [
    "again", "all_gather", "all_gather_together", "all_reduce", "all_reduce_both", "all_to_all", "batch_norm",
    "channels_last", "class_split_cross_entropy", "compiled", "count_targets", "drawn_apart", "expert_split", "gather",
    "keep_shards", "kept", "mask", "mask_both", "mask_gradient", "mean_cross_entropy", "mean_of_shards", "narrow",
    "pad", "recompute", "recompute_except_last", "reduce_scatter", "regather", "regather_together",
    "row_split_embedding", "row_split_embedding_bag", "scope", "shard", "sum_gradient", "without_autocast",
]  # fmt: skip
