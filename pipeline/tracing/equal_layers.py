"""Equal layers are exported once: of 80 layers `torch.export` takes ten times as long as of 8.

Of such layers the second is traced between marks: clones of the tensors that it is given, and of the one it
makes. A later layer is a mark alone. In the exported program what lies between the marks is then written out for each
of them, with their own parameters, and the marks go. So a later layer does what the second does. It would, if it ran:

- Their modules hold the same, but for own tensors of the same kind and the layer's own number; and the second did not
  read its number.
- It is given the same tensors and settings, but for one tensor of the same kind, under the same modes.
- What lies between the marks reads what it is given, own parameters and buffers, and constants; it writes into nothing
  that is given; and nothing but the last mark reads of it: no hook, list or module has taken a tensor out.

A layer of which one of the first two does not hold is traced. Where the third does not, the whole model is. What this
cannot see is a `forward()` that counts its calls somewhere outside of its modules.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from shardwright.pipeline.tracing.equal_modules import PLAIN, kind_of, layers_in_groups, same_value, tensor_uses
from shardwright.pipeline.tracing.lower import module_of

MARK = torch.ops.aten.clone.default
PREFIX = "model."  # of LossOnly


class NotEqual(Exception):
    """What lies between the marks has to do with more than its layer is given: the model is to be traced whole."""


@contextmanager
def marked(model: nn.Module) -> Iterator[list[EqualLayers]]:
    """While it is exported."""
    times = tensor_uses(model)
    found = [EqualLayers(name, layers) for name, own in _lists(model, "") for layers in layers_in_groups(own, times)]
    with ExitStack() as stack:
        for layers in found:
            stack.enter_context(layers.marked())
        yield found


def write_out(program: ExportedProgram, found: list[EqualLayers]) -> None:
    """Every layer of its own, and no marks."""
    for layers in found:
        layers.write_out(program)


def numbered(program: ExportedProgram) -> ExportedProgram:
    """Names of ops are those of their kinds, with numbers in order: the same in whatever way it was exported."""
    taken = {node.name for node in program.graph.nodes if node.op != "call_function"}
    counts: dict[str, int] = {}
    for node in program.graph.nodes:
        if node.op == "call_function":
            name = base = re.sub(r"_\d+$", "", node.name)
            while name in taken:
                counts[base] = counts.get(base, 0) + 1
                name = f"{base}_{counts[base]}"
            taken.add(name)
            node.name = name
    return program


def _lists(module: nn.Module, name: str) -> Iterator[tuple[str, nn.ModuleList]]:
    """Outermost ones."""
    for own, child in module.named_children():
        if isinstance(child, nn.ModuleList):
            yield name + own, child
        else:
            yield from _lists(child, f"{name}{own}.")


class _Watched:
    """An attribute of a class, for as long as it notes that it is read."""

    def __init__(self, name: str, read: list[str]) -> None:
        self.name, self.read = name, read

    def __get__(self, module: nn.Module | None, kind: type) -> Any:
        if module is None:
            raise AttributeError(self.name)
        self.read.append(self.name)
        return vars(module)[self.name]

    def __set__(self, module: nn.Module, value: Any) -> None:
        self.read.append(self.name)
        vars(module)[self.name] = value


# ------------------------------------------------------------------------------------------------------- their calls


@dataclass
class Given:
    """What the second layer was called with, and under which modes; what it gave."""

    leaves: list[Any]
    spec: TreeSpec
    modes: object
    tensors: list[Tensor]  # those of the leaves that differ
    made: Any = None
    result: tuple[list[Any], TreeSpec] | None = None


@dataclass
class EqualLayers:
    """Layers of the model that are equal, by their numbers in a list."""

    name: str
    layers: dict[int, nn.Module]
    given: Given | None = None
    calls: int = 0
    left_out: dict[int, int] = field(default_factory=dict)  # which of the tensors given differs

    @property
    def second(self) -> int:
        return list(self.layers)[1]

    @contextmanager
    def marked(self) -> Iterator[None]:
        numbers = list(self.layers)
        forwards = {number: self.layers[number].forward for number in numbers[1:]}
        for number in numbers[1:]:
            of = self._second if number == self.second else partial(self._later, number)
            self.layers[number].__dict__["forward"] = partial(of, forwards[number])
        try:
            yield
        finally:
            for number in numbers[1:]:
                del self.layers[number].__dict__["forward"]

    def _second(self, forward: Any, *args: Any, **named: Any) -> Any:
        self.calls += 1
        leaves, spec = tree_flatten((args, named))
        tensors = list({id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}.values())
        if self.calls > 1 or not all(isinstance(leaf, (*PLAIN, Tensor)) for leaf in leaves):
            return forward(*args, **named)
        self.given = Given(leaves, spec, _modes(), tensors)
        marks = {id(tensor): torch.clone(tensor) for tensor in tensors}
        args, named = tree_unflatten([marks.get(id(leaf), leaf) for leaf in leaves], spec)
        held = [dict(vars(module)) for module in self.layers[self.second].modules()]
        with self._watched() as read:
            result = forward(*args, **named)
        after = [dict(vars(module)) for module in self.layers[self.second].modules()]
        unchanged = all(a.keys() == b.keys() and all(a[k] is b[k] for k in a) for a, b in zip(held, after, strict=True))
        originals = {id(mark): tensor for tensor, mark in zip(tensors, marks.values(), strict=True)}
        found, form = tree_flatten(result)
        found = [originals.get(id(leaf), leaf) for leaf in found]
        made = list({id(leaf): leaf for leaf in found if self._is_made(leaf)}.values())
        plain = all(isinstance(leaf, (*PLAIN, Tensor)) for leaf in found)
        if len(made) == 1 and plain and not read and unchanged:
            mark = torch.clone(made[0])
            found = [mark if leaf is made[0] else leaf for leaf in found]
            self.given.made, self.given.result = mark, (found, form)
        return tree_unflatten(found, form)

    def _is_made(self, leaf: Any) -> bool:
        assert self.given is not None
        return isinstance(leaf, Tensor) and all(leaf is not tensor for tensor in self.given.tensors)

    @contextmanager
    def _watched(self) -> Iterator[list[str]]:
        """Notes which numbers of the layer are read."""
        one, other = (self.layers[number] for number in list(self.layers)[1:3])
        found = {
            (type(module), key)
            for module, same in zip(one.modules(), other.modules(), strict=True)
            for key, own in vars(module).items()
            if type(own) is int and own != vars(same)[key]
        }
        read: list[str] = []
        with ExitStack() as stack:
            for kind, key in found:
                stack.enter_context(patch.object(kind, key, _Watched(key, read), create=True))
            yield read

    def _later(self, number: int, forward: Any, *args: Any, **named: Any) -> Any:
        """What is given in place of the one tensor that differs, as a mark; or the layer itself."""
        given = self.given
        leaves, spec = tree_flatten((args, named))
        if given is None or given.result is None or spec != given.spec or _modes() != given.modes:
            return forward(*args, **named)
        own: dict[int, Tensor] = {}  # by the id of what the second layer was given
        for leaf, same in zip(leaves, given.leaves, strict=True):
            if not isinstance(same, Tensor):
                if isinstance(leaf, Tensor) or not same_value(leaf, same):
                    return forward(*args, **named)
            elif not isinstance(leaf, Tensor) or own.setdefault(id(same), leaf) is not leaf:
                return forward(*args, **named)
        others = [(same, own[id(same)]) for same in given.tensors if own[id(same)] is not same]
        if len(others) != 1 or len({kind_of(tensor) for tensor in (*others[0], given.made)}) > 1:
            return forward(*args, **named)
        (differs,) = (n for n, same in enumerate(given.tensors) if same is others[0][0])
        self.left_out[number] = differs
        mark = torch.clone(others[0][1])
        found, form = given.result
        return tree_unflatten([mark if leaf is given.made else own.get(id(leaf), leaf) for leaf in found], form)

    # ---- in the exported program

    def write_out(self, program: ExportedProgram) -> None:
        if self.given is None:
            return
        graph = program.graph
        nodes = self._nodes(graph)
        marks = self._marks(nodes[self.second])
        if self.left_out:
            body = _between(graph, marks[-2], marks[-1])
            tensors = _Tensors(program)
            self._check(marks, body, tensors)
            for number, differs in self.left_out.items():
                if [node.target for node in nodes[number]] != [MARK]:
                    raise NotEqual
                (place,) = nodes[number]
                given = {mark: mark.args[0] for mark in marks[:-1]} | {marks[differs]: place.args[0]}
                own = partial(tensors.moved, self._path(self.second), self._path(number))
                made = self._copied(graph, body, place, partial(_of, given, own), number)
                place.replace_all_uses_with(made[marks[-1].args[0]])
                graph.erase_node(place)
        for mark in reversed(marks):
            mark.replace_all_uses_with(mark.args[0])  # type: ignore[arg-type]
            graph.erase_node(mark)

    def _copied(
        self, graph: Graph, body: list[Node], place: Node, given: Callable[[Node], Any], number: int
    ) -> dict[Any, Node]:
        """The body's nodes before that place, as those of another layer."""
        made: dict[Any, Node] = {}
        with graph.inserting_before(place):
            for node in body:
                made[node] = graph.node_copy(node, lambda read: made.get(read) or given(read))
                made[node].meta = self._meta(node, number)
        return made

    def _path(self, number: int) -> str:
        return f"{self.name}.{number}"

    def _nodes(self, graph: Graph) -> dict[int, list[Node]]:
        """Of each layer."""
        found: dict[int, list[Node]] = {number: [] for number in self.layers}
        pattern = re.compile(rf"{re.escape(self.name)}\.(\d+)(\.|$)")
        for node in graph.nodes:
            if node.op == "call_function" and (match := pattern.match(module_of(node))) and int(match[1]) in found:
                found[int(match[1])].append(node)
        return found

    def _marks(self, nodes: list[Node]) -> list[Node]:
        """Of what the second layer is given, and last of what it gave, if that has one."""
        assert self.given is not None
        count = len(self.given.tensors)
        marks = [*nodes[:count], *(nodes[-1:] if self.given.made is not None else [])]
        if self.calls > 1 or len(marks) < count or any(mark.target is not MARK for mark in marks):
            raise NotEqual
        return marks

    def _check(self, marks: list[Node], body: list[Node], tensors: _Tensors) -> None:
        """Nothing but what is given and the layer's own is read, and nothing but what is marked is read of it."""
        inside, path = set(body), self._path(self.second)
        known = inside.union(marks[:-1])
        for node in body:
            read = (n for n in node.all_input_nodes if n not in known and n.op != "get_attr")
            if not all(tensors.is_own(n, path) for n in read) or not inside.union(marks[-1:]).issuperset(node.users):
                raise NotEqual
            if any(_root(written, inside) in marks for written in _written(node)) or _writes_inside(node):
                raise NotEqual

    def _meta(self, node: Node, number: int) -> dict[str, Any]:
        """With the layer's own name in those of its modules."""
        one, own = (f"{PREFIX}{self._path(n)}" for n in (self.second, number))
        stack = node.meta.get("nn_module_stack", {})
        moved = {key: (re.sub(rf"^{re.escape(one)}(?=\.|$)", own, path), kind) for key, (path, kind) in stack.items()}
        return {**node.meta, "nn_module_stack": moved}


def _modes() -> object:
    kinds = ("cpu", "cuda")
    return torch.is_grad_enabled(), [(torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds]


def _between(graph: Graph, first: Node, last: Node) -> list[Node]:
    order = list(graph.nodes)
    return order[order.index(first) + 1 : order.index(last)]


def _of(given: Mapping[Node, Any], own: Callable[[Node], Node], node: Node) -> Any:
    return given[node] if node in given else own(node)


def _written(node: Node) -> list[Any]:
    """What an op writes into, by its schema."""
    arguments = schema.arguments if (schema := getattr(node.target, "_schema", None)) else []
    given = {**dict(zip((argument.name for argument in arguments), node.args, strict=False)), **node.kwargs}
    into = (a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write)
    found: list[Any] = tree_leaves([given[name] for name in into if name in given])
    return found


def _writes_inside(node: Node) -> bool:
    """Of a region, such as one without gradient."""
    if node.op != "get_attr":
        return False
    region = getattr(node.graph.owning_module, str(node.target), None)
    return isinstance(region, GraphModule) and any(map(_written, region.graph.nodes))


def _root(node: Any, inside: set[Node]) -> Any:
    """Of what views of it are."""
    while isinstance(node, Node) and node in inside and node.args and _is_view(node):
        node = node.args[0]
    return node


def _is_view(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is None or any(r.alias_info is not None for r in schema.returns)


class _Tensors:
    """Placeholders of a program, by what they are in the model."""

    def __init__(self, program: ExportedProgram) -> None:
        nodes = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
        kinds = (InputKind.PARAMETER, InputKind.BUFFER)
        specs = program.graph_signature.input_specs
        self.places = {str(spec.target): nodes[spec.arg.name] for spec in specs if spec.kind in kinds}
        self.names = {node: name for name, node in self.places.items()}
        self.constants = {nodes[spec.arg.name] for spec in specs if spec.kind is InputKind.CONSTANT_TENSOR}

    def is_own(self, node: Node, path: str) -> bool:
        return node in self.constants or self.names.get(node, "").startswith(f"{PREFIX}{path}.")

    def moved(self, one: str, other: str, node: Node) -> Node:
        """A layer's tensor as that of another layer; all else is as it is."""
        before, after = f"{PREFIX}{one}.", f"{PREFIX}{other}."
        name = self.names.get(node, "")
        if not name.startswith(before):
            return node
        if (found := self.places.get(after + name.removeprefix(before))) is None:
            raise NotEqual
        return found
