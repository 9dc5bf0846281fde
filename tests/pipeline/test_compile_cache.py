"""The folder with torch's compiled code is this user's alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardwright.pipeline.runtime.compiler import host_calls as cache


def test_a_folder_of_somebody_else_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.CACHE, "")  # as it is afterwards, whatever is set in between
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    own = tmp_path / "own"
    assert cache.is_own(own) and own.stat().st_mode & 0o777 == 0o700
    own.chmod(0o777)
    assert cache.is_own(own) and own.stat().st_mode & 0o777 == 0o755
    (tmp_path / "link").symlink_to(own)
    (tmp_path / "nowhere").symlink_to(tmp_path / "x")
    assert not cache.is_own(tmp_path / "link") and not cache.is_own(tmp_path / "nowhere")
    monkeypatch.setattr(os, "geteuid", lambda: own.stat().st_uid + 1)
    cache.own_cache_folder.__wrapped__()
    assert Path(os.environ[cache.CACHE]).parent == tmp_path
    assert Path(os.environ[cache.CACHE]).name.startswith("torchinductor-")
    monkeypatch.setenv(cache.CACHE, "named")
    cache.own_cache_folder.__wrapped__()
    assert os.environ[cache.CACHE] == "named"
