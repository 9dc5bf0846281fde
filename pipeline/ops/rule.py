"""What a rule says of an op, and the view of an op that a rule reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardwright.pipeline.ir.graph import Arg, Op, OpGraph, TensorType


@dataclass(frozen=True)
class OpView:
    """An op with the types of the tensors it reads and writes."""

    op: Op
    inputs: tuple[TensorType, ...]
    outputs: tuple[TensorType, ...]
    input_grads: tuple[bool, ...]
    factors: tuple[tuple[str, tuple[int, ...]], ...] = ()  # letter -> in how many parts the graph lets its dim lie
    uneven: tuple[str, ...] = ()  # letters that the graph lets lie in shards that are not equal
    shards: tuple[tuple[str, int], ...] = ()  # letter -> in how many shards other axes have cut it; constants are whole

    @property
    def output(self) -> TensorType:
        return self.outputs[0]

    def constant(self, position: int, name: str, default: Arg) -> Arg:
        return self.op.args.get(position, name, default)


def plain_view(graph: OpGraph, op: Op) -> OpView:
    """The op by itself, without what its neighbours say of its dims."""
    names = op.inputs
    return OpView(op, graph.types(names), graph.types(op.outputs), tuple(graph.values[n].grad for n in names))


@dataclass(frozen=True)
class Rendered:
    """An op's arguments as source text, for a rule that prints its own call."""

    positional: tuple[str, ...]
    named: dict[str, str]
    tensors: tuple[str, ...]
    local_inputs: tuple[tuple[int, ...], ...]  # the shapes of this rank's shards
    local_outputs: tuple[tuple[int, ...], ...]
    bodies: tuple[tuple[str, str], ...]  # local form of the op -> the mesh axis that asks for it
    view: OpView

    @property
    def local_output(self) -> tuple[int, ...]:
        return self.local_outputs[0]

    def axes(self, body: str) -> str:
        """The axes that ask for a local form, as an argument: `"d0"`, `"d0+d1"`, or nothing."""
        names = "+".join(axis for name, axis in self.bodies if name == body)
        return f'"{names}"' if names else ""

    def given(self, names: tuple[str, ...]) -> dict[str, str]:
        """The arguments by name, whether given by position or by name."""
        return {**dict(zip(names, self.positional, strict=False)), **self.named}


Dims = str | Callable[[OpView], str]
Linear = tuple[tuple[int, ...], ...]
Flops = Callable[[OpView], float]
Sent = tuple[str, int]  # a collective, and the bytes of the unsplit tensor; of those below, of what each rank has
GATHER_FEW, SUM_FEW = "gather_few", "sum_few"  # a few numbers of each rank come to all, or their sum does
FEW_RANKS = 8  # a sum over no more of them is made of what all have


def no_flops(view: OpView) -> float:
    return 0.0


def no_bytes(view: OpView) -> int:
    return 0


@dataclass(frozen=True)
class OpRule:
    """One entry of the table.

    `dims` is one line, such as `* k+, n k+, n -> * n`: `k+` may be split and sums, `k^` is never split, `k!` may be
    split because the local form talks to the other ranks and returns the whole; `*` stands for any leading dims,
    `(h d)` for a dim that is a product. `linear` lists groups of inputs in which the op is linear together; `addends`
    are inputs that must enter just once when the others are summands.
    """

    target: str
    dims: Dims
    render: Callable[[Rendered], str]  # prints the call in generated code
    linear: Linear | Callable[[OpView], Linear] = ()
    addends: tuple[int, ...] = ()
    saves_inputs: tuple[int, ...] = ()
    crosswise: bool = False  # each of `saves_inputs` is kept just for the gradients of the others
    saves_output: bool = False
    masks_gradient: bool = False  # a gradient passes as it is, but is zero where the result is not above zero
    extra_saved: Callable[[OpView], int] = no_bytes
    flops: Flops = no_flops
    backward_factor: float = 2.0  # backward FLOPs over forward FLOPs
    is_view: bool = False  # writes no memory: shares its first input's
    permutes: bool = False  # a view that changes the order of dims in memory
    needs_order: bool = False  # a view only while no permutation lies between it and the memory; else a copy
    keeps_order: bool = False  # new memory, in which dims lie in the order in which the first input's do
    mutates: tuple[int, ...] = ()  # tensor inputs that it changes in place although its name does not say so
    split_body: Callable[[OpView, str], str] | None = None  # the local form when that letter is split, or ""
    reads_values: bool = False  # the host looks into its inputs: it waits for a GPU, in both passes, before it goes on
    random: bool = False  # draws numbers: alike where it runs whole, apart where it is split
    form: Callable[[OpView], str] | None = None  # which of several kernels it runs, where a device has a pace for each
    talks: Callable[[OpView], tuple[Sent, Sent]] | None = None  # what the local form sends forward and backward
    early: Callable[[Rendered], str] | None = None  # a call that may be made long before the op, or "" for none
    early_inputs: tuple[int, ...] = ()  # the inputs that this call reads

    @property
    def is_product(self) -> bool:
        """Matrix products, convolutions, attention: what FLOPs are counted of."""
        return self.flops is not no_flops

    def line(self, view: OpView) -> str:
        return self.dims if isinstance(self.dims, str) else self.dims(view)

    def linear_groups(self, view: OpView) -> Linear:
        return self.linear(view) if callable(self.linear) else self.linear

    def body(self, view: OpView, letter: str) -> str:
        return self.split_body(view, letter) if self.split_body else ""


def call(function: str, drop: Sequence[int] = ()) -> Callable[[Rendered], str]:
    """Prints `function(arguments)`, without the positions that the readable form does not take."""

    def render(r: Rendered) -> str:
        positional = [text for i, text in enumerate(r.positional) if i not in drop]
        return f"{function}({', '.join([*positional, *(f'{k}={v}' for k, v in r.named.items())])})"

    return render


def apart(render: Callable[[Rendered], str]) -> Callable[[Rendered], str]:
    """Prints a random op that is split: `drawn_apart(lambda: F.dropout(x, 0.1), axis="d0")`."""

    def split(r: Rendered) -> str:
        text = render(r)
        return f"drawn_apart(lambda: {text}, axis={r.axes('apart')})" if r.bodies else text

    return split


def drawn(view: OpView, letter: str) -> str:
    return "apart"


def method(name: str) -> Callable[[Rendered], str]:
    """Prints `x.name(arguments)`."""

    def render(r: Rendered) -> str:
        arguments = [*r.positional[1:], *(f"{k}={v}" for k, v in r.named.items())]
        return f"{r.positional[0]}.{name}({', '.join(arguments)})"

    return render


def reshaped(name: str) -> Callable[[Rendered], str]:
    """Prints `x.name(local shape)`: the sizes in the graph are those of the unsplit tensor."""

    def render(r: Rendered) -> str:
        sizes = ", ".join(str(n) for n in r.local_output) or "()"
        return f"{r.positional[0]}.{name}({sizes})"

    return render


def infix(symbol: str, function: str) -> Callable[[Rendered], str]:
    """Prints `a + b`, or the function where the op has further arguments."""

    def render(r: Rendered) -> str:
        if len(r.positional) == 2 and not r.named:
            return f"{r.positional[0]} {symbol} {r.positional[1]}"
        return call(function)(r)

    return render
