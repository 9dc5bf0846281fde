"""Plans and programs of ten families of models, to hold two versions of the source against one another.

`python -m benchmarks.same_plans FOLDER` runs the stages from trace to codegen for every family and five settings, and
leaves plan.json and module.py of each in FOLDER, or the line with which a stage refused. Run it in a checkout of one
version, then with `--beside` and that folder in one of the other: what differs is listed, digests and versions of
artifacts aside. The last line is one JSON object; the exit status says whether all are equal.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from shardwright.stages.command_line import main as stages
from tests.families import FAMILIES

ROOT = Path(__file__).parents[1]
CARD = {"matmul_gflops": 50_000, "memory_gbytes_per_s": 900, "launch_us": 5, "latency_us": 20, "link_gbytes_per_s": 20}
SETTINGS: dict[str, dict[str, dict[str, Any]]] = {  # of each group of conf/ what differs; budgets: of the unsplit peak
    "recompute": {"cluster": {"devices": 1}, "solve": {"memory_budget_gb": 0.7}},
    "fastest": {"cluster": {"devices": 2}, "checkpoint": {"recompute": "off"}},
    "tensor": {"cluster": {"devices": 4}, "solve": {"only": "tensor"}},
    "tight": {"cluster": {"devices": 4}, "solve": {"memory_budget_gb": 0.4}},
    "pipeline": {"cluster": {"devices": 2}, "checkpoint": {"pipeline": "1f1b", "partitions": 2, "micro_batches": 2}},
}
STAGES = ("cluster", "solve", "checkpoint", "codegen")
KEPT = {"plan.json": "runs/checkpoint/plan.json", "module.py": "runs/codegen/module.py"}
HEADER = re.compile(r"sha256:[0-9a-f]+|^# .*(?:version|digest).*$", re.MULTILINE)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--beside", type=Path, help="the folder that another version has written")
    parser.add_argument("--only", nargs="*", default=[], help="families")
    asked = parser.parse_args()
    folder, beside = asked.folder.resolve(), asked.beside and asked.beside.resolve()
    for build in FAMILIES:
        if not asked.only or build.__name__ in asked.only:
            write_family(build.__name__, FAMILIES[build], folder)
    written = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    refused = [str(path) for path in written if path.name == "refused.txt"]
    differ = [str(path) for path in written if beside and text_of(folder / path) != text_of(beside / path)]
    for path in differ:
        print(f"differs: {path}")
    counts = {"files": len(written), "refused": len(refused), "different": len(differ) if beside else None}
    print(json.dumps(counts))
    return 1 if differ else 0


def write_family(name: str, batch: Mapping[str, Any], folder: Path) -> None:
    with tempfile.TemporaryDirectory() as project, contextlib.chdir(project):
        root = Path(project)
        shutil.copytree(ROOT / "conf", root / "conf")
        (root / "pipeline/models").mkdir(parents=True)
        shapes = {key: {"shape": [*t.shape], "dtype": str(t.dtype).removeprefix("torch.")} for key, t in batch.items()}
        model = {"module": {"_target_": f"tests.families.{name}"}, "batch": shapes}
        choose(root, model=model, cluster={"devices": 1}, solve={}, checkpoint={}, train={})
        for stage in ("trace", "profile"):
            if refused := run(stage):
                raise SystemExit(f"{name}: {stage}: {refused}")
        peak_gb = json.loads((root / "runs/profile/summary.json").read_text())["unsplit_peak_mb"] / 1e3
        for setting, changes in SETTINGS.items():
            solve = {**changes.get("solve", {})}
            if "memory_budget_gb" in solve:
                solve["memory_budget_gb"] *= peak_gb
            choose(root, **{"model": model, "cluster": {}, "checkpoint": {}, "train": {}, **changes, "solve": solve})
            refused = next((said for stage in STAGES if (said := run(stage))), "")
            place = folder / name / setting
            place.mkdir(parents=True, exist_ok=True)
            for kept, path in KEPT.items():
                if not refused:
                    shutil.copy(root / path, place / kept)
            if refused:
                (place / "refused.txt").write_text(refused)
            print(f"{name:10}{setting:12}{refused.strip()[:90]}", flush=True)


def choose(root: Path, **groups: Mapping[str, Any]) -> None:
    """A file `same` in every group, chosen in conf/config.yaml."""
    card = {"source": "preset", "device": "cpu", "memory_gb": 4, "preset": CARD}
    small = {"backend": "highs", "gap": 1e-4, "frontier_points": 3, "submeshes": 1}
    train = yaml.safe_load((root / "conf/train/adamw.yaml").read_text())
    usual = {"cluster": card, "solve": small, "checkpoint": {"recompute": "optimal"}, "train": train}
    for group, changes in groups.items():
        (root / f"conf/{group}/same.yaml").write_text(yaml.safe_dump({**usual.get(group, {}), **changes}))
    text = (root / "conf/config.yaml").read_text()
    text = re.sub(rf"(?m)^({'|'.join(groups)}): \S+", r"\1: same", text)
    (root / "conf/config.yaml").write_text(text.replace("enabled: true", "enabled: false"))


def run(stage: str) -> str:
    """What it said where it refused."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        status = stages([stage, "-q"])
    return said.getvalue() or f"status {status}" if status else ""


def text_of(path: Path) -> str:
    return HEADER.sub("", path.read_text()) if path.exists() else ""


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
