"""What the site has beyond docs/: README as its first page, what pages link to elsewhere in the repository, the API.

A link is written as a repository browser wants it. In the site a file outside docs/ has a page below repository/, made
for the build: Markdown as it is, everything else as source. A link to nothing stays, and MkDocs warns of it.
"""

from __future__ import annotations

import importlib
import inspect
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\]\(([^)\s#:]+)(#[^)\s]*)?\)")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json", ".toml": "toml"}
MADE_HERE = "<!-- made by docs/site/hooks.py -->"
# What a reader may import, and the heading that it has. Of a module with __all__ that, of others what it defines.
API = {
    "shardwright": "From Python",
    "shardwright.pipeline.ops": "Rules of your own ops",
    "shardwright.pipeline.models.data": "Data sets that can be learned",
    "shardwright.pipeline.models.text": "A text file as data",
    "shardwright.pipeline.models.mlp": "Models: a plain classifier",
    "shardwright.pipeline.models.conv": "Models: a convolutional classifier",
    "shardwright.pipeline.models.gpt": "Models: a small transformer",
    "shardwright.pipeline.models.transformer": "Models: transformers by their sizes",
    "shardwright.pipeline.runtime": "What generated programs call",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds README and, page by page, what is linked."""
    waiting = ["README.md", *(f"docs/{file.src_uri}" for file in files.documentation_pages())]
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        if not in_docs(path):
            content = (ROOT / path).read_text(encoding="utf-8")
            shown = content if path.endswith(".md") else as_source(path, content)
            inclusion = InclusionLevel.INCLUDED if path in listed(config.nav) else InclusionLevel.NOT_IN_NAV
            files.append(File.generated(config, uri_of(path), content=shown, inclusion=inclusion))
        targets = links_of(path) if path.endswith(".md") else []
        waiting += [target for target in targets if target not in seen and not in_docs(target)]
        seen.update(targets)
    return files


def listed(nav: list[object] | None) -> set[str]:
    """Files of the repository that the navigation names."""
    return {path for path in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md") if uri_of(path) in str(nav)}


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    path = path_of(page.file.src_uri)
    own = posixpath.dirname(page.file.src_uri)

    def in_site(found: re.Match[str]) -> str:
        target = target_of(path, found[1])
        return f"]({posixpath.relpath(uri_of(target), own or '.')}{found[2] or ''})" if target else found[0]

    linked = LINK.sub(in_site, markdown) if path.endswith(".md") else markdown
    return linked.replace(MADE_HERE, api()) if path == "docs/api.md" else linked


# ---- paths in the repository, and in the site


def in_docs(path: str) -> bool:
    """`exclude_docs` leaves docs/site out."""
    return path.startswith("docs/") and not path.startswith("docs/site/")


def uri_of(path: str) -> str:
    if in_docs(path):
        return path.removeprefix("docs/")
    return "index.md" if path == "README.md" else f"repository/{path}{'' if path.endswith('.md') else '.md'}"


def path_of(uri: str) -> str:
    if uri == "index.md":
        return "README.md"
    if not uri.startswith("repository/"):
        return f"docs/{uri}"
    path = uri.removeprefix("repository/")
    return path if (ROOT / path).is_file() else path.removesuffix(".md")


def links_of(path: str) -> list[str]:
    found = (target_of(path, link) for link, _ in LINK.findall((ROOT / path).read_text(encoding="utf-8")))
    return [target for target in found if target]


def target_of(path: str, link: str) -> str | None:
    """A file of the repository; of a folder its README."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
    if (ROOT / target).is_dir():
        target = f"{target}/README.md"
    return target if not target.startswith("..") and (ROOT / target).is_file() else None


def as_source(path: str, content: str) -> str:
    fence = "`" * 6
    return f"# {path}\n\n{fence}{LANGUAGES.get(Path(path).suffix, 'text')}\n{content}\n{fence}\n"


# ---- the API


def api() -> str:
    told = ((name, title, section(name)) for name, title in API.items())
    return "\n".join(f"## {title}\n\n`{name}`\n\n{entries}" for name, title, entries in told if entries)


def section(name: str) -> str:
    """A directive for mkdocstrings for each name, where it is defined: also where the package imports it when asked."""
    module = importlib.import_module(name)
    names = getattr(module, "__all__", None) or [key for key, value in vars(module).items() if own(value, name)]
    found = [(each, getattr(module, each)) for each in names if not each.startswith("__")]
    return "\n".join(f"::: {place(each, value, name)}\n" for each, value in found)


def own(value: object, module: str) -> bool:
    public = inspect.isclass(value) or inspect.isfunction(value)
    return public and value.__module__ == module and not value.__name__.startswith("_")


def place(name: str, value: object, module: str) -> str:
    where = getattr(value, "__module__", module) if hasattr(value, "__qualname__") else module
    return f"{where}.{getattr(value, '__qualname__', name)}"
