"""The run of a git revision or a DVC experiment: artifacts and settings from DVC's cache, laid out as in a project."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from shardwright.pipeline.base.revision import files_of
from shardwright.stages.solve.explain.priced_run import ExplainError


def lay_out(root: Path, revision: str, files: Iterable[str], folder: Path) -> None:
    """`files` by their path in the project; and conf/, whole."""
    from dvc.exceptions import DvcException, NotDvcRepoError  # two seconds
    from dvc.scm import SCMError
    from scmrepo.exceptions import SCMError as GitError

    try:
        with files_of(root, revision) as there:
            for file in files:
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                there.get_file(file, str(folder / file))
            there.get("conf", str(folder / "conf"), recursive=True)
    except (NotDvcRepoError, SCMError, GitError) as error:
        remedy = "name a copy of runs/, a project, a git revision or an experiment of `dvc exp show`"
        raise ExplainError("there is no such folder, revision or experiment", where=revision, remedy=remedy) from error
    except (DvcException, OSError) as error:
        what = f"its run is not in DVC's cache: {error}"
        remedy = f"`git checkout {revision}` and `dvc repro checkpoint` make it"
        raise ExplainError(what, where=revision, remedy=remedy) from error
