"""What the command line offers beside the stages."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.pipeline.base.errors import ShardwrightError
from shardwright.pipeline.base.lock import locked, refuse_locked
from shardwright.pipeline.base.log import QUIET, VERBOSE, Log, say
from shardwright.pipeline.base.signals import run_dvc

if TYPE_CHECKING:
    from shardwright.pipeline.base.stage import Inputs, Result
    from shardwright.pipeline.config import ClusterSettings, Config
    from shardwright.pipeline.ir.cluster import Cluster
    from shardwright.pipeline.layouts.planner_stages import PlannerStages
    from shardwright.stages.fit.model import FitStages


class RunFailed(ShardwrightError):
    """`dvc repro` did not get through; the stage has already said why."""


Run = Callable[[Path, argparse.Namespace, Log], int]
Argument = tuple[tuple[str, ...], dict[str, Any]]  # names and options, as `add_argument` takes them


@dataclass(frozen=True)
class Command:
    help: str
    run: Run
    arguments: tuple[Argument, ...] = ()


COMMANDS: dict[str, Command] = {}
QUESTIONS = {
    "batch": "the largest batch (of layouts: micro-batch) that fits",
    "sequence": "the longest sequence that fits",
    "devices": "the fewest devices that fit",
    "budget": "the memory budgets at which the plan changes",
    "link": "what links cost that are slower: bandwidth=0.5 latency=2",
    "clusters": "the plan on several clusters: a100_80,h100",
}


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


def argument(*names: str, **options: Any) -> Argument:
    return names, options


def command(help: str, *arguments: Argument) -> Callable[[Run], Run]:
    """Makes a function the command of its name."""

    def register(run: Run) -> Run:
        COMMANDS[run.__name__] = Command(help, run, arguments)
        return run

    return register


@command(
    "write a project into a folder: conf/, dvc.yaml, a model that runs",
    argument("folder", nargs="?", type=Path, default=Path(), help="made if it is not there (this one)"),
)
def init(root: Path, arguments: argparse.Namespace, log: Log) -> int:
    from shardwright.stages.project.init import run as written

    return written(root / arguments.folder)


@command(
    "bring a project of an older version forward, showing the difference",
    argument("--show", action="store_true", help="write nothing"),
)
def upgrade(root: Path, arguments: argparse.Namespace, log: Log) -> int:
    from shardwright.stages.project.upgrade import run as brought

    return brought(root, arguments.show)


@command(
    "print a page of the docs; without a name the list",
    argument("page", nargs="?", help="as `fit` or docs/fit.md"),
)
def docs(root: Path, arguments: argparse.Namespace, log: Log) -> int:
    from shardwright.stages.pages import show

    return show(arguments.page)


@command("check the configuration: files, classes, one item of the data, devices")
def check(root: Path, arguments: argparse.Namespace, log: Log) -> int:
    from shardwright.pipeline.config import read_draft
    from shardwright.stages.check import check as judge

    draft = read_draft(root)
    if not draft.mistakes.found:
        log.info("conf/ is read; now the code and the data that it names")
    judge(root, draft, log)
    chosen = ", ".join(f"{group}={name}" for group, name in draft.config.choices.items())
    log.info("the configuration is valid: %s", chosen)
    return 0


@command("write what solve reads of the train file (for DVC)")
def settings(root: Path, arguments: argparse.Namespace, log: Log) -> int:
    """DVC cannot track a key that is left to its default."""
    from shardwright.pipeline.base.files import write_atomic
    from shardwright.pipeline.config import load_config

    config = load_config(root)
    found = {"gradient_accumulation": config.plain("train.gradient_accumulation")}
    with locked(root / "runs"):
        write_atomic(root / "runs" / "settings" / "train.json", (json.dumps(found, indent=1) + "\n").encode())
    return 0


@command(
    "check, `dvc repro`, summary",
    argument("targets", nargs="*", help="stages to reproduce; all where none is named"),
)
def run(root: Path, arguments: argparse.Namespace, log: Log) -> int:
    check(root, arguments, log)
    refuse_locked(root / "runs")  # before DVC removes what a stage is to write
    loud = {QUIET: ["--quiet"], VERBOSE: ["--verbose"]}.get(arguments.verbosity, [])
    command = [sys.executable, "-m", "dvc", "repro", *loud, *arguments.targets]
    status = run_dvc(command, root, _with_python())
    if status:
        raise RunFailed("the pipeline stopped", where="dvc repro", remedy="see the message of the stage above")
    return summary(root, arguments, log)


@command("print the plan and what was measured")
def summary(root: Path, arguments: argparse.Namespace, log: Log) -> int:
    from shardwright.stages.summary import summarise

    say(summarise(root))
    return 0


@command(
    "write the page of the run: model, time, memory, schedule, frontier, measured",
    argument("--out", type=Path, default=Path("runs/report.html"), help="(runs/report.html)"),
)
def report(root: Path, arguments: argparse.Namespace, log: Log) -> int:
    from shardwright.stages.report.run import report as write

    return write(root, arguments, log)


@command(
    "write an experiment's settings into conf/",
    argument("name", help="a file of conf/experiment/, without its ending"),
)
def apply(root: Path, arguments: argparse.Namespace, log: Log) -> int:
    from shardwright.pipeline.config import apply_experiment

    for line in apply_experiment(root, arguments.name):
        log.info(line)
    log.info("now run `dvc repro`; `git diff conf` shows what changed")
    return 0


@command(
    "hold the written program against the unsplit module, in float64",
    argument("--steps", type=_positive, default=3, help="optimizer steps that are compared"),
    argument("--all", action="store_true", help="every gradient and buffer, not just the furthest"),
)
def verify(root: Path, arguments: argparse.Namespace, log: Log) -> int:
    from shardwright.stages.codegen.run import write_program
    from shardwright.stages.verify.run import verify as compare

    return compare(root, arguments.steps, write_program, log, arguments.all)


@command(
    "copy the trained weights to a safetensors file",
    argument("--out", type=Path, required=True, metavar="FILE.safetensors"),
)
def export(root: Path, arguments: argparse.Namespace, log: Log) -> int:
    weights = root / "runs" / "train" / "weights" / "model.safetensors"
    if not weights.is_file():
        raise ShardwrightError(
            "the last training run wrote no weights",
            where="runs/train/weights",
            remedy="set `export: true` in your conf/train file and run `dvc repro train`",
        )
    temporary = arguments.out.with_name(f".{arguments.out.name}.{os.getpid()}.tmp")  # it is whole or absent
    try:
        shutil.copyfile(weights, temporary)
        os.replace(temporary, arguments.out)
    except OSError as error:
        raise ShardwrightError(f"cannot be written: {error.strerror or error}", where=str(arguments.out)) from error
    finally:
        temporary.unlink(missing_ok=True)
    log.info("wrote %s, %.1f MB", arguments.out, weights.stat().st_size / 1e6)
    return 0


@command(
    "write a Slurm script that trains the plan",
    argument("--out", type=Path, default=Path("train.sbatch"), help="the script (train.sbatch)"),
    argument("--time", default="24:00:00", help="time limit of the job (24:00:00)"),
    argument("--python", default="python", help="the interpreter on the nodes (python)"),
    argument(
        "--option", action="append", default=[], metavar="OPTION", help="a further option: --option=--partition=gpu"
    ),
)
def sbatch(root: Path, arguments: argparse.Namespace, log: Log) -> int:
    from shardwright.stages.sbatch import sbatch as write

    return write(root, arguments, log)


def planner_stages() -> PlannerStages:
    """What a price is made of, of several stages."""
    from shardwright.pipeline.layouts.planner_stages import PlannerStages
    from shardwright.stages.cluster.described import describe_compute, describe_group, hidden_share
    from shardwright.stages.cluster.meshes import GroupLinks
    from shardwright.stages.profile.run import unsplit_profile
    from shardwright.stages.solve.forced import tensor_parallel

    return PlannerStages(unsplit_profile, tensor_parallel, describe_compute, hidden_share, describe_group, GroupLinks)


@command(
    "price layouts on a cluster without solving: dp=8 tp=4 pp=2 micro_batch=2, or search (`docs price`)",
    argument("words", nargs="*", metavar="name=value", help="what is given; `search` frees the rest"),
)
def price(root: Path, arguments: argparse.Namespace, log: Log) -> int:
    from shardwright.pipeline.config import load_config
    from shardwright.pipeline.layouts.words import find_model, read_words

    model = find_model(root, read_words(arguments.words), load_config(root))  # a mistake in a word is told at once
    log.info("%s, batch %d: being traced", model, model.batch)
    from shardwright.stages.price import run as priced

    return priced(root, arguments, planner_stages(), log)


@command(
    "take what was measured into the predictions to come: runs of this project, or a CSV of steps (`docs price`)",
    argument("files", type=Path, nargs="*", metavar="RUN", help="folder or report.json of a run, or a CSV (runs/)"),
    argument("--cluster", help="on which it was measured (that of conf/config.yaml)"),
    argument("--recompute", choices=("none", "selective", "full"), default="none", help="of the CSV's steps (none)"),
    argument("--overlap", choices=("none", "runtime", "megatron"), default="none", help="of these (none)"),
    argument("--vocabulary", type=_positive, default=51200, help="of these (51200)"),
)
def calibrate(root: Path, arguments: argparse.Namespace, log: Log) -> int:
    if any(file.suffix == ".csv" for file in arguments.files):
        from shardwright.stages.calibrate import run as fitted

        return fitted(root, arguments, planner_stages(), log)
    from shardwright.stages.calibrate_runs import run as learnt

    return learnt(root, arguments, _described, log)


def _described(settings: ClusterSettings) -> Cluster:
    from shardwright.stages.cluster.described import from_preset, simulate

    return simulate(settings) if settings.source == "simulate" else from_preset(settings)


@command(
    "say what was chosen, what else there was, and why not (`docs explain`)",
    argument("name", nargs="?", help="a module (also with *), parameter, tensor or op; none: the plan"),
    argument("--solve", action="store_true", help="solve all else again with each option fixed"),
    argument("--seconds", type=_positive, default=5, help="that each of these may take (5)"),
    argument("--most", type=_positive, default=10, help="options that are priced in full (10)"),
    argument(
        "--diff",
        nargs=2,
        metavar="RUNS",
        help="what changed: two folders, git revisions or experiments",
    ),
    argument("--json", action="store_true", help="the same facts as JSON"),
)
def explain(root: Path, arguments: argparse.Namespace, log: Log) -> int:
    from shardwright.pipeline.base.artifacts import KINDS

    plan = KINDS["plan"].path(root)
    if not arguments.diff and plan.is_file():
        made = time.strftime("%Y-%m-%d %H:%M", time.localtime(plan.stat().st_mtime))
        log.info("the plan of %s, made %s", plan.relative_to(root), made)
    from shardwright.stages.checkpoint.choose import evaluate
    from shardwright.stages.solve.explain.run import explain as told

    return told(root, arguments, evaluate, log)


@command(
    "answer what would happen: batch, sequence, devices, budget, link, clusters (`docs what-if`)",
    argument("question", choices=QUESTIONS, help="; ".join(f"{n}: {what}" for n, what in QUESTIONS.items())),
    argument("words", nargs="*", metavar="name=value", help="settings, or a transformer as `price` takes it"),
    argument("--step", type=_positive, help="batch and sequence: what the answer is a multiple of"),
    argument("--most", type=_positive, help="batch, sequence and devices: the largest that is tried"),
    argument("--seconds", type=float, default=15.0, help="after which it says what is known by then (15)"),
    argument("--json", action="store_true", help="the same facts as JSON"),
)
def whatif(root: Path, arguments: argparse.Namespace, log: Log) -> int:
    from shardwright.stages.whatif.run import run as answered

    return answered(root, arguments, stage_for_planning, planner_stages, log)


def stage_for_planning(name: str) -> Callable[[Inputs, Config], Result]:
    """What the stage of that name does for a plan, and nothing beside."""
    found: Callable[..., Result] = importlib.import_module(f"shardwright.stages.{name}.run").run
    return partial(found, compared=False) if name == "solve" else found


@command(
    "say whether a model fits: a config.json of transformers, or a file of conf/model (`docs fit`)",
    argument("model", help="path of a config.json; or a file of conf/model, also by its name alone"),
    argument("--cluster", default="dgx_h100", help="a file of conf/cluster that is described (dgx_h100)"),
    argument("--clusters", help="a table of several instead: a100_80,h100; or all"),
    argument("--batch", type=_positive, help="samples of a step, all devices together (2 for each device)"),
    argument("--sequence", type=_positive, help="tokens of a sample (2048, or as many as the model takes)"),
    argument("--precision", choices=("fp32", "bf16", "amp"), default="amp", help="(amp)"),
    argument("--lora", type=_positive, default=0, metavar="RANK", help="train adapters of this rank, freeze the rest"),
    argument("--devices", type=_positive, help="of a host, instead of the cluster's"),
    argument("--nodes", type=_positive, help="hosts, instead of the cluster's"),
    argument("--memory", type=float, dest="memory_gb", metavar="GB", help="of a device, instead of the cluster's"),
    argument("--page", type=Path, metavar="FILE.html", help="also write a page with pictures"),
    argument("--json", action="store_true", help="the same facts as JSON"),
)
def fit(root: Path, arguments: argparse.Namespace, log: Log) -> int:
    log.info("%s: PyTorch is being loaded", arguments.model)
    from shardwright.stages.fit.run import run as fitted

    return fitted(root, arguments, fit_stages(), log)


def fit_stages() -> FitStages:
    """What `fit` is made of, of several stages."""
    from shardwright.stages.checkpoint.choose import choose, evaluate
    from shardwright.stages.checkpoint.unpipelined import find_alone
    from shardwright.stages.cluster.described import from_preset
    from shardwright.stages.fit.model import FitStages
    from shardwright.stages.profile.optimizer import optimizer_copies
    from shardwright.stages.profile.run import make_profile
    from shardwright.stages.solve.on_mesh import MeshProblem

    return FitStages(make_profile, optimizer_copies, from_preset, MeshProblem, find_alone, choose, evaluate)


@command(
    "run points as DVC experiments and compare them (`docs what-if`)",
    argument("words", nargs="+", metavar="name=value,value", help="what is varied; or a file of conf/sweep"),
    argument("--name", help="of the sweep, before the time at which it began"),
    argument("--until", choices=("checkpoint", "codegen", "train"), help="the last stage (checkpoint)"),
    argument("--json", action="store_true", help="the table as JSON"),
)
def sweep(root: Path, arguments: argparse.Namespace, log: Log) -> int:
    from shardwright.stages.sweep.run import run as swept

    return swept(root, arguments, _with_python(), log)


def _with_python() -> dict[str, str]:
    """The environment in which `python` of dvc.yaml is this interpreter."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {**os.environ, "PATH": path}


@command("send tracked runs that are still waiting")
def sync(root: Path, arguments: argparse.Namespace, log: Log) -> int:
    from shardwright.pipeline.config import load_config
    from shardwright.pipeline.tracking.tracker import sync as send

    try:
        sent, left = send(root, load_config(root).tracking, log)
    except OSError as error:
        raise ShardwrightError(f"the records cannot be read: {error}", where="runs/tracking") from error
    log.info("%d runs are in the store, %d are still waiting", sent, left)
    return 1 if left else 0


@command("serve the MLflow UI on 127.0.0.1")
def ui(root: Path, arguments: argparse.Namespace, log: Log) -> int:
    from shardwright.pipeline.config import load_config
    from shardwright.pipeline.tracking.tracker import ui_command

    command = ui_command(root, load_config(root).tracking)
    os.execvp(command[0], command)
