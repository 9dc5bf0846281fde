"""Processes in one gloo group that stay for many programs: each judges what it is given, as `verify` does."""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import asdict, replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.equality_plans import Case

LIMIT_S, COLLECTIVE_S = 180, 60


class Group:
    """Ranks on this machine; after a program that fails, others take their place."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["torch", "torch._dynamo"])  # imported once for all ranks
        self.processes: list[Any] = []

    def __enter__(self) -> Group:
        self._start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()

    def _start(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.pipes = []
        for rank in range(self.ranks):
            here, there = self.context.Pipe()
            given = (rank, self.ranks, self.folder.name, there)
            process = self.context.Process(target=_serve, args=given, daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def _stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.processes.clear()
        self.folder.cleanup()

    def judge(self, cases: Iterator[Case]) -> Iterator[tuple[Case, dict[str, Any]]]:
        """Each case with what rank 0 found, or the first error of a rank; the next is planned while the ranks work."""
        case = next(cases, None)
        while case is not None:
            for pipe in self.pipes:
                pipe.send(case)
            following = next(cases, None)
            answers = [self._answer(pipe) for pipe in self.pipes]
            failed = [answer for answer in answers if "error" in answer]
            if failed:
                self._stop()
                self._start()
            yield case, failed[0] if failed else answers[0]
            case = following

    def _answer(self, pipe: Any) -> dict[str, Any]:
        try:
            found: dict[str, Any] = pipe.recv() if pipe.poll(LIMIT_S) else {"error": "no answer"}
        except (EOFError, ConnectionError):
            return {"error": "a rank died"}
        return found


def _serve(rank: int, ranks: int, folder: str, pipe: Any) -> None:
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    timeout = timedelta(seconds=COLLECTIVE_S)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=timeout)
    while True:
        try:
            case = pipe.recv()
        except EOFError:  # nobody asks any more
            return
        pipe.send(_answer(case, Path(folder) / f"{rank}.py"))


def _answer(case: Case, path: Path) -> dict[str, Any]:
    try:
        return _judge(case, path)
    except Exception as error:  # a program that fails is one of the answers
        details = "".join(traceback.format_exception(error))
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0], "details": details}


def _judge(case: Case, path: Path) -> dict[str, Any]:
    from benchmarks.equality_models import optimizer
    from shardwright.pipeline.runtime.programs.source import load_program
    from shardwright.stages.verify.compare import judge
    from shardwright.stages.verify.float64 import draws_alike
    from shardwright.stages.verify.locate import Case as Located
    from shardwright.stages.verify.locate import locate

    path.write_text(case.text)
    truth = _truth(case.model, case.plan.micro_batches, draws_alike(case.graph, case.text))
    verdict = judge(load_program(str(path), compiles=False), truth, optimizer)
    worst = verdict.worst
    found: dict[str, Any] = {"worst": worst.over, "tolerance": worst.tolerance, "at": f"{worst.kind} {worst.name}"}
    first = verdict.first()
    if not verdict.equal and first is not None:
        located = Located(case.graph, case.plan, case.text, case.text, str(path))
        found["fault"] = asdict(locate(located, truth, optimizer, first))
    return found


@cache
def _truth(model: str, passes: int, draw: bool) -> Any:
    from benchmarks.equality_models import batches, build, optimizer
    from shardwright.stages.verify.truth import truth_of

    truth = truth_of(lambda: build(model), batches(model, passes), optimizer, draw=draw)
    first = deepcopy(truth.first)  # copies, so that several programs can be held against them
    return replace(truth, first=first, steps=[deepcopy(step) for step in truth.steps])
