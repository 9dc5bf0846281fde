"""Names of the functions generated programs may call, known without importing torch (a test holds them to runtime)."""

from __future__ import annotations

from shardwright.pipeline.sharding.conversions import REGATHER, TABLE

CONVERSIONS = tuple(sorted({entry.function for entry in (*TABLE.values(), REGATHER)}))
BODIES = (  # local forms of ops
    "batch_norm",
    "class_split_cross_entropy",
    "drawn_apart",
    "expert_split",
    "mean_cross_entropy",
    "mean_of_shards",
    "row_split_embedding",
    "row_split_embedding_bag",
)
EARLY = ("count_targets",)  # what an op begins before the first link; it returns nothing
TOGETHER = ("all_gather_together", "regather_together")  # of several parameters
REGIONS = ("recompute", "recompute_except_last")
NAMES = (
    *CONVERSIONS,
    *TOGETHER,
    *BODIES,
    *EARLY,
    "again",
    "channels_last",
    "compiled",
    "keep_shards",
    "kept",
    *REGIONS,
    "scope",
    "without_autocast",
)
