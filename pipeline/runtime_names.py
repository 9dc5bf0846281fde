"""Names of the functions generated programs may call, known without importing torch (a test holds them to runtime)."""

from __future__ import annotations

from pipeline.cost.conversions import REGATHER, TABLE

CONVERSIONS = tuple(sorted({entry.function for entry in (*TABLE.values(), REGATHER)}))
BODIES = ("batch_norm", "mean_cross_entropy", "mean_of_pieces")  # local forms of ops
NAMES = (*CONVERSIONS, *BODIES, "keep_shards", "recompute", "scope")
