"""What every rank of a training run is given: plain values, which `run.py` writes as JSON and `worker.py` reads."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

Settings = dict[str, Any]  # of a group of conf/, checked by pipeline.config


class Job(TypedDict):
    module_path: str
    program: NotRequired[str]  # its source, where no file has it
    weights_path: str  # to which they are exported
    trace_path: str  # of the Chrome trace of a step
    spare_result: NotRequired[str | None]  # where the result goes if the work folder has no room
    device: str
    digests: dict[str, str]  # of what the run was started with, by its file
    model: Settings
    data: Settings
    train: Settings
    where: dict[str, str]  # group -> its file
    safety: Settings
