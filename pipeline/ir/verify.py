"""The rules that a graph and a sharding keep at every boundary: what must hold, and how to see that it does not."""

from __future__ import annotations

import keyword
import re
from collections import Counter
from collections.abc import Callable, Container, Iterator

from shardwright.pipeline.ir.graph import OpGraph, Role
from shardwright.pipeline.ir.layout import Layout
from shardwright.pipeline.ir.plan import Sharding

_TARGET = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*){2}", re.ASCII)  # library.op.overload


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


def _names_are_names(graph: OpGraph) -> Iterator[str]:
    """What stands in a program as code: targets of ops, and inputs, which are arguments."""
    yield from (f"{op.name} calls {op.target!r}" for op in graph.ops if not _TARGET.fullmatch(op.target))
    for value in graph.of_role(Role.INPUT):
        if not value.name.isidentifier() or keyword.iskeyword(value.name) or value.origin != value.name:
            yield f"{value.name!r} cannot be an argument of forward()"


def _each_once(graph: OpGraph) -> Iterator[str]:
    """Ops, and parameters and buffers by their own names."""
    stored = (value.origin for value in graph.values.values() if value.role in (Role.PARAMETER, Role.BUFFER))
    for names, what in (((op.name for op in graph.ops), "ops"), (stored, "parameters or buffers")):
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            yield f"two {what} are called {twice[0]!r}"


def _values_have_writers(graph: OpGraph) -> Iterator[str]:
    """A result names the op that writes it; all else is written by none."""
    for op in graph.ops:
        if not op.outputs:
            yield f"{op.name} writes nothing"
        for name in op.outputs:
            if graph.values[name].role is not Role.RESULT or graph.values[name].origin != op.name:
                yield f"{op.name} writes {name}, which is not its result"
        for name in (name for name in op.mutates if name not in op.inputs):
            yield f"{op.name} changes {name!r}, which it does not read"
    written = {name for op in graph.ops for name in op.outputs}
    for value in graph.values.values():
        if value.role is Role.RESULT and value.name not in written:
            yield f"no op writes {value.name}"


def _sizes_are_sizes(graph: OpGraph) -> Iterator[str]:
    for value in graph.values.values():
        if min(value.type.shape, default=0) < 0 or value.type.numel >= 1 << 60:
            yield f"{value.name} has the shape {str(list(value.type.shape))[:60]}"
        if value.role is Role.INPUT and not all(value.type.shape[:1]):
            yield f"{value.name} has no sample"


RULES: dict[str, Callable[[OpGraph], Iterator[str]]] = {
    "written once": _written_once,
    "names are names": _names_are_names,
    "each once": _each_once,
    "values have writers": _values_have_writers,
    "sizes are sizes": _sizes_are_sizes,
    "read after written": _reads_before_writes,
    "chain covers the ops": _chain_covers_ops,
    "links read one activation": _links_read_one_activation,
    "common values are carried": _common_values_are_carried,
}


def verify_graph(graph: OpGraph) -> None:
    for name, broken in RULES.items():
        if problem := next(broken(graph), None):
            raise InvalidGraph(f"{name}: {problem}")


# ---- shardings


class InvalidSharding(ValueError):
    """A sharding breaks a rule: a bug in what made it, or an artifact that was edited."""


Sizes = tuple[int, ...]


def _every_op_has_a_strategy(graph: OpGraph, sharding: Sharding, sizes: Sizes) -> Iterator[str]:
    if odd := set(sharding.strategies) ^ {op.name for op in graph.ops}:
        yield f"{min(odd)} is not both an op and in `strategies`"
    for op in graph.ops:
        strategy = sharding.strategies.get(op.name)
        if strategy and (len(strategy.inputs), len(strategy.outputs)) != (len(op.inputs), len(op.outputs)):
            yield f"{strategy.name} of {op.name} does not have a layout for each of its tensors"


def _every_source_is_stored(graph: OpGraph, sharding: Sharding, sizes: Sizes) -> Iterator[str]:
    """A parameter or an input is whole or split; it has no summands. What enters a partition may have them.

    Beside what enters a partition there may be what leaves it.
    """
    parameters = {value.origin for value in graph.of_role(Role.PARAMETER)}
    inputs = {value.name for value in graph.values.values() if value.role in (Role.INPUT, Role.ENTERS)}
    given = sharding.inputs.keys() - {graph.output}
    for have, want, what in ((set(sharding.storage), parameters, "a parameter"), (given, inputs, "an input")):
        if odd := have ^ want:
            yield f"{min(odd)} is not both {what} of the graph and stored"
    fed = ((name, layout) for name, layout in sharding.inputs.items() if graph.values[name].role is Role.INPUT)
    for name, layout in (*sharding.storage.items(), *fed, *sharding.state.items()):
        if any(state.kind not in "RS" for state in layout.states):
            yield f"{name} is stored as {layout}"


def _layouts_fit(graph: OpGraph, sharding: Sharding, sizes: Sizes) -> Iterator[str]:
    parameters = [(value.name, value.origin) for value in graph.of_role(Role.PARAMETER)]
    kept = [(name, kind[own]) for name, own in parameters for kind in (sharding.storage, sharding.state) if own in kind]
    for value, layout in (*kept, *_read(graph, sharding)):
        shape = graph.values[value].type.shape
        if len(layout.states) != len(sizes):
            yield f"{value} in {layout}: the mesh has {len(sizes)} axes"
        elif not layout.holds(shape, sizes):
            yield f"{value} in {layout}: {list(shape)} does not divide so on {sizes}"


def _read(graph: OpGraph, sharding: Sharding) -> Iterator[tuple[str, Layout]]:
    """What is fed, and what ops read and write."""
    yield from sharding.inputs.items()
    for op in graph.ops:
        strategy = sharding.strategies[op.name]
        yield from zip((*op.inputs, *op.outputs), (*strategy.inputs, *strategy.outputs), strict=True)


def _state_is_finer_than_storage(graph: OpGraph, sharding: Sharding, sizes: Sizes) -> Iterator[str]:
    for name, state in sharding.state.items():
        if name not in sharding.storage:
            yield f"{name} has a state and is no parameter"
            continue
        try:
            sharding.storage[name].further(state, sizes)
        except ValueError as error:
            yield f"{name}: {error}"


def _regathered_is_gathered(graph: OpGraph, sharding: Sharding, sizes: Sizes) -> Iterator[str]:
    found = gathered(graph, sharding, sizes)
    for name in sharding.regathered:
        if name not in sharding.storage:
            yield f"{name} is no parameter"
        elif name not in found:
            yield f"no op reads {name} other than as it is stored"
    if len(set(sharding.regathered)) != len(sharding.regathered):
        yield "a parameter is named twice"


def gathered(graph: OpGraph, sharding: Sharding, sizes: Sizes) -> set[str]:
    """The parameters that some op reads otherwise than they are split: which may be regathered."""
    found = set()
    for op in graph.ops:
        for name, layout in zip(op.inputs, sharding.strategies[op.name].inputs, strict=True):
            value = graph.values[name]
            if value.role is Role.PARAMETER:
                wanted, stored = layout.places(sizes), sharding.storage[value.origin].places(sizes)
                found |= {value.origin} if any(wanted.get(a) != place for a, place in stored.items()) else set()
    return found


SHARDING_RULES: dict[str, Callable[[OpGraph, Sharding, Sizes], Iterator[str]]] = {
    "every op has a strategy": _every_op_has_a_strategy,
    "every parameter and input is stored": _every_source_is_stored,
    "layouts fit": _layouts_fit,
    "state is finer than storage": _state_is_finer_than_storage,
    "regathered is gathered": _regathered_is_gathered,
}


def verify_sharding(graph: OpGraph, sharding: Sharding, sizes: Sizes, uneven: Container[tuple[str, int]] = ()) -> None:
    """`uneven` are the dims of values that ops may read and write in uneven shards (pipeline.ops.uneven)."""
    for name, broken in SHARDING_RULES.items():
        if problem := next(broken(graph, sharding, sizes), None):
            raise InvalidSharding(f"{name}: {problem}")
    # A parameter may be stored unevenly in any case: it is gathered where ops read it otherwise.
    for value, layout in _read(graph, sharding):
        shape = graph.values[value].type.shape
        if any((value, dim) not in uneven for dim in layout.uneven(shape, sizes)):
            raise InvalidSharding(f"layouts fit: {value} in {layout}: {list(shape)} does not divide so on {sizes}")
