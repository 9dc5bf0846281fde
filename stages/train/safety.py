"""Beside the steps: snapshots, a look at replicas, and a bound on the time of a step.

What happens is told as notes, lines of steps.jsonl beside those of the steps: {"snapshot": 40} once it is on the disk.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pipeline.errors import TrainError
from pipeline.launch import restart_count
from stages.train import replicas
from stages.train.engine import Engine, Job
from stages.train.manifest import name_of
from stages.train.resume import find, restore
from stages.train.snapshots import About, Snapshots
from stages.train.watchdog import Watchdog

Note = dict[str, Any]
OFF = {"every": 0, "keep": 1, "background": False, "hang_s": None, "compare_every": 0, "folder": None}


class Safety:
    def __init__(self, engine: Engine, job: Job, watchdog: Watchdog) -> None:
        self.engine = engine
        self.settings = job.get("safety", OFF)
        self.where = f"{job['where']['train']}: resume"
        self.steps: int = job["train"]["steps"]
        self.program = hashlib.sha256(Path(job["module_path"]).read_bytes()).hexdigest()
        self.watchdog = watchdog
        if self.settings["every"] or self.settings["compare_every"]:
            list(engine.state())  # one that cannot be told is refused now, not after hours
        self.snapshots: Snapshots | None = None
        if self.settings["every"]:
            folder, wait_s = Path(self.settings["folder"]), job["train"]["wait_s"]
            self.snapshots = Snapshots(folder, self.settings["keep"], self.settings["background"], wait_s)

    def resume(self) -> tuple[About, list[Note]]:
        """The state as a snapshot has it, its numbers, and what there is to tell; no numbers for a run that begins."""
        if not self.settings["folder"]:
            return {}, []
        found = find(Path(self.settings["folder"]), self.settings["origin"], self.where)
        notes: list[Note] = [{"damaged": text} for text in found.damaged]
        restarts = restart_count()
        if found.path is None:
            return {}, [*notes, *([{"resumed": 0, "restart": restarts}] if restarts else [])]
        restore(self.engine, found.path, found.about, self.program)
        if self.snapshots and found.path.parent == self.snapshots.folder:
            self.snapshots.saved = found.about["step"]
        told = {"resumed": found.about["step"], "restart": restarts, "losses": found.about["losses"]}
        return found.about, [*notes, {**told, "from": str(found.path)}]

    def same_plan(self, about: About) -> bool:
        return bool(about["program"] == self.program and about["ranks"] == dist.get_world_size())

    def after(self, done: int, numbers: Callable[[], About]) -> list[Note]:
        """When so many steps are done; `numbers` are what the loop wants back when it goes on."""
        self.watchdog.beat(f"the snapshot or the comparison after step {done - 1}", slow=True)
        notes = self._after(done, numbers)
        self.watchdog.beat(f"step {done}")
        return notes

    def _after(self, done: int, numbers: Callable[[], About]) -> list[Note]:
        every = self.settings["every"]
        due = bool(every) and (done % every == 0 or done == self.steps)
        compared = self.settings["compare_every"]
        if compared and (done % compared == 0 or due):
            self._compare(done)
        if not self.snapshots:
            return []
        outcome = self.snapshots.done(wait=due)
        if due:
            self.snapshots.take(self.engine, done, self._about(done, numbers()))
        return [outcome.note()] if outcome else []

    def end(self) -> list[Note]:
        """After the last step, or before the run is given up by all ranks: a snapshot under way is finished."""
        self.watchdog.beat("the last snapshot", slow=True)
        outcome = self.snapshots.done(wait=True) if self.snapshots else None
        return [outcome.note()] if outcome else []

    def last_good(self) -> str:
        """The folder of the last snapshot, for a message; nothing where there is none."""
        if self.snapshots is None or self.snapshots.saved is None:
            return ""
        *_, runs, train, kind, run = self.snapshots.folder.parts
        return str(Path(runs, train, kind, run, name_of(self.snapshots.saved)))

    def _about(self, done: int, numbers: About) -> About:
        here = {"program": self.program, "ranks": dist.get_world_size(), "settings": self.settings["settings"]}
        return {"step": done, "samples": done * self.engine.samples, **here, **numbers}

    def _compare(self, done: int) -> None:
        problem = replicas.compare(self.engine)
        if problem:
            self.end()
            raise TrainError(
                f"after step {done - 1} replicas are no longer equal: {problem}",
                remedy=self.advice("a device or a link is at fault, or an op is not deterministic"),
            )

    def advice(self, text: str) -> str:
        """For the message with which a run is given up."""
        good = self.last_good()
        return f"{text}; the last good snapshot is {good}, name it as `resume` to go on from there" if good else text
