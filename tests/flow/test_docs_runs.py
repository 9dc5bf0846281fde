"""Commands of the docs that plan, train or run experiments: as the pages write them, in one project of a small model.

The tests follow one another in the order of this file: a command finds what those before it have made.
`test_docs.py` runs all others, and holds RUN_HERE against the pages.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import yaml

from shardwright.pipeline.base.artifacts import KINDS
from shardwright.pipeline.base.stage import STAGES as SPECS
from shardwright.pipeline.config import try_settings
from shardwright.stages.sweep.run import points_of
from tests.asked import mostly_long
from tests.flow.conftest import Maker
from tests.flow.project import STAGES, TINY, Done, Project

pytestmark = pytest.mark.flow

# What is changed in the files that the docs name, so that every command takes seconds.
PRESET = {"source": "preset", "devices": 2, "memory_gb": 0.02, "preset": TINY["cluster"]["preset"]}
FEW = {"frontier_points": 1, "most_meshes": 1, "submeshes": 0}
SMALL: dict[str, dict[str, Any]] = {
    # Logits are most of its memory: the largest batch that fits is near that of the file.
    "model/gpt_small": {
        "module": {"layers": 1, "width": 32, "vocab_size": 4096},
        "batch": {"input_ids": {"shape": [8, 64]}, "labels": {"shape": [8, 64]}},
    },
    "data/synthetic_tokens": {"dataset": {"vocab_size": 4096}},
    "cluster/local_cpu": PRESET,  # described, not measured
    "cluster/single_cpu": PRESET | {"devices": 1, "memory_gb": 4},
    "solve/glpk": FEW,
    "solve/highs": FEW,
    "train/adamw": {"steps": 2},
}
RUN_HERE: list[str] = []


def documented(*commands: str, short: Sequence[str] = ()) -> pytest.MarkDecorator:
    """All are short unless some are named."""
    RUN_HERE.extend(commands)
    return pytest.mark.parametrize("command", mostly_long(commands, lambda one: one in (short or commands)))


@pytest.fixture(scope="module")
def made(make_project: Maker) -> Project:
    project = make_project()
    for name, changes in SMALL.items():
        content = yaml.safe_load((project.root / f"conf/{name}.yaml").read_text())
        project.write_yaml(f"conf/{name}.yaml", _changed(content, changes))
    project.edit("conf/config.yaml", "enabled: true", "enabled: false")
    project.edit("conf/sweep/budgets.yaml", "0.04,0.02,0.005", "0.04,0.005")
    project.commit()
    return project


def _changed(content: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    inner = {key: _changed(content[key], new) for key, new in changes.items() if isinstance(content.get(key), dict)}
    return content | changes | inner


@pytest.fixture
def project(made: Project) -> Iterator[Project]:
    """With the settings of the first commit, whatever the command before has written into conf/."""
    yield made
    made.git("checkout", "--quiet", "conf")


def call(project: Project, command: str) -> Done:
    environment = project.environment(warm=True)
    done = subprocess.run(["bash", "-c", command], cwd=project.root, env=environment, capture_output=True, text=True)
    return Done(done.returncode, done.stdout, done.stderr)


def run(project: Project, command: str) -> Done:
    return call(project, command).ok()


def whole_answer(project: Project, command: str) -> str:
    """Of `whatif`, however busy the machine is."""
    return run(project, f"{command} --seconds 1000").out


# -- stages -----------------------------------------------------------------------------------------------------------


TARGETS = tuple(f"dvc repro {stage}" for stage in ("cluster", "solve", "checkpoint", "codegen", "train"))


@documented(*TARGETS, short=(*TARGETS[:2], TARGETS[-1]))
def test_up_to_a_stage(project: Project, command: str) -> None:
    stage = command.split()[-1]
    assert run(project, command).stages[-1] == stage
    made = [kind for kind in KINDS if KINDS[kind].path(project.root).is_file()]
    assert SPECS[stage].writes in made and len(made) == {"cluster": 1, "solve": 4}.get(stage, STAGES.index(stage) + 1)


FORCED = ("dvc repro --force cluster", "dvc repro --force --single-item train")


@documented(*FORCED, short=FORCED[1:])
def test_a_stage_that_is_done_runs_again_and_no_other(project: Project, command: str) -> None:
    assert run(project, command).stages == [command.split()[-1]]


ALONE = ("shardwright cluster", "shardwright solve", "shardwright train", "shardwright train -v")


@documented(*ALONE, short=(*ALONE[:2], ALONE[-1]))
def test_one_stage_without_dvc(project: Project, command: str) -> None:
    stage = command.split()[1]
    said = run(project, command).err
    assert f"[{stage}] wrote {KINDS[SPECS[stage].writes].path(project.root).relative_to(project.root)}" in said
    assert ("plan.json is sha256:" in said) is command.endswith("-v")
    assert stage != "cluster" or "candidate meshes: d0 2" in said


VERIFY = ("shardwright verify", "shardwright verify --steps 3")


@documented(*VERIFY, short=VERIFY[:1])
def test_the_program_is_the_model(project: Project, command: str) -> None:
    done = run(project, command)
    assert "3 steps on 2 ranks" in done.err and "\nequal: loss, " in done.out


# -- experiments ------------------------------------------------------------------------------------------------------

HIGHS = "dvc exp run -S conf/config.yaml:solve=highs"
LONGER = "dvc exp run -S conf/train/adamw.yaml:steps=50"
ENGINE = "dvc exp run -S conf/train/adamw.yaml:engine="
H100 = "dvc exp run -S conf/config.yaml:cluster=dgx_h100_infiniband codegen"
A100 = "dvc exp run -S conf/config.yaml:cluster=dgx_a100 codegen"
LESS = "dvc exp run -S conf/config.yaml:cluster=dgx_a100 -S conf/cluster/dgx_a100.yaml:memory_gb=40 codegen"


def experiment(project: Project, command: str) -> Done:
    """What it is called is listed, and its results are in the workspace."""
    done = run(project, command)
    (name,) = re.findall(r"Ran experiment\(s\): (\S+)", done.out)
    assert "results have been applied" in done.out
    assert name in experiments(project)
    return done


def experiments(project: Project) -> set[str]:
    """As DVC keeps them; `dvc exp list` takes longer."""
    return set(project.git("for-each-ref", "--format=%(refname:lstrip=-1)", "refs/exps").split())


@pytest.mark.long
@documented(HIGHS)
def test_another_solver(project: Project, command: str) -> None:
    ran = experiment(project, command).stages
    assert ran[0] == "solve" and not {"trace", "profile", "cluster"} & set(ran)
    assert "solve: highs" in (project.root / "conf/config.yaml").read_text()


@documented(LONGER)
def test_more_steps(project: Project, command: str) -> None:
    assert experiment(project, command).stages == ["train"]
    losses = project.load("report").losses
    assert len(losses) == 50 and losses[-1] < losses[0]


@pytest.mark.long
@documented(f"{ENGINE}ddp")
def test_another_engine(project: Project, command: str) -> None:
    assert experiment(project, command).stages == ["train"]
    assert project.load("report").engine == "ddp"


@documented("dvc plots show", "dvc plots diff A B")
def test_plots_of_what_is_here_and_of_two_experiments(project: Project, command: str) -> None:
    ours, numbers = yaml.safe_load((project.root / "dvc.yaml").read_text())["plots"], {}
    names = sorted(name for name in experiments(project) if name.islower())  # others are DVC's own marks
    shown = [*names[:1], *(names[1:2] or ["workspace"])] if "diff" in command else ["workspace"]
    command = re.sub("A B$", " ".join(shown), command)
    assert "/runs/plots/index.html" in run(project, command).out
    found = json.loads(run(project, f"{command} --json").out)
    assert not found.get("errors") and set(found["data"]) == {name for plot in ours for name in plot}
    for name, (drawn,) in found["data"].items():
        assert set(drawn["revisions"]) == set(shown), name
        numbers[name] = drawn["content"]["data"]["values"]
    if "diff" not in command:
        report, plan = project.load("report"), project.load("plan")
        assert [row["loss"] for row in numbers["loss"]] == list(report.losses)
        assert [row["step_ms"] for row in numbers["step time"] if row["field"] == "step_ms"] == pytest.approx(
            [seconds * 1e3 for seconds in report.step_seconds]
        )
        assert max(row["held_mb"] for row in numbers["memory"]) == plan.prediction.peak_bytes / 1e6
        (chosen,) = (row for row in numbers["frontier"] if row["field"] == "plan" and row["plan"] is not None)
        assert chosen["plan"] == plan.prediction.step_seconds * 1e3


@pytest.mark.long
@documented(LESS)
def test_another_cluster(project: Project, command: str) -> None:
    done, cluster = experiment(project, command), project.load("cluster")
    assert done.stages[-1] == "codegen" and project.load("plan").budget_bytes == cluster.memory_bytes
    assert (cluster.devices, cluster.memory_bytes) == (8, 40e9)


@documented(f"{ENGINE}planned", f"{ENGINE}fsdp2", H100, A100)
def test_experiments_with_other_words_are_accepted(project: Project, command: str) -> None:
    """They differ from those above in the one word that is set."""
    (key, value), *none = re.findall(r"-S conf/\w+(?:/\w+)?\.yaml:(\w+)=(\w+)", command)
    config = try_settings(project.root, [f"{'train.' if key == 'engine' else ''}{key}={value}"])
    found = config.train.engine.value if key == "engine" else config.choices[key]
    assert found == value and not none


# -- questions --------------------------------------------------------------------------------------------------------

TIGHT = "cluster=preset_cpu solve.memory_budget_gb=0.02"


WHATIF = (
    "shardwright whatif batch",
    f"shardwright whatif batch {TIGHT} --step 8",
    f"shardwright whatif sequence {TIGHT} --step 64",
)


@documented(*WHATIF, short=WHATIF[1:2])
def test_the_largest_that_fits(project: Project, command: str) -> None:
    question, step = command.split()[2], int((re.findall(r"--step (\d+)", command) or ["2"])[0])
    found = re.search(rf"the largest {question} that fits is (\d+); (\d+) does not", whole_answer(project, command))
    assert found is not None and int(found[2]) - int(found[1]) == step and int(found[1]) % step == 0


DEVICES = ("shardwright whatif devices", f"shardwright whatif devices {TIGHT}")


@documented(*DEVICES, short=DEVICES[1:])
def test_the_fewest_devices(project: Project, command: str) -> None:
    told = r"^(one device is enough|2 devices are the fewest that fit)$"
    assert re.search(told, whole_answer(project, command), re.MULTILINE)


@documented("shardwright whatif budget cluster=preset_cpu model=mlp")
def test_budgets(project: Project, command: str) -> None:
    assert re.search(
        r"GB is the least that fits, to 1%; the plan changes at \d+ budgets", whole_answer(project, command)
    )


@documented("shardwright whatif link bandwidth=0.5,0.25 latency=2 cluster=preset_cpu")
def test_slower_links(project: Project, command: str) -> None:
    out = whole_answer(project, command)
    assert re.findall(r"^([\d.]+) of the bandwidth, 2 of the latency ", out, re.MULTILINE) == ["0.5", "0.25"]


@documented("shardwright whatif clusters preset_cpu,single_cpu")
def test_clusters(project: Project, command: str) -> None:
    out = whole_answer(project, command)
    assert re.findall(r"^(\w+_cpu) +([12]) +\d", out, re.MULTILINE) == [("preset_cpu", "2"), ("single_cpu", "1")]


# -- sweeps -----------------------------------------------------------------------------------------------------------


@documented("shardwright sweep cluster=preset_cpu,single_cpu solve.memory_budget_gb=0.02")
def test_a_sweep_without_a_file(project: Project, command: str) -> None:
    """Its points are those of the page, and are accepted; test_sweeps.py runs one such."""
    points = points_of(command.split()[2:])
    found = [try_settings(project.root, point) for point in points]
    assert [config.cluster.devices for config in found] == [2, 1]
    assert [config.solve.memory_budget_gb for config in found] == [0.02, 0.02]


@pytest.mark.long
@documented("shardwright sweep budgets")
def test_points_of_a_sweep(project: Project, command: str) -> None:
    """Each is an experiment and a row; the last has a budget that no plan fits, which is its row's reason."""
    out = run(project, command).out
    name = re.findall(r"dvc exp apply (\S+)-\d+` takes the fastest", out)[0]
    points = json.loads((project.root / f"runs/sweep/{name}/points.json").read_text())
    assert [row["solve.memory_budget_gb"] for row in points] == ["0.04", "0.005"]
    assert [row["experiment"] for row in points[:-1]] == [f"{name}-{n}" for n in range(1, len(points))]
    assert {row["experiment"] for row in points[:-1]} <= experiments(project)
    assert "no plan fits" in points[-1]["reason"] and (project.root / f"runs/sweep/{name}/1.log").is_file()


@pytest.mark.long
@documented("shardwright explain --diff HEAD NAME")
def test_an_experiment_beside_a_revision(project: Project, command: str) -> None:
    name = next(name for name in sorted(experiments(project)) if name.startswith("budgets"))
    project.repro("checkpoint").ok()
    project.commit()
    told = run(project, command.replace("NAME", name)).out
    assert told.startswith(f"HEAD -> {name}: ") and "solve.memory_budget_gb: None -> 0.04" in told
    unknown = call(project, command.replace("NAME", "no-such"))
    assert unknown.status == 2 and "no such folder, revision or experiment" in unknown.err
    project.git("rm", "--quiet", "--cached", "dvc.lock")
    project.git("commit", "--quiet", "--message", "without its run")
    assert "its run is not in DVC's cache" in call(project, command.replace("NAME", name)).refused()


@pytest.mark.long
@documented("dvc exp apply NAME")
def test_an_experiment_is_taken(project: Project, command: str) -> None:
    name = next(name for name in sorted(experiments(project)) if name.startswith("budgets"))
    done = call(project, command.replace("NAME", name))
    missing = re.findall(r"^runs/(\w+)/", done.err, re.MULTILINE)
    assert done.status == 255 and set(missing) == {"codegen", "train"}  # the stages that a sweep does not run
    assert "memory_budget_gb: 0.04" in (project.root / "conf/solve/glpk.yaml").read_text()
    assert project.load("plan").budget_bytes == 0.04e9
