"""Every command that the docs show is run, most of them here: in one small project that has been run once.

A new command in the docs needs nothing: it is run as it stands, and has to succeed. One that plans or trains is better
in `test_docs_runs.py`, where models are smaller. One that cannot be run is named in NOT_RUN with the reason; what it
says (options, files, keys, stages) is held against the programs, as it is for all others.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.asked import mostly_long
from tests.doc_commands import commands_of, complaint, shown_commands
from tests.flow.conftest import Maker
from tests.flow.project import SOURCE, TINY, Project
from tests.flow.test_docs_runs import RUN_HERE as RUN_THERE
from tests.small_configs import shrink

pytestmark = pytest.mark.flow

# What stands for a name that the reader has to put in.
PLACEHOLDERS = {
    "shardwright apply NAME": "shardwright apply tight_memory",
    "sweep NAME": "sweep budgets",
    "--diff A B": "--diff kept .",
    "--node-rank=N": "--node-rank=0",
    "benchmarks.NAME": "benchmarks.rotor",
}
NOT_RUN = {
    r"make (run|lint|test)\b.*": "what CI does: .ci/run",
    r"make .*": "makes an environment: tests/flow/test_cli.py asks make what it would do",
    r"source .*|pre-commit .*|pip .*|apt-get .*": "changes the reader's environment",
    r"git clone .*": "needs the address of the project",
    r"shardwright init": "needs a folder that is no project: tests/package/test_project.py",
    r"shardwright upgrade.*": "needs a project of an older version: tests/package/test_project.py",
    r"shardwright ui": "serves until it is stopped; its command is in tests/pipeline/test_tracking.py",
    r"python -m benchmarks\..*": "minutes to hours, or a GPU; some parts: tests/stages/test_overhead_benchmark.py",
    r"python -m docs\.site\.gallery|dvc exp run .*(=1f1b|:memory_budget).*": "minutes: docs/site/gallery.py runs it",
    r"python -m pytest .*": "an op of the reader's",
    r"python -m torch\.distributed\.run .*": "needs a GPU",
    r"python -m shardwright\.stages\.cluster\.join .*": "several hosts: tests/flow/test_cluster_hosts.py runs it",
    r"shardwright calibrate .*": "needs steps that the reader measured: tests/stages/test_calibrate.py",
    r"(python|torchrun .*) examples/own_loop/.*": "two ranks: tests/api/test_api_examples.py",
    r"torchrun .*": "several hosts: tests/flow/test_train_hosts.py runs it",
    r"srun .*|sbatch .*": "needs Slurm; the script is tried in tests/stages/test_sbatch.py",
}
SHOWN = {re.sub("|".join(map(re.escape, PLACEHOLDERS)), lambda found: PLACEHOLDERS[found[0]], one.text): one.page
         for one in shown_commands(SOURCE)}  # fmt: skip
WITHOUT_RUN = ("shardwright price", "shardwright whatif", "shardwright fit")  # begin so: run in a project as it ships


def reason(command: str) -> str | None:
    return next((why for pattern, why in NOT_RUN.items() if re.fullmatch(pattern, command)), None)


MADE_BY = "dvc repro -f"  # by this command the project is what the others need
RUN = [one for one in SHOWN if reason(one) is None and one not in (MADE_BY, *RUN_THERE)]
RUN.sort(key=lambda one: not one.startswith(("git add", "mkdir", "cp", "echo")))  # others read what these make
SEARCHES = [one for one in RUN if one.startswith(WITHOUT_RUN)]
SHORT = {(one.split()[1], "search" in one): one for one in reversed(SEARCHES)}.values()  # the first of each


@pytest.fixture(scope="module")
def project(make_project: Maker) -> Project:
    """Under the names that the docs use, everything very small; run once as they say."""
    project = make_project()
    project.warm = True
    names = {
        "model": "gpt_small",
        "data": "synthetic_tokens",
        "cluster": "local_cpu",
        "solve": "glpk",
        "train": "adamw",
    }
    for group, name in names.items():
        project.write_yaml(f"conf/{group}/{name}.yaml", TINY[group])
    project.edit("conf/model/gpt_small.yaml", "layers: 2", "layers: 4")
    project.edit("conf/train/adamw.yaml", "steps: 4", "steps: 1\nexport: true")
    project.edit("conf/config.yaml", "enabled: true", "enabled: false")
    project.commit()
    done = call(project, MADE_BY)
    assert done.returncode == 0, f"{MADE_BY}\n{done.stdout}{done.stderr}"
    return project


def call(project: Project, command: str) -> subprocess.CompletedProcess[str]:
    environment = project.environment(warm=True)
    return subprocess.run(["bash", "-c", command], cwd=project.root, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def shipped(make_project: Maker) -> Project:
    """As it comes, and not run: for what needs no run, and other clusters than that of the small project. The models of
    examples/fit are small."""
    project = make_project()
    for path in (project.root / "examples/fit").glob("*.json"):
        shrink(path, path)
    return project


def short(command: str) -> bool:
    """One search of each kind; Python itself has no warm interpreter, and the help of a module no further test."""
    return command in SHORT or not (command in SEARCHES or command.startswith("python -c"))


@pytest.mark.parametrize("command", mostly_long(RUN, short))
def test_a_command_of_the_docs_succeeds(project: Project, shipped: Project, command: str) -> None:
    project = shipped if command.startswith(WITHOUT_RUN) else project
    done = call(project, command)
    project.git("checkout", "--quiet", "conf")
    project.git("clean", "--quiet", "-d", "--force", "conf")
    assert done.returncode == 0, f"{SHOWN[command]}: {command}\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("command", SHOWN)
def test_the_words_of_a_command_are_known(tmp_path: Path, command: str) -> None:
    why = complaint(command, SOURCE, tmp_path)
    assert why is None, f"{SHOWN[command]}: {command}: {why}"


def test_what_is_not_run_has_a_reason_that_holds() -> None:
    """Tests that are named exist, and no pattern is left over from a command that is gone."""
    for pattern, why in NOT_RUN.items():
        assert any(re.fullmatch(pattern, command) for command in SHOWN), f"no page shows {pattern}"
        for file in re.findall(r"\S+\.py|\.ci/run", why):
            assert (SOURCE / file).is_file(), file
    assert len(RUN) > 20


def test_what_is_run_elsewhere_is_shown() -> None:
    assert [command for command in (MADE_BY, *RUN_THERE) if command not in SHOWN] == []


def test_commands_are_found_wherever_they_stand() -> None:
    page = """
Say `dvc repro --force
train` or `explain layers.0`, not `make`, `source: probe` or `# a comment`.

```sh
shardwright check   # a comment
.venv/bin/python -m pytest \\
    tests/a.py
no_such_program --here
```

```
error: nothing to run
$ git status
```

    torchrun --nnodes=2 --module shardwright train
    predicted 2 ms

    mkdir kept && cp -r runs kept/   # both
"""
    assert commands_of(page) == [
        *("shardwright check", "python -m pytest tests/a.py", "no_such_program --here", "git status"),
        *("torchrun --nnodes=2 --module shardwright train", "mkdir kept && cp -r runs kept/"),
        *("dvc repro --force train", "shardwright explain layers.0"),
    ]


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("shardwright explain --no-such", "--no-such"),
        ("shardwright no_such", "no_such"),
        ("python -m benchmarks.no_such", "no module benchmarks.no_such"),
        ("python -m benchmarks.rotor --no-such 3", "--no-such"),
        ("make no_such", "no_such"),
        ("dvc repro no_such", "no stage no_such"),
        ("dvc exp run -S conf/train/adamw.yaml:stepz=50", "did you mean 'steps'"),
        ("dvc exp run -S conf/config.yaml:cluster=no_such codegen", "no_such"),
        ("torchrun --nnodes=4 --no-such=1 --module shardwright train", "no-such"),
        ("srun --nodes=4 shardwright trian", "trian"),
        ("cd docs && dvc commit trian", "no stage trian"),
    ],
)
def test_unknown_words_are_seen(tmp_path: Path, command: str, told: str) -> None:
    assert told in (complaint(command, SOURCE, tmp_path) or "")
