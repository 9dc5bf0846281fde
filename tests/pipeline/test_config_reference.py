"""docs/configuration.md is what the schemas say."""

from __future__ import annotations

from pathlib import Path

from pipeline.config import reference

PAGE = Path(__file__).parents[2] / "docs/configuration.md"


def test_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == reference(), "run: python -m pipeline.config > docs/configuration.md"


def test_rows_tell_type_default_and_range() -> None:
    page = reference()
    assert "| `gap` | number | `1e-06` | >= 0 and < 1 | Relative gap" in page
    assert "| `backend` | choice | required | `glpk`, `highs` | Program" in page
    assert "| `probe.repeats` | integer | `7` | from 3 to 1000 | Times" in page
    assert "| `batch.NAME.shape` | list of integers | required | not empty; each >= 1 | Size" in page
    assert "| `tracking.uri` | text or null | `null` |  | MLflow" in page
