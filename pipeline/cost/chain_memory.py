"""Bytes of a step beside what its links keep: what is there whatever is recomputed, gradients as backward makes them,
the optimizer's peak; and the peak of a step of which nothing is recomputed.

Gradients of parameters are either there all the time (they lie in buckets, or add up over several passes), or each
appears in backward and stays until the optimizer has used it: then they are no part of what is `fixed`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from shardwright.pipeline.cost.groups import Join, groups_of
from shardwright.pipeline.cost.links import LinkCosts, LinkWay, link_costs
from shardwright.pipeline.cost.step import Priced
from shardwright.pipeline.ir.graph import Role
from shardwright.pipeline.ir.layout import Layout
from shardwright.pipeline.ir.profile import Profile
from shardwright.pipeline.sharding.sharded import Sharded

PRODUCTS_WITH_BIAS = ("aten.linear.default", "aten.addmm.default")
Span = tuple[int, int]  # the first and the last of the links that are taken as one


@dataclass(frozen=True)
class ChainMemory:
    fixed: int  # there whatever is recomputed
    grown: tuple[int, ...]  # of each link, the gradients that its backward leaves
    optimizer_peak: int  # when nothing of the chain is left
    repeated: int = 0  # there all the time, if anything is recomputed


def chain_memory(priced: Priced, join: Join) -> ChainMemory:
    sharded, price, profile = priced.sharded, priced.step, priced.profile
    spans = [(group.first, group.last) for group in groups_of(priced.graph, profile, join)]
    grown = tuple(_grown(sharded, spans, growing(sharded)))
    given = _given(sharded, profile) + workspace(priced)
    extra = profile.step.optimizer_bytes if profile.step else 0
    beside = math.ceil(max(_updated_part(sharded), _largest_part(sharded)) * extra)
    return ChainMemory(
        fixed=price.fixed_bytes + given - sum(grown),
        grown=grown,
        optimizer_peak=price.resident_bytes + given + beside + _apart_bytes(sharded),
        repeated=_biased(priced),
    )


def workspace(priced: Priced) -> int:
    """What libraries of products keep, if nothing is recomputed."""
    return priced.cluster.compute.workspace + _biased(priced)


def _biased(priced: Priced) -> int:
    """What they keep more for products with a bias: of forward, and as much again of what backward repeats."""
    found = any(op.target in PRODUCTS_WITH_BIAS and len(op.inputs) > 2 for op in priced.graph.ops)
    return priced.cluster.compute.workspace_biased if found else 0


def unrecomputed_peak(priced: Priced) -> int:
    """Of a step that keeps all it needs for backward."""
    join = Join.NEEDLESS if priced.profile.compiled is None else Join.COMPILED
    *links, loss = link_costs(priced, growing(priced.sharded), join)
    memory, ways = chain_memory(priced, join), [link.ways[0] for link in links]
    sizes = [link.input_bytes for link in (*links, loss)]
    saved = [saved_bytes(way, after) for way, (_, after) in zip(ways, pairwise((*links, loss)), strict=True)]
    kept = list(accumulate(saved, initial=sizes[0] if links else 0))  # with what enters, before each link
    left = list(accumulate(reversed(memory.grown), initial=0))[::-1]  # gradients that later links have left
    forward = [kept[n + 1] + way.forward_extra for n, way in enumerate(ways)]
    backward = [kept[n + 1] + sizes[n + 1] + left[n + 1] + sizes[n] + w.backward_extra for n, w in enumerate(ways)]
    at_loss = kept[-1] + (sizes[-1] if links else 0) + loss_temporaries(loss)
    return max(memory.fixed + max(*forward, *backward, at_loss, 0), memory.optimizer_peak)


def saved_bytes(way: LinkWay, after: LinkCosts) -> int:
    """With what the next link reads."""
    return max(way.saved, after.input_bytes)


def loss_temporaries(loss: LinkCosts) -> int:
    """The loss runs forwards and backwards at once: what it keeps is alive beside the gradient it makes."""
    way = loss.ways[0]
    return max(way.saved + way.forward_extra, way.saved + loss.output_bytes + way.backward_extra)


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
        if not lies_in(sharded.sharding.storage[value.origin], state, value.type.shape, sharded.sizes):
            found += sharded.local_bytes(name, state)
    return found


def lies_in(stored: Layout, state: Layout, shape: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    """Whether a rank's shard of a parameter is one run of what it stores: cut on the first dim, from the outside."""
    cuts = sorted((place.dim, place.outside, sizes[axis]) for axis, place in stored.further(state, sizes).items())
    if state.uneven(shape, sizes):  # on the last rank it is padded
        return False
    before, whole = stored.local_shape(shape, sizes), 1
    for dim, outside, size in cuts:
        if size > 1 and (outside != whole or any(length > 1 for length in before[:dim])):
            return False
        whole *= size
    return True


def growing(sharded: Sharded) -> frozenset[str]:
    """The parameters whose gradients are not there until backward makes them: complete as they are, in one pass."""
    if sharded.micro_batches > 1:
        return frozenset()
    graph, stored = sharded.graph, sharded.sharding.storage
    as_stored = {name for name, state in sharded.states.items() if state == stored[graph.values[name].origin]}
    return frozenset(as_stored - sharded.program.reduced.keys())


def _grown(sharded: Sharded, spans: Sequence[Span], owned: frozenset[str]) -> Iterator[int]:
    """Of each link, the bytes of gradients that its backward leaves: of parameters and common values that no later link
    reads, and of copies that are made for several links."""
    graph, stored, program = sharded.graph, sharded.sharding.storage, sharded.program
    sizes = {name: sharded.local_bytes(name, stored[graph.values[name].origin]) for name in owned}
    sizes |= {name: sharded.local_bytes(name) for name in graph.common if graph.values[name].grad}
    for step in program.shared if program.micro_batches == 1 else ():
        name = step.target.value
        sizes[name] = sizes.get(name, 0) + sharded.local_bytes(name, step.target.layout)
    last: dict[str, int] = {}
    for number, (first, end) in enumerate(spans):
        for link in graph.chain[first : end + 1]:
            last |= {read: number for op in link.ops for read in graph.op(op).inputs if read in sizes}
    for number in range(len(spans)):
        yield sum(sizes[name] for name, place in last.items() if place == number)
