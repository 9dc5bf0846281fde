"""Sends a spool to MLflow; with pipeline/tracking/store.py, which connects, the only file that imports mlflow.

Sending twice is harmless, which is what makes it harmless to be killed between sending and noting it: the run is found
again by its tag, a param the run has is not logged again, an artifact is written over by itself, and the store ignores
a metric equal in name, step, time and value to one it has.
"""

from __future__ import annotations

import hashlib
import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

from pipeline.tracking.headline import numbered
from pipeline.tracking.point import tags_in_set
from pipeline.tracking.spool import Point, Scalar, Spool, StageRecord, State
from pipeline.tracking.store import Store

BATCH = 800  # metrics in a batch; with 100 params and 100 tags within MLflow's limit of 1000
PARAM_CHARS, TAG_CHARS, KEY_CHARS = 6000, 8000, 250
EXECUTION_TAG = "shardwright.execution"

T = TypeVar("T")


def send(client: Any, store: Store, spool: Spool, state: State) -> None:
    """Send everything the state does not count as sent, noting progress in the spool; the caller holds its lock."""
    from mlflow.exceptions import MlflowException

    state, run = _open_run(client, store, spool, state)
    if run.info.status != "RUNNING":
        client.update_run(run.info.run_id, status="RUNNING")
    params, refused = dict(run.data.params), None
    for name, entry in spool.records().items():
        if name not in state.done:
            try:
                state = _send_record(client, spool, state, name, entry, params)
            except MlflowException as error:
                if error.error_code != "INVALID_PARAMETER_VALUE":
                    raise
                refused = error  # this record cannot be stored, the others can
    names = [entry.run_name for entry in spool.records().values() if entry.run_name]
    if names and names[-1] != run.info.run_name:
        client.update_run(run.info.run_id, name=names[-1])
    for path in spool.live_files():
        state = _send_live(client, spool, state, path)
    wanted = spool.wanted_status(state)
    if wanted != "RUNNING":
        ends = [entry.ended for entry in spool.records().values()]
        client.set_terminated(state.run_id, wanted, end_time=_ms(max(ends, default=time.time())))
    spool.save(replace(state, status=wanted, retry_after=0.0))
    spool.drop_live(state)
    if refused:
        raise refused


def _open_run(client: Any, store: Store, spool: Spool, state: State) -> tuple[State, Any]:
    """The run of this execution in this store: the one noted, else the one with its tag, else a new one."""
    if state.run_id and state.store == store.digest:
        run = _find_run(client, state.run_id)
        if run is not None:
            return state, run
    words, execution = spool.description(), spool.folder.name
    experiment_id = _experiment(client, store, words.get("experiment", "shardwright"))
    found = client.search_runs([experiment_id], f"tags.`{EXECUTION_TAG}` = '{execution}'", max_results=1)
    started = min((entry.started for entry in spool.records().values()), default=time.time())
    run = (
        found[0]
        if found
        else client.create_run(
            experiment_id,
            start_time=_ms(started),
            tags={EXECUTION_TAG: execution} | tags_in_set(client, experiment_id, EXECUTION_TAG, words.get("sweep")),
            run_name=words.get("run_name", execution),
        )
    )
    fresh = replace(state, store=store.digest, experiment_id=experiment_id, run_id=run.info.run_id, done=(), offsets={})
    spool.save(fresh)
    return fresh, run


def _find_run(client: Any, run_id: str) -> Any:
    from mlflow.exceptions import MlflowException

    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None
    return run if run.info.lifecycle_stage == "active" else None


def _experiment(client: Any, store: Store, name: str) -> str:
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return str(client.create_experiment(name, store.artifacts.as_uri() if store.artifacts else None))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            found = client.get_experiment_by_name(name)  # another process was faster
    return str(found.experiment_id)


def _send_record(
    client: Any, spool: Spool, state: State, name: str, entry: StageRecord, params: dict[str, str]
) -> State:
    keys = _keys(f"{entry.stage}.", entry.params)
    values = {keys[param]: _cut(_text(value), PARAM_CHARS) for param, value in entry.params.items()}
    tags = {**entry.tags, f"stage.{entry.stage}": entry.status}
    if entry.error:
        tags[f"stage.{entry.stage}.error"] = entry.error
    # a run's param cannot change: where a stage ran again with another value, a tag tells it
    tags |= {f"changed.{key}": value for key, value in values.items() if params.get(key, value) != value}
    keys = _keys(f"{entry.stage}/", entry.figures)
    figures = {keys[figure]: value for figure, value in entry.figures.items()} | numbered(entry.stage, entry.figures)
    tags |= {key: _text(value) for key, value in figures.items() if not isinstance(value, int | float)}
    rows = [(key, _number(v), _ms(entry.ended), 0) for key, v in figures.items() if isinstance(v, int | float)]
    fresh = {key: value for key, value in values.items() if key not in params}
    _log(client, state, rows, fresh, tags)
    params |= fresh
    for path in entry.artifacts:
        if path.is_dir():
            client.log_artifacts(state.run_id, str(path), f"{entry.stage}/{path.name}")
        else:
            client.log_artifact(state.run_id, str(path), entry.stage)
    for first in range(state.offsets.get(name, 0), len(entry.series), BATCH):
        _log(client, state, _metrics(entry.stage, entry.series[first : first + BATCH]))
        state = replace(state, offsets={**state.offsets, name: first + BATCH})
        spool.save(state)
    state = replace(state, done=(*state.done, name))
    spool.save(state)
    spool.drop_artifacts(name)
    return state


def _send_live(client: Any, spool: Spool, state: State, path: Path) -> State:
    while True:
        before = state.offsets.get(path.name, 0)
        found = spool.points(path, before)
        if found is None or found[2] == before:
            return state
        stage, points, after = found
        _log(client, state, _metrics(stage, points))
        state = replace(state, offsets={**state.offsets, path.name: after})
        spool.save(state)


Row = tuple[str, float, int, int]  # key, value, time in ms, step


def _metrics(stage: str, points: Sequence[Point]) -> list[Row]:
    rows = []
    for point in points:
        keys = _keys(f"{stage}/", point.values)
        rows += [(keys[name], float(value), _ms(point.at), point.step) for name, value in point.values.items()]
    return rows


def _log(
    client: Any,
    state: State,
    rows: Sequence[Row],
    params: Mapping[str, str] | None = None,
    tags: Mapping[str, str] | None = None,
) -> None:
    from mlflow.entities import Metric, Param, RunTag

    for some, few, marks in zip_longest(
        _chunks(rows, BATCH), _chunks((params or {}).items(), 100), _chunks((tags or {}).items(), 100), fillvalue=()
    ):
        client.log_batch(
            state.run_id,
            metrics=[Metric(*row) for row in some],
            params=[Param(key, value) for key, value in few],
            tags=[RunTag(_key(key), _cut(value, TAG_CHARS)) for key, value in marks],
        )


def _chunks(items: Iterable[T], size: int) -> Iterator[Sequence[T]]:
    whole = list(items)
    return (whole[first : first + size] for first in range(0, len(whole), size))


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
