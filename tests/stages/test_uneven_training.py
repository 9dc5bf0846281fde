"""Training with shards that are not equal: snapshots, weights that are read and written, and pipelines with tied ones.

No size of the model but its batch's divides by the ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shardwright.pipeline.models import gpt
from shardwright.stages.codegen.partitions import write_partitions
from shardwright.stages.train.loop import Loop
from shardwright.stages.train.worker import make_engine
from tests import plans, snapshot_runs
from tests.piped_training import Case, plan_of
from tests.ranks import run_ranks
from tests.storage_plans import plan_named
from tests.vocabulary import MODEL, vocabulary_plan

EACH, NEAR = 2, 1e-5  # steps under each plan; losses
ON_TWO, ON_FOUR = ("zero3", "vocabulary", "zero1", "piped"), ("pp_zero1",)
JOURNEY = (*ON_TWO, *ON_FOUR, "one")
STOPS = {name: EACH * number for number, name in enumerate(JOURNEY, start=1)}
PIPELINES = {
    "piped": Case(MODEL, "1f1b", (1, 1), micro_batches=1),
    "pp_zero1": Case(MODEL, "1f1b", (2, 2), micro_batches=1, plans="zero1"),
}


def text_of(name: str) -> str:
    if name in PIPELINES:
        return write_partitions(plans.graph_of(MODEL), plan_of(PIPELINES[name]))
    return plans.lowered(MODEL, vocabulary_plan() if name == "vocabulary" else plan_named(MODEL, name))[1]


def job(here: Path, name: str, steps: int, /, **safety: Any) -> dict[str, Any]:
    given = snapshot_runs.job(here, name, steps, **safety)
    shape = {"shape": [12, plans.UNEVEN["context"]], "dtype": "int64"}
    given["model"] |= {
        "module": {"_target_": "shardwright.pipeline.models.gpt.build", **plans.UNEVEN},
        "batch": {"input_ids": shape, "labels": shape},
    }
    given["data"]["dataset"]["vocab_size"] = plans.UNEVEN["vocab_size"]
    return given


def travel(folder: str, *names: str) -> dict[str, list[float]]:
    """On a rank: on under each of these plans, from where the one before has stopped."""
    here, found = Path(folder), {}
    for name in names:
        given = job(here, name, STOPS[name], every=EACH, compare_every=1)
        found[name] = snapshot_runs.train(given, here / "journey")["losses"]
    return found


def on_two_ranks(folder: str) -> dict[str, Any]:
    here = Path(folder)
    plain = snapshot_runs.train(job(here, "vocabulary", STOPS["one"]), here / "plain")["losses"]
    for name in ("vocabulary", "zero3"):  # each reads what the one before wrote
        given = job(here, name, 1)
        given["train"]["init_from"] = None if name == "vocabulary" else str(here / "vocabulary.safetensors")
        engine = make_engine(given)
        if name == "vocabulary":
            Loop(engine, given, here / "plain").run()
        engine.export(here / f"{name}.safetensors")
    return {"plain": plain, **travel(folder, *ON_TWO)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("uneven")


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    for name in JOURNEY:
        (folder / f"{name}.py").write_text(text_of(name))
    return {
        **run_ranks(2, on_two_ranks, str(folder))[0],
        **run_ranks(4, travel, str(folder), *ON_FOUR)[0],
        **run_ranks(1, travel, str(folder), "one")[0],
    }


def test_a_vocabulary_of_17_words_is_split() -> None:
    text = text_of("vocabulary")
    assert '"token.weight": ("S(0)", "", "S(0)"),' in text
    assert "row_split_embedding(" in text and "classes=17)" in text and "[12, 8, 9]" in text


@pytest.mark.parametrize("name", JOURNEY)
def test_a_run_goes_on_under_every_kind_of_plan(found: dict[str, Any], name: str) -> None:
    assert len(found[name]) == STOPS[name]
    assert found[name] == pytest.approx(found["plain"][: STOPS[name]], abs=NEAR)


def test_weights_are_written_without_padding(found: dict[str, Any], folder: Path) -> None:
    """And read with it: another plan writes the same file."""
    first, second = (load_file(folder / f"{name}.safetensors") for name in ("vocabulary", "zero3"))
    shapes = {name: tensor.shape for name, tensor in gpt.build(**plans.UNEVEN).state_dict().items()}
    assert {name: tensor.shape for name, tensor in first.items()} == shapes
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    assert first["token.weight"].count_nonzero() == 17 * 15
