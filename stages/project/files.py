"""What a new project consists of: the text of each file by its path.

conf/ and dvc.yaml are those of this package. In dvc.yaml the commands are `shardwright ...`, and in place of our source
stages depend on the file that says which version made the project.
"""

from __future__ import annotations

import re
from pathlib import Path

import shardwright
from shardwright.pipeline.config.made_by import FILE

PACKAGE = Path(shardwright.__file__).parent
TEMPLATE = Path(__file__).parent / "template"
CHOICES = {"model": "my_model", "data": "my_data", "code": "my_model.py"}
OURS = re.compile(r"      - (?:pipeline|stages)/\S+\n")
# What git and DVC need, beside dvc.yaml.
DVC = {
    ".gitignore": "__pycache__/\n.venv/\n",
    ".dvc/config": "[core]\n    analytics = false\n    check_update = false\n[plots]\n    out_dir = runs/plots\n",
    ".dvc/.gitignore": "/config.local\n/tmp\n/cache\n",
    ".dvcignore": "# Never a reason to run a stage again.\n__pycache__\n*.pyc\nREADME.md\n.venv\n",
    "runs/.gitignore": "*\n!.gitignore\n",
}


def new_files() -> dict[str, str]:
    """Of a project that is made today."""
    own = {
        "my_model.py": (TEMPLATE / "my_model.py").read_text(),
        "conf/model/my_model.yaml": (TEMPLATE / "model.yaml").read_text(),
        "conf/data/my_data.yaml": (TEMPLATE / "data.yaml").read_text(),
    }
    return {**DVC, **_conf(), **own, "dvc.yaml": dvc_yaml()}


def needed_files() -> dict[str, str]:
    """Without which no stage runs, whatever the user has chosen."""
    return {
        **DVC,
        **{path: text for path, text in _conf().items() if path.endswith("README.md")},
        "dvc.yaml": dvc_yaml(),
    }


def dvc_yaml() -> str:
    text = (PACKAGE / "seven_stages.yaml").read_text().replace("cmd: python -m stages ", "cmd: shardwright ")
    return OURS.sub("", text).replace("    deps:\n", f"    deps:\n      - {FILE}\n")


def _conf() -> dict[str, str]:
    folder = PACKAGE / "conf"
    kinds = ("**/*.yaml", "**/README.md", "data/*.txt")
    paths = [path for kind in kinds for path in folder.glob(kind) if path.is_file()]
    found = {f"conf/{path.relative_to(folder)}": path.read_text() for path in sorted(paths)}
    for key, name in CHOICES.items():
        found["conf/config.yaml"] = re.sub(rf"(?m)^{key}: [^\s#]+", f"{key}: {name}", found["conf/config.yaml"])
    return found
