"""`docs [PAGE]`: the pages of docs/, which are installed too."""

from __future__ import annotations

from pathlib import Path

import shardwright
from shardwright.pipeline.base.errors import ShardwrightError, nearest
from shardwright.pipeline.base.log import say

FOLDER = Path(shardwright.__file__).parent / "docs"


def show(page: str | None) -> int:
    """The text of one, by its name or as `docs/name.md`; of none the list."""
    pages = {path.stem: path for path in sorted(FOLDER.glob("*.md"))}
    if page is None:
        say("\n".join(f"{name:<22}{_title(path)}" for name, path in pages.items()))
        say(f"`shardwright docs NAME` prints one; they are files in {FOLDER}")
        return 0
    name = page.removeprefix("docs/").removesuffix(".md")
    if name not in pages:
        near = nearest(name, list(pages))
        remedy = f"did you mean '{near}'?" if near else "`shardwright docs` lists them"
        raise ShardwrightError(f"there is no page {page}", where="shardwright docs", remedy=remedy)
    say(pages[name].read_text("utf-8").rstrip("\n"))
    return 0


def _title(path: Path) -> str:
    return path.read_text("utf-8").split("\n", 1)[0].removeprefix("# ")
