"""Before the ranks start: which snapshots belong to this run, and whether it may go on from them.

Settings make a training run what it is: a run goes on from snapshots of the same ones, under any plan.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwright.pipeline.base.errors import TrainError
from shardwright.pipeline.base.secrets import without_secrets
from shardwright.pipeline.base.stage import Inputs, flat
from shardwright.pipeline.config import Config
from shardwright.stages.train.snapshots import manifest

AUTO, NEVER = "auto", "never"
# Keys of the train file that change neither a weight nor the order of the data. Any other key counts.
NO_MATTER = {
    *("steps", "evaluate", "trace_step", "export", "snapshots", "resume", "compare_replicas_every"),
    *("engine", "accept_edited_module", "timeout_s", "wait_s", "max_restarts", "hang_s"),
}


def prepare(inputs: Inputs, config: Config, first: bool = True) -> dict[str, Any]:
    """What the ranks need to know; a run that begins anew finds nothing of an earlier one.

    Where every rank asks, as a launcher outside has started them, the first one alone looks at the folder and puts
    aside what there is: others may see it before, after or in the midst of that. A launcher that starts the ranks
    again runs the whole stage again: they go on from what this very run wrote, whatever `resume` says.
    """
    settings = settings_of(config.plain("model"), config.plain("data"), config.plain("train"))
    origin, listing = _origin(inputs.root, config)
    if listing:
        changed = differing(listing["about"]["settings"], public(settings))
        if changed:
            inputs.log.info("the run begins from %s with other settings of %s", config.train.resume, ", ".join(changed))
    digest = digest_of_run(settings, inputs.artifacts["graph"].digest, listing.get("digest"))
    folder = inputs.root / "runs" / "train" / "snapshots" / digest
    if first:
        launch, again = launch_of(os.environ)
        goes_on = again and manifest.is_of(folder, launch)
        if not goes_on and (config.train.resume == NEVER or manifest.is_finished(folder)):
            aside = ", ".join(str(path.relative_to(inputs.root)) for path in manifest.begin_anew(folder))
            if aside:
                inputs.log.info("training begins anew: %s has the run before until this one has come as far", aside)
        if config.train.snapshots.every:
            manifest.claim(folder, launch)
        newest = next(iter([*manifest.snapshots_in(folder), *([Path(origin)] if origin else [])]), None)
        if newest and manifest.step_of(newest) > config.train.steps:  # it is not cut back without a word
            what = f"{config.train.steps} steps are asked for, and the run has come to step {manifest.step_of(newest)}"
            remedy = "raise `steps`, or begin anew with `resume: never`"
            raise TrainError(what, where=f"conf/train/{config.choices['train']}.yaml: steps", remedy=remedy)
    return {
        "folder": str(folder),
        "settings": public(settings),
        "origin": origin,
        **config.plain("train.snapshots"),
        "hang_s": config.train.hang_s,
        "compare_every": config.train.compare_replicas_every,
    }


def launch_of(environment: Mapping[str, str]) -> tuple[str, bool]:
    """The job that a launcher outside runs this process for, or nothing; and whether it has started it before."""
    launch = environment.get("SLURM_JOB_ID") or environment.get("TORCHELASTIC_RUN_ID", "")
    counts = [environment.get(name, "") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")]
    return launch, any(count not in ("", "0") for count in counts)


def _origin(root: Path, config: Config) -> tuple[str | None, dict[str, Any]]:
    """The snapshot that a run is told to begin from, and its manifest."""
    if config.train.resume in (AUTO, NEVER):
        return None, {}
    path = root / config.train.resume
    where = f"conf/train/{config.choices['train']}.yaml: resume"
    if not manifest.is_snapshot_name(path.name) or not path.is_dir():
        remedy = "give auto, never or a folder such as runs/train/snapshots/0123456789ab/step-000040"
        raise TrainError(f"there is no snapshot {config.train.resume}", where=where, remedy=remedy)
    try:
        return str(path), manifest.read_manifest(path)
    except manifest.Damaged as error:
        what = f"{config.train.resume} is not a whole snapshot: {error}"
        raise TrainError(what, where=where, remedy="name another one") from None
    except manifest.Unreadable as error:
        raise TrainError(f"{config.train.resume} cannot be used: {error}", where=where) from None


# ---- which settings are those of a run


def settings_of(model: Mapping[str, Any], data: Mapping[str, Any], train: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that matter, flat. The number of steps does where the learning rate falls until the last one."""
    kept = {key: value for key, value in train.items() if key not in NO_MATTER}
    schedule = train.get("schedule")
    if schedule and schedule.get("decay", "none") != "none" and schedule.get("decay_steps") is None:
        kept["schedule"] = {**schedule, "decay_steps": train["steps"]}
    return dict([*flat(model, "model"), *flat(data, "data"), *flat(kept, "train")])


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
