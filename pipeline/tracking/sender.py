"""Sends a spool to MLflow; with pipeline/tracking/store.py, which connects, the only file that imports mlflow.

Sending twice is harmless, which is what makes it harmless to be killed between sending and noting it: the run is found
again by its tag, a param the run has is not logged again, an artifact is written over by itself, and the store ignores
a metric equal in name, step, time and value to one it has.
"""

from __future__ import annotations

import hashlib
import math
import re
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import islice
from typing import Any

from shardwright.pipeline.tracking.execution import SWEEP_TAG
from shardwright.pipeline.tracking.headline import numbered
from shardwright.pipeline.tracking.spool import POINTS, Scalar, SendState, Spool, StageRecord
from shardwright.pipeline.tracking.store import Store

PARAM_CHARS, TAG_CHARS, KEY_CHARS = 6000, 8000, 250
BATCH = 500  # points that are sent, and noted as sent, together
EXECUTION_TAG = "shardwright.execution"


def send(client: Any, store: Store, spool: Spool, state: SendState) -> None:
    """Send everything the state does not count as sent, noting progress in the spool; the caller has its lock."""
    from mlflow.exceptions import MlflowException

    state, run = _open_run(client, store, spool, state)
    if run.info.status != "RUNNING":
        client.update_run(run.info.run_id, status="RUNNING")
    params, refused, records = dict(run.data.params), None, spool.records()
    for end, entry in records.items():
        if end in state.done:
            continue
        if entry is None:
            spool.log.warning("tracking: %s: a damaged record before byte %d is skipped", spool.folder, end)
        elif entry.status != "live":
            try:
                _send_record(client, run.info.run_id, entry, params)
            except MlflowException as error:
                if error.error_code != "INVALID_PARAMETER_VALUE":
                    raise
                refused = error  # this record cannot be stored, the others can
                continue
        state = replace(state, done=(*state.done, end))
        spool.save(state)
        for folder in {path.parent for path in entry.artifacts} if entry else ():
            shutil.rmtree(folder, ignore_errors=True)
    known = [entry for entry in records.values() if entry]
    names = [entry.run_name for entry in known if entry.run_name]
    if names and names[-1] != run.info.run_name:
        client.update_run(run.info.run_id, name=names[-1])
    wanted = spool.wanted_status()  # asked first: what a dead writer wrote is all there when it is read
    state = _send_points(client, spool, state)
    if wanted != "RUNNING":
        ends = [entry.ended for entry in known if entry.status != "live"]
        client.set_terminated(state.run_id, wanted, end_time=_ms(max(ends, default=time.time())))
    state = replace(state, status=wanted, retry_after=0.0)
    spool.save(state)
    spool.drop_points(state)
    if refused:
        raise refused


def _open_run(client: Any, store: Store, spool: Spool, state: SendState) -> tuple[SendState, Any]:
    """The run of this execution in this store: the one noted, else the one with its tag, else a new one."""
    if state.run_id and state.store == store.digest:
        run = _unless("RESOURCE_DOES_NOT_EXIST", lambda: client.get_run(state.run_id))
        if run is not None and run.info.lifecycle_stage == "active":
            return state, run
    first, execution = spool.first_run(), spool.folder.name
    named, place = first.get("experiment", "shardwright"), store.artifacts.as_uri() if store.artifacts else None
    if client.get_experiment_by_name(named) is None:  # another process may be faster
        _unless("RESOURCE_ALREADY_EXISTS", lambda: client.create_experiment(named, place))
    experiment_id = str(client.get_experiment_by_name(named).experiment_id)

    def of_execution(name: str) -> Any:
        found = client.search_runs([experiment_id], f"tags.`{EXECUTION_TAG}` = '{name}'", max_results=1)
        return found[0] if found else None

    run = of_execution(execution)
    if run is None:
        tags = {EXECUTION_TAG: execution}
        if sweep := first.get("sweep"):
            above = of_execution(sweep)  # the sweep's own run is the execution of its name
            tags |= {SWEEP_TAG: sweep} | ({"mlflow.parentRunId": above.info.run_id} if above else {})
        started = _ms(min((entry.started for entry in spool.records().values() if entry), default=time.time()))
        name = first.get("run_name", execution)
        run = client.create_run(experiment_id, start_time=started, tags=tags, run_name=name)
    fresh = replace(state, store=store.digest, experiment_id=experiment_id, run_id=run.info.run_id, done=(), points=0)
    spool.save(fresh)
    return fresh, run


def _unless(code: str, ask: Callable[[], Any]) -> Any:
    """What MLflow answers; None where it refuses with that code."""
    from mlflow.exceptions import MlflowException

    try:
        return ask()
    except MlflowException as error:
        if error.error_code != code:
            raise
        return None


def _send_record(client: Any, run_id: str, entry: StageRecord, params: dict[str, str]) -> None:
    """`params` are those that the run has, and then has."""
    from mlflow.entities import Metric, Param, RunTag

    keys = _keys(f"{entry.stage}.", entry.params)
    values = {keys[param]: _cut(_text(value), PARAM_CHARS) for param, value in entry.params.items()}
    tags = {**entry.tags, f"stage.{entry.stage}": entry.status}
    if entry.error:
        tags[f"stage.{entry.stage}.error"] = entry.error
    # a run's param cannot change: where a stage ran again with another value, a tag has it
    tags |= {f"changed.{key}": value for key, value in values.items() if params.get(key, value) != value}
    keys = _keys(f"{entry.stage}/", entry.figures)
    figures = {keys[figure]: value for figure, value in entry.figures.items()} | numbered(entry.stage, entry.figures)
    tags |= {key: _text(value) for key, value in figures.items() if not isinstance(value, int | float)}
    fresh = {key: value for key, value in values.items() if key not in params}
    numbers = {key: _number(value) for key, value in figures.items() if isinstance(value, int | float)}
    client.log_batch(
        run_id,
        metrics=[Metric(key, value, _ms(entry.ended), 0) for key, value in numbers.items()],
        params=[Param(key, value) for key, value in fresh.items()],
        tags=[RunTag(_key(key), _cut(value, TAG_CHARS)) for key, value in tags.items()],
    )
    params |= fresh
    for path in entry.artifacts:
        if path.is_dir():
            client.log_artifacts(run_id, str(path), f"{entry.stage}/{path.name}")
        else:
            client.log_artifact(run_id, str(path), entry.stage)


def _send_points(client: Any, spool: Spool, state: SendState) -> SendState:
    """So many at a time, each time noted."""
    from mlflow.entities import Metric

    while lines := list(islice(spool.lines(POINTS, state.points), BATCH)):
        metrics = []
        for end, line in lines:
            try:
                stage, step, at, values = line
                keys = _keys(f"{stage}/", values)
                metrics += [Metric(keys[key], float(value), _ms(at), int(step)) for key, value in values.items()]
            except (AttributeError, OverflowError, TypeError, ValueError):
                spool.log.warning("tracking: %s: a damaged point before byte %d is skipped", spool.folder, end)
        client.log_batch(state.run_id, metrics=metrics)
        state = replace(state, points=lines[-1][0])
        spool.save(state)
    return state


# -- what MLflow accepts ----------------------------------------------------------------------------------------------


def _keys(prefix: str, names: Iterable[str]) -> dict[str, str]:
    """A key MLflow accepts for every name; different for different names."""
    keys: dict[str, str] = {}
    taken = {prefix + name for name in names}
    for name in names:
        key = _key(prefix + name)
        if key != prefix + name and key in taken:
            key = f"{key[: KEY_CHARS - 9]}-{_hash(name)}"
        keys[name] = key
        taken.add(key)
    return keys


def _key(text: str) -> str:
    """Letters, digits and `_-. :/` only, no part that a path would swallow, not too long."""
    parts = re.sub(r"[^\w.\- :/]", "_", text).split("/")
    key = "/".join(part for part in parts if part not in ("", ".", "..")) or "_"
    return key if len(key) <= KEY_CHARS else f"{key[: KEY_CHARS - 9]}-{_hash(text)}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _text(value: Scalar) -> str:
    """As YAML writes it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def _number(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer beyond what a float holds
        return math.inf if value > 0 else -math.inf


def _cut(text: str, limit: int) -> str:
    mark = f" ... [cut, {len(text)} characters]"
    return text if len(text) <= limit else text[: limit - len(mark)] + mark


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
