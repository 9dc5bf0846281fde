"""Names in the generated program: literals and comments, whatever the user or a forged artifact calls things."""

from __future__ import annotations

import ast
from dataclasses import replace

import pytest

from shardwright.pipeline.base.errors import CodegenError
from shardwright.pipeline.ir.graph import OpGraph, Role
from shardwright.pipeline.ir.names import look_up, printable, ranges
from shardwright.pipeline.ir.plan import Sharding
from shardwright.stages.codegen.block import RESERVED, free_name, statement
from shardwright.stages.codegen.run import check_parses
from shardwright.stages.codegen.text import quoted
from tests.graphs import mlp_graph
from tests.programs import nested, plan_for, uniform, write

CODE = "open('code_ran', 'w')"
NAMES = (
    f'x": {CODE}, "y',
    f'"]; {CODE}; p["',
    f"a\n{CODE}\r{CODE}\x0c\u2028{CODE}",
    f'"""\n{CODE}\n"""',
    "a\\",
    "{x}%s (b, [c",
    "²x³",
    "class",
    "\x1b[31m\u202e\x00",
    "very long, (with) a comma, " * 8,
)


def renamed(graph: OpGraph, sharding: Sharding, name: str) -> tuple[OpGraph, Sharding, dict[str, str]]:
    """Modules, parameters, buffers, files of the user: all have that name in theirs."""
    kinds = (Role.PARAMETER, Role.BUFFER)
    origins = {
        v.origin: ".".join(p + name for p in v.origin.split(".")) for v in graph.values.values() if v.role in kinds
    }
    values = {
        key: replace(value, origin=origins[value.origin] if value.role in kinds else value.origin)
        for key, value in graph.values.items()
    }
    ops = tuple(replace(op, module=f"{op.module}{name}", source=f"{name}:3") for op in graph.ops)
    storage = {origins[key]: layout for key, layout in sharding.storage.items()}
    return replace(graph, values=values, ops=ops), replace(sharding, storage=storage), origins


@pytest.mark.parametrize("name", NAMES)
def test_names_are_no_code(name):
    graph = mlp_graph()
    own, sharding, origins = renamed(graph, uniform(graph, 2), name)
    for regions in ((), nested(own)):
        text = check_parses(write(own, plan_for(own, sharding, 2, regions) if regions else plan_for(own, sharding, 2)))
        assert all(line.isprintable() for line in text.splitlines())
        tree = ast.parse(text)
        functions = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and hasattr(node.func, "id")}
        assert "open" not in functions
        (table,) = (n.value for n in tree.body if isinstance(n, ast.Assign) and n.targets[0].id == "PARAMETERS")
        rows = ast.literal_eval(table)
        assert all(look_up(rows, origins[value.origin]) for value in graph.of_role(Role.PARAMETER))


def test_ordinary_names_stand_as_they_are():
    for name in ("layers.0.up.weight", "größe", "a b", "it's"):
        assert quoted(name) == f'"{name}"'
    assert quoted('a"\\\n') == r'"a\"\\\n"'.replace(r"\n", r"\x0a")
    assert ast.literal_eval(quoted("\u202e\x00\U000e0001")) == "\u202e\x00\U000e0001"
    assert printable("a\nb\t", keep="\t") == "a\\x0ab\t"


@pytest.mark.parametrize("name", ["0", "0a", "²", "ﬁ", "class", "self", "x", "", "-", "größe"])
def test_any_name_becomes_a_variable(name):
    taken: set[str] = set()
    found = [free_name(name, taken) for _ in range(3)]
    assert len(set(found)) == 3
    assert all(one.isascii() and one.isidentifier() and one not in RESERVED for one in found)


def test_a_literal_is_not_where_a_line_is_broken():
    text = f"y = F.linear(x, p[{quoted('a(b, c)')}], p[{quoted('long ' * 30)}])"
    assert ast.dump(ast.parse("\n".join(statement(text)))) == ast.dump(ast.parse(text))
    assert len(statement(text)) > 3


def test_a_parameter_may_be_called_as_a_range():
    table = {"layers.0-3.w": 1, "layers.1.w": 2, "layers.2.w": 2, "layers.3.w": 2}
    assert all(look_up(ranges(table), name) == entry for name, entry in table.items())


@pytest.mark.parametrize("text", ["x = (", "x = '\n", "a\x00b", "return 3"])
def test_a_program_that_does_not_parse_is_refused_in_one_line(text):
    with pytest.raises(CodegenError) as refusal:
        check_parses(text)
    assert "does not parse" in refusal.value.line()
