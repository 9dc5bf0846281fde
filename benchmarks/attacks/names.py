"""Names that are code, markup or nothing that can be printed: of parameters, buffers, modules and the user's files.

A model has them, and is taken through all stages before train. A name that runs would make the file `MARK`. Held where
every stage ends by itself, the program parses, its names are those of the model, and no code ran.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import small_project
from benchmarks.attacks.outcome import TRACEBACK, Outcome
from benchmarks.in_folder import commands, warm

MARK = "code_ran"
RUNS = f"open('{MARK}', 'w')"  # torch takes no name with a dot
NAMES = {
    "code in a literal": f'x": {RUNS}, "y',
    "code after a bracket": f'x"]; {RUNS}; p["x',
    "code in a comment": f"x\n{RUNS}\n#",
    "code after a carriage return": f"x\r{RUNS}\r#",
    "code after a form feed": f"x\f\n    {RUNS}\n#",
    "three quotes": f'"""\n{RUNS}\n"""',
    "a quote": 'it"s',
    "an apostrophe": "it's",
    "a newline": "a\nb",
    "a backslash": "a\\",
    "an escape": 'a\\"b',
    "braces": "{x} {0} {}",
    "percent": "%s %(x)s",
    "brackets and commas": "a(b, [c, d",
    "closing brackets": "a)b]c}",
    "a hash": "a # b",
    "a dollar": "$a $(touch code_ran) `touch code_ran`",
    "spaces": " a  b ",
    "nothing but digits": "0",
    "digits before letters": "0a",
    "superscript digits": "²x³",
    "a range": "0-3",
    "a star": "*",
    "a keyword": "class",
    "a name of the program": "self",
    "a name of Python": "__import__",
    "a dunder": "__class__x__",
    "letters of other scripts": "größe_重み_ﬁ",
    "letters that Python holds for equal": "ﬁ_fi",
    "a terminal's code": "\x1b[31mred\x07",
    "turned direction": "a\u202eb\u2066c",
    "line separators": "a\u2028b\x85c\x0bd",
    "a null": "a\x00b",
    "markup": "[bold]x[/bold] [/]",
    "html": f"</script><script>{RUNS}</script><img src=x onerror=alert(1)>",
    "markdown": "a | b ` * _ [x](y)",
    "a path": "/tmp/x",
    "very long": "n" * 5000,
    "a slash and a colon": "a/b: S(0) -> R",
}
MODEL = """
import torch
from torch import nn

NAME = {name!r}


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_parameter(NAME, nn.Parameter(torch.randn({size}, {size})))
        self.register_buffer("b" + NAME, torch.randn({size}))

    def forward(self, x):
        return x @ getattr(self, NAME) + getattr(self, "b" + NAME)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear({size}, {size})
        self.add_module("m" + NAME, Odd())
        self.last = nn.Sequential(nn.Linear({size}, {size}), nn.ReLU(), nn.Linear({size}, {size}))

    def forward(self, x, labels):
        x = torch.relu(getattr(self, "m" + NAME)(torch.relu(self.first(x))))
        return ((self.last(x) - labels) ** 2).mean()
"""
SIZE = 16
STAGES = (*(f"{stage} -q" for stage in small_project.BEFORE_TRAIN), "explain", "report")
SAMPLED = ("code in a literal", "code in a comment", "brackets and commas")


def attacks(folder: Path, sample: bool) -> Iterator[Outcome]:
    if sample:
        made(folder / "all", "".join(NAMES[what] for what in SAMPLED))
        yield attack(", ".join(SAMPLED), folder / "all", "".join(NAMES[what] for what in SAMPLED))
        return
    made(folder / "plain", "weight")
    warm(folder / "plain", *STAGES)
    for number, (what, name) in enumerate(NAMES.items()):
        root = folder / str(number)
        made(root, name)
        yield attack(what, root, name)


def made(root: Path, name: str) -> None:
    small_project.configure(root, {"steps": 1})
    (root / "odd.py").write_text(MODEL.format(name=name, size=SIZE), encoding="utf-8")
    batch = {"shape": [8, SIZE], "dtype": "float32"}
    settings: dict[str, Any] = {"module": {"_target_": "odd.Model"}, "batch": {"x": batch, "labels": batch}}
    (root / "conf/model/small.yaml").write_text(json.dumps(settings))


def attack(what: str, root: Path, name: str) -> Outcome:
    ended = commands(root, *(stage.split() for stage in STAGES))
    if any(root.rglob(MARK)):
        return Outcome(what, False, "it ran", code_run=True)
    if ended.returncode or TRACEBACK in ended.stderr:
        return Outcome(what, False, ended.stderr[-500:], TRACEBACK in ended.stderr)
    if {"\x1b", "\u202e"} & set(ended.stdout + ended.stderr):
        return Outcome(what, False, "it is printed as it is")
    return Outcome(what, *_program(root, name))


def _program(root: Path, name: str) -> tuple[bool, str]:
    """Whether it parses, reads the parameter by its own name, and does nothing when it is imported."""
    text = (root / "runs/codegen/module.py").read_text(encoding="utf-8")
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        return False, f"the program does not parse: {error}"
    (table,) = (node.value for node in tree.body if isinstance(node, ast.Assign) and _is(node.targets[0], "PARAMETERS"))
    rows = ast.literal_eval(table)
    from shardwright.pipeline.ir.names import look_up

    wanted = f"m{name}.{name}"
    found = look_up(rows, wanted) is not None
    calls = [node for node in tree.body if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)]
    return found and not calls, "" if found else f"no row of {wanted!r} in {list(rows)}"


def _is(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
