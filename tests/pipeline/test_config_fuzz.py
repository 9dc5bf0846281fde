"""However conf/ is damaged, loading gives a valid Config or one line that says where the damage is."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwright.pipeline.base.errors import ConfigError
from shardwright.pipeline.config import Config, load_config
from tests.config_mutations import Mutation, any_mutations, chosen_files, invalid_mutations

PROJECT = Path(__file__).parents[2]
MANY = settings(
    max_examples=200,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("project")
    shutil.copytree(PROJECT / "conf", root / "conf")
    yield root


def load_mutated(root: Path, mutation: Mutation) -> Config:
    path = root / mutation.file
    before = path.read_bytes()
    mutation.write(root)
    try:
        return load_config(root)
    finally:
        path.write_bytes(before)


def check_error(error: ConfigError, file: str) -> None:
    line = str(error)
    assert line and line.isprintable() and "Traceback" not in line
    assert len(line) < 600
    assert line.startswith(file) or line.startswith("conf/"), line
    line.encode("utf-8")


@settings(MANY, max_examples=80)
@given(st.data())
def test_invalid_mutations_are_refused_at_the_mutated_file(project: Path, data: st.DataObject) -> None:
    mutation = data.draw(invalid_mutations(PROJECT))
    with pytest.raises(ConfigError) as caught:
        load_mutated(project, mutation)
    assert str(caught.value).startswith(mutation.file), mutation
    check_error(caught.value, mutation.file)


@pytest.mark.long
@MANY
@given(st.data())
def test_any_mutation_loads_or_is_refused_in_one_line(project: Path, data: st.DataObject) -> None:
    mutation = data.draw(any_mutations(PROJECT))
    try:
        config = load_mutated(project, mutation)
    except ConfigError as error:
        check_error(error, mutation.file)
    else:
        for key in ("model", "data", "cluster", "solve", "checkpoint", "train", "code", "tracking"):
            assert len(config.digest(key)) == 64


def test_mutations_cover_every_file_that_is_read() -> None:
    assert list(chosen_files(PROJECT)) == [
        "conf/config.yaml",
        "conf/model/gpt_small.yaml",
        "conf/data/synthetic_tokens.yaml",
        "conf/cluster/local_cpu.yaml",
        "conf/solve/glpk.yaml",
        "conf/checkpoint/rotor.yaml",
        "conf/train/adamw.yaml",
    ]
