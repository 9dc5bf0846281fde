"""Which settings make a training run what it is: a run goes on from snapshots of the same ones, under any plan."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.base.secrets import without_secrets

# Keys of the train file that change neither a weight nor the order of the data. Any other key counts.
NO_MATTER = {
    "steps",
    "timeout_s",
    "wait_s",
    "accept_edited_module",
    "export",
    "snapshots",
    "resume",
    "max_restarts",
    "hang_s",
    "compare_replicas_every",
    "evaluate",
    "trace_step",
    "engine",
}


def settings_of(model: Mapping[str, Any], data: Mapping[str, Any], train: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that matter, flat. The number of steps does where the learning rate falls until the last one."""
    kept = {key: value for key, value in train.items() if key not in NO_MATTER}
    schedule = train.get("schedule")
    if schedule and schedule.get("decay", "none") != "none" and schedule.get("until") is None:
        kept["schedule"] = {**schedule, "until": train["steps"]}
    return dict(_flat({"model": model, "data": data, "train": kept}))


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value


def digest_of_run(settings: Mapping[str, Any], graph: str, origin: str | None) -> str:
    """`graph` is the digest of the traced model, `origin` that of the snapshot a run is told to begin from."""
    text = json.dumps([settings, graph, origin], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def public(settings: Mapping[str, Any]) -> dict[str, Any]:
    """As they may stand in a snapshot, which others may read."""
    return {key: without_secrets(value) if isinstance(value, str) else value for key, value in settings.items()}


def differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Keys whose values are not the same in both."""
    return sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
