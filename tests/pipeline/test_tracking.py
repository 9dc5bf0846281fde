"""Tracking against a real SQLite store: one run per execution, and nothing lost or doubled when things break."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from shardwright.pipeline.base.errors import ShardwrightError
from shardwright.pipeline.tracking import sender as sender
from shardwright.pipeline.tracking import store as store_module
from shardwright.pipeline.tracking import tracker as tracking
from shardwright.pipeline.tracking.spool import StageRecord
from shardwright.pipeline.tracking.store import Location, Store, connect, mend
from shardwright.pipeline.tracking.tracker import Tracker, latest_run_url, sync, ui_command

LOG = logging.getLogger("test")
ROOT = Path(__file__).resolve().parents[2]
DEAD = "http://127.0.0.1:9"


@dataclass(frozen=True)
class Settings:
    enabled: bool = True
    uri: str | None = None
    experiment: str = "shardwright"


NEW_STORE = """
import logging, shutil, sys; from pathlib import Path; logging.basicConfig(level=logging.INFO)
from test_tracking import Settings; from shardwright.pipeline.tracking.tracker import Tracker
from shardwright.pipeline.tracking.spool import StageRecord
from shardwright.pipeline.tracking.store import Store, connect
assert 'mlflow' not in sys.modules
connect(Store.of(Path('.'), Settings()))
shutil.copyfile('runs/mlflow.db', sys.argv[1])
Tracker(Path('.'), Settings(), logging.getLogger(), execution='one').stage(StageRecord('trace'))
"""


def python(script, *arguments, **where):
    paths = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    environment = os.environ | {"PYTHONPATH": paths}
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, **where)


@pytest.fixture(scope="module")
def new_store(tmp_path_factory):
    """A project that had no store when its first record was sent, how that went, and its store before that record."""
    folder, empty = tmp_path_factory.mktemp("new"), tmp_path_factory.mktemp("empty") / "mlflow.db"
    return folder, python(NEW_STORE, str(empty), cwd=folder), empty


@pytest.fixture(scope="module")
def empty_store(new_store):
    """An SQLite store with its tables and no run: creating one takes seconds, copying it none."""
    return new_store[2]


def project(folder, store):
    (folder / "runs").mkdir(parents=True)
    shutil.copyfile(store, folder / "runs" / "mlflow.db")
    return folder


@pytest.fixture
def root(tmp_path, empty_store):
    return project(tmp_path / "a project, 100%", empty_store)


def client(root):
    return connect(Store.of(root, Settings()))


def runs(root):
    mlflow = client(root)
    experiment = mlflow.get_experiment_by_name("shardwright")
    return mlflow.search_runs([experiment.experiment_id]) if experiment else []


def history(root, run, key):
    return [(metric.step, metric.value) for metric in client(root).get_metric_history(run.info.run_id, key)]


def tracker(root, execution="one", run_name="gpt_small", **settings):
    return Tracker(root, Settings(**settings), LOG, run_name=run_name, execution=execution)


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_run_content(root, tmp_path, caplog):
    plan = tmp_path / "plan.json"
    plan.write_text("{}")
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    (pictures / "a.svg").write_text("<svg/>")
    entry = StageRecord(
        "solve",
        params={
            "solver": "glpk",
            "tied": True,
            "bound": None,
            "text": "x" * 7000,
            "empty": "",
            "weird[0]": 1,
            "weird(0)": 2,
        },
        figures={
            "objective": 1.5,
            "layers": 4,
            "bytes[0]": 3,
            "huge": 10**400,
            "nan": float("nan"),
            "reason": "optimal",
        },
        artifacts=(plan, pictures),
        started=100.0,
        ended=200.0,
    )
    tracker(root).stage(entry)
    [run] = runs(root)
    params, metrics, tags = run.data.params, run.data.metrics, run.data.tags
    assert params.pop("solve.text").endswith("[cut, 7000 characters]")
    assert params.pop("solve.weird_0_") == "1"
    assert [value for key, value in params.items() if key.startswith("solve.weird_0_-")] == ["2"]
    assert params["solve.solver"] == "glpk" and params["solve.tied"] == "true" and params["solve.bound"] == "null"
    assert metrics["solve/objective"] == 1.5 and metrics["solve/bytes_0_"] == 3 and metrics["solve/layers"] == 4
    assert metrics["solve/huge"] > 1e300
    assert tags["stage.solve"] == "executed" and tags["solve/reason"] == "optimal"
    assert tags["shardwright.execution"] == "one"
    assert run.info.run_name == "gpt_small"
    assert (run.info.status, run.info.start_time, run.info.end_time) == ("FINISHED", 100_000, 200_000)
    files = [file.path for file in client(root).list_artifacts(run.info.run_id, "solve")]
    assert files == ["solve/pictures", "solve/plan.json"]
    assert (root / "runs" / "mlartifacts" / run.info.run_id / "artifacts" / "solve" / "pictures" / "a.svg").exists()
    assert not list((root / "runs" / "tracking" / "one" / "artifacts").iterdir())
    url = latest_run_url(root, Settings())
    assert url.endswith(
        f"/#/experiments/{run.info.experiment_id}/runs?workflowType=machine_learning&compareRunsMode=CHART"
    )
    assert "shardwright ui" in url and not warnings(caplog)


def test_one_run_per_execution_with_cached_stages(root):
    trace, profile = (StageRecord(name, params={"seed": 1}, figures={"time": 0.5}) for name in ("trace", "profile"))
    tracker(root).stage(StageRecord("solve"), [trace, profile])
    tracker(root).stage(StageRecord("train"), [trace, profile, StageRecord("solve", params={"never": 1})])
    tracker(root, "two", run_name="mine").stage(StageRecord("trace"))
    second, first = runs(root)
    stages = {key: value for key, value in first.data.tags.items() if key.startswith("stage.")}
    assert stages == {
        "stage.trace": "cached", "stage.profile": "cached", "stage.solve": "executed", "stage.train": "executed"
    }  # fmt: skip
    assert first.data.params == {"trace.seed": "1", "profile.seed": "1"}
    assert history(root, first, "trace/time") == [(0, 0.5)]
    assert second.info.run_name == "mine"


def test_a_run_is_named_and_tagged_by_what_its_stages_know(root):
    """The name follows the last record that has one, also where records were written before there was a store."""
    at_first = {"model": "gpt", "engine": "planned"}
    dead = tracker(root, uri=DEAD)
    dead.stage(StageRecord("trace", run_name="gpt on laptop", tags=at_first))
    one = tracker(root)
    one._spool.save(replace(one._spool.state(), retry_after=0.0))
    one.stage(StageRecord("profile", run_name="gpt on laptop", tags=at_first))
    [run] = runs(root)
    assert run.info.run_name == "gpt on laptop" and run.data.tags["model"] == "gpt"
    one.stage(StageRecord("checkpoint", run_name="gpt on laptop, d0=2, 8 GB", tags={**at_first, "mesh": "d0=2"}))
    one.stage(StageRecord("codegen"))
    [run] = runs(root)
    assert run.info.run_name == "gpt on laptop, d0=2, 8 GB"
    assert (run.data.tags["mesh"], run.data.tags["engine"]) == ("d0=2", "planned")
    assert run.data.tags["mlflow.runName"] == run.info.run_name


def test_headline_metrics_sort_before_all_others(root):
    """In the order in which they matter, whichever stage found them, and also from a stage that was cached."""
    planned = StageRecord("checkpoint", figures={"step_ms": 10.0, "peak_mb": 2.0, "bubble_ms": 0.0})
    trained = {"median_step_ms": 12.0, "step_ratio": 1.2, "peak_mb": 2.2, "final_loss": 3.0, "ranks": 2}
    tracker(root).stage(StageRecord("train", figures=trained), [planned])
    [run] = runs(root)
    found = sorted(run.data.metrics)
    first = [key for key in found if "/" not in key]
    assert found[: len(first)] == first
    assert {key.split("_", 1)[1]: run.data.metrics[key] for key in first} == {
        "step_ms": 12.0, "predicted_step_ms": 10.0, "step_ratio": 1.2,
        "peak_mb": 2.2, "predicted_peak_mb": 2.0, "final_loss": 3.0,
    }  # fmt: skip
    assert first[0] == "1_step_ms" and first[-1] == "8_final_loss"
    assert run.data.metrics["train/median_step_ms"] == 12.0
    for limit, count in ((50, 1), (5, 0)):  # as docs/runs.md searches for them
        assert len(client(root).search_runs([run.info.experiment_id], f'metrics."1_step_ms" < {limit}')) == count


def test_stage_run_again_with_other_params(root, caplog):
    one = tracker(root)
    one.stage(StageRecord("solve", params={"gap": 0.1}, figures={"objective": 2.0}, ended=10.0))
    one.stage(StageRecord("solve", params={"gap": 0.2, "new": 1}, figures={"objective": 1.0}, ended=20.0))
    [run] = runs(root)
    assert run.data.params == {"solve.gap": "0.1", "solve.new": "1"}
    assert run.data.tags["changed.solve.gap"] == "0.2"
    assert run.data.metrics == {"solve/objective": 1.0} and not warnings(caplog)


def test_failure_and_another_try(root):
    one = tracker(root)
    one.stage(StageRecord("solve", "failed", error="conf/solve.yaml:3: no plan fits"))
    [run] = runs(root)
    assert run.info.status == "FAILED" and run.data.tags["stage.solve"] == "failed"
    assert run.data.tags["stage.solve.error"] == "conf/solve.yaml:3: no plan fits"
    one.stage(StageRecord("solve"))
    assert runs(root)[0].info.status == "FINISHED"


def test_live_points_arrive_while_training_runs(root, monkeypatch):
    monkeypatch.setattr(tracking, "LIVE_S", 0.05)
    one = tracker(root)
    with one.live("train") as log:
        log(0, {"loss": 2.0})
        deadline = time.monotonic() + 600
        while not runs(root) or not runs(root)[0].data.metrics:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert runs(root)[0].info.status == "RUNNING"
        for step in range(1, 1500):
            log(step, {"loss": float(step), "rate[0]": 0.1})
    one.stage(StageRecord("train", figures={"time": 1.0}))
    [run] = runs(root)
    assert run.info.status == "FINISHED" and run.data.metrics["train/rate_0_"] == 0.1
    assert history(root, run, "train/loss") == [(0, 2.0)] + [(step, float(step)) for step in range(1, 1500)]
    assert (one._spool.folder / "points.jsonl").stat().st_size == 0 and sync(root, Settings(), LOG) == (0, 0)


def test_disabled_does_nothing(root):
    one = tracker(root, enabled=False)
    with one.live("train") as log:
        log(0, {"loss": 1.0})
    one.stage(StageRecord("train"))
    one.complete([StageRecord("solve")])
    assert latest_run_url(root, Settings(enabled=False)) is None
    assert not (root / "runs" / "tracking").exists()


def bad_stores(root):
    (root / "folder.db").mkdir()
    (root / "corrupt.db").write_bytes(b"SQLite format 3\x00" + os.urandom(4000))
    (root / "text.db").write_text("hello " * 100)
    return [
        DEAD,
        "nonsense://me:secret@host",
        "sqlite:///folder.db",
        "sqlite:///corrupt.db",
        "sqlite:///text.db",
        "sqlite:///text.db/below.db",
        "plain/folder",
        "postgresql://me:secret@127.0.0.1:9/runs",
    ]


def test_bad_store_is_told_once_and_sync_sends_later(root, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(tracking, "RETRY_S", 0.0)  # told once even where it is tried, and fails, again
    file = tmp_path / "plan.json"
    file.write_text("then")
    for index, uri in enumerate(bad_stores(root)):
        caplog.clear()
        for stage in ("trace", "solve"):  # each stage is a process of its own: nothing is shared but the disk
            tracker(root, f"e{index}", uri=uri).stage(StageRecord(stage, figures={"time": 1.0}, artifacts=(file,)))
        assert len(warnings(caplog)) == 1, uri
        assert "shardwright sync" in caplog.text and "secret" not in caplog.text
        assert len(warnings(caplog)[0].splitlines()) == 1
    count = index + 1
    file.write_text("now")
    caplog.clear()
    assert sync(root, Settings(uri=DEAD), LOG) == (0, count)
    assert len(warnings(caplog)) == 1
    assert sync(root, Settings(), LOG) == (count, 0)
    assert sync(root, Settings(), LOG) == (0, 0)
    assert len(runs(root)) == count
    for run in runs(root):
        assert history(root, run, "trace/time") == history(root, run, "solve/time") == [(0, 1.0)]
        assert Path(client(root).download_artifacts(run.info.run_id, "solve/plan.json")).read_text() == "then"
        assert run.info.status == "FINISHED"


def test_a_silent_server_is_left_after_its_time_and_asked_once(root, caplog, monkeypatch):
    monkeypatch.setattr(store_module, "CONNECT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        uri = f"http://127.0.0.1:{server.getsockname()[1]}"
        tracker(root, uri=uri).stage(StageRecord("trace"))
        assert len(warnings(caplog)) == 1 and "no answer within" in caplog.text
        monkeypatch.setattr(tracking, "connect", None)  # called by nobody any more
        tracker(root, uri=uri).stage(StageRecord("solve"))
    assert len(warnings(caplog)) == 1


def test_live_never_waits_for_the_store(root, monkeypatch, caplog):
    """What is logged is logged while the store is being asked and does not answer."""
    asked, answer = threading.Event(), threading.Event()

    def never(store):
        asked.set()
        answer.wait()
        raise ConnectionError("no answer")

    monkeypatch.setattr(tracking, "LIVE_S", 0.01)
    monkeypatch.setattr(tracking, "connect", never)
    one = tracker(root, uri=DEAD)
    with one.live("train") as log:
        log(0, {"loss": 0.0})
        asked.wait()
        for step in range(1, 1000):
            log(step, {"loss": float(step)})
        answer.set()
    monkeypatch.undo()
    one.stage(StageRecord("train"))
    assert len(warnings(caplog)) == 1
    assert sync(root, Settings(), LOG) == (1, 0)
    [run] = runs(root)
    assert history(root, run, "train/loss") == [(step, float(step)) for step in range(1000)]


KILLED = """
import json, logging, os, signal, sys
from pathlib import Path
from mlflow.tracking import MlflowClient
from shardwright.pipeline.tracking.spool import StageRecord
from shardwright.pipeline.tracking.tracker import Tracker
from test_tracking import Settings

def deadly(method, count, after):
    whole, calls = getattr(MlflowClient, method), [0]
    def call(*args, **kwargs):
        calls[0] += 1
        if calls[0] == count and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = whole(*args, **kwargs)
        if calls[0] == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    setattr(MlflowClient, method, call)

def send(root, method, count, after):
    tracker = Tracker(root, Settings(), logging.getLogger(), execution="one")
    live = tracker.live("train")
    log = live.__enter__()
    for step in range(2000):
        log(step, {"loss": 1.0 / (step + 1)})
    deadly(method, count, after)
    files = (root / "f.txt",)
    tracker.stage(StageRecord("solve", params={"a": 1}, figures={"time": 2.0}, artifacts=files))

for root, *how in json.loads(sys.argv[1]):
    child = os.fork()
    if child == 0:
        try:
            send(Path(root), *how)
        finally:
            os._exit(1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
KILLS = (("create_run", 1, True), ("log_artifact", 1, True), ("log_batch", 3, False), ("log_batch", 3, True))


@pytest.fixture(scope="module")
def killed(tmp_path_factory, empty_store):
    """Projects whose sender was killed, each in a process of its own; what these import is imported once."""
    roots = {how: project(tmp_path_factory.mktemp("killed") / "a project, 100%", empty_store) for how in KILLS}
    for root in roots.values():
        (root / "f.txt").write_text("x")
    done = python(KILLED, json.dumps([(str(root), *how) for how, root in roots.items()]))
    assert done.stdout.split() == [str(-signal.SIGKILL)] * len(KILLS), done.stderr
    return roots


@pytest.mark.parametrize("how", KILLS)
def test_killed_while_sending(killed, how):
    root = killed[how]
    assert sync(root, Settings(), LOG) == (1, 0)
    assert sync(root, Settings(), LOG) == (0, 0)
    [run] = runs(root)
    assert run.data.params == {"solve.a": "1"}
    assert history(root, run, "solve/time") == [(0, 2.0)]
    assert history(root, run, "train/loss") == [(step, 1.0 / (step + 1)) for step in range(2000)]
    assert [file.path for file in client(root).list_artifacts(run.info.run_id, "solve")] == ["solve/f.txt"]
    assert run.info.status == "KILLED"  # training never told its end


def test_lost_state_and_lost_run(root, caplog):
    one = tracker(root)
    one.stage(StageRecord("trace", params={"a": 1}, figures={"time": 1.0}))
    (one._spool.folder / "sent.json").write_text("{")
    one.stage(StageRecord("solve"))
    [run] = runs(root)
    assert history(root, run, "trace/time") == [(0, 1.0)] and len(warnings(caplog)) == 1
    client(root).delete_run(run.info.run_id)
    one.stage(StageRecord("train"))
    [again] = runs(root)
    assert again.info.run_id != run.info.run_id and again.data.params == {"trace.a": "1"}


def test_damaged_lines_are_told_once_and_cost_no_others(root, caplog):
    one = tracker(root, uri=DEAD)
    with one.live("train") as log:
        log(0, {"loss": 1.0})
        with (one._spool.folder / "points.jsonl").open("a") as file:
            file.write("[1, 2.0,")
        log(2, {"loss": 1.0})
    with (one._spool.folder / "records.jsonl").open("a") as file:
        file.write('{"stage": "so')
    one.stage(StageRecord("train", figures={"time": 1.0}))
    caplog.clear()
    for count in (1, 0):
        assert sync(root, Settings(), LOG) == (count, 0)
    assert ["a damaged record" in text for text in warnings(caplog)] == [True, False]
    [run] = runs(root)
    assert history(root, run, "train/loss") == [(0, 1.0), (2, 1.0)] and run.info.status == "FINISHED"


def test_store_changed_between_stages(root):
    tracker(root).stage(StageRecord("trace", figures={"time": 1.0}))
    other = "sqlite:///other/mlflow.db"
    (root / "other").mkdir()
    shutil.copyfile(root / "runs" / "mlflow.db", root / "other" / "mlflow.db")
    mlflow = connect(Store.of(root, Settings(uri=other)))
    mlflow.delete_run(runs(root)[0].info.run_id)
    tracker(root, uri=other).stage(StageRecord("solve"))
    [run] = mlflow.search_runs([runs(root)[0].info.experiment_id])
    assert run.data.tags["stage.trace"] == run.data.tags["stage.solve"] == "executed"


def test_two_senders_do_not_double(root):
    dead = tracker(root, uri=DEAD)
    with dead.live("train") as log:
        for step in range(3000):
            log(step, {"loss": 1.0})
    dead.stage(StageRecord("train"))
    threads = [threading.Thread(target=sync, args=(root, Settings(), LOG)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    [run] = runs(root)
    assert len(history(root, run, "train/loss")) == 3000


def test_spool_that_cannot_be_written_is_told_once(root, caplog):
    (root / "runs" / "tracking").write_text("in the way")
    one = tracker(root)
    with one.live("train") as log:
        log(0, {"loss": 1.0})
    one.stage(StageRecord("train"))
    assert len(warnings(caplog)) == 1


def test_refused_record_does_not_hold_up_the_others(root, caplog, monkeypatch):
    monkeypatch.setattr(sender, "_key", lambda text: text)  # let MLflow see a name it refuses
    one = tracker(root)
    one.stage(StageRecord("trace", params={"bad[0]": 1}))
    monkeypatch.undo()
    state = one._spool.state()
    one._spool.save(type(state)(**{**vars(state), "retry_after": 0.0}))
    one.stage(StageRecord("solve"))
    [run] = runs(root)
    assert run.data.tags["stage.solve"] == "executed" and run.data.params == {"trace.bad_0_": "1"}
    assert len(warnings(caplog)) == 1


def test_a_new_store_is_created_quietly(new_store):
    folder, done, _ = new_store
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert len(runs(folder)) == 1
    assert sorted(path.name for path in folder.iterdir()) == ["runs"]


def test_ui_command(root):
    command = ui_command(root, Settings())
    assert command[:2] == ["env", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false"]
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert command[command.index("--backend-store-uri") + 1] == f"sqlite:///{root / 'runs' / 'mlflow.db'}"
    with pytest.raises(ShardwrightError, match=r"open http://127\.0\.0\.1:9"):
        ui_command(root, Settings(uri=DEAD))


# ---- a project that was copied or moved with its store


def with_artifact(root, execution, text="original", **settings):
    """A run with an artifact; its number."""
    file = root / "plan.json"
    file.write_text(text)
    tracker(root, execution, **settings).stage(StageRecord("solve", artifacts=(file,)))
    tag = f"tags.`{sender.EXECUTION_TAG}` = '{execution}'"
    [run] = client(root).search_runs(["0", "1"], tag)
    return run.info.run_id


def downloaded(root, run):
    return Path(client(root).download_artifacts(run, "solve/plan.json")).read_text()


def content(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_copy_keeps_its_artifacts_to_itself(root, tmp_path):
    old = with_artifact(root, "old")
    before = content(root)
    copy = tmp_path / "copy"
    shutil.copytree(root, copy)
    new = with_artifact(copy, "new", "copy")
    assert content(root) == before
    shutil.rmtree(root)
    assert (downloaded(copy, old), downloaded(copy, new)) == ("original", "copy")
    assert tracker(copy, "old")._spool.state().store == Store.of(copy, Settings()).digest  # known in the copy, too
    assert mend(copy / "runs/mlflow.db") == 0


@pytest.mark.parametrize("another", [False, True])
def test_a_moved_project_has_its_artifacts_where_it_is(root, tmp_path, another):
    """Also where another project is in its place by now; the one `mlflow ui` looks at is mended as well."""
    old, moved = with_artifact(root, "old"), tmp_path / "moved, 50%"
    empty = (root / "runs/mlflow.db").read_bytes()
    root.rename(moved)
    if another:
        (root / "runs/mlartifacts").mkdir(parents=True)
        (root / "runs/mlflow.db").write_bytes(empty)
    before = content(root)
    ui_command(moved, Settings())
    assert mend(moved / "runs/mlflow.db") == 0
    assert downloaded(moved, old) == "original" and downloaded(moved, with_artifact(moved, "new", "moved")) == "moved"
    assert content(root) == before


def test_what_was_not_taken_along_is_read_from_where_it_is(root, tmp_path):
    old, copy = with_artifact(root, "old"), tmp_path / "copy"
    shutil.copytree(root, copy, ignore=shutil.ignore_patterns("mlartifacts"))
    before = content(root)
    assert downloaded(copy, with_artifact(copy, "new", "copy")) == "copy" and downloaded(copy, old) == "original"
    assert content(root) == before


def test_locations_that_the_user_chose_are_left(root, tmp_path):
    """A folder elsewhere, another scheme, and a store that does not lie in the project."""
    chosen = tmp_path / "chosen" / "mlartifacts"
    chosen.mkdir(parents=True)
    mlflow = client(root)
    for name, place in (("a", chosen.as_uri()), ("b", "s3://bucket/mlartifacts"), ("c", "file:///x/mlruns")):
        mlflow.create_experiment(name, place)
    assert mend(root / "runs/mlflow.db") == 0
    outside = Settings(uri=f"sqlite:///{tmp_path / 'shared.db'}")
    assert Store.of(root, outside).root is None and Store.of(root, Settings(uri=DEAD)).root is None
    moved = tmp_path / "moved"
    root.rename(moved)
    places = {found.name: found.artifact_location for found in client(moved).search_experiments()}
    assert places["a"] == chosen.as_uri() and places["b"].startswith("s3:") and places["c"] == "file:///x/mlruns"
    assert str(moved) in places["Default"]


@pytest.mark.parametrize(
    "text", ["", "mlartifacts", "s3://b/mlartifacts/x", "file://host/mlartifacts", "/a/../mlartifacts/b"]
)
def test_what_is_no_location_of_a_store(text):
    assert Location.of(text) is None
