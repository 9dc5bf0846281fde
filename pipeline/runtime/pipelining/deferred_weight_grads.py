"""Gradients of weights that are made later than those of activations, in a pipeline without bubbles.

    I   entered <- ops <- product <- ops <- gradients that arrive   autograd, but not beyond products and borders
                             |        |
                          x and g     g
                             v        v
    W    parameters <- product      border <- product               what was deferred, the last of the pass first
         parameters <--- conversion ---'

While a pass is recorded (`DeferredGradients.recording`), a product of an activation and a weight
(pipeline/ops/products.py) is no child of its weight: its gradient goes on to the activation, and what the weight's
gradient is made of is deferred. A conversion of weights ends at a border, which collects the gradients of its results
from products and other ops alike: so its collective runs once a pass, in W. Other ops that read a parameter itself add
to its gradient in I. In a recompute region nothing is deferred: it would hold from I to W what the region drops.

A program calls products as ever: `split_products` gives it others in place of torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, update_wrapper
from types import ModuleType
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from shardwright.pipeline.ops.products import PRODUCTS, SEEN_OTHERWISE, Product, is_split
from shardwright.pipeline.runtime.context import setting, step
from shardwright.pipeline.runtime.programs.autocast import as_autocast

_SEEN_OTHERWISE = {f"{node}Backward0" for nodes in SEEN_OTHERWISE.values() for node in nodes}


class DeferredEntry(Protocol):
    def leaves(self) -> list[Tensor]:
        """To whose gradients it adds."""

    def run(self) -> None: ...


class DeferredGradients:
    """Of a pass. `leaves` are its weights that are not parameters: copies that are made once a step."""

    def __init__(self, leaves: Iterable[Tensor] = ()) -> None:
        self.own = {id(leaf) for leaf in leaves}
        self.entries: list[DeferredEntry] = []
        self.anchor = torch.empty(0, requires_grad=True)  # autograd comes by where no activation has a gradient

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Around the forward pass."""
        assert step.thread.deferred is None, "a pass is recorded already"
        with setting(step.thread, deferred=self):
            yield

    def is_weight(self, tensor: Tensor) -> bool:
        """Whether its gradient can be deferred: it is a parameter, converted, seen otherwise or cast."""
        if not tensor.requires_grad or tensor.grad_fn is None:
            return tensor.requires_grad and self._is_leaf(tensor)
        node = tensor.grad_fn
        while node.name() in _SEEN_OTHERWISE:
            node = node.next_functions[0][0]
        return hasattr(node, "border") or (hasattr(node, "variable") and self._is_leaf(node.variable))

    def _is_leaf(self, tensor: Tensor) -> bool:
        return isinstance(tensor, nn.Parameter) or id(tensor) in self.own

    def leaves(self) -> set[int]:
        """The `id` of all leaves that will get a gradient."""
        return {id(leaf) for entry in self.entries for leaf in entry.leaves()}

    def run(self, finish: Callable[[Iterable[Tensor]], None] | None = None) -> None:
        """`finish` gets leaves when nothing is left that would add to their gradients."""
        last: dict[int, int] = {}  # `id` of a leaf -> the entry that is its last to run
        if finish is not None:
            for number, entry in reversed([*enumerate(self.entries)]):
                last |= {id(leaf): number for leaf in entry.leaves()}
        while self.entries:
            entry = self.entries.pop()
            reached = entry.leaves() if finish is not None else []
            entry.run()
            if finish is not None:
                finish([leaf for leaf in reached if last[id(leaf)] == len(self.entries)])


# ------------------------------------------------------------------------------------------- where gradients go in W


class Border:
    """The results of a conversion, and their gradients as they come."""

    def __init__(self, results: Sequence[Tensor]) -> None:
        self.edges = [get_gradient_edge(result) for result in results]
        self.gradients: list[Tensor | None] = [None] * len(results)

    def add(self, number: int, gradient: Tensor) -> None:
        there = self.gradients[number]
        self.gradients[number] = gradient if there is None else there + gradient

    def leaves(self) -> list[Tensor]:
        return leaves_of(edge.node for edge in self.edges)

    def run(self) -> None:
        undo(zip(self.edges, self.gradients, strict=True))
        self.gradients = []


class _AtBorder(torch.autograd.Function):
    """What a conversion has made, for the rest of the pass."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, border: Border, *results: Tensor) -> tuple[Tensor, ...]:
        ctx.border = border
        ctx.set_materialize_grads(False)
        return tuple(result.view_as(result) for result in results)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        for number, gradient in enumerate(gradients):
            if gradient is not None:
                ctx.border.add(number, gradient)
        return (None, None, *(None for _ in gradients))


def at_border(sources: Iterable[Tensor], results: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The results of a conversion: behind a border where it is of weights, and a pass is recorded."""
    own = step.thread.deferred
    trained = [result for result in results if result.requires_grad]
    if own is None or not trained or not all(own.is_weight(source) for source in sources if source.requires_grad):
        return tuple(results)
    border = Border(trained)
    own.entries.append(border)
    behind = iter(_AtBorder.apply(own.anchor, border, *(result.detach() for result in trained)))  # type: ignore[no-untyped-call]
    return tuple(next(behind) if result.requires_grad else result for result in results)


def leaves_of(nodes: Iterable[Node]) -> list[Tensor]:
    """From which autograd would come to these nodes, as far as the next border."""
    found: dict[int, Tensor] = {}
    left, seen = list(nodes), set()
    while left:
        node = left.pop()
        if node in seen or hasattr(node, "border"):
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found[id(node.variable)] = node.variable
        left += [following for following, _ in node.next_functions if following is not None]
    return list(found.values())


def undo(ends: Iterable[tuple[Tensor | GradientEdge, Tensor | None]]) -> None:
    """Backward from these, as far as they have a gradient."""
    there = [(end, gradient) for end, gradient in ends if gradient is not None]
    if there:
        torch.autograd.backward([end for end, _ in there], [gradient for _, gradient in there])


# ------------------------------------------------------------------------------------------------------------ products

_Way: TypeAlias = Tensor | GradientEdge | tuple[Border, int]


def _way_to(weight: Tensor) -> _Way:
    """A converted weight itself is not held: it may be gathered, and goes after the forward pass."""
    if weight.grad_fn is None:
        return weight
    border: Border | None = getattr(weight.grad_fn, "border", None)
    edge: GradientEdge = get_gradient_edge(weight)
    return edge if border is None else (border, edge.output_nr)


class _WeightGradient:
    """Of a product: what it is made of, as soon as that is there, and where it goes."""

    def __init__(self, product: Product, weight: Tensor, addend: Tensor | None) -> None:
        self.product, self.dims = product, weight.dim()
        self.ways = [_way_to(tensor) for tensor in (weight, addend) if tensor is not None]
        self.addend_shape = None if addend is None else addend.shape
        self.made_of: tuple[Tensor, Tensor] | None = None  # the activation, and the gradient of the result

    def leaves(self) -> list[Tensor]:
        plain = [way for way in self.ways if isinstance(way, Tensor)]
        return [*plain, *leaves_of(way.node for way in self.ways if isinstance(way, GradientEdge))]

    def run(self) -> None:
        if self.made_of is None:
            return
        (x, gradient), self.made_of = self.made_of, None
        with torch.no_grad():
            self._lead(0, _of_weight(self.product, x, gradient, self.dims))
            if self.addend_shape is not None:
                self._lead(1, gradient.sum_to_size(self.addend_shape))

    def _lead(self, number: int, gradient: Tensor) -> None:
        way = self.ways[number]
        if isinstance(way, Tensor | GradientEdge):
            undo([(way, gradient)])
        else:
            border, place = way
            border.add(place, gradient)


def _of_x(product: Product, weight: Tensor, gradient: Tensor) -> Tensor:
    return gradient @ (weight.conj() if product.transposed else weight.mH)


def _of_weight(product: Product, x: Tensor, gradient: Tensor, dims: int) -> Tensor:
    if dims == 2:  # all other dims are rows
        x, gradient = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
    return gradient.mT @ x.conj() if product.transposed else x.mH @ gradient


class _Product(torch.autograd.Function):
    """A product whose weight's gradient is deferred; that of what is added too, where it gets no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        deferred: _WeightGradient,
        native: Callable[..., Tensor],
        x: Tensor,
        weight: Tensor,
        addend: Tensor | None,
    ) -> Tensor:
        ctx.deferred = deferred
        ctx.addend_shape = None if addend is None else addend.shape
        ctx.save_for_backward(x, weight)
        product = deferred.product
        places = {product.x: x, product.weight: weight}
        if addend is not None and product.addend is not None:
            places[product.addend] = addend
        return native(*(places[number] for number in sorted(places)))  # in the op's order

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        x, weight = ctx.saved_tensors
        _, _, _, needs_x, _, needs_addend = ctx.needs_input_grad
        ctx.deferred.made_of = x.detach(), gradient.detach()
        of_x = _of_x(ctx.deferred.product, weight, gradient) if needs_x else None
        of_addend = gradient.sum_to_size(ctx.addend_shape) if needs_addend else None
        return None, None, None, of_x, None, of_addend


def _call(product: Product, native: Callable[..., Tensor], *arguments: Any, **named: Any) -> Tensor:
    own = step.thread.deferred
    if own is None or named or not torch.is_grad_enabled():
        return native(*arguments, **named)
    arguments = as_autocast(product.name, arguments)
    x, weight = arguments[product.x], arguments[product.weight]
    addend = arguments[product.addend] if product.addend is not None and product.addend < len(arguments) else None
    if not is_split(x.shape, weight.shape) or not own.is_weight(weight):
        return native(*arguments)
    own_addend = addend if addend is not None and own.is_weight(addend) else None
    deferred = _WeightGradient(product, weight, own_addend)
    own.entries.append(deferred)
    rest = addend if own_addend is None else own_addend.detach()
    result: Tensor = _Product.apply(own.anchor, deferred, native, x, weight.detach(), rest)  # type: ignore[no-untyped-call]
    return result


class _ModuleWith:
    """A module some of whose functions are others."""

    def __init__(self, module: Any, others: dict[str, Any]) -> None:
        self.__dict__.update(others)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def split_products(program: ModuleType) -> None:
    """A generated program calls products that can defer; what it has compiled stays as it is."""
    for name in {product.module for product in PRODUCTS.values()} & program.__dict__.keys():
        module, others = getattr(program, name), {}
        for product in PRODUCTS.values():
            if product.module == name:
                native = getattr(module, product.name)
                other = partial(_call, product, native)
                others[product.name] = update_wrapper(other, native, assigned=("__name__", "__doc__"), updated=())
        setattr(program, name, _ModuleWith(module, others))
