"""`python -m stages report`: the page of the run that is under runs/; also written after codegen and after train."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from pipeline.config import Config, load_config
from pipeline.errors import ShardwrightError
from pipeline.files import write_atomic
from pipeline.instantiate import add_code_path
from pipeline.ir.report import Report
from pipeline.log import Log
from pipeline.own_ops import know_own_ops
from pipeline.stage import Inputs, Result
from stages.report.facts import facts_of
from stages.report.page import page_of
from stages.report.sources import Sources, read_sources

PAGE = Path("runs") / "report.html"
Run = Callable[[Inputs, Config], Result]


def report(root: Path, arguments: argparse.Namespace, log: Log) -> int:
    """Writes the page of the artifacts that are there; without a plan there is none."""
    config = load_config(root)
    add_code_path(root, config.code)
    sources = read_sources(root, config)
    know_own_ops(config, sources.graph)
    path = root / arguments.out
    size = _write(sources, path)
    for note in sources.notes:
        log.warning(note)
    log.info("wrote %s, %.1f kB", arguments.out, size / 1e3)
    return 0


def with_page(run: Run) -> Run:
    """A stage's work, and then the page, which is logged with what the stage made."""

    def both(inputs: Inputs, config: Config) -> Result:
        result = run(inputs, config)
        path = page_after(inputs, config, result)
        return replace(result, files=(*result.files, path)) if path else result

    return both


def page_after(inputs: Inputs, config: Config, result: Result) -> Path | None:
    """None, and a warning, where the page cannot be made: the stage has done its work all the same."""
    path = inputs.root / PAGE
    try:
        sources = read_sources(inputs.root, config)
        if isinstance(result.body, Report):
            sources = replace(sources, report=result.body)  # just measured, and not written yet
        _write(sources, path)
    except Exception as error:  # whatever it is, the work of hours is not lost for a picture of it
        inputs.log.warning("%s was not written: %s", PAGE, " ".join(str(error or type(error).__name__).split()))
        return None
    inputs.log.info("wrote %s", PAGE)
    return path


def _write(sources: Sources, path: Path) -> int:
    content = page_of(facts_of(sources)).encode()
    try:
        write_atomic(path, content)
    except OSError as error:
        raise ShardwrightError(f"cannot be written: {error.strerror or error}", where=str(path)) from error
    return len(content)
