"""The site of a small repository: links out of docs/ work, links to nothing end the build, and the API is whole."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import yaml

from shardwright.pipeline import runtime

ROOT = Path(__file__).parents[2]
pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")
PAGES = {
    "README.md": "# Name\n\n[a page](docs/a.md#two-words) and [a folder](conf) and [how](CONTRIBUTING.md)\n",
    "CONTRIBUTING.md": "# How\n\n[its hook](docs/site/hooks.py) and [the first page](README.md)\n",
    "conf/README.md": "# Settings\n\n[one](one.yaml)\n",
    "conf/one.yaml": "key: value\n",
    "docs/a.md": "# A\n\n## Two words\n\n[settings](../conf/one.yaml), [the first page](../README.md#name)\n",
}


def made(root: Path, **changed: str) -> Path:
    """With our settings and hooks; without the API and our pages, which `make site` builds."""
    for path, text in {**PAGES, **changed}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    shutil.copytree(ROOT / "docs/site", root / "docs/site")
    own = {"INHERIT": str(ROOT / "mkdocs.yml"), "plugins": ["search"], "nav": [{"Name": "index.md"}, {"A": "a.md"}]}
    (root / "mkdocs.yml").write_text(yaml.safe_dump(own))
    return root


def build(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True)


def test_links_out_of_docs_lead_to_pages_of_the_site(tmp_path: Path) -> None:
    done = build(made(tmp_path))
    assert done.returncode == 0, done.stderr
    site = tmp_path / "build/site"
    seen = set()
    for page in set(site.rglob("*.html")) - {site / "404.html"}:
        text = page.read_text()
        assert not re.search(r'<(?:script|link|img|iframe)[^>]+(?:src|href)="?https?:', text), "fetched from elsewhere"
        for link in re.findall(r'href="([^"#:]+)[#"]', text):
            assert (page.parent / link).is_file(), f"{page}: {link}"
            seen.add((page.parent / link).resolve().relative_to(site.resolve()).as_posix())
    outside = {f"repository/{path}.html" for path in ("CONTRIBUTING", "conf/index", "conf/one.yaml")}
    assert outside | {"a.html", "index.html"} <= seen
    assert "key" in (site / "repository/conf/one.yaml.html").read_text()


def test_links_to_nothing_and_a_forgotten_page_end_the_build(tmp_path: Path) -> None:
    gone = {
        "README.md": "docs/c.md",
        "conf/README.md": "two.yaml",
        "docs/a.md": "#no-such",
        "CONTRIBUTING.md": "README.md#no",
    }
    broken = {file: f"{PAGES[file]}\n[gone]({link})\n" for file, link in gone.items()}
    done = build(made(tmp_path, **broken, **{"docs/b.md": "# B\n"}))
    assert done.returncode == 1 and "with 5 warnings in strict mode" in done.stdout, done.stderr
    for told in ("docs/c.md'", "two.yaml'", "#no-such'", "#no'", "- b.md"):
        assert told in done.stderr, told


def hooks() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs/site/hooks.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_api_has_every_public_name_where_it_is_defined(monkeypatch: pytest.MonkeyPatch) -> None:
    told = hooks().section("shardwright.pipeline.runtime")
    assert sorted(line.rpartition(".")[2] for line in told.splitlines() if line) == sorted(runtime.__all__)
    assert "::: shardwright.pipeline.runtime.programs.collectives.all_reduce\n" in told
    late = types.ModuleType("late")
    late.__all__ = ["__version__", "recompute"]
    late.__getattr__ = lambda name: getattr(runtime, name)  # imported when it is asked for
    monkeypatch.setitem(sys.modules, "late", late)
    assert hooks().section("late") == "::: shardwright.pipeline.runtime.recompute.regions.recompute\n"
    assert (ROOT / "docs/api.md").read_text().count(hooks().MADE_HERE) == 1
