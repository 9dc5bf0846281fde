"""Beside the steps: snapshots, a comparison of replicas, and a bound on the time of a step.

What happens is told as notes, lines of steps.jsonl beside those of the steps: {"snapshot": 40} once it is on the disk.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.pipeline.base.errors import TrainError
from shardwright.pipeline.launch.rank import restart_count
from shardwright.pipeline.runtime.programs.collectives import as_real
from shardwright.stages.train.engines.engine import Engine
from shardwright.stages.train.job import Job
from shardwright.stages.train.journal import Note
from shardwright.stages.train.ranks.joining import gathered
from shardwright.stages.train.ranks.watchdog import Watchdog
from shardwright.stages.train.snapshots.boxes import BITS, BoxedTensor
from shardwright.stages.train.snapshots.manifest import name_of, step_of
from shardwright.stages.train.snapshots.resume import find, restore
from shardwright.stages.train.snapshots.writer import About, SnapshotWriter

Checksums = dict[tuple[str, Any], int]  # by the name of a tensor and the place of the shard in it
OFF = {"every": 0, "keep": 1, "background": False, "hang_s": None, "compare_every": 0, "folder": None}


class Safety:
    def __init__(self, engine: Engine, job: Job, watchdog: Watchdog) -> None:
        self.engine = engine
        self.settings = job.get("safety", OFF)
        self.where = f"{job['where']['train']}: resume"
        self.steps: int = job["train"]["steps"]
        self.made_by: str = job["train"]["engine"]
        self.program = hashlib.sha256(Path(job["module_path"]).read_bytes()).hexdigest()
        self.watchdog = watchdog
        if self.settings["every"] or self.settings["compare_every"]:
            list(engine.state())  # one that cannot be told is refused now, not after hours
        self.snapshots: SnapshotWriter | None = None
        if self.settings["every"]:
            folder, wait_s = Path(self.settings["folder"]), job["train"]["wait_s"]
            self.snapshots = SnapshotWriter(folder, self.settings["keep"], self.settings["background"], wait_s)
        self.finite = 0  # so many steps had a loss that is a number
        self.newest: Path | None = None  # the last snapshot on the disk
        self.good: Path | None = None  # the last one from which a finite loss was computed
        self.problem = "no snapshot was due"  # of the last one that was taken, or nothing

    def resume(self) -> tuple[About, list[Note]]:
        """The state as a snapshot has it, its numbers, and what there is to tell; no numbers for a run that begins."""
        if not self.settings["folder"]:
            return {}, []
        found = find(Path(self.settings["folder"]), self.settings["origin"], self.where)
        notes: list[Note] = [{"damaged": text} for text in found.damaged]
        restarts = restart_count()
        if found.path is None:
            return {}, [*notes, *([{"resumed": 0, "restart": restarts}] if restarts else [])]
        own = self.same_steps(found.about)  # another engine draws otherwise, though the program is the same
        restore(self.engine, found, self.program if own else "")
        self.finite, self.newest, self.good = found.about["step"], found.path, found.before
        numbers = {"resumed": found.about["step"], "restart": restarts, "losses": found.about["losses"]}
        return found.about, [*notes, {**numbers, "from": str(found.path)}]

    def same_steps(self, about: About) -> bool:
        """Whether its times and memory are those of the steps that are taken here: by this engine, of this plan."""
        here = (self.program, dist.get_world_size(), self.made_by)
        return (about["program"], about["ranks"], about.get("engine")) == here

    def after(self, done: int, numbers: Callable[[], About]) -> list[Note]:
        """When so many steps are done; `numbers` are what the loop wants back when it goes on."""
        self.watchdog.beat(f"the snapshot or the comparison after step {done - 1}", slow=True)
        self.finite = done
        self._prove()
        every, compared = self.settings["every"], self.settings["compare_every"]
        due = bool(every) and (done % every == 0 or done == self.steps)
        if compared and (done % compared == 0 or due) and (problem := differing_replicas(self.engine)):
            self.end()
            what = f"after step {done - 1} replicas are no longer equal: {problem}"
            advice = self.advice("a device or a link is at fault, or an op is not deterministic")
            raise TrainError(what, remedy=advice)
        notes = self._outcome(wait=due)
        if self.snapshots and due:
            self.snapshots.take(self.engine, done, self._about(done, numbers()))
        self.watchdog.beat(f"step {done}")
        return notes

    def end(self) -> list[Note]:
        """After the last step, or before the run is given up by all ranks: a snapshot under way is finished."""
        self.watchdog.beat("the last snapshot", slow=True)
        return self._outcome(wait=True)

    def require_last(self, *, exports: bool) -> None:
        """A run whose settings ask for its last state has come to its end only if that is on the disk somewhere."""
        if self.snapshots is None or exports or (self.newest and step_of(self.newest) >= self.steps):
            return
        went_on = f"from {self._shown(self.newest)}" if self.newest else "from the start"
        what = f"the state after the last step could not be saved: {self.problem}"
        remedy = f"mend that, and run again: training goes on {went_on}"
        raise TrainError(what, where=self._shown(self.snapshots.folder), remedy=remedy)

    def stop(self, done: int, numbers: Callable[[], About]) -> list[Note]:
        """All ranks, where the run ends before its last step: a snapshot of where it stands, unless there is one."""
        notes = self.end()
        if self.snapshots and done and not (self.newest and step_of(self.newest) == done):
            self.watchdog.beat("the last snapshot", slow=True)
            self.snapshots.take(self.engine, done, self._about(done, numbers()))
            notes += self._outcome(wait=True)
        kept = step_of(self.newest) if self.newest else None
        return [*notes, {"stopped": done, "kept": kept, "asked": bool(self.settings["every"])}]

    def _outcome(self, *, wait: bool) -> list[Note]:
        """What became of the snapshot that was taken, once that is known."""
        outcome = self.snapshots.done(wait=wait) if self.snapshots else None
        if not outcome or not self.snapshots:
            return []
        step, self.problem = outcome
        if self.problem:
            return [{"snapshot": step, "problem": self.problem}]
        self.newest = self.snapshots.folder / name_of(step)
        self._prove()
        return [{"snapshot": step}]

    def _prove(self) -> None:
        if self.newest and step_of(self.newest) < self.finite:
            self.good = self.newest

    def _shown(self, path: Path) -> str:
        """From the root of the project, as the user names it."""
        *_, root = Path(self.settings["folder"]).parents[:4]
        return str(path.relative_to(root) if path.is_relative_to(root) else path)

    def _about(self, done: int, numbers: About) -> About:
        return {
            "step": done,
            "samples": done * self.engine.samples,
            "settings": self.settings["settings"],
            "program": self.program,
            "ranks": dist.get_world_size(),
            "engine": self.made_by,
            **numbers,
        }

    def advice(self, text: str) -> str:
        """For the message with which a run is given up."""
        if self.good:
            good = self._shown(self.good)
            return f"{text}; the last good snapshot is {good}, name it as `resume` to go on from there"
        return f"{text}; no snapshot is known to be good, begin anew" if self.newest else text


# ---- replicas


def differing_replicas(engine: Engine) -> str:
    """The first tensor whose replicas differ, and on which ranks, or nothing; all ranks ask together."""
    own: Checksums = {}
    for boxed in (BoxedTensor.of(shard) for shard in engine.state() if not shard.drifts):
        own[boxed.name, tuple(box.place for box in boxed.boxes)] = checksum(boxed.tensor)
    return difference(gathered(own))


def checksum(tensor: Tensor) -> int:
    """The sum of all words as integers, modulo 2^64: any one that differs changes it."""
    plain = as_real(tensor)
    words = plain.detach().contiguous().view(-1).view(BITS[plain.element_size()])
    return int(words.sum(dtype=torch.int64))


def difference(everyone: Iterable[Checksums]) -> str:
    first: dict[tuple[str, Any], tuple[int, int]] = {}
    for rank, checksums in enumerate(everyone):
        for key, value in checksums.items():
            other, expected = first.setdefault(key, (rank, value))
            if value != expected:
                return f"{key[0]} differs between rank {other} and rank {rank}"
    return ""
