"""The chain that Rotor schedules, in bytes and in slots: links 0..L-1 are the model, link L is the loss."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from shardwright.pipeline.base.errors import ShardwrightError


class ChainError(ShardwrightError):
    """The numbers given do not describe a chain, or not one that a table can hold."""


LAST = -1  # the number of the option of a link that ends a region


@dataclass(frozen=True)
class Option:
    """One way for a link to be run with its backward to come: seconds, bytes kept (output included), temporaries."""

    f: float
    b: float
    saved: float
    ft: float
    bt: float


@dataclass(frozen=True)
class Chain:
    """A chain of L links and its loss. `x[i]` belongs to link i, and entry L of `b` and `bt` to the loss.

    a        L+1 sizes: a[i] is the input of link i and the size of its gradient; a[L] is what the loss reads
    saved    L sizes: saved[i] is A_{i+1}, what link i keeps for its backward, its output a[i+1] included
    f, b     L and L+1 times: forward with saving, backward; b[L] is the loss, forwards and backwards
    ft, bt   L and L+1 sizes: temporaries on top of inputs and outputs
    f_none   L times, ft_none L sizes: the forward that saves nothing; as f and ft where not given
    more     for each link, further options beside (f, b, saved, ft, bt), which is its option 0; or nothing at all
    last     L options: the link as the last of a region that is run again, where its output need not be made; if they
             are given it is run so there, and only so
    grown    L+1 sizes: what the backward of a link leaves until the end (gradients of parameters); else nothing
    """

    a: tuple[float, ...]
    saved: tuple[float, ...]
    f: tuple[float, ...]
    b: tuple[float, ...]
    ft: tuple[float, ...]
    bt: tuple[float, ...]
    f_none: tuple[float, ...] = ()
    ft_none: tuple[float, ...] = ()
    more: tuple[tuple[Option, ...], ...] = ()
    last: tuple[Option, ...] = ()
    grown: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        length = len(self.f)
        defaults = {"f_none": self.f, "ft_none": self.ft, "more": ((),) * length, "grown": (0,) * (length + 1)}
        for name in self.__dataclass_fields__:
            object.__setattr__(self, name, tuple(getattr(self, name)) or tuple(defaults.get(name, ())))
        self._check()

    def _check(self) -> None:
        length = len(self.f)
        if length == 0:
            raise ChainError("a chain needs at least one link before its loss")
        for name in self.__dataclass_fields__:
            want, have = length + (name in ("a", "b", "bt", "grown")), len(getattr(self, name))
            if have != want and (have or name != "last"):
                raise ChainError(f"{name} has {have} entries, {want} expected for {length} links", where="chain")
            if name not in ("more", "last") and not all(math.isfinite(x) and x >= 0 for x in getattr(self, name)):
                raise ChainError(f"{name} holds a negative or non-finite number", where="chain")
        for i in range(length):
            for option in (*self.options(i), *self.last[i : i + 1]):
                if not all(math.isfinite(x) and x >= 0 for x in vars(option).values()):
                    raise ChainError("an option holds a negative or non-finite number", where=f"link {i}")
            for option in self.options(i):
                if option.saved < self.a[i + 1]:
                    what = f"keeps {option.saved}, less than its output of {self.a[i + 1]}"
                    raise ChainError(what, where=f"link {i}", remedy="what a link keeps includes its output")

    @property
    def length(self) -> int:
        """L: the number of links, and the index of the loss."""
        return len(self.f)

    def size(self, i: int) -> float:
        """a_i, for i up to L+1, where it is nothing."""
        return self.a[i] if i <= self.length else 0

    def options(self, i: int) -> tuple[Option, ...]:
        """What link i (or the loss) offers for F_all; the index is `Op.option`."""
        return self._options[i]

    @cached_property
    def _options(self) -> tuple[tuple[Option, ...], ...]:
        """Made once: a schedule that is played asks for them hundreds of thousands of times."""
        own = map(Option, self.f, self.b, self.saved, self.ft, self.bt)
        loss = Option(0, self.b[self.length], 0, 0, self.bt[self.length])
        return (*((first, *more) for first, more in zip(own, self.more, strict=True)), (loss,))

    def option(self, i: int, number: int) -> Option:
        """One of them, or how the link is run as the last of a region (`LAST`)."""
        return self.last[i] if number == LAST else self.options(i)[number]

    def ends(self, i: int) -> tuple[Option, ...]:
        """What link i offers as the last of a sub-chain that is run again."""
        return (self.last[i],) if self.last and i < self.length else self.options(i)

    def grown_after(self, i: int) -> float:
        """What the backwards of all links after i have left."""
        return sum(self.grown[i + 1 :])

    def whole(self, slots: int = 1, memory: int = 1) -> Chain:
        """Every size times slots/memory, rounded up to a whole number; exact for integers."""

        def up(sizes: tuple[float, ...]) -> tuple[int, ...]:
            return tuple(-(-math.ceil(x) * slots // memory) for x in sizes)

        def up_option(o: Option) -> Option:
            saved, ft, bt = up((o.saved, o.ft, o.bt))
            return replace(o, saved=saved, ft=ft, bt=bt)

        sizes = {name: up(getattr(self, name)) for name in ("a", "saved", "ft", "bt", "ft_none", "grown")}
        more = tuple(tuple(map(up_option, options)) for options in self.more)
        return replace(self, **sizes, more=more, last=tuple(map(up_option, self.last)))


@dataclass(frozen=True)
class SlotChain:
    """A chain whose sizes are whole slots, `slots` of which make the budget `memory`; `source` is in bytes."""

    source: Chain
    sizes: Chain
    memory: int
    slots: int

    def bytes_of(self, slots: int) -> int:
        """The bytes that so many slots stand for."""
        return slots * self.memory // self.slots


@dataclass(frozen=True)
class Slots:
    """How finely memory is counted. Rounding costs up to a slot for each tensor held, so slots grow with the chain."""

    per_link: int = 20
    least: int = 500
    step: int = 4  # every how many of the least a division between hold and the rest is tried (in_flight_dp.py)

    def of(self, links: int) -> int:
        """For so many links, the loss included."""
        return max(self.least, self.per_link * links)

    def step_of(self, slots: int) -> int:
        """As many divisions are tried of more slots: time grows with the slots, not with their square."""
        return self.step * max(1, slots // self.least)

    def finer(self, least: int) -> Slots:
        return replace(self, least=max(least, self.least))


SLOTS = Slots()


def default_slots(length: int) -> int:
    return SLOTS.of(length + 1)


def discretise(chain: Chain, memory_bytes: int, slots: int) -> SlotChain:
    """Count sizes in slots of memory_bytes/slots, rounded up: what fits in the slots fits in the bytes."""
    if memory_bytes <= 0 or slots <= 0:
        raise ChainError(f"a budget of {memory_bytes} bytes in {slots} slots is none", remedy="give positive numbers")
    return SlotChain(chain, chain.whole(slots, int(memory_bytes)), int(memory_bytes), slots)


def as_slots(chain: Chain, memory: int) -> SlotChain:
    """A chain whose sizes are whole numbers already: one slot is one unit."""
    whole = chain.whole()
    if whole != chain:
        raise ChainError("sizes are not whole numbers", where="chain", remedy="discretise the chain first")
    return SlotChain(whole, whole, max(memory, 1), max(memory, 1))
