"""Print the configuration reference: `python -m pipeline.config > docs/configuration.md`."""

from __future__ import annotations

from pipeline.config.reference import reference

print(reference(), end="")
