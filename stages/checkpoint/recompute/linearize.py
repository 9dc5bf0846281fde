"""The links of a sharded program, as they cost, as a chain of numbers for Rotor; the last link is the loss.

Gradients of parameters are either there all the time (they lie in buckets, or add up over several passes), or each
appears in backward and stays until the optimizer has used it: then they are no part of `fixed_bytes`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from pipeline.cost.groups import Join
from pipeline.cost.links import LinkCosts, LinkWay, link_costs
from pipeline.cost.step import Priced
from pipeline.ir import plan
from pipeline.ir.graph import Role
from pipeline.ir.layout import Layout
from pipeline.ir.profile import Profile
from pipeline.sharding.sharded import Sharded
from stages.checkpoint.recompute.chain import Chain, Option
from stages.checkpoint.recompute.schedule import Nesting


@dataclass(frozen=True)
class Linear:
    chain: Chain | None  # None where the whole model is one link: there is nothing to choose
    costs: tuple[LinkCosts, ...]
    fixed_bytes: int  # there whatever is recomputed
    optimizer_peak: int  # bytes, when nothing of the chain is left
    compiled: bool = False  # every function of the program is
    device_chain: Chain | None = None  # where the links know of a host: with the seconds of the device alone

    @property
    def once(self) -> float:
        """Seconds of the device for every link once, forward and backward."""
        return sum(own.ways[0].device.total for own in self.costs)

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """The links of the graph that each link of the chain stands for."""
        return tuple((own.first, own.last_link) for own in self.costs)

    def regions(self, region: Nesting) -> tuple[plan.Region, ...]:
        """As the plan has them: links that keep a part of themselves are a region with what they keep."""
        found = tuple(self._regions(region))
        return tuple(map(_compiled, found)) if self.compiled else found

    def _regions(self, region: Nesting) -> Iterator[plan.Region]:
        for step in region.steps:
            if isinstance(step, Nesting):
                first, last = self.costs[step.first].first, self.costs[step.last].last_link
                yield plan.Region(first, last, True, self.regions(step))
                continue
            own = self.costs[step.link]
            way = own.ways[step.option]
            if way.compiled is not None:
                yield plan.Region(own.first, own.last_link, False, (), (), way.compiled, way.cheapest)
                continue
            each = tuple(plan.Region(n, n, False, ()) for n in range(own.first, own.last_link + 1))
            if way.kept is None:
                yield from each
            else:
                yield plan.Region(own.first, own.last_link, True, each, way.kept)


def _compiled(region: plan.Region) -> plan.Region:
    """With every function compiled, also where the links of the graph are taken one by one."""
    if region.recompute:
        return replace(region, inner=tuple(map(_compiled, region.inner)))
    return region if region.compiled is not None else replace(region, compiled=1.0)


def linearize(priced: Priced, join: Join = Join.NEEDLESS) -> Linear:
    sharded, price, profile = priced.sharded, priced.step, priced.profile
    owned = growing(sharded)
    costs = link_costs(priced, owned, join)
    grown = tuple(_grown(sharded, costs, owned))
    given = _given(sharded, profile) + priced.cluster.compute.workspace
    part = _updated_part(sharded)
    extra = profile.step.optimizer_bytes if profile.step else 0
    beside = math.ceil(max(part, _largest_part(sharded)) * extra)
    issued = _chain(tuple(map(_of_device, costs)), grown) if costs[0].ways[0].lines else None
    return Linear(
        chain=_chain(costs, grown),
        costs=costs,
        fixed_bytes=price.fixed_bytes + given - sum(grown),
        optimizer_peak=price.resident_bytes + given + beside + _apart_bytes(sharded),
        compiled=profile.compiled is not None,
        device_chain=issued,
    )


def _of_device(costs: LinkCosts) -> LinkCosts:
    def alone(way: LinkWay) -> LinkWay:
        return replace(way, forward=way.device.forward, backward=way.device.backward)

    ways = tuple(map(alone, costs.ways))
    return replace(costs, ways=ways, last=alone(costs.last), dropped=ways[0].forward)


def _given(sharded: Sharded, profile: Profile) -> int:
    """Bytes of the batch, and of what is computed before the chain for its links (masks, rotary angles)."""
    graph = sharded.graph
    read = {profile.storage[name] for link in graph.chain for op in link.ops for name in graph.op(op).inputs}
    made = {name for op in graph.prologue for name in graph.op(op).outputs} & read
    return sum(map(sharded.local_bytes, made | {value.name for value in graph.of_role(Role.INPUT)}))


def _updated_part(sharded: Sharded) -> float:
    """Of all that the optimizer updates, what one rank does."""
    own = sum(sharded.local_bytes(*state) for state in sharded.states.items())
    return own / max(1, sum(sharded.graph.values[name].type.nbytes for name in sharded.states))


def _largest_part(sharded: Sharded) -> float:
    """The same of the largest that is updated: an optimizer may go from one to the next."""
    own = max((sharded.local_bytes(*state) for state in sharded.states.items()), default=0)
    return own / max(1, max((sharded.graph.values[name].type.nbytes for name in sharded.states), default=0))


def _apart_bytes(sharded: Sharded) -> int:
    """Of the shards that the optimizer updates apart from their parameters, as they do not lie there in one run."""
    found = 0
    for name, state in sharded.states.items():
        value = sharded.graph.values[name]
        if not _lies_in(sharded.sharding.storage[value.origin], state, value.type.shape, sharded.sizes):
            found += sharded.local_bytes(name, state)
    return found


def _lies_in(stored: Layout, state: Layout, shape: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    """Whether a rank's piece of a parameter is one run of what it stores: cut on the first dim, from the outside."""
    cuts = sorted((place.dim, place.outside, sizes[axis]) for axis, place in stored.further(state, sizes).items())
    if state.uneven(shape, sizes):  # on the last rank it is padded
        return False
    before, whole = stored.local_shape(shape, sizes), 1
    for dim, outside, size in cuts:
        if size > 1 and (outside != whole or any(length > 1 for length in before[:dim])):
            return False
        whole *= size
    return True


def linearize_partitions(priced: Priced, join: Join = Join.NONE) -> Linear:
    """For a pipeline: every link (or compiled block) may begin a partition, gradients add up over micro-batches, and
    the last link of a partition makes its output for the next."""
    found = linearize(priced, join)
    chain = found.chain and replace(found.chain, last=(), grown=())
    fixed = priced.step.fixed_bytes + priced.cluster.compute.workspace
    return replace(found, chain=chain, device_chain=None, fixed_bytes=fixed)


def growing(sharded: Sharded) -> frozenset[str]:
    """The parameters whose gradients are not there until backward makes them: complete as they are, in one pass."""
    if sharded.micro_batches > 1:
        return frozenset()
    graph, stored = sharded.graph, sharded.sharding.storage
    as_stored = {name for name, state in sharded.states.items() if state == stored[graph.values[name].origin]}
    return frozenset(as_stored - sharded.program.reduced.keys())


def _grown(sharded: Sharded, costs: tuple[LinkCosts, ...], owned: frozenset[str]) -> Iterator[int]:
    """Of each link, the bytes of gradients that its backward leaves: of parameters that no later link reads."""
    graph, stored = sharded.graph, sharded.sharding.storage
    last: dict[str, int] = {}
    for number, own in enumerate(costs):
        for link in graph.chain[own.first : own.last_link + 1]:
            last |= {read: number for op in link.ops for read in graph.op(op).inputs if read in owned}
    for number in range(len(costs)):
        mine = (name for name, place in last.items() if place == number)
        yield sum(sharded.local_bytes(name, stored[graph.values[name].origin]) for name in mine)


def _chain(costs: tuple[LinkCosts, ...], grown: tuple[int, ...]) -> Chain | None:
    links, loss = costs[:-1], costs[-1]
    if not links:
        return None
    plain = [link.ways[0] for link in links]
    return Chain(
        a=tuple(link.input_bytes for link in costs),
        saved=tuple(_saved(way, after) for way, after in zip(plain, costs[1:], strict=True)),
        f=tuple(way.forward for way in plain),
        b=(*(way.backward for way in plain), loss.ways[0].forward + loss.ways[0].backward),
        ft=tuple(way.forward_extra for way in plain),
        bt=(*(way.backward_extra for way in plain), loss_temporaries(loss)),
        f_none=tuple(link.dropped for link in links),
        ft_none=tuple(link.dropped_extra for link in links),
        more=tuple(tuple(_option(way, _saved(way, after)) for way in link.ways[1:]) for link, after in pairwise(costs)),
        last=tuple(_option(link.last, link.last.saved) for link in links),
        grown=grown,
    )


def _saved(way: LinkWay, after: LinkCosts) -> int:
    return max(way.saved, after.input_bytes)


def _option(way: LinkWay, saved: int) -> Option:
    return Option(way.forward, way.backward, saved, way.forward_extra, way.backward_extra)


def loss_temporaries(loss: LinkCosts) -> int:
    """The loss runs forwards and backwards at once: what it keeps is alive beside the gradient it makes."""
    way = loss.ways[0]
    return max(way.saved + way.forward_extra, way.saved + loss.output_bytes + way.backward_extra)
