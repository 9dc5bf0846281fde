"""Names of the functions generated programs may call, known without importing torch (a test holds them to runtime)."""

from __future__ import annotations

from pipeline.cost.conversions import TABLE

CONVERSIONS = tuple(sorted({entry.function for entry in TABLE.values()}))
LOSSES = ("mean_cross_entropy", "mean_of_pieces")
NAMES = (*CONVERSIONS, *LOSSES, "recompute", "scope")
