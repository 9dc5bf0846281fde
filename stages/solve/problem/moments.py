"""The step as a row of moments: every op forward, every op backward in reverse, then the optimizer, which updates all
parameters at once or one after the other: a moment each, as the step's price takes the worse (chain_memory.py).

A block's function holds what it wrote until it returns, so what a link writes is there until the end of the last link
that reads it; what backward needs stays until the op that needs it is undone, and what one link gives to the next until
that is undone.
"""

from __future__ import annotations

from itertools import pairwise

from shardwright.pipeline.cost.groups import Join, groups_of
from shardwright.pipeline.ir.graph import Op, OpGraph, Role
from shardwright.pipeline.ir.profile import Profile


class Moments:
    def __init__(self, graph: OpGraph, profile: Profile) -> None:
        self.graph, self.profile = graph, profile
        order = [*graph.prologue, *(name for link in graph.chain for name in link.ops)]
        self.position = {name: number for number, name in enumerate(order)}
        self.count = len(order)
        self.passes = 2 * self.count  # until before the optimizer
        self.end = self.passes + 2
        self.link = {name: number for number, link in enumerate(graph.chain) for name in link.ops}
        self.link_end = self._link_ends()
        self.readers = graph.consumers()
        self.views = self._views()
        self.saved = {
            (self.link.get(op.name), profile.storage.get(name, name))
            for op in graph.ops
            for name in profile.ops[op.name].saves
        }
        self.common = {profile.storage[name] for name in graph.common}
        keepers = self._keepers()
        self.crossing = self._crossing(keepers)
        self.keepers = {root: op for root, op in keepers.items() if root not in self.crossing}
        self.leading = self._leading()

    def forward(self, op: str) -> int:
        return self.position[op]

    def backward(self, op: str) -> int:
        return 2 * self.count - 1 - self.position[op]

    def places(self, value: str) -> list[tuple[Op, int]]:
        """Where ops read a value: among which of their inputs."""
        return [(op, at) for op in self.readers[value] for at, name in enumerate(op.inputs) if name == value]

    def saves(self, op: str, value: str) -> bool:
        """Whether the link of an op keeps a value for backward."""
        return (self.link.get(op), value) in self.saved

    def begins(self, op: str) -> int:
        """The first moment of the op's link."""
        return self.position[self._ops_beside(op)[0]]

    def ends(self, op: str) -> int:
        """When the function of the op's link returns."""
        return self.link_end[self.link[op]]

    def finished(self, op: str) -> int:
        """When the op's link has run backward."""
        return self.backward(self._ops_beside(op)[0]) + 1

    def asks(self, op: str) -> int:
        """When the backward pass of the op's link first needs a parameter."""
        values, ops = self.graph.values, self.profile.ops
        needs = (
            o for o in reversed(self._ops_beside(op)) if any(values[n].role is Role.PARAMETER for n in ops[o].saves)
        )
        return self.backward(next(needs, op))

    def keeping(self, op: Op, value: str) -> list[str]:
        """The ops of its link that keep for backward what an op reads of a value, or a view of that."""
        storage, saves = self.profile.storage, self.profile.ops[op.name].saves
        views = [name for name in op.outputs if storage[name] == storage[value]]
        beside = [(r, v) for v in views for r in self.readers[v] if self.link.get(r.name) == self.link.get(op.name)]
        own = [op.name] if any(name in saves for name in (value, *views)) else []
        return own + [name for reader, view in beside for name in self.keeping(reader, view)]

    def leads(self, op: str) -> bool:
        """Whether what the op's link gathers ahead of time is counted, and then all the time."""
        return op in self.link and self.link[op] == self.leading

    def _ops_beside(self, op: str) -> tuple[str, ...]:
        return self.graph.chain[self.link[op]].ops if op in self.link else (op,)

    def forgotten(self, op: Op, value: str) -> int:
        """When the forward pass lets go of what the op wrote: at the end of the last link that reads it. What is made
        before the chain for its links is there until the step ends."""
        if op.name not in self.link and any(r.name in self.link for r in self.readers[value]):
            return self.end
        links = [self.link[r.name] for r in self.readers[value] if r.name in self.link]
        own = [self.link[op.name]] if op.name in self.link else []
        return max((self.link_end[link] for link in (*links, *own)), default=self.count)

    def _crossing(self, keepers: dict[str, str]) -> dict[str, int]:
        """The memory of each activation between two links -> when the second is undone, to which the step has it, also
        where a converted copy is all that is read. Not what a link keeps for longer that it wrote itself."""
        found = {}
        for group, after in pairwise(groups_of(self.graph, self.profile, Join.NEEDLESS)):
            root = self.profile.storage[group.link.output]
            inside = self.graph.values[root].origin in group.link.ops and root not in self.common
            if inside and keepers.get(root) not in group.link.ops:
                found[root] = self.finished(after.link.ops[0])
        return found

    def _link_ends(self) -> list[int]:
        """When what a link wrote is let go of: with the last of those that are taken as one with it."""
        ends = [self.position[link.ops[-1]] + 1 for link in self.graph.chain]
        for group in groups_of(self.graph, self.profile, Join.NEEDLESS):
            ends[group.first : group.last] = [ends[group.last]] * (group.last - group.first)
        return ends

    def _leading(self) -> int | None:
        """The link whose parameters are taken to be there all the time where they are gathered ahead.

        Of what is gathered ahead a step has that of one link at a time, and counts the largest (pipeline.cost.step).
        Which it is depends on how all are stored: it is taken to be that with most of the parameters, of equal ones,
        which are stored alike, the last.
        """
        sizes: dict[int, int] = {}
        for number, link in enumerate(self.graph.chain):
            read = {name for op in link.ops for name in self.graph.op(op).inputs}
            alone = (name for name in read if len({self.link.get(op.name) for op in self.readers[name]}) == 1)
            own = (self.graph.values[name] for name in alone)
            sizes[number] = sum(value.type.nbytes for value in own if value.role is Role.PARAMETER)
        return max(sizes, key=lambda number: (sizes[number], number), default=None)

    def undone(self, value: str) -> int:
        """When the first gradient of a value is there: as the last of its readers, or of its views', is undone."""
        names = {value, *self.views.get(value, ())}
        readers = (r for name in names for r in self.readers[name] if names.isdisjoint(r.outputs))
        return min((self.backward(r.name) for r in readers), default=self.count)

    def _views(self) -> dict[str, list[str]]:
        """Of each value the others that lie in its memory: so do their gradients in the memory of its gradient."""
        found: dict[str, list[str]] = {}
        for name, root in self.profile.storage.items():
            if name != root:
                found.setdefault(root, []).append(name)
        return found

    def _keepers(self) -> dict[str, str]:
        """Each activation's memory that backward needs, beside the common values -> the first op that keeps it."""
        keepers: dict[str, str] = {}
        for op in self.graph.ops:
            for name in self.profile.ops[op.name].saves:
                root = self.profile.storage[name]
                if self.graph.values[root].role is Role.RESULT and root not in self.common:
                    keepers.setdefault(root, op.name)
        return keepers
