"""The code that dvc.yaml has a stage depend on is the code that the stage imports: an edit leaves no stale result."""

from __future__ import annotations

import pytest

from benchmarks.architecture import code_of, covers, dependencies, missing_dependencies
from shardwright.pipeline.base.stage import STAGES

# How solve comes to know of them, before it begins.
USERS_OPS = {"pipeline/user/own_ops.py", "pipeline/base/instantiate.py"}


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_depends_on_the_code_that_it_imports(stage):
    deps, code = dependencies()[stage], code_of(stage)
    assert len(code) > 3, "nothing was found to look at"
    assert not missing_dependencies()[stage]
    assert not {dep for dep in deps - USERS_OPS if not any(covers(dep, path) for path in code)}, "nothing imports it"


def test_what_is_forgotten_is_seen(monkeypatch):
    whole = dependencies()
    less = {stage: deps - {"pipeline/user/optimizer.py"} for stage, deps in whole.items()}
    monkeypatch.setattr("benchmarks.architecture.dependencies", lambda: less)
    assert missing_dependencies()["profile"] == {"pipeline/user/optimizer.py"} and not missing_dependencies()["trace"]
