"""A graph that breaks a rule is refused; every rule is broken by some graph."""

from __future__ import annotations

import operator
from dataclasses import replace
from functools import reduce

import pytest

from shardwright.pipeline.ir.graph import Op, OpGraph, Ref, Role, TensorType
from shardwright.pipeline.ir.verify import RULES, InvalidGraph, verify_graph
from tests.graphs import gpt_graph, ladder_graph, mlp_graph, shared_graph


def changed(graph: OpGraph, name: str, **fields) -> OpGraph:
    return replace(graph, ops=tuple(replace(op, **fields) if op.name == name else op for op in graph.ops))


def renamed_output(graph: OpGraph, index: int, output: str) -> OpGraph:
    return changed(graph, graph.ops[index].name, outputs=(output,))


def swapped(items: tuple, a: int, b: int) -> tuple:
    found = list(items)
    found[a], found[b] = found[b], found[a]
    return tuple(found)


def relinked(graph: OpGraph, index: int, **fields) -> OpGraph:
    chain = list(graph.chain)
    chain[index] = replace(chain[index], **fields)
    return replace(graph, chain=tuple(chain))


def reading(op: Op, index: int, value: str) -> Op:
    positional = list(op.args.positional)
    positional[index] = Ref(value)
    return replace(op, args=replace(op.args, positional=tuple(positional)))


BROKEN = {
    "written once": [
        lambda g: renamed_output(g, 1, "not_a_value"),
        lambda g: renamed_output(g, 1, g.ops[0].outputs[0]),
        lambda g: replace(g, values={n: v for n, v in g.values.items() if n != g.ops[3].outputs[0]}),
    ],
    "read after written": [
        lambda g: replace(g, ops=swapped(g.ops, 0, 1)),
        lambda g: replace(g, ops=g.ops[:-1]),
        lambda g: replace(g, output="nothing"),
        lambda g: replace(g, ops=(g.ops[0], reading(g.ops[1], 0, "nothing"), *g.ops[2:])),
    ],
    "chain covers the ops": [
        lambda g: relinked(g, 0, ops=()),
        lambda g: replace(g, chain=g.chain[:-1]),
        lambda g: replace(g, chain=()),
        lambda g: replace(g, chain=swapped(g.chain, 1, 2)),
        lambda g: replace(g, prologue=(g.ops[0].name,)),
        lambda g: relinked(g, -1, output=g.chain[0].output),
    ],
    "links read one activation": [
        lambda g: relinked(g, 2, input=g.chain[0].output),
        lambda g: relinked(g, 0, input=g.chain[0].output),
        lambda g: relinked(g, 1, input=None),
        lambda g: replace(g, ops=(*g.ops[:4], reading(g.ops[4], 0, g.ops[0].outputs[0]), *g.ops[5:])),
        lambda g: relinked(ladder_graph(), 1, common=()),
    ],
    "common values are carried": [
        lambda g: relinked(g, 1, common=(g.chain[0].output,)),  # another link writes it
        lambda g: relinked(g, 0, common=(g.chain[0].output,)),  # it is carried already
        lambda g: relinked(g, 0, common=("nothing",)),
        lambda g: relinked(ladder_graph(), -1, common=(ladder_graph().output,)),  # nobody reads it
        lambda g: relinked(shared_graph(), 1, common=shared_graph().chain[1].common[::-1]),
        lambda g: relinked(shared_graph(), 1, common=shared_graph().chain[1].common * 2),
    ],
}


def valued(g, number, **changes):
    """With a value of that number changed."""
    name = list(g.values)[number]
    return replace(g, values={**g.values, name: replace(g.values[name], **changes)})


def called(g, **changes):
    return replace(g, ops=(replace(g.ops[0], **changes), *g.ops[1:]))


def number_of(g, role):
    return next(number for number, value in enumerate(g.values.values()) if value.role is role)


BROKEN |= {
    "names are names": [
        *(lambda g, t=t: called(g, target=t) for t in ("os.system", "aten.mm.default(x)", "a.b.c\n", "aten.ﬁ.x", "")),
        *(lambda g, n=n: valued(g, number_of(g, Role.INPUT), name=n, origin=n) for n in ("x: int", "class", "", "0")),
    ],
    "each once": [
        lambda g: called(g, name=g.ops[1].name),
        lambda g: valued(g, number_of(g, Role.PARAMETER), origin=[*g.of_role(Role.PARAMETER)][1].origin),
    ],
    "values have writers": [
        lambda g: called(g, outputs=()),
        lambda g: called(g, mutates=("nothing",)),
        lambda g: valued(g, number_of(g, Role.RESULT), origin="another"),
        lambda g: valued(g, number_of(g, Role.RESULT), role=Role.BUFFER),
        lambda g: valued(g, number_of(g, Role.PARAMETER), role=Role.RESULT),
    ],
    "sizes are sizes": [
        lambda g: valued(g, 0, type=TensorType((2, -1), "float32")),
        lambda g: valued(g, 0, type=TensorType((1 << 40, 1 << 40), "float32")),
        lambda g: valued(g, number_of(g, Role.INPUT), type=TensorType((0, 3), "float32")),
    ],
}


def test_a_whole_graph_is_accepted():
    verify_graph(mlp_graph())
    verify_graph(gpt_graph())


def test_every_rule_is_broken_by_some_graph():
    assert set(BROKEN) == set(RULES)


@pytest.mark.parametrize(("rule", "number"), [(rule, n) for rule, cases in BROKEN.items() for n in range(len(cases))])
def test_broken_graphs_are_refused(rule, number):
    graph = BROKEN[rule][number](mlp_graph())
    assert next(RULES[rule](graph), None) is not None
    with pytest.raises(InvalidGraph):
        verify_graph(graph)


def test_the_order_of_ops_is_that_of_prologue_and_chain():
    for graph in (gpt_graph(), mlp_graph()):
        order = [*graph.prologue, *reduce(operator.add, (link.ops for link in graph.chain))]
        assert order == [op.name for op in graph.ops]
