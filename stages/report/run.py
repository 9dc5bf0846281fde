"""`shardwright report`: the page of the run that is under runs/. Codegen and train write one of their own."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from shardwright.pipeline.base.errors import ShardwrightError
from shardwright.pipeline.base.files import write_atomic
from shardwright.pipeline.base.instantiate import add_code_path
from shardwright.pipeline.base.log import Log
from shardwright.pipeline.base.stage import Inputs, Result
from shardwright.pipeline.config import Config, load_config
from shardwright.pipeline.ir.report import Report
from shardwright.pipeline.ops.discovery.remembered import remember_in
from shardwright.stages.report.facts import facts_of
from shardwright.stages.report.page import page_of, page_without_facts
from shardwright.stages.report.priced import ABOVE, read_sources

PAGE = Path("runs") / "report.html"
Run = Callable[[Inputs, Config], Result]


def report(root: Path, arguments: argparse.Namespace, log: Log) -> int:
    """Writes the page of the artifacts that are there; without a plan there is none."""
    config = load_config(root)
    add_code_path(root, config.code)
    remember_in(root / "runs" / "ops")
    sources = read_sources(root, config)
    path = root / arguments.out
    size = _write(page_of(facts_of(sources)), path)
    for note in sources.notes:
        log.warning(note)
    log.info("wrote %s, %.1f kB", arguments.out, size / 1e3)
    return 0


def with_page(run: Run, stage: str) -> Run:
    """A stage's work, and then the page, which lies and is logged with what the stage made."""

    def both(inputs: Inputs, config: Config) -> Result:
        result = run(inputs, config)
        path = page_after(inputs, config, result, inputs.root / "runs" / stage / PAGE.name)
        return replace(result, files=(*result.files, path)) if path else result

    return both


def page_after(inputs: Inputs, config: Config, result: Result, path: Path) -> Path | None:
    """Says on the page why it cannot be made, where that is so: the stage has done its work all the same.

    DVC keeps the page for what the stage read, so a measurement is shown where the stage itself has made it.
    """
    remember_in(inputs.root / "runs" / "ops")
    try:
        measured = result.body if isinstance(result.body, Report) else None
        content = page_of(facts_of(replace(read_sources(inputs.root, config, ABOVE), report=measured)))
    except Exception as error:  # whatever it is, the work of hours is not lost for a picture of it
        why = " ".join(str(error or type(error).__name__).split())
        inputs.log.warning("%s shows nothing: %s", path.relative_to(inputs.root), why)
        content = page_without_facts(why)
    try:
        _write(content, path)
    except ShardwrightError as error:
        inputs.log.warning(error.line())
        return None
    inputs.log.info("wrote %s", path.relative_to(inputs.root))
    return path


def _write(page: str, path: Path) -> int:
    content = page.encode()
    try:
        write_atomic(path, content)
    except OSError as error:
        raise ShardwrightError(f"cannot be written: {error.strerror or error}", where=str(path)) from error
    return len(content)
