"""The pages themselves: links lead somewhere, README lists them all, and names of the program are the program's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardwright.pipeline.runtime_names import NAMES
from shardwright.pipeline.tracking.headline import HEADLINES, numbered

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def anchors(path: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    heads = re.findall(r"(?m)^#+ (.+)$", path.read_text())
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" not in link:
            file, _, anchor = link.partition("#")
            target = (page.parent / file).resolve() if file else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_folders_that_are_compared_are_made_on_the_same_page(page: Path) -> None:
    text = page.read_text()
    named = {name for pair in re.findall(r"--diff (\S+) (\S+?)[`\s]", text) for name in pair if name.islower()}
    assert [name for name in named if f"mkdir {name}" not in text] == []


def test_readme_lists_every_page() -> None:
    listed = re.findall(r"\]\(docs/([\w.-]+)", (ROOT / "README.md").read_text())
    assert {page.name for page in PAGES if page.parent.name == "docs"} <= set(listed)


def test_every_call_of_generated_programs_is_told() -> None:
    rows = re.findall(r"(?m)^\| (`[^|]+) \|", (ROOT / "docs/reading-the-program.md").read_text())
    told = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert set(NAMES) <= told
    assert told - set(NAMES) == {"MESH", "INPUTS", "PARAMETERS", "MICRO_BATCHES", "SLICES"}


def test_every_headline_metric_is_told() -> None:
    page = (ROOT / "docs/runs.md").read_text()
    figures = {figure: 0 for _, figure in HEADLINES.values()}
    named = [name for stage in ("checkpoint", "train") for name in numbered(stage, figures)]
    assert len(named) == len(HEADLINES) and all(f"`{name}`" in page for name in named)


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name == "docs"], ids=lambda page: page.name)
def test_a_page_begins_with_what_it_is_for_and_a_command(page: Path) -> None:
    """A sentence under the heading, and within the first 16 lines a line to copy."""
    lines = page.read_text().splitlines()
    assert lines[0].startswith("# ") and re.match(r"[A-Z][\w`,' ]+", lines[2]), lines[2]
    fences = re.findall(r"(?ms)^```sh\n(.+?)^```", "\n".join([*lines[:16], "```"]))
    assert [line for line in lines[:16] if line.startswith("    ")] or fences
