"""What a parameter takes in each way to store it: seconds of the step, and bytes from moment to moment.

    stored        value and optimizer state               all the time
    updated       what the optimizer takes beside         while it runs
    gradient      in a bucket, split or added up          all the time, and once more while it is made
                  else                                    from when backward makes it
    copy          gathered                                from the start of its link
                  converted otherwise                     from the first op that reads it
                  not needed by backward, or regathered   until its link's forward pass returns
                  else                                    until the first op that reads it is undone
    made again    regathered                              from the first in its link's backward pass that needs a
                                                          gathered copy, until the op that reads it is undone
    its gradient  gathered                                from when backward makes it until its link is undone
    ahead         regathered                              all the time, of one link (moments.Moments.leads)
    shared        a copy that several links read          all the time; its gradient from when backward makes it

Which forms other links take is not known where the bytes of one are counted. Links that may read the same form are
taken to do so where they are equal, or where it is whole, as in data parallelism; else the last of them reads it alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwright.pipeline.cost.chain_memory import lies_in
from shardwright.pipeline.cost.step import Workload, update_seconds
from shardwright.pipeline.ir.cluster import Axis
from shardwright.pipeline.ir.graph import Op, OpGraph, Role, TensorType, Value
from shardwright.pipeline.ir.layout import B, Layout, Place, R
from shardwright.pipeline.ir.program import GATHERED_ALONE
from shardwright.pipeline.rates.compute import shard_bytes
from shardwright.pipeline.sharding.conversions import gathered_share, step_arguments
from shardwright.pipeline.sharding.path_tables import conversion_table
from shardwright.stages.solve.problem.arrays import Arrays, Layouts
from shardwright.stages.solve.problem.data import FORBIDDEN, Array, Holding
from shardwright.stages.solve.problem.made_once import Listed
from shardwright.stages.solve.problem.moments import Moments
from shardwright.stages.solve.problem.storage import Stored, Way, storage_choices

Ways = Listed[Stored]


@dataclass(frozen=True, eq=False)
class Copies:
    """Bytes by the way to store a parameter and the form in which it is read."""

    whole: Array  # of the copy, where it is one
    between: Array  # of other copies on the way to it
    first: Array  # of what its first collective makes, and what that sends
    received: Array  # beside the copies that one collective makes
    gathered: Array  # of the copy, where it is gathered


class Parameters:
    def __init__(self, workload: Workload, moments: Moments, arrays: Arrays, shards: bool) -> None:
        self.workload, self.moments, self.arrays, self.shards = workload, moments, arrays, shards
        self.graph: OpGraph = workload.graph
        self.once, self.axes, self.sizes = arrays.once, arrays.axes, arrays.sizes
        sizes = {value.name: value.type.nbytes for value in self.graph.of_role(Role.PARAMETER)}
        self.updated, self.largest = max(1, sum(sizes.values())), max(sizes, key=sizes.__getitem__, default="")

    # ---- stored

    def ways(self, value: Value, wanted: frozenset[Layout]) -> Ways:
        """What several links read is gathered once for all of them, or each of them would gather it twice."""
        return self.once(self._ways_of, value.type.shape, wanted, self.shared(value))

    def _ways_of(self, shape: tuple[int, ...], wanted: frozenset[Layout], shared: bool) -> Ways:
        found = storage_choices(shape, wanted, self.sizes, shards=self.shards)
        return Listed(way for way in found if not (shared and way.way is Way.regathered))

    def shared(self, value: Value) -> bool:
        """Whether several links read it."""
        return len({self.moments.link.get(op.name) for op in self.moments.readers[value.name]}) > 1

    def layouts(self, ways: Ways) -> Layouts:
        return self.arrays.listed(tuple(way.layout for way in ways))

    def states(self, ways: Ways) -> Layouts:
        return self.arrays.listed(tuple(way.state for way in ways))

    def node(self, value: Value, ways: Ways) -> tuple[Array, list[Holding]]:
        """Seconds and bytes however it is read; with the gradient, where several places read it."""
        resident = self.once(self._resident, ways, value.type)
        updating = (h for h in self._updating(value, ways) if h.usages.any())
        held = [Holding(0, self.moments.end, resident), *updating]
        if value.grad and len(self.moments.places(value.name)) > 1:
            held += self._gradients(value, self.once(self._gradients_of_many, ways, value.type))
        return self.once(self._update, ways, value.type), held

    def _resident(self, ways: Ways, kind: TensorType) -> Array:
        stored, state = (self.arrays.split_bytes(own, kind) for own in (self.layouts(ways), self.states(ways)))
        return stored + self.workload.optimizer_copies * state

    def _update(self, ways: Ways, kind: TensorType) -> Array:
        copies, optimizer = self.workload.optimizer_copies, self.workload.ops.optimizer
        stored, state = (self.arrays.split_bytes(own, kind) for own in (self.layouts(ways), self.states(ways)))
        each = zip(ways, stored, state, strict=True)
        return np.array(
            [optimizer(own, copies) + update_seconds(n, [], _split(way, self.axes)) for way, n, own in each]
        )

    def _updating(self, value: Value, ways: Ways) -> Iterator[Holding]:
        """What the optimizer takes beside: in proportion to all that it updates at once, or to the largest alone where
        it goes from one to the next; and shards that do not lie in one run."""
        first, end, step = self.moments.passes, self.moments.end, self.workload.profile.step
        extra = float(step.optimizer_bytes) if step else 0.0
        state = self.arrays.split_bytes(self.states(ways), value.type)
        yield Holding(first, end, self.once(self._apart, ways, value.type))
        yield Holding(first, first + 1, self.once(np.multiply, state, extra / self.updated))
        if value.name == self.largest:
            yield Holding(first + 1, end, self.once(np.multiply, state, extra / max(1, value.type.nbytes)))

    def _apart(self, ways: Ways, kind: TensorType) -> Array:
        in_one_run = np.array([lies_in(way.layout, way.state, kind.shape, self.sizes) for way in ways])
        return np.where(in_one_run, 0.0, self.arrays.split_bytes(self.states(ways), kind))

    # ---- gradients: what is there all the time, and what backward makes

    def _gradients(self, value: Value, parts: tuple[Array, Array]) -> Iterator[Holding]:
        for first, own in zip((0, self.moments.undone(value.name)), parts, strict=True):
            if own.any():
                yield Holding(first, self.moments.end, own)

    def _gradients_of_one(self, ways: Ways, forms: Layouts, kind: TensorType) -> tuple[Array, Array]:
        """By way and form: it is in a bucket where it is summed."""
        return self._in_place(ways, kind, _summed_axes(ways, forms) > 0)

    def _gradients_of_many(self, ways: Ways, kind: TensorType) -> tuple[Array, Array]:
        """By way: one is taken as summed over each axis on which it is whole, however it is read."""
        whole = [any(state == R and n > 1 for state, n in zip(w.layout.states, self.sizes, strict=True)) for w in ways]
        there, made = self._in_place(ways, kind, np.array(whole)[:, None])
        return there[:, 0], made[:, 0]

    def _in_place(self, ways: Ways, kind: TensorType, summed: NDArray[np.bool_]) -> tuple[Array, Array]:
        stored, state = (self.arrays.split_bytes(own, kind) for own in (self.layouts(ways), self.states(ways)))
        shards = np.array([way.state.shards(self.sizes) // way.layout.shards(self.sizes) for way in ways])
        apart = np.array([way.state != way.layout for way in ways])
        there = apart[:, None] | summed | (self.workload.micro_batches > 1)
        nbytes = np.maximum(stored, shards * state)[:, None]
        return nbytes * there, nbytes * ~there

    # ---- read

    def reading(
        self, value: Value, ways: Ways, forms: Layouts, wants: list[tuple[Op, Layouts]]
    ) -> tuple[Array, tuple[Holding, ...], Array | None]:
        """Seconds and bytes to have it in each form; of the seconds those that may run behind other work."""
        moments, shared = self.moments, self.shared(value)
        saved = any(moments.saves(op.name, value.name) for op, _ in wants)
        times = 1 if shared else self.workload.micro_batches
        share = gathered_share(self.graph, value.name)
        costs, behind = self.once(self._seconds, ways, forms, value.type, value.grad, share, saved, times)
        copies = self.once(self._copies, ways, forms, value.type, share, len(self.graph.beside(value.name)) > 1)
        found: list[Holding] = []
        if value.grad and len(wants) == 1:
            gradients = self.once(self._gradients_of_one, ways, forms, value.type)
            found += self._gradients(value, gradients)
            made = self.once(_beside_place, gradients[0], copies.whole, self.arrays.split_bytes(forms, value.type))
            found += [Holding(at, at + 1, made) for op, _ in wants for at in (moments.backward(op.name),)]
        if copies.whole.any():
            found += self._copies_of(value, copies, ways, forms, wants)
        hidden = behind if self.workload.cluster.overlap.hidden and behind.any() else None
        return costs, tuple(h for h in found if h.end > h.first and h.usages.any()), hidden

    def _copies_of(
        self, value: Value, copies: Copies, ways: Ways, forms: Layouts, wants: list[tuple[Op, Layouts]]
    ) -> Iterator[Holding]:
        readers: dict[int | None, list[Op]] = {}
        wanted: dict[int | None, tuple[Layouts, ...]] = {}
        for op, layouts in wants:
            link = self.moments.link.get(op.name)
            readers.setdefault(link, []).append(op)
            wanted[link] = (*wanted.get(link, ()), layouts)
        blocks = {self.graph.chain[link].block for link in readers if link is not None}
        equal = len(blocks) < len(readers) or (len(readers) > 1 and self.workload.micro_batches > 1)
        shared = self.once(_shared_forms, forms, tuple(wanted.values()), equal)
        if shared.any():
            yield from self._shared_copies(value, self.once(_within, copies, shared))
        later: tuple[Layouts, ...] = ()
        for link in reversed(readers):
            mine = self.once(_forms_of, forms, wanted[link], later, shared)
            yield from self._own_copies(value, self.once(_within, copies, mine), ways, readers[link])
            later += wanted[link]

    def _shared_copies(self, value: Value, copies: Copies) -> Iterator[Holding]:
        """It, its gradient and, between passes, what was added up before."""
        end, several = self.moments.passes, self.workload.micro_batches > 1
        each = self.once(np.add, copies.whole, copies.between)
        yield Holding(0, end, self.once(np.multiply, each, 1.0 + several))
        yield Holding(0 if several else self.moments.undone(value.name), end, each)

    def _own_copies(self, value: Value, copies: Copies, ways: Ways, readers: list[Op]) -> Iterator[Holding]:
        """Of one link."""
        moments = self.moments
        saved = any(moments.saves(op.name, value.name) for op in readers)
        first, last = readers[0].name, readers[-1].name
        read, undone = moments.forward(first), moments.backward(first) + 1
        begins, ends = moments.begins(first), max(moments.forgotten(op, value.name) for op in readers)
        own = self.once(_lives, copies, ways, saved)
        yield Holding(begins, begins + 1, copies.received)
        yield Holding(begins, ends, own.dropped)
        yield Holding(begins, undone, own.kept)
        yield Holding(read, undone if saved else ends, own.otherwise)
        yield Holding(moments.asks(first), undone, own.again)
        if moments.leads(first):
            yield Holding(0, moments.passes, own.ahead)
        if value.grad:
            made = moments.backward(last)
            yield Holding(made, moments.finished(first), own.gathered)
            yield Holding(made, undone, own.otherwise)

    def _copies(self, ways: Ways, forms: Layouts, kind: TensorType, share: float, joined: bool) -> Copies:
        have = self.layouts(ways)
        whole = self.arrays.copied_bytes(have, forms, kind)
        gathered = (_split_states(have)[:, None] & ~_split_states(forms)[None]).sum(axis=2)
        between, first = np.zeros(whole.shape), np.zeros(whole.shape)
        received = np.zeros(whole.shape)
        paths = self.arrays.paths(share)
        for i, j in zip(*np.nonzero(_goes(ways, forms, self.sizes) & (gathered > 0) & (whole > 0)), strict=True):
            home = Layout(
                tuple(B if (a, b) == (R, B) else a for a, b in zip(have[i].states, forms[j].states, strict=True))
            )
            path = paths.cheapest(home, forms[j], kind.shape, kind.nbytes, True).layouts
            sizes = [shard_bytes(kind, layout, self.sizes) for layout in path]
            between[i, j] = sum(sizes[1:-1])
            first[i, j] = sizes[1] + (sizes[0] if sizes[1] < GATHERED_ALONE else 0)
            in_place = sizes[-1] >= GATHERED_ALONE and step_arguments(path[-2], path[-1], self.sizes) == {"dim": 0}
            received[i, j] = 0 if in_place or not joined else sizes[-1]
        return Copies(whole, between, first, received, whole * (gathered > 0))

    def _seconds(
        self, ways: Ways, forms: Layouts, kind: TensorType, grad: bool, share: float, saved: bool, times: int
    ) -> tuple[Array, Array]:
        """Of a step, to have a stored parameter in each form so many times, and its gradient as it is stored; of
        these the sums, which may leave in backward, and the gathers of what is regathered, which begin ahead of time.

        It is gathered again only where backward reads it (`saved`): a bias or an embedding's table it does not.
        """
        goes = _goes(ways, forms, self.sizes)
        if not goes.any():
            return np.full(goes.shape, FORBIDDEN), np.zeros(goes.shape)
        summed = _summed_axes(ways, forms)
        source, step = np.zeros(goes.shape, dtype=np.int64), np.zeros(goes.shape)
        rows: dict[Layout, int] = {}
        for i, way in enumerate(ways):
            for code in np.unique(summed[i, goes[i]]):
                axes = [a for a in range(len(self.sizes)) if code >> a & 1]
                at = goes[i] & (summed[i] == code)
                source[i, at] = rows.setdefault(_summed(way.layout, axes), len(rows))
                step[i, at] = self._step_seconds(kind, way, axes if grad else [])
        paths = self.arrays.paths(share)
        there, again = (
            conversion_table(paths, tuple(rows), forms, kind.shape, kind.nbytes, backward)
            for backward in (grad, False)  # without a gradient it is the forward pass alone
        )
        columns = np.arange(len(forms))
        once = there[source, columns]
        twice = once + again[source, columns] if saved else once
        regathered = _of(ways, Way.regathered)
        gathers = np.where(regathered, times * (1 + saved) * again[source, columns], 0.0)
        costs = np.where(goes, times * np.where(regathered, twice, once) + step, FORBIDDEN)
        return costs, np.where(np.isfinite(costs), gathers + step, 0.0)

    def _step_seconds(self, kind: TensorType, way: Stored, summed: list[int]) -> float:
        """Once a step: gradients summed over these axes, on which the parameter is replicated."""
        nbytes = kind.nbytes // way.layout.shards(self.sizes)
        split = _split(way, self.axes)
        return update_seconds(nbytes, [self.axes[a] for a in summed], split) - update_seconds(nbytes, [], split)


@dataclass(frozen=True, eq=False)
class _Lives:
    """Bytes of copies, by how long they are there."""

    dropped: Array  # gathered, and not kept for backward
    kept: Array  # gathered
    otherwise: Array  # not gathered
    again: Array  # gathered for backward
    ahead: Array  # gathered before it is asked for
    gathered: Array


def _lives(copies: Copies, ways: Ways, saved: bool) -> _Lives:
    again = _of(ways, Way.regathered)
    stays, each = ~again & saved, copies.gathered + copies.between
    return _Lives(
        dropped=np.where(stays, copies.between, each),
        kept=np.where(stays, copies.gathered, 0.0),
        otherwise=copies.whole - copies.gathered,
        again=np.where(again & saved, each, 0.0),
        ahead=np.where(again, copies.first, 0.0),
        gathered=copies.gathered,
    )


def _shared_forms(forms: Layouts, wanted: tuple[tuple[Layouts, ...], ...], equal: bool) -> NDArray[np.bool_]:
    """Those that several links are taken to read."""
    each = [{layout for layouts in own for layout in layouts} for own in wanted]
    several = [sum(form in own for own in each) > 1 for form in forms]
    return np.array(several) & (equal | ~_split_states(forms).any(axis=1))


def _forms_of(
    forms: Layouts, wanted: tuple[Layouts, ...], later: tuple[Layouts, ...], shared: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Of those that are not shared: what these readers may want, and none after them."""
    mine, others = ({layout for layouts in each for layout in layouts} for each in (wanted, later))
    return np.array([form in mine and form not in others for form in forms]) & ~shared


def _within(copies: Copies, mine: NDArray[np.bool_]) -> Copies:
    return Copies(*(np.where(mine, own, 0) for own in vars(copies).values()))


def _beside_place(there: Array, whole: Array, forms: Array) -> Array:
    """Of a gradient that has a place, what backward makes before it is added to it."""
    return np.where((there > 0) & (whole == 0), forms[None, :], 0.0)


def _of(ways: Ways, kind: Way) -> NDArray[np.bool_]:
    return np.array([way.way is kind for way in ways])[:, None]


def _split_states(layouts: Layouts) -> NDArray[np.bool_]:
    return np.array([[state.kind == "S" for state in layout.states] for layout in layouts])


def _summed_axes(ways: Ways, forms: Layouts) -> NDArray[np.int64]:
    """Of each way to store and each form to read: the axes over which gradients are summed, as bits."""
    whole = np.array([[state == R for state in way.layout.states] for way in ways])
    partial = np.array([[state == B for state in form.states] for form in forms])
    return np.asarray((whole[:, None] & partial[None]) @ (1 << np.arange(whole.shape[1])))


def _goes(ways: Ways, forms: Layouts, sizes: tuple[int, ...]) -> NDArray[np.bool_]:
    """A parameter that is to be read as it lies is not gathered on any axis, one to be regathered by nothing else."""
    number: dict[Place, int] = {}

    def placed(layouts: list[Layout]) -> NDArray[np.int64]:
        found = np.full((len(layouts), len(sizes)), -1)
        for row, layout in enumerate(layouts):
            for axis, place in layout.places(sizes).items():
                found[row, axis] = number.setdefault(place, len(number))
        return found

    have, wanted = placed([way.layout for way in ways]), placed(list(forms))
    partial = np.array([[state == B for state in form.states] for form in forms])
    regathered = _of(ways, Way.regathered)[:, :, None]
    stays = (have[:, None] < 0) | (have[:, None] == wanted[None]) | (regathered & partial[None])
    return np.asarray(_of(ways, Way.gathered) | stays.all(axis=2))


def _summed(have: Layout, axes: list[int]) -> Layout:
    """The stored layout once the step has seen to the gradients of these replicated axes."""
    return Layout(tuple(B if a in axes else state for a, state in enumerate(have.states)))


def _split(way: Stored, axes: tuple[Axis, ...]) -> list[Axis]:
    """The axes over which new values are gathered: whatever reads the parameter, once a step."""
    pairs = zip(axes, way.layout.states, way.state.states, strict=True)
    return [axis for axis, have, state in pairs if have.kind != "S" == state.kind]
