"""docs/configuration.md is what the schemas say."""

from __future__ import annotations

from pathlib import Path

import yaml

from shardwright.pipeline.base.stage import STAGES
from shardwright.pipeline.config import Backend
from shardwright.pipeline.config.__main__ import reference
from shardwright.pipeline.config.check import fields_of, mandatory
from shardwright.pipeline.config.schema import GROUPS

PROJECT = Path(__file__).parents[2]
PAGE = PROJECT / "docs/configuration.md"


def test_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == reference(), (
        "run: python -m shardwright.pipeline.config > docs/configuration.md"
    )


def test_the_keys_that_dvc_names_are_mandatory_and_those_of_the_stages() -> None:
    """DVC refuses a file without a key that it is to track; a stage names the same keys for its artifact's header."""
    stages = yaml.safe_load((PROJECT / "dvc.yaml").read_text())["stages"]
    named = []
    for stage, told in stages.items():
        if stage not in STAGES:  # train-settings: the whole file, with defaults
            continue
        entries = {file: keys for entry in told.get("params", ()) for file, keys in entry.items() if keys}
        keys = [f"{Path(file).parent.name}.{key}" for file, found in entries.items() for key in found]
        assert set(keys) <= set(STAGES[stage].config), stage
        named += keys
    assert "train.optimizer" in named
    assert "runs/settings/train.json" in stages["solve"]["deps"]
    assert "train.gradient_accumulation" in STAGES["solve"].config
    for group, _, key in (name.partition(".") for name in named):
        assert mandatory(fields_of(GROUPS[group])[key][1]), f"{group}.{key}"


def test_rows_tell_type_default_and_range() -> None:
    page, backends = reference(), ", ".join(f"`{own}`" for own in Backend)
    assert "| `gap` | number | `1e-06` | >= 0 and < 1 | Relative gap" in page
    assert f"| `backend` | choice | required | {backends} | Program" in page
    assert "| `probe.repeats` | integer | `7` | from 3 to 1000 | Times" in page
    assert "| `batch.NAME.shape` | list of integers | required | not empty; each >= 1 | Size" in page
    assert "| `tracking.uri` | text or null | `null` |  | MLflow" in page
