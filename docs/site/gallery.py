"""Makes docs/gallery/: a project is made, planned and trained by the commands of every user; pages are photographed.

    python -m docs.site.gallery

It needs Chromium and some minutes, and belongs on a machine that does nothing else: steps are measured beside what was
predicted of them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.browser import Page, opened

GALLERY = Path(__file__).parents[1] / "gallery"
FOUR = ("config.yaml:cluster=preset_cpu", "config.yaml:checkpoint=pipeline", "cluster/preset_cpu.yaml:devices=4")
PARTITIONS = {"gpipe": 4, "1f1b": 4, "interleaved": 8, "zero_bubble": 4}
WIDTH, GAP = 1100, 12  # pixels: of the page, and around what is photographed


def main() -> int:
    GALLERY.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, opened() as page:
        root = Path(folder)
        call(root, "git", "init", "--quiet")
        call(root, "shardwright", "init")
        call(root, "dvc", "repro")
        commit(root)
        report = keep(root, "runs/train/report.html", "report.html")
        keep(root, "runs/profile/memory.png", "profile.png")
        keep(root, "runs/cluster/topology.png", "cluster.png")
        for part in ("memory", "frontier"):
            picture(page, report, part, f"{part}.png")
        experiment(root, "solve/glpk.yaml:memory_budget_gb=0.02")
        picture(page, root / "runs/codegen/report.html", "recompute", "recompute.png")
        for name, partitions in PARTITIONS.items():
            wish = (f"checkpoint/pipeline.yaml:pipeline={name}", f"checkpoint/pipeline.yaml:+partitions={partitions}")
            experiment(root, *FOUR, *wish, "train/adamw.yaml:gradient_accumulation=8")
            picture(page, root / "runs/codegen/report.html", "schedule", f"{name}.png")
    return 0


def call(root: Path, *command: str) -> None:
    """With the programs of this environment."""
    print("$", *command, flush=True)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(command, cwd=root, env={**os.environ, "PATH": path}, check=True)


def commit(root: Path) -> None:
    who = ("-c", "user.name=gallery", "-c", "user.email=gallery@example.invalid")
    call(root, "git", "add", "--all")
    call(root, "git", *who, "commit", "--quiet", "--message", "planned and trained")


def experiment(root: Path, *settings: str) -> None:
    """From the first commit: the settings of the one before are taken back."""
    call(root, "git", "checkout", "--quiet", ".")
    words = [word for setting in settings for word in ("-S", f"conf/{setting}")]
    call(root, "dvc", "exp", "run", *words, "codegen")


def keep(root: Path, made: str, name: str) -> Path:
    return Path(shutil.copyfile(root / made, GALLERY / name))


def picture(page: Page, report: Path, part: str, name: str) -> None:
    """One section of a report page."""
    page.prefer("light")
    page.call("Emulation.setScrollbarsHidden", hidden=True)
    page.call("Emulation.setDeviceMetricsOverride", width=WIDTH, height=900, deviceScaleFactor=1, mobile=False)
    page.open(report)
    page.frame()
    box = page.ask(f"(() => {{ const one = document.getElementById('{part}').getBoundingClientRect();"
                   "return [one.x + scrollX, one.y + scrollY, one.width, one.height]; })()")  # fmt: skip
    x, y, width, height = box
    area = {"x": x - GAP, "y": y - GAP, "width": width + 2 * GAP, "height": height + 2 * GAP, "scale": 1}
    page.picture(GALLERY / name, clip=area)


if __name__ == "__main__":
    sys.exit(main())
