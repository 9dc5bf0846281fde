"""Keys of a run that go together and do not: one line with the file and the key."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardwright.pipeline.base.errors import ConfigError
from shardwright.pipeline.config import load_config

PROJECT = Path(__file__).parents[2]
TRAIN, DATA = "conf/train/adamw.yaml", "conf/data/synthetic_tokens.yaml"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    shutil.copytree(PROJECT / "conf", tmp_path / "conf")
    return tmp_path


def change(root: Path, file: str, **changes: Any) -> None:
    path = root / file
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **changes}))


def test_what_a_run_can_ask_for(project: Path) -> None:
    change(project, TRAIN, steps=30, schedule={"warm_up": 5, "decay": "cosine"}, evaluate={"every": 10}, trace_step=29)
    plain = load_config(project).plain("train")
    assert plain["schedule"] == {"warm_up": 5, "decay": "cosine", "decay_steps": None, "least": 0.0}
    assert plain["evaluate"] == {"every": 10, "batches": 8} and plain["trace_step"] == 29
    assert plain["running_stats"] == "exact"
    change(project, TRAIN, running_stats="deferred")
    assert load_config(project).plain("train")["running_stats"] == "deferred"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"schedule": {"decay_steps": 9}}, "train.schedule.decay_steps: is not read with `decay: none`"),
        ({"schedule": {"warm_up": 9, "decay": "linear", "decay_steps": 9}}, "`decay_steps` the decay ends at step 9"),
        ({"schedule": {"warm_up": 20, "decay": "cosine"}}, "by `steps` the decay ends at step 20"),
        ({"schedule": {"decay": "constant"}}, "did you mean 'none'?"),
        ({"schedule": {"least": 1.5}}, "expected a number from 0 to 1"),
        ({"trace_step": 20}, "the 20 steps are counted from 0"),
        ({"trace_step": 1}, "expected an integer from 2"),
        ({"evaluate": {"every": -1}}, "expected an integer from 0"),
        ({"running_stats": "later"}, "train.running_stats"),
        *(
            (
                {"running_stats": "deferred", "engine": engine},
                f"train.running_stats: 'deferred' is for the plan's program, and `engine` is {engine}",
            )
            for engine in ("ddp", "fsdp2", "single")
        ),
    ],
)
def test_what_does_not_go_together(project: Path, changes: dict[str, Any], told: str) -> None:
    change(project, TRAIN, **changes)
    with pytest.raises(ConfigError) as error:
        load_config(project)
    assert error.value.line().startswith(TRAIN) and told in error.value.line()


def test_evaluation_needs_data(project: Path) -> None:
    change(project, TRAIN, evaluate={"every": 5})
    change(project, DATA, held_out=None)
    with pytest.raises(ConfigError) as error:
        load_config(project)
    assert f"train.evaluate.every: got 5, and {DATA} has no `held_out` data" in error.value.line()
