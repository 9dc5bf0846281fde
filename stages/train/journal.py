"""steps.jsonl: what rank 0 writes down, a line for each step and each note; the stage follows it.

It lies in a temporary folder that may be full: training does not depend on it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardwright.pipeline.base.files import whole_lines
from shardwright.pipeline.base.log import Advance, Log
from shardwright.pipeline.launch.rank import tell_user
from shardwright.pipeline.launch.work_folder import ROOM
from shardwright.pipeline.tracking.tracker import LogPoint

Note = dict[str, Any]  # a line: a step, or what happened beside the steps


class Journal:
    """What there is no room for waits in memory, and is written with what comes later."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.waiting: list[str] = []
        self.told = False

    def write(self, lines: list[Note]) -> None:
        """Ranks that are started again go on in the same file."""
        self.waiting += [json.dumps(line) + "\n" for line in lines]
        if not self.waiting:
            return
        try:
            self._append("".join(self.waiting).encode())
        except OSError as error:
            if not self.told:
                self.told = True
                tell_user(f"{self.path} cannot be written ({error.strerror}): training goes on, unseen; {ROOM}")
            return
        self.waiting.clear()

    def _append(self, content: bytes) -> None:
        """All of it, or nothing."""
        with open(self.path, "ab", buffering=0, opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            before = os.fstat(file.fileno()).st_size
            try:
                while content:
                    content = content[file.write(content) :]
            except OSError:
                with suppress(OSError):
                    file.truncate(before)
                raise


class Follower:
    """Reads the steps that rank 0 has written so far, and passes them on to the bar and the tracked run.

    Lines that are no steps go to the log; a step that is taken again after a restart is passed on once.
    """

    def __init__(self, log: LogPoint, advance: Advance, tell: Callable[[Note], None] = lambda note: None) -> None:
        self.log, self.advance, self.tell = log, advance, tell
        self.position = 0
        self.next = 0

    def __call__(self, work: Path) -> None:
        for end, line in whole_lines(work / "steps.jsonl", self.position):
            self.position = end
            self._pass_on(json.loads(line))

    def _pass_on(self, step: Note) -> None:
        if "step" not in step:
            self.tell(step)
            for number in range(self.next, step.get("resumed", 0)):  # taken before this run was started
                self.log(number, {"loss": step["losses"][number]})
                self.next = number + 1
            return
        if step["step"] < self.next:
            return
        self.next = step["step"] + 1
        values = {
            "loss": step["loss"],
            "step_ms": step["seconds"] * 1e3,
            "samples_per_second": step["samples"] / step["seconds"],
            "resident_mb": step["resident_bytes"] / 1e6,
        }
        values |= {name: step[name] for name in ("learning_rate", "eval_loss") if name in step}
        self.log(step["step"], values)
        self.advance(step["step"] + 1, f"loss {step['loss']:.4f}")


def tell(log: Log, root: Path, note: Note) -> None:
    """What happened beside the steps, as a line of the log."""
    if "damaged" in note:
        log.warning("snapshot %s; the one before it is taken", note["damaged"])
    elif "resumed" in note:
        path = Path(note.get("from", "the start"))
        where = path.relative_to(root) if path.is_relative_to(root) else path
        if note["restart"]:
            log.warning("a rank failed: all ranks go on from %s (restart %d)", where, note["restart"])
        else:
            log.info("going on after %d steps, from %s", note["resumed"], where)
    elif "stopped" in note:
        anew = "the next start begins anew"
        if not note["asked"]:
            how = f" without a snapshot, as `snapshots.every` is 0: {anew}"
        elif note["kept"] is None:
            how = f": there is no snapshot, and {anew}"
        else:
            how = f": the next start goes on after step {note['kept']} (`resume: auto`)"
        log.warning("stopped after %d steps%s", note["stopped"], how)
    elif "untraced" in note:
        log.warning("step %d is not traced: its memory is measured, and none follows", note["untraced"])
    elif "python_calls" in note:
        log.warning("on %d of %d ranks %s", note["failed"], note["ranks"], note["python_calls"])
    elif "not_captured" in note:
        log.warning("steps are not captured as a CUDA graph: %s", note["not_captured"])
    elif note.get("problem"):
        log.warning(
            "the snapshot after step %d could not be written: %s; those before it stay, and training goes on",
            note["snapshot"],
            note["problem"],
        )
    elif "snapshot" in note:
        log.info("snapshot after %d steps is on the disk", note["snapshot"])
