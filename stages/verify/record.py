"""A program that notes every tensor it writes, and every gradient that reaches one.

Codegen writes one statement for each step of a link, in order; so the text as it was written says which name of which
function is which tensor. The text that is run may have been edited: its names are looked up in that of codegen, and
those that are not there are not noted. Functions are shared by links, and regions run twice: links are counted as they
are called, and a region's own method says with which link it begins.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType

from torch import Tensor as Data

from shardwright.pipeline.ir.program import Call, Program, Step, Tensor
from shardwright.pipeline.runtime import context
from shardwright.pipeline.runtime.compiler.compiled import as_written
from shardwright.pipeline.runtime.recompute.regions import replaying
from shardwright.pipeline.runtime_names import EARLY, REGIONS, TOGETHER

BEFORE = -1  # in place of a link's number: what is done before the chain
_NOTE, _ENTER, _BEGIN = "_shardwright_note", "_shardwright_enter", "_shardwright_begin"
_REGION = re.compile(r"links_(\d+)_to_\d+")


@dataclass(frozen=True)
class WrittenTensor:
    """What a name stands for."""

    tensor: Tensor
    step: Step
    function: str = ""  # in which it is written; a method has none


Names = dict[tuple[int, str], WrittenTensor]  # link, name -> what it is


@dataclass
class Noted:
    written: WrittenTensor
    place: tuple[int, int]  # the partition, and how many were noted before
    line: int
    value: Data
    gradient: Data | None = None

    def keep(self, gradient: Data) -> None:
        self.gradient = gradient.detach().clone()


@dataclass
class Recorder:
    """Notes what forward passes write while it is on; what backward runs again is not noted."""

    names: dict[int, Names]  # of each partition; of a program that is no pipeline there is one
    noted: dict[tuple[int, int, str], Noted] = field(default_factory=dict)  # by partition, link and name, in order
    on: bool = False
    partition: int = 0
    link: int = BEFORE

    @contextmanager
    def inside(self, partition: int, on: bool) -> Iterator[None]:
        """A forward pass of that partition."""
        self.partition, self.on = partition, on
        yield
        self.on = False

    def begin(self, link: int) -> None:
        if not replaying():
            self.link = link

    def enter(self) -> None:
        """The next function: of one link, or of several that are compiled as one."""
        if not replaying():
            self.link = min(link for link, _ in self.names[self.partition] if link > self.link)

    def note(self, before: bool, line: int, /, **tensors: object) -> None:
        if not self.on or replaying():  # gradients go through what the first run of a region wrote
            return
        context.step.settle()
        for name, tensor in tensors.items():
            link = BEFORE if before else self.link
            written = self.names[self.partition].get((link, name))
            if written is not None and isinstance(tensor, Data):
                noted = Noted(written, (self.partition, len(self.noted)), line, tensor.detach().clone())
                self.noted[self.partition, link, name] = noted
                if tensor.requires_grad and isinstance(written.step, Call):
                    tensor.register_hook(noted.keep)


# ---- which name is which tensor


def names_of(text: str, program: Program, written: str = "Program", first: int = 0) -> Names:
    """Of the text as codegen wrote it; `written` is a class, of a partition that begins with link `first`."""
    tree = ast.parse(text)
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    bases = [classes[base.id] for base in classes[written].bases if isinstance(base, ast.Name)]
    lines = [node for own in (*bases, classes[written]) for node in own.body]
    methods = {node.name: node for node in lines if isinstance(node, ast.FunctionDef)}
    called = functions | _compiled(tree, functions)
    found: Names = {}
    steps = [(link, step) for link, own in enumerate(program.links, first) for step in own]
    for name in _links(methods["forward"].body, called, methods):
        statements = _statements(called[name].body)
        count = sum(map(_steps_of, statements))
        found |= _match(steps[0][0], statements, tuple(step for _, step in steps[:count]), called[name].name)
        steps = steps[count:]
    assert not steps, "steps that no function has"
    before: dict[str, tuple[Step, ...]] = {"forward": (*program.prologue, *program.shared)}
    if "copies" in methods:
        before = {"copies": program.shared, "forward": program.prologue}
    for name, own in before.items():
        found |= _match(BEFORE, [s for s in _statements(methods[name].body) if _is_step(s, functions)], own)
    return found


def _statements(body: list[ast.stmt]) -> list[ast.stmt]:
    """Assignments and calls, also those under a `with`."""
    found: list[ast.stmt] = []
    for node in body:
        if isinstance(node, ast.With):
            found += _statements(node.body)
        elif isinstance(node, ast.Assign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
            found.append(node)
    return found


def _is_step(node: ast.stmt, functions: dict[str, ast.FunctionDef]) -> bool:
    """Not a link, a region, an input by its own name, what begins early, or the parameters."""
    assert isinstance(node, ast.Assign | ast.Expr)
    if name := _called(node):
        return name.partition("_keeps_")[0] not in (*functions, *REGIONS, *EARLY)
    told = ast.unparse(node.value)
    return told != "self.tensors" and not told.startswith("batch[")


def _links(
    body: list[ast.stmt], functions: dict[str, ast.FunctionDef], methods: dict[str, ast.FunctionDef]
) -> Iterator[str]:
    """The functions of the links, in the order in which forward calls them."""
    for node in _statements(body):
        name, call = _called(node), getattr(node, "value", None)
        if name in REGIONS and isinstance(call, ast.Call) and isinstance(call.args[0], ast.Attribute):
            yield from _links(methods[call.args[0].attr].body, functions, methods)
        elif name in functions:
            yield name


def _compiled(tree: ast.Module, functions: dict[str, ast.FunctionDef]) -> dict[str, ast.FunctionDef]:
    """Names of compiled functions -> the function: `a_keeps_50 = compiled(a, keeps=0.5)`."""
    found = {}
    for node in _statements(tree.body):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and _called(node) == "compiled":
            found[_targets(node)[0]] = functions[ast.unparse(node.value.args[0])]
    return found


def _called(node: ast.stmt) -> str:
    call = node.value if isinstance(node, ast.Assign | ast.Expr) else None
    return call.func.id if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) else ""


def _steps_of(node: ast.stmt) -> int:
    """One, unless parameters are gathered together, or counters counted."""
    counted = re.match(r"torch\._foreach_add_\(\[(.*)\], \d+\)", ast.unparse(node))
    return counted[1].count(",") + 1 if counted else len(_targets(node)) if _called(node) in TOGETHER else 1


def _match(link: int, statements: list[ast.stmt], steps: tuple[Step, ...], function: str = "") -> Names:
    found: Names = {}
    left = iter(steps)
    for node in statements:
        own = [next(left) for _ in range(_steps_of(node))]
        outputs = [(t, step) for step in own for t in (step.outputs if isinstance(step, Call) else (step.target,))]
        for name, (tensor, step) in zip(_targets(node), outputs, strict=False):
            found[link, name] = WrittenTensor(tensor, step, function)
    assert next(left, None) is None, "a step without a statement"
    return found


def _targets(node: ast.stmt) -> list[str]:
    if not isinstance(node, ast.Assign):
        return []
    return [part.id for target in node.targets for part in ast.walk(target) if isinstance(part, ast.Name)]


def targets_by_line(text: str) -> dict[int, list[tuple[str, str]]]:
    """The names that the statement of each line gives, each with its function."""
    found: dict[int, list[tuple[str, str]]] = {}
    for part in ast.parse(text).body:
        function = part.name if isinstance(part, ast.FunctionDef) else ""
        for node in ast.walk(part):
            if isinstance(node, ast.Assign):
                names = [(function, name) for name in _targets(node)]
                found |= dict.fromkeys(range(node.lineno, (node.end_lineno or node.lineno) + 1), names)
    return found


# ---- the text that is run, with notes


def recorded(text: str, path: str, recorder: Recorder) -> ModuleType:
    """The program, noting what it writes; lines have the numbers of the text."""
    tree = ast.parse(text, path)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            node.body = [_call(_ENTER, node), *_noting(node.body, before=False)]
        elif isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name != "__init__":
                    region = _REGION.fullmatch(method.name)
                    begin = _call(_BEGIN, method, ast.Constant(int(region[1]) - 1 if region else BEFORE))
                    method.body = [begin, *(method.body if region else _noting(method.body, before=True))]
    ast.fix_missing_locations(tree)
    module = ModuleType("shardwright_program")
    module.__file__ = path
    module.__dict__.update({_NOTE: recorder.note, _ENTER: recorder.enter, _BEGIN: recorder.begin})
    with as_written():
        exec(compile(tree, path, "exec", dont_inherit=True), module.__dict__)
    return module


def _noting(body: list[ast.stmt], *, before: bool) -> list[ast.stmt]:
    found: list[ast.stmt] = []
    for node in body:
        found.append(node)
        if isinstance(node, ast.With):
            node.body = _noting(node.body, before=before)
        elif isinstance(node, ast.Assign) and (names := _targets(node)):
            tensors = [ast.keyword(name, ast.Name(name, ast.Load())) for name in names]
            found.append(_call(_NOTE, node, ast.Constant(before), ast.Constant(node.lineno), keywords=tensors))
    return found


def _call(name: str, at: ast.stmt, *args: ast.expr, keywords: list[ast.keyword] | None = None) -> ast.Expr:
    call = ast.Expr(ast.Call(ast.Name(name, ast.Load()), list(args), keywords or []))
    return ast.copy_location(call, at)
