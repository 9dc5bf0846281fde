"""Objects from configuration: `_target_` names an importable class or function, the other keys are its arguments."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.errors import ShardwrightError


class TargetError(ShardwrightError):
    """A `_target_` cannot be imported, refuses its arguments, or is not what is needed."""


def locate(target: str, where: str) -> Any:
    """The object that a dotted name stands for."""
    parts = target.split(".")
    for split in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:split])
        try:
            found: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
                continue  # the name goes on inside a shorter module
            raise TargetError(
                f"importing {target!r} failed: {error}", where=where, remedy="install the missing package"
            ) from error
        except Exception as error:  # the user's module runs here: whatever it raises is theirs to see
            raise TargetError(f"importing {target!r} failed: {type(error).__name__}: {error}", where=where) from error
        try:
            for part in parts[split:]:
                found = getattr(found, part)
        except AttributeError as error:
            raise TargetError(
                f"{target!r} cannot be found: {error}", where=where, remedy="check the dotted name"
            ) from error
        return found
    raise TargetError(
        f"{target!r} cannot be imported: no module named {parts[0]!r}",
        where=where,
        remedy="install its package, or name its folder as `code` in conf/config.yaml",
    )


def instantiate(settings: Mapping[str, Any], where: str, *leading: Any) -> Any:
    """Calls what `_target_` names with the other keys; a nested mapping with `_target_` is made first."""
    function = locate(str(settings["_target_"]), where)
    arguments = {k: _value(v, f"{where}.{k}") for k, v in settings.items() if k != "_target_"}
    if not callable(function):
        raise TargetError(f"{settings['_target_']!r} is not callable", where=where, remedy="name a class or a function")
    try:
        return function(*leading, **arguments)
    except Exception as error:  # the user's constructor: one line, not our traceback
        raise TargetError(
            f"{settings['_target_']} refused its arguments: {type(error).__name__}: {error}",
            where=where,
            remedy="check the keys beside `_target_`",
        ) from error


def _value(value: Any, where: str) -> Any:
    if isinstance(value, Mapping):
        return (
            instantiate(value, where)
            if "_target_" in value
            else {k: _value(v, f"{where}.{k}") for k, v in value.items()}
        )
    return [_value(v, f"{where}[{i}]") for i, v in enumerate(value)] if isinstance(value, list) else value


def add_code_path(root: Path, code: str) -> None:
    """Puts the folder of the user's code on the import path where it lies outside the project."""
    path = (root / code).resolve()
    if not path.exists():
        raise TargetError(
            f"the code folder {code!r} does not exist",
            where="conf/config.yaml: code",
            remedy="name the folder or file that holds your model's source",
        )
    folder = path if path.is_dir() else path.parent
    if not folder.is_relative_to(root.resolve()):
        sys.dont_write_bytecode = True  # .dvcignore does not reach there: a __pycache__ of ours would look like an edit
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
