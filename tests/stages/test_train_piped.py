"""Pipelines on real ranks: losses, weights and exported files are those of the unsplit module, in float64.

Each partition has a random plan of its own, with random layouts of what it sends, random storage of its parameters and
random recompute regions; so what crosses a cut lies otherwise at its reader, and tied parameters at their holders.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardwright.pipeline.runtime.programs.source import load_program
from shardwright.stages.verify.locate import Fault
from tests.compiling import compiles_attention_in_float64
from tests.piped_training import Case, judge, put_off_in, train, write_case
from tests.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without units for bfloat16
CASES = (
    Case("tied", "gpipe", (1, 1), seed=1),
    Case("gpt", "1f1b", (1, 1)),
    Case("ladder", "1f1b", (1, 1), clip_norm=0.1),  # a partition without parameters, and rungs across the cut
    Case("tied", "interleaved", (1, 1), chunks=2),  # both holders on one rank
    Case("odd", "zero_bubble", (1, 1), micro_batches=2),  # buffers, frozen and unused parameters
    Case("gpt", "zero_bubble", (1, 1), micro_batches=2, precision="amp"),
    Case("gpt", "1f1b", (1, 1), micro_batches=2, precision="amp"),  # what crosses the cut is in bfloat16
    Case("gpt", "gpipe", (1, 1), micro_batches=2, precision="bf16"),
    Case("tied", "gpipe", (2, 2), micro_batches=2, plans="data_parallel", clip_norm=0.05),
    Case("gpt", "1f1b", (2, 2), micro_batches=2, plans="megatron"),
    Case("tied", "interleaved", (2, 2), chunks=2, micro_batches=2, seed=1),
    Case("shared", "zero_bubble", (2, 2), seed=3),
    Case("gpt", "zero_bubble", (2, 2), plans="zero", clip_norm=0.1),  # buckets of shards
    Case("tied", "1f1b", (2, 2), micro_batches=2, plans="zero1"),  # shards that are empty between steps
    Case("odd", "zero_bubble", (2, 2), micro_batches=2, seed=2),
    Case("tied", "zero_bubble", (1, 2, 1)),
    Case("odd", "gpipe", (2, 2), micro_batches=2, seed=2),  # copies of a parameter that several links read
    Case("tied", "1f1b", (3, 1), seed=2),
    Case("unet", "1f1b", (2, 2), micro_batches=2, seed=11),  # statistics of batch norms
    Case("shared", "gpipe", (1, 2, 1), micro_batches=2, seed=5),
    Case("unet", "1f1b", (1, 1), micro_batches=3, seed=1, batch_norm="deferred"),
    Case("unet", "gpipe", (2, 2), micro_batches=2, seed=11, batch_norm="deferred"),
    Case("tied", "1f1b", (1, 1), micro_batches=6, slices=3, clip_norm=0.1),
    Case("unet", "gpipe", (1, 1), micro_batches=4, slices=4, seed=4, batch_norm="deferred"),  # 2, 2, 1 and 1 samples
    Case("gpt", "interleaved", (2, 2), chunks=2, micro_batches=6, slices=3, seed=3),
    Case("shared", "1f1b", (2, 2), micro_batches=2, slices=2, seed=6),
    Case("gpt", "gpipe", (1, 1), micro_batches=6, slices=6, seed=2),  # one sample each
    Case("tied", "1f1b", (1, 1), micro_batches=8, slices=4, clip_norm=0.1),  # two passes, each of 2, 2, 1 and 1
    Case("gpt", "zero_bubble", (1, 1), micro_batches=4, slices=4),
    Case("ladder", "interleaved", (1, 1), chunks=2, micro_batches=4, slices=4),
    Case("tied", "gpipe", (2, 2), micro_batches=2, slices=2, grain=2, plans="data_parallel"),  # 4 and 2, of two ranks
    Case("gpt", "1f1b", (2, 2), micro_batches=4, slices=4, plans="megatron"),
    Case("shared", "zero_bubble", (1, 2, 1), micro_batches=4, slices=2, grain=2, seed=1),
    Case("tied", "gpipe", (1, 1), seed=1, keeps_last=True),
    Case("gpt", "1f1b", (2, 2), micro_batches=3, keeps_last=True),
    Case("unet", "interleaved", (1, 1), chunks=2, micro_batches=4, slices=4, seed=2, keeps_last=True),  # 2, 2, 1 and 1
    Case("gpt", "zero_bubble", (1, 1), keeps_last=True),  # only the last one's products are put off
    Case("gpt", "gpipe", (2, 2), plans="zero", micro_batches=3, keeps_last=True),
)
COMPILED = (
    Case("tied", "zero_bubble", (1, 1), micro_batches=2, compiled=True),  # products are not put off
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("piped")


@pytest.fixture(scope="module")
def errors(folder: Path) -> dict[str, str]:
    """Of all cases, on the same ranks for all of one number of devices."""
    found: dict[str, str] = {}
    for ranks in (2, 4):
        own = folder / str(ranks)
        own.mkdir()
        for case in CASES:
            if sum(case.devices) == ranks:
                write_case(case, own)
        by_rank = run_ranks(ranks, train, str(own))
        found |= {name: "\n".join(filter(None, (each.get(name, "") for each in by_rank))) for name in by_rank[0]}
    return found


@pytest.fixture(scope="module")
def errors_compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A rank waits while the one before it compiles."""
    folder = tmp_path_factory.mktemp("compiled")
    for case in COMPILED:
        write_case(case, folder)
    one, other = run_ranks(2, train, str(folder))
    return {name: one[name] + other.get(name, "") for name in one}


@pytest.mark.skipif(not compiles_attention_in_float64(), reason="torch 2.11 cannot")
@pytest.mark.parametrize("case", COMPILED, ids=lambda case: case.name)
def test_a_pipeline_of_compiled_blocks_trains_as_the_unsplit_module(
    case: Case, errors_compiled: dict[str, str]
) -> None:
    assert errors_compiled[case.name] == ""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_pipeline_trains_as_the_unsplit_module(case: Case, errors: dict[str, str]) -> None:
    assert errors[case.name] == ""


def test_the_cases_have_what_they_are_for(errors: dict[str, str], folder: Path) -> None:
    texts = {path.stem: path.read_text() for path in folder.glob("*/*.py")}
    programs = [load_program(str(path)) for path in folder.glob("*/*.py")]
    rows = [row for program in programs for cut in program.SENT for row in cut.values()]
    assert any(row["from"] != row["to"] for row in rows) and any(not row["gradient"] for row in rows)
    assert any(len(cut) > 1 for program in programs for cut in program.SENT)
    assert any(program.TIED for program in programs) and any("recompute(" in text for text in texts.values())
    assert any("def copies" in text for text in texts.values()) and any("BUFFERS" in text for text in texts.values())
    put_off = [text.split("class Partition1")[1] for name, text in texts.items() if "zero_bubble" in name]
    for what in ("recompute(", "keep_shards(", "def copies"):
        assert any(what in text for text in put_off), f"no gradients are put off with {what}"
    of_gpt = [case for case in CASES if case.schedule == "zero_bubble" and case.model == "gpt"]
    without = [case for case in of_gpt if not put_off_in(case, last=True)[1]]
    assert not without, "their second partition has no product that is put off"


# ---- verify


WRONG = {
    "forward": (r"(F\.linear\(x, p\[.token.weight.\]\))", r"\1 * (1 + 1e-6)"),  # of the second partition
    "backward": (
        "^def norm(.*\n.*\n.*\n)    return layer_norm$",
        r"def norm\1    return 2 * layer_norm - layer_norm.detach()",
    ),
    "untied": ("^TIED = .*$", "TIED = {}"),
}


@pytest.fixture(scope="module", params=[1, 4])
def judged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Fault | None]]:
    """By rank: program -> what differs first, if anything does."""
    folder = tmp_path_factory.mktemp("judged")
    write_case(Case("tied", "1f1b", (1, 1), micro_batches=4, slices=request.param), folder)
    (path,) = folder.glob("*.py")
    text = path.read_text()
    path.rename(folder / "right.py")
    path.with_suffix(".truth").rename(folder / "case.truth")
    for name, (right, wrong) in WRONG.items():
        assert len(re.findall(right, text, re.MULTILINE)) == 1
        (folder / f"{name}.py").write_text(re.sub(right, wrong, text, flags=re.MULTILINE))
    return run_ranks(2, judge, str(folder))


def test_verify_judges_pipelines(judged: list[dict[str, Fault | None]]) -> None:
    """All ranks name the same op, whichever of them has the partition that it is in."""
    one, other = judged
    assert one == other and one["right"] is None
    wrong, undone, untied = (one[name] for name in WRONG)
    assert wrong and wrong.what == f"the result of {wrong.op} differs" and wrong.target == "aten.linear.default"
    assert wrong.source == "gpt.py:69" and wrong.text.startswith("linear = F.linear(x") and wrong.difference > 0
    assert undone and "forward is equal, but the gradient of the result of layer_norm" in undone.what
    assert undone.source == "gpt.py:69" and undone.module == "norm"
    assert untied and "but the gradient of token.weight is not" in untied.what and ", and TIED, line" in untied.what
