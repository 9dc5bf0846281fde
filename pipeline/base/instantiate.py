"""Objects from configuration: `_target_` names an importable class or function, the other keys are its arguments.

In a configuration that no file holds `_target_` may be the function itself.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from shardwright.pipeline.base.errors import ShardwrightError, nearest, refuse, shown, suggestion


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
            what, remedy = f"importing {target!r} failed: {error}", "install the missing package"
            raise TargetError(what, where=where, remedy=remedy) from error
        except (Exception, SystemExit) as error:  # the user's module runs here: whatever it raises is theirs to see
            raise TargetError(f"importing {target!r} failed: {type(error).__name__}: {error}", where=where) from error
        try:
            for part in parts[split:]:
                found = getattr(found, part)
        except AttributeError as error:
            what = f"{target!r} cannot be found: {error}"
            raise TargetError(what, where=where, remedy="check the dotted name") from error
        return found
    what = f"{target!r} cannot be imported: no module named {parts[0]!r}"
    raise TargetError(what, where=where, remedy="install its package, or name its folder as `code` in conf/config.yaml")


def instantiate(settings: Mapping[str, Any], where: str, *leading: Any) -> Any:
    """Calls what `_target_` names, or is, with the other keys; a nested mapping with `_target_` is made first."""
    given = settings["_target_"]
    function = given if callable(given) else locate(str(given), where)
    arguments = {k: _value(v, f"{where}.{k}") for k, v in settings.items() if k != "_target_"}
    if not callable(function):
        raise TargetError(f"{settings['_target_']!r} is not callable", where=where, remedy="name a class or a function")
    try:
        return function(*leading, **arguments)
    except (Exception, SystemExit) as error:  # the user's constructor: one line, not our traceback
        refuse(argument_mistakes(function, settings, where, len(leading)))
        odd = re.search(r"unexpected keyword argument '(\w+)'", str(error)) if isinstance(error, TypeError) else None
        if odd and odd[1] in settings:  # the call has passed it on to another one
            what = f"{settings['_target_']} takes no such argument: {error}"
            raise TargetError(what, where=f"{where}.{odd[1]}", remedy="leave it out") from error
        what = f"{settings['_target_']} refused its arguments: {type(error).__name__}: {error}"
        raise TargetError(what, where=where, remedy="check the keys beside `_target_`") from error


def argument_mistakes(
    function: Callable[..., Any], settings: Mapping[str, Any], where: str, leading: int = 0
) -> Iterator[TargetError]:
    """Why a call failed, as far as the keys tell: those that it does not take, lacks, or takes another type for.

    Asked after the failure alone, as what a decorator has changed may take more than its signature says.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # of a function in C
        return
    target = settings["_target_"]
    plain = [p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    given_first = {p.name for p in plain[:leading]}
    named = {p.name: p for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    free = [name for name in named if name not in given_first]
    odd = [key for key in settings if key != "_target_" and key not in free and not open_ended]
    for key in odd:
        remedy = suggestion(key, free, "it takes: ") if free else "leave it out"
        yield TargetError(f"{target} takes no such argument", where=f"{where}.{key}", remedy=remedy)
    meant = {nearest(key, free) for key in odd}
    for name in free:
        if name in settings and (wanted := _unlike(settings[name], named[name])):
            value = shown(settings[name])
            yield TargetError(f"got {value}, and {target} takes {wanted}", where=f"{where}.{name}")
        elif name not in settings and named[name].default is inspect.Parameter.empty and name not in meant:
            yield TargetError(f"{target} needs it", where=f"{where}.{name}", remedy="add the key")


def _unlike(value: Any, parameter: inspect.Parameter) -> str:
    """What the parameter takes by its default and annotation, where the value is plainly something else."""
    default = parameter.default
    known = {type(default).__name__} if isinstance(default, bool | int | float | str) else set()
    annotation = parameter.annotation
    written = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    known |= set(re.findall(r"\b(?:bool|int|float|str|list|dict|tuple|Any|Literal|Path)\b", written))
    number = bool(known & {"int", "float"}) and not known & {"str", "Any", "Literal", "Path"}
    if isinstance(value, str) and number:
        return "a number"
    if known == {"str"} and isinstance(value, bool | int | float):
        return "text"
    return ""


def _value(value: Any, where: str) -> Any:
    if isinstance(value, Mapping) and "_target_" in value:
        return instantiate(value, where)
    if isinstance(value, Mapping):
        return {k: _value(v, f"{where}.{k}") for k, v in value.items()}
    return [_value(v, f"{where}[{i}]") for i, v in enumerate(value)] if isinstance(value, list) else value


def add_code_path(root: Path, code: str) -> None:
    """Puts the folder of the user's code on the import path where it lies outside the project."""
    path = (root / code).resolve()
    if not path.exists():
        what = f"the code folder {code!r} does not exist"
        remedy = "name the folder or file that holds your model's source"
        raise TargetError(what, where="conf/config.yaml: code", remedy=remedy)
    folder = path if path.is_dir() else path.parent
    if not folder.is_relative_to(root.resolve()):
        sys.dont_write_bytecode = True  # .dvcignore does not reach there: a __pycache__ of ours would look like an edit
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
