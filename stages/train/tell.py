"""What happened beside the steps, as lines of the log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.base.log import Log


def tell(log: Log, root: Path, note: dict[str, Any]) -> None:
    if "damaged" in note:
        log.warning("snapshot %s; the one before it is taken", note["damaged"])
    elif "resumed" in note:
        where = _shown(note["from"], root) if "from" in note else "the start"
        if note["restart"]:
            log.warning("a rank failed: all ranks go on from %s (restart %d)", where, note["restart"])
        else:
            log.info("going on after %d steps, from %s", note["resumed"], where)
    elif "stopped" in note:
        log.warning("%s", _of_stop(note["stopped"], note["kept"], note["asked"]))
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


def _of_stop(done: int, kept: int | None, asked: bool) -> str:
    if not asked:
        return f"stopped after {done} steps without a snapshot, as `snapshots.every` is 0: the next start begins anew"
    if kept is None:
        return f"stopped after {done} steps: there is no snapshot, and the next start begins anew"
    return f"stopped after {done} steps: the next start goes on after step {kept} (`resume: auto`)"


def _shown(path: str, root: Path) -> str:
    return str(Path(path).relative_to(root)) if Path(path).is_relative_to(root) else path
