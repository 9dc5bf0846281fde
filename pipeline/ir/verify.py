"""The rules that a graph keeps at every boundary, as a table: what must hold, and how to see that it does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pipeline.ir.graph import OpGraph, Role


class InvalidGraph(ValueError):
    """A graph breaks a rule: a bug in what made it, or an artifact that was edited."""


def _reads_before_writes(graph: OpGraph) -> Iterator[str]:
    known = {v.name for v in graph.values.values() if v.role is not Role.RESULT}
    for op in graph.ops:
        yield from (f"{op.name} reads {name} before it is written" for name in op.inputs if name not in known)
        known.update(op.outputs)
    if graph.output not in known:
        yield f"the loss {graph.output} is never written"


def _written_once(graph: OpGraph) -> Iterator[str]:
    seen: set[str] = set()
    for op in graph.ops:
        yield from (f"{op.name} writes {name}, which has no type" for name in op.outputs if name not in graph.values)
        yield from (f"{op.name} writes {name} a second time" for name in op.outputs if name in seen)
        seen.update(op.outputs)


def _chain_covers_ops(graph: OpGraph) -> Iterator[str]:
    order = [*graph.prologue, *(name for link in graph.chain for name in link.ops)]
    if order != [op.name for op in graph.ops]:
        yield "prologue and chain are not the ops in their order"
    if not graph.chain or graph.chain[-1].output != graph.output:
        yield "the chain does not end in the loss"


def _links_read_one_activation(graph: OpGraph) -> Iterator[str]:
    known = {v.name for v in graph.values.values() if v.role is not Role.RESULT}
    known.update(out for name in graph.prologue for out in graph.op(name).outputs)
    for index, link in enumerate(graph.chain):
        before = graph.chain[index - 1].output if index else None
        if link.input != before:
            yield f"link {index} reads {link.input}, the one before writes {before}"
        written = {out for name in link.ops for out in graph.op(name).outputs}
        for name in link.ops:
            for read in graph.op(name).inputs:
                if read not in known and read not in written and read != link.input:
                    yield f"link {index} reads {read} of an earlier link"
        known.update(link.common)


def _common_values_are_carried(graph: OpGraph) -> Iterator[str]:
    """A common value is written by its link, and a later one reads it; a link's output is carried without that."""
    last_read = {read: i for i, link in enumerate(graph.chain) for name in link.ops for read in graph.op(name).inputs}
    for index, link in enumerate(graph.chain):
        written = [out for name in link.ops for out in graph.op(name).outputs]
        if list(link.common) != [name for name in written if name in link.common]:
            yield f"link {index} does not write its common values {', '.join(link.common)}, once each and in this order"
        for name in link.common:
            if name == link.output:
                yield f"link {index} has its output {name} as a common value"
            if last_read.get(name, -1) <= index:
                yield f"no link after link {index} reads its common value {name}"


RULES: dict[str, Callable[[OpGraph], Iterator[str]]] = {
    "written once": _written_once,
    "read after written": _reads_before_writes,
    "chain covers the ops": _chain_covers_ops,
    "links read one activation": _links_read_one_activation,
    "common values are carried": _common_values_are_carried,
}


def verify_graph(graph: OpGraph) -> None:
    for name, broken in RULES.items():
        problem = next(broken(graph), None)
        if problem:
            raise InvalidGraph(f"{name}: {problem}")
