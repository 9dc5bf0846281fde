"""The oldest versions that pyproject.toml allows, as constraints for pip: what `make test-oldest` installs.

`torch>=2.11,<2.14` becomes `torch==2.11.*`: with the corrections that its first version had.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LOWER = re.compile(r"([\w.-]+)>=([\d.]+)")


def constraints(project: dict[str, Any]) -> Iterator[str]:
    """Of what users install; tools of developers are as new as they get."""
    for requirement in (*project["dependencies"], *project["optional-dependencies"]["hf"]):
        found = LOWER.match(requirement)
        if found is None:
            raise ValueError(f"{requirement}: no oldest version is named")
        yield f"{found[1]}=={found[2]}.*"


if __name__ == "__main__":
    content = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    sys.stdout.write("".join(f"{line}\n" for line in constraints(content["project"])))
