"""What benchmarks.gpipe measures: two halves of a stack, alike but for the ends, alone and as a pipeline."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import gpipe
from shardwright.pipeline.ir.names import look_up
from shardwright.pipeline.runtime.programs.source import load_program


def test_the_partitions_are_equal(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(gpipe.program(width=8, layers=4, batch=2, micro_batches=3))
    program = load_program(str(path))
    assert program.SCHEDULE == "gpipe" and program.MICRO_BATCHES == 3 and program.DEVICES == (1, 1)
    first, last = program.PARTITIONS
    layers = ["hidden.0", "hidden.1", "hidden.2", "out"]
    held = [[name for name in layers if look_up(part.PARAMETERS, f"{name}.weight")] for part in (first, last)]
    assert held == [layers[:2], layers[2:]]
    assert program.SENT[0]["x"]["shape"] == (2, 8)


@pytest.mark.usefixtures("warm_python")
def test_the_work_is_done_alone_and_in_the_pipeline() -> None:
    ((work, step),) = gpipe.measured(width=8, layers=4, batch=2, micro_batches=3, pairs=1)
    assert work > 0 and step > 0
