"""Every dependency names the oldest version that is allowed, so that `make test-oldest` has one to install."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tests.oldest import constraints


def test_the_oldest_of_each_is_known():
    content = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    found = list(constraints(content["project"]))
    assert "torch==2.11.*" in found and len(found) == len(content["project"]["dependencies"]) + 1
    with pytest.raises(ValueError, match="numpy: no oldest version"):
        list(constraints({"dependencies": ["numpy"], "optional-dependencies": {"hf": []}}))
