"""The exported forward graph: values, ops, and the chain of links that the graph falls into.

A value is a tensor with a role; an op reads and writes values. Ops that read no parameter (position indices, masks,
reshaped labels) form the prologue; the others form the chain: between two links just one activation is alive, beside
the common values, which many links read (an encoder's output in every decoder layer, a long skip).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from math import gcd, prod
from typing import Any

from shardwright.pipeline.ir.names import is_name

ITEM_SIZE = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint8": 1, "bool": 1, "complex32": 4, "complex64": 8, "complex128": 16,
}  # fmt: skip


class Role(Enum):
    INPUT = "input"
    PARAMETER = "parameter"
    BUFFER = "buffer"
    RESULT = "result"
    ENTERS = "enters"  # in the graph of a partition alone (pipeline.sharding.partitions): an earlier one has written it


@dataclass(frozen=True)
class TensorType:
    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_SIZE:
            raise ValueError(f"unsupported dtype {self.dtype!r}: known are {', '.join(ITEM_SIZE)}")

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * ITEM_SIZE[self.dtype]

    @property
    def is_inexact(self) -> bool:
        """Real or complex numbers with rounding: what has gradients, and may lie in summands."""
        return self.dtype.startswith(("float", "bfloat", "complex"))


@dataclass(frozen=True)
class Value:
    name: str
    type: TensorType
    role: Role
    origin: str  # qualified name of a parameter or buffer, name of an input, or the op that writes it
    grad: bool  # whether a gradient flows through it


@dataclass(frozen=True)
class Ref:
    """An op's argument that is a value of the graph."""

    value: str


@dataclass(frozen=True)
class Torch:
    """A constant that torch names: `torch.float32`, a device, a layout or a memory format."""

    kind: str
    name: str

    def __post_init__(self) -> None:
        if self.kind not in TORCH_NAMES or not re.fullmatch(TORCH_NAMES[self.kind], self.name):
            raise ValueError(f"torch has no {self.kind} {self.name!r}")


TORCH_NAMES = {  # of each kind of constant, what its name can be
    "dtype": r"(float|bfloat|complex|u?int)\d+|bool|q?u?int\d+|float8_\w+|complex\d+|quint\dx\d|bits\w+",
    "device": r"any|[a-z]+(:\d+)?",
    "layout": r"strided|sparse_\w+|_mkldnn|jagged",
    "memory_format": r"(contiguous|preserve)_format|channels_last(_3d)?",
}

MOST_DIMS = 64  # that torch allows; the numbers of a tensor are the deepest argument
Arg = Any  # Ref | Torch | None | bool | int | float | complex | str | tuple of Arg


@dataclass(frozen=True)
class Args:
    """Positional and named arguments, with values as `Ref`."""

    positional: tuple[Arg, ...] = ()
    named: tuple[tuple[str, Arg], ...] = ()

    def refs(self) -> tuple[str, ...]:
        """The values that are read, in order of appearance, repeated where read twice."""
        return tuple(r.value for arg in (*self.positional, *(v for _, v in self.named)) for r in _refs(arg))

    def get(self, position: int, name: str, default: Arg) -> Arg:
        """A constant that may be given by position, by name, or left out."""
        if position < len(self.positional):
            return self.positional[position]
        return dict(self.named).get(name, default)

    def renamed(self, names: Mapping[str, str]) -> Args:
        """With other values; those that are not named stay."""

        def new(arg: Arg) -> Arg:
            if isinstance(arg, Ref):
                return Ref(names.get(arg.value, arg.value))
            return tuple(map(new, arg)) if isinstance(arg, tuple) else arg

        return Args(tuple(map(new, self.positional)), tuple((name, new(arg)) for name, arg in self.named))

    def to_json(self) -> Any:
        return {"positional": [_encode(a) for a in self.positional], "named": {k: _encode(v) for k, v in self.named}}

    @staticmethod
    def from_json(data: Any) -> Args:
        match data:
            case {"positional": list(positional), "named": dict(named)} if len(data) == 2:
                if odd := [name for name in named if not is_name(name)]:
                    raise ValueError(f"{odd[0]!r} is not the name of an argument")
                return Args(tuple(_decode(a) for a in positional), tuple((k, _decode(v)) for k, v in named.items()))
        raise ValueError("expected an object of positional and named arguments")


@dataclass(frozen=True)
class Op:
    name: str
    target: str  # e.g. aten.linear.default
    args: Args
    outputs: tuple[str, ...]
    module: str  # qualified name of the module that called it
    source: str  # file and line of the user's code
    mutates: tuple[str, ...] = ()  # buffers that it changes in place (batch-norm statistics)
    exact: bool = False  # the module turns autocast off around it, which would cast something here
    per_rank: bool = False  # a batch norm in training, each rank with the statistics of its own part of the batch

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        return self.args.refs()


@dataclass(frozen=True)
class Link:
    """A part of the chain: reads one activation (the first link none) and writes one, beside common values."""

    ops: tuple[str, ...]
    input: str | None
    output: str
    block: int  # links of equal structure have equal numbers
    common: tuple[str, ...] = ()  # what it writes of these, in the order of writing; any later link may read them


@dataclass(frozen=True)
class OpGraph:
    values: dict[str, Value]
    ops: tuple[Op, ...]
    output: str  # the loss
    prologue: tuple[str, ...]  # ops that depend on no parameter, in order
    chain: tuple[Link, ...]

    def op(self, name: str) -> Op:
        return self._ops[name]

    @cached_property
    def _ops(self) -> dict[str, Op]:
        return {op.name: op for op in self.ops}

    @cached_property
    def common(self) -> dict[str, int]:
        """Each common value -> the number of the link that writes it."""
        return {name: number for number, link in enumerate(self.chain) for name in link.common}

    def of_role(self, role: Role) -> Iterator[Value]:
        return (v for v in self.values.values() if v.role is role)

    @property
    def batch(self) -> int:
        """Samples: what the first dim of every input is a multiple of."""
        return gcd(*(value.type.shape[0] for value in self.of_role(Role.INPUT) if value.type.shape)) or 1

    def types(self, names: tuple[str, ...]) -> tuple[TensorType, ...]:
        return tuple(self.values[n].type for n in names)

    def consumers(self) -> dict[str, list[Op]]:
        """Each value -> the ops that read it, in order; found once."""
        return self._consumers

    @cached_property
    def _consumers(self) -> dict[str, list[Op]]:
        users: dict[str, list[Op]] = {name: [] for name in self.values}
        for op in self.ops:
            for name in dict.fromkeys(op.inputs):
                users[name].append(op)
        return users

    def beside(self, parameter: str) -> tuple[str, ...]:
        """The parameters that one link alone reads, this one among them; none where several links read it."""
        return self._beside.get(parameter, ())

    @cached_property
    def _beside(self) -> dict[str, tuple[str, ...]]:
        links: dict[str, list[int]] = {value.name: [] for value in self.of_role(Role.PARAMETER)}
        for number, link in enumerate(self.chain):
            for name in dict.fromkeys(name for op in link.ops for name in self.op(op).inputs if name in links):
                links[name].append(number)
        own: dict[int, list[str]] = {}
        for name, readers in links.items():
            if len(readers) == 1:
                own.setdefault(readers[0], []).append(name)
        return {name: tuple(names) for names in own.values() for name in names}

    def reads_common(self, link: Link) -> tuple[str, ...]:
        """The common values of earlier links that a link reads, in the order of reading."""
        read = dict.fromkeys(name for op in link.ops for name in self.op(op).inputs)
        return tuple(name for name in read if name in self.common and name not in link.common)

    def to_json(self) -> Any:
        from shardwright.pipeline.ir.codec import encode

        return {
            "values": [encode(v) for v in self.values.values()],
            "ops": encode(self.ops),
            "output": self.output,
            "prologue": list(self.prologue),
            "chain": encode(self.chain),
        }

    @staticmethod
    def from_json(data: Any) -> OpGraph:
        from shardwright.pipeline.ir.codec import decode

        if not isinstance(data, dict) or set(data) != {"values", "ops", "output", "prologue", "chain"}:
            raise ValueError("expected an object of values, ops, output, prologue and chain")
        values = decode(tuple[Value, ...], data["values"], "values")
        if len({value.name for value in values}) != len(values):
            raise ValueError("two values have one name")
        return OpGraph(
            values={v.name: v for v in values},
            ops=decode(tuple[Op, ...], data["ops"], "ops"),
            output=decode(str, data["output"], "output"),
            prologue=decode(tuple[str, ...], data["prologue"], "prologue"),
            chain=decode(tuple[Link, ...], data["chain"], "chain"),
        )


def _refs(arg: Arg) -> Iterator[Ref]:
    if isinstance(arg, Ref):
        yield arg
    elif isinstance(arg, tuple):
        for item in arg:
            yield from _refs(item)


def _encode(arg: Arg) -> Any:
    if isinstance(arg, Ref):
        return {"ref": arg.value}
    if isinstance(arg, Torch):
        return {"torch": [arg.kind, arg.name]}
    if isinstance(arg, float) and (arg != arg or arg in (float("inf"), float("-inf"))):
        return {"float": str(arg)}  # JSON has no such numbers
    if isinstance(arg, complex):
        return {"complex": [str(arg.real), str(arg.imag)]}
    return [_encode(a) for a in arg] if isinstance(arg, tuple) else arg


def _decode(data: Any, depth: int = 0) -> Arg:
    if depth > MOST_DIMS:
        raise ValueError(f"an argument of lists in lists, more than {MOST_DIMS} deep")
    if isinstance(data, dict):
        match data:
            case {"ref": str(name)} if len(data) == 1:
                return Ref(name)
            case {"torch": [str(kind), str(name)]} if len(data) == 1:
                return Torch(kind, name)
            case {"float": "nan" | "inf" | "-inf" as number} if len(data) == 1:
                return float(number)
            case {"complex": [str(real), str(imaginary)]} if len(data) == 1:
                return complex(float(real), float(imaginary))
        raise ValueError(f"unknown argument {str(data)[:40]!r}")
    return tuple(_decode(a, depth + 1) for a in data) if isinstance(data, list) else data
