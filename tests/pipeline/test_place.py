"""Which rank a process is, as launchers outside say it; and one rank that is run where it was started."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.pipeline.base.errors import TrainError
from shardwright.pipeline.launch.launch import run_ranks
from shardwright.pipeline.launch.place import PORTS, RankPlace, find_place, first_host, tasks_of_nodes
from shardwright.pipeline.launch.work_folder import LaunchFailed

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}  # fmt: skip
SLURM = {
    "SLURM_JOB_ID": "41007", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NODELIST": "node[07-10]", "SLURM_STEP_TASKS_PER_NODE": "2(x4)", "SLURM_NODEID": "2",
}  # fmt: skip
names = st.text("abcxyz-", min_size=1, max_size=5)


def test_torchrun_says_it() -> None:
    place = find_place(TORCHRUN)
    assert place == RankPlace(3, 8, 1, "10.0.0.1", 29500, 2)
    assert find_place(place.environment()) == place


def test_slurm_says_it_for_steps_of_several_tasks() -> None:
    assert find_place(SLURM) == RankPlace(5, 8, 1, "node07", PORTS[41007 % len(PORTS)], 2)
    named = SLURM | {"MASTER_ADDR": "login", "MASTER_PORT": "3000"}
    assert find_place(named) == RankPlace(5, 8, 1, "login", 3000, 2)


def test_hosts_may_have_different_numbers_of_ranks() -> None:
    assert tasks_of_nodes("8(x2),4") == [8, 8, 4] and tasks_of_nodes("3") == [3]
    listed = SLURM | {"SLURM_STEP_TASKS_PER_NODE": "1,5,2"}
    assert [find_place(listed | {"SLURM_NODEID": str(node)}).local_ranks for node in range(3)] == [1, 5, 2]
    unknown = ("LOCAL_WORLD_SIZE", "SLURM_STEP_TASKS_PER_NODE")
    for given_ in (TORCHRUN, SLURM):
        left = {name: value for name, value in given_.items() if name not in unknown}
        assert find_place(left).local_ranks == 8, "all may be here"


def test_nobody_says_it() -> None:
    assert find_place({}) is None
    assert find_place({name: value for name, value in TORCHRUN.items() if name != "MASTER_ADDR"}) is None
    assert find_place(SLURM | {"SLURM_STEP_NUM_TASKS": "1"}) is None, "one task starts its own ranks"
    in_the_script = {name: value for name, value in SLURM.items() if not name.startswith("SLURM_STEP")}
    assert find_place(in_the_script | {"SLURM_NTASKS": "8"}) is None, "the script of a job is no rank of it"


@pytest.mark.parametrize(
    "broken",
    [
        TORCHRUN | {"RANK": "first"},
        SLURM | {"SLURM_STEP_NODELIST": ""},
        SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x"},
    ],
)
def test_what_cannot_be_read_is_told(broken: dict[str, str]) -> None:
    with pytest.raises(TrainError, match=r"cannot be read: .*`shardwright docs launch`"):
        find_place(broken)


@given(names, st.integers(0, 999), st.integers(1, 4), names, st.booleans())
def test_the_first_host_of_a_shortened_list(before: str, number: int, digits: int, after: str, suffix: bool) -> None:
    first = f"{number:0{digits}}"
    after = after if suffix else ""
    for inside in (first, f"{first}-{number + 3:0{digits}}", f"{first},{number + 5}", f"{first}-{number + 2},77"):
        assert first_host(f"{before}[{inside}]{after},other[1-2]") == f"{before}{first}{after}"
    assert first_host(f"{before}{first},{before}x") == first_host(f"{before}{first}") == f"{before}{first}"


RANK = """
import json, os, signal, sys
from pathlib import Path
work = Path(sys.argv[1])
job = json.loads((work / "job.json").read_text())
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
told = {name: os.environ[name] for name in names}
if job.get("die"):
    os.kill(os.getpid(), signal.SIGKILL)
if job.get("fail"):
    (work / "error-3.txt").write_text("the cause")
    sys.exit(1)
if job.get("threads"):
    (work / "result.json").write_text(json.dumps({"threads": os.environ["OMP_NUM_THREADS"]}))
elif not int(told["RANK"]):
    (work / "result.json").write_text(json.dumps(told))
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "one_rank.py").write_text(RANK)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return "one_rank"


def test_the_rank_is_run_where_it_was_started(module: str) -> None:
    first = RankPlace(0, 4, 0, "10.0.0.1", 29500, 2)
    assert run_ranks(module, {}, 1, 30, node=first) == first.environment()
    assert run_ranks(module, {}, 1, 30, node=RankPlace(3, 4, 1, "10.0.0.1", 29500, 2)) == {}, (
        "only the first has a result"
    )


@pytest.mark.parametrize(("ranks", "here", "threads"), [(4, 1, "12"), (4, 4, "3"), (64, 32, "1")])
def test_ranks_share_the_cores_of_their_host(
    module: str, monkeypatch: pytest.MonkeyPatch, ranks: int, here: int, threads: str
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 12)
    place = RankPlace(0, ranks, 0, "10.0.0.1", 29500, here)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert run_ranks(module, {"threads": 1}, 1, 30, node=place) == {"threads": threads}
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert run_ranks(module, {"threads": 1}, 1, 30, node=place) == {"threads": "5"}, "what was given is kept"


@pytest.mark.parametrize(("job", "told"), [({"fail": 1}, "the cause"), ({"die": 1}, "rank 3 died of SIGKILL")])
def test_why_the_rank_failed(module: str, job: dict[str, int], told: str) -> None:
    with pytest.raises(LaunchFailed, match=told):
        run_ranks(module, job, 1, 30, node=RankPlace(3, 4, 1, "10.0.0.1", 29500, 2))
