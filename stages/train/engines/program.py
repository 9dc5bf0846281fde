"""The written program as a rank reads it."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from pipeline.base import artifacts
from pipeline.base.errors import TrainError
from pipeline.runtime.programs.source import CannotEvaluate, load_program
from stages.train.engines.engine import Job

MODULE = str(artifacts.KINDS["module"].path(Path()))


def program_of(job: Job, *, evaluates: bool = False) -> ModuleType:
    """It must still be what the run was started with: a rank reads it later, and once more after a restart."""
    source = Path(job["module_path"]).read_bytes()
    given = job.get("digests", {}).get(MODULE)
    if given is not None and artifacts.digest_of("module", source) != given:
        raise TrainError(
            "it has changed since the run was started",
            where=MODULE,
            remedy="start the run again, and leave the file as it is while it begins",
        )
    try:
        return load_program(job["module_path"], evaluates=evaluates, source=source)
    except CannotEvaluate as error:
        remedy = "set `evaluate.every` to 0, or draw with a dropout of torch.nn"
        raise TrainError(str(error), where=error.where, remedy=remedy) from error


def is_pipeline(job: Job) -> bool:
    return hasattr(program_of(job), "PARTITIONS")
