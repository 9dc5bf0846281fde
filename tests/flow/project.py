"""A copy of the project in a folder of its own, and the commands a user runs there."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import yaml

from shardwright.pipeline.base import artifacts
from shardwright.pipeline.config import load_config
from tests.flow.warm import Server

SOURCE = Path(__file__).parents[2]
STAGES = ("trace", "profile", "cluster", "solve", "checkpoint", "codegen", "train")
WARM = Server()
_NUMBERS = count()
MARK = "SHARDWRIGHT_TEST"  # in the environment of every process we start, so that leftovers are found

TINY: dict[str, dict[str, Any]] = {
    "model": {
        "module": {
            "_target_": "shardwright.pipeline.models.gpt.build",
            "vocab_size": 32,
            "context": 8,
            "width": 16,
            "layers": 2,
            "heads": 2,
        },
        "batch": {
            "input_ids": {"shape": [12, 8], "dtype": "int64"},
            "labels": {"shape": [12, 8], "dtype": "int64"},
        },
    },
    "data": {
        "dataset": {
            "_target_": "shardwright.pipeline.models.data.TokenSequences",
            "vocab_size": 32,
            "length": 8,
            "samples": 20,  # fewer than two steps need: the second step begins the second epoch
            "seed": 3,
        },
        "shuffle": True,
        "seed": 5,
    },
    "cluster": {
        "source": "preset",
        "device": "cpu",
        "devices": 2,
        "memory_gb": 4,
        "preset": {
            "matmul_gflops": 50,
            "memory_gbytes_per_s": 10,
            "launch_us": 10,
            "latency_us": 50,
            "link_gbytes_per_s": 2,
        },
    },
    # The fastest plan alone: another point is an integer program, which takes longer than all other stages.
    "solve": {"backend": "highs", "gap": 1e-4, "frontier_points": 1, "submeshes": 0},
    "checkpoint": {"recompute": "optimal", "slots_per_link": 10},
    "train": {
        "steps": 4,
        "gradient_accumulation": 1,
        "seed": 1,
        "optimizer": {"_target_": "torch.optim.AdamW", "lr": 1e-2},
    },
}


@dataclass(frozen=True)
class Done:
    """A command that has ended; `stages` are those that dvc says it ran, in order."""

    status: int
    out: str
    err: str

    @property
    def text(self) -> str:
        return self.out + self.err

    @property
    def stages(self) -> list[str]:
        return re.findall(r"Running stage '(\w+)'", self.text)

    @property
    def from_cache(self) -> list[str]:
        return re.findall(r"Stage '(\w+)' is cached", self.text)

    def ok(self) -> Done:
        assert self.status == 0, self.text
        return self

    def refused(self, *, details: bool = False) -> str:
        """The one line of a user's mistake, where that is told beside the stage's own lines; `details`: with -v."""
        assert self.status == 2, self.text
        assert details or "Traceback" not in self.text, self.text
        lines = [line for line in self.err.splitlines() if not line.startswith("[")]
        assert len(lines) == 1 and lines[0].startswith("error: "), self.text
        return lines[0]


def _heeds_interrupts() -> None:
    """A shell that runs the tests in the background has made them, and all they start, ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _copy_compiled(root: Path) -> None:
    """What was compiled beside the source, modules and kernels, so that not every copy compiles it again."""
    for folder in ("pipeline", "stages"):
        for path in (SOURCE / folder).rglob("__pycache__/*"):
            copy = root / path.relative_to(SOURCE)
            if copy.parent.parent.is_dir():  # else of a folder that is no more
                copy.parent.mkdir(exist_ok=True)
                shutil.copy2(path, copy)


class Project:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.warm = False  # whether the stages that a command starts wait for their imports
        self.temporary = root.parent / f"{root.name}-tmp"  # of the processes started here

    # -- making -------------------------------------------------------------------------------------------------------

    @classmethod
    def copy(cls, root: Path) -> Project:
        """The source tree's files, without what git ignores; one commit, as after `git clone`."""
        listed = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
        names = subprocess.run(listed, cwd=SOURCE, capture_output=True, check=True, text=True).stdout.split("\0")
        for name in filter(None, names):
            if name != "dvc.lock" and (SOURCE / name).exists():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(SOURCE / name, root / name, follow_symlinks=False)
        _copy_compiled(root)
        project = cls(root)
        project.git("init", "--quiet")
        project.git("config", "user.name", "test")
        project.git("config", "user.email", "test@example.invalid")
        project.commit()
        return project

    @classmethod
    def tiny(cls, root: Path, *, tracking: bool = False, **changes: Mapping[str, Any]) -> Project:
        """A copy that trains a very small model, chosen as `tiny` in every group, without tracking."""
        project = cls.copy(root)
        project.warm = True
        for group, content in TINY.items():
            project.write_yaml(f"conf/{group}/tiny.yaml", content | dict(changes.get(group, {})))
        project.choose(**dict.fromkeys(TINY, "tiny"))
        project.edit("conf/config.yaml", "enabled: true", f"enabled: {str(tracking).lower()}")
        project.commit()
        return project

    def twin(self, root: Path) -> Project:
        """The project as it stands, with what has been run and DVC's cache of it."""
        shutil.copytree(self.root, root, symlinks=True)
        project = Project(root)
        project.warm = True
        return project

    def git(self, *arguments: str) -> str:
        done = subprocess.run(("git", *arguments), cwd=self.root, capture_output=True, check=True, text=True)
        return done.stdout

    def commit(self) -> None:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message", "test")

    # -- conf/ --------------------------------------------------------------------------------------------------------

    def edit(self, file: str, old: str, new: str) -> None:
        path = self.root / file
        text = path.read_text()
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {file}"
        path.write_text(text.replace(old, new))

    def write_yaml(self, file: str, content: Mapping[str, Any]) -> None:
        path = self.root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(dict(content), sort_keys=False))

    def choose(self, **choices: str) -> None:
        path = self.root / "conf/config.yaml"
        text = path.read_text()
        for group, name in choices.items():
            text, count = re.subn(rf"(?m)^{group}: \S+", f"{group}: {name}", text)
            assert count == 1, group
        path.write_text(text)

    @contextmanager
    def with_file(self, file: str, content: bytes) -> Iterator[None]:
        path = self.root / file
        before = path.read_bytes()
        path.write_bytes(content)
        try:
            yield
        finally:
            path.write_bytes(before)

    # -- running ------------------------------------------------------------------------------------------------------

    def environment(self, *, warm: bool = False) -> dict[str, str]:
        """`python` in dvc.yaml is this interpreter; what the caller set for itself does not reach the stages."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SHARDWRIGHT", "MLFLOW", "DVC", "PYTHON"))}
        first = [str(WARM.folder)] if warm else []
        path = os.pathsep.join([*first, str(Path(sys.executable).parent), kept.get("PATH", "")])
        self.temporary.mkdir(exist_ok=True)
        own = {"PATH": path, "TMPDIR": str(self.temporary), "PYTHONUNBUFFERED": "1", MARK: str(self.root)}
        return {**kept, **own}

    def start(self, *arguments: str, to: Path | None = None, warm: bool = False) -> subprocess.Popen[str]:
        """`python -m ...`, with pipes for what it says, or a file for all of it."""
        python = str(WARM.python) if warm else sys.executable
        command, environment = [python, "-m", *arguments], self.environment(warm=warm)
        if warm:  # a tracked run is what one dvc starts, told by its processes: those of forks are not below it
            environment["SHARDWRIGHT_EXECUTION"] = f"warm-{next(_NUMBERS)}"
        options: dict[str, Any] = {"cwd": self.root, "env": environment, "stdin": subprocess.DEVNULL, "text": True}
        options["preexec_fn"] = _heeds_interrupts
        if to is None:
            return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
        with to.open("w") as file:
            return subprocess.Popen(command, stdout=file, stderr=file, **options)

    def run(self, *arguments: str, timeout: float = 600) -> Done:
        process = self.start(*arguments, warm=self.warm)
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            self.end_all()
            process.communicate()
            raise
        return Done(process.returncode, out, err)

    def stages(self, *arguments: str) -> Done:
        """`shardwright ...`, without waiting for its imports."""
        return Done(*WARM.run("stages", *arguments, folder=self.root, environment=self.environment(warm=self.warm)))

    def repro(self, *arguments: str) -> Done:
        return self.run("dvc", "repro", *arguments)

    # -- processes ----------------------------------------------------------------------------------------------------

    def processes(self) -> list[psutil.Process]:
        """Every live process that was started here, orphans too."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == str(self.root):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def all_gone(self, within: float = 120.0) -> list[list[str]]:
        """The command lines of what still runs after that many seconds."""
        deadline = time.monotonic() + within
        while left := self.processes():
            if time.monotonic() > deadline:
                return [_command_line(process) for process in left]
            time.sleep(0.1)
        return []

    def end_all(self) -> None:
        for process in self.processes():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue

    # -- runs/ --------------------------------------------------------------------------------------------------------

    def load(self, kind: str) -> Any:
        return artifacts.load(kind, self.root).body

    def snapshot(self) -> dict[str, str]:
        """Every file under runs/ with the digest of its content."""
        files = sorted(path for path in (self.root / "runs").rglob("*") if path.is_file())
        return {str(path.relative_to(self.root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}

    def plain_losses(self, steps: int) -> list[float]:
        """What the configured model, data and optimizer give in a plain loop; in its own process: fresh imports."""
        code = (self.root / load_config(self.root).code).resolve()
        environment = self.environment() | {"PYTHONDONTWRITEBYTECODE": "1"}
        path = (Path(__file__).parent, code, self.root)
        status, out, err = WARM.run("plain_loop", str(steps), folder=self.root, environment=environment, path=path)
        assert status == 0, err
        return [float(line) for line in out.split()]


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def worst_difference(found: list[float] | tuple[float, ...], wanted: list[float]) -> float:
    """The largest relative difference of two series of the same length."""
    assert len(found) == len(wanted)
    return max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))


def check_against_plain(project: Project, ranks: int, tolerance: float) -> None:
    report = project.load("report")
    assert report.ranks == ranks and len(report.peak_bytes) == ranks
    assert worst_difference(report.losses, project.plain_losses(report.steps)) < tolerance


@contextmanager
def undone(project: Project, *files: str) -> Iterator[None]:
    """The files as they were, afterwards."""
    before = {file: (project.root / file).read_bytes() for file in files}
    try:
        yield
    finally:
        for file, content in before.items():
            (project.root / file).write_bytes(content)
