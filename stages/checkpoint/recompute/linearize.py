"""The links of a sharded program, as they cost, as a chain of numbers for Rotor; the last link is the loss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from shardwright.pipeline.cost.chain_memory import chain_memory, growing, loss_temporaries, saved_bytes, workspace
from shardwright.pipeline.cost.groups import Join
from shardwright.pipeline.cost.links import LinkCosts, LinkWay, link_costs
from shardwright.pipeline.cost.step import Priced
from shardwright.pipeline.ir import plan
from shardwright.stages.checkpoint.recompute.chain import Chain, Option
from shardwright.stages.checkpoint.recompute.schedule import Nesting


@dataclass(frozen=True)
class Linear:
    chain: Chain | None  # None where the whole model is one link: there is nothing to choose
    costs: tuple[LinkCosts, ...]
    fixed_bytes: int  # there whatever is recomputed
    optimizer_peak: int  # bytes, when nothing of the chain is left
    repeated_bytes: int = 0  # there all the time, if anything is recomputed
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
    costs, memory = link_costs(priced, growing(priced.sharded), join), chain_memory(priced, join)
    issued = _chain(tuple(map(_of_device, costs)), memory.grown) if costs[0].ways[0].lines else None
    return Linear(
        chain=_chain(costs, memory.grown),
        costs=costs,
        fixed_bytes=memory.fixed,
        optimizer_peak=memory.optimizer_peak,
        repeated_bytes=memory.repeated,
        compiled=priced.profile.compiled is not None,
        device_chain=issued,
    )


def _of_device(costs: LinkCosts) -> LinkCosts:
    def alone(way: LinkWay) -> LinkWay:
        return replace(way, forward=way.device.forward, backward=way.device.backward)

    ways = tuple(map(alone, costs.ways))
    return replace(costs, ways=ways, last=alone(costs.last), dropped=ways[0].forward)


def linearize_partitions(priced: Priced, join: Join = Join.NONE) -> Linear:
    """For a pipeline: every link (or compiled block) may begin a partition, gradients add up over micro-batches, and
    the last link of a partition makes its output for the next."""
    found = linearize(priced, join)
    chain = found.chain and replace(found.chain, last=(), grown=())
    fixed = priced.step.fixed_bytes + workspace(priced) + found.repeated_bytes
    return replace(found, chain=chain, device_chain=None, fixed_bytes=fixed)


def _chain(costs: tuple[LinkCosts, ...], grown: tuple[int, ...]) -> Chain | None:
    links, loss = costs[:-1], costs[-1]
    if not links:
        return None
    plain = [link.ways[0] for link in links]
    more = (tuple(_option(way, saved_bytes(way, after)) for way in link.ways[1:]) for link, after in pairwise(costs))
    return Chain(
        a=tuple(link.input_bytes for link in costs),
        saved=tuple(saved_bytes(way, after) for way, after in zip(plain, costs[1:], strict=True)),
        f=tuple(way.forward for way in plain),
        b=(*(way.backward for way in plain), loss.ways[0].forward + loss.ways[0].backward),
        ft=tuple(way.forward_extra for way in plain),
        bt=(*(way.backward_extra for way in plain), loss_temporaries(loss)),
        f_none=tuple(link.dropped for link in links),
        ft_none=tuple(link.dropped_extra for link in links),
        more=tuple(more),
        last=tuple(_option(link.last, link.last.saved) for link in links),
        grown=grown,
    )


def _option(way: LinkWay, saved: int) -> Option:
    return Option(way.forward, way.backward, saved, way.forward_extra, way.backward_extra)
