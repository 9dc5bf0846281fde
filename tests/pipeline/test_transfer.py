"""A tensor from any layout on one mesh to any layout on another, without ranks: every message is looked at."""

from __future__ import annotations

from functools import reduce
from itertools import product
from operator import add

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardwright.pipeline.ir.layout import B, Layout, P, R, S, of_gradient
from shardwright.pipeline.runtime.pipelining.transfer import Site, Transfer, messages

SHAPE = (12, 8)
STATES = (R, B, P, S(0), S(1), S(0, 2), S(0, 3))
CPU = torch.device("cpu")


def shards_of(whole: Tensor, site: Site, seed: int = 0) -> dict[int, Tensor]:
    """Of every rank; on axes where the layout is partial they add up to the whole."""
    generator = torch.Generator().manual_seed(seed)
    partial = [axis for axis, state in enumerate(site.layout.states) if state == P]
    shares: dict[tuple[int, ...], Tensor] = {}
    for place in product(*(range(site.sizes[axis]) for axis in partial)):
        shares[place] = torch.randn(whole.shape, generator=generator, dtype=whole.dtype)
    first = next(iter(shares))
    shares[first] = whole - reduce(add, (t for place, t in shares.items() if place != first), torch.zeros_like(whole))
    found = {}
    for rank in site.ranks:
        place = site.place(rank)
        share = shares[tuple(place[axis] for axis in partial)]
        for dim, runs in enumerate(site.runs(tuple(whole.shape), rank)):
            share = share.index_select(dim, torch.cat([torch.arange(start, start + count) for start, count in runs]))
        found[rank] = share
    return found


def moved(shards: dict[int, Tensor], source: Site, target: Site) -> dict[int, Tensor]:
    senders = {rank: Transfer(source, target, SHAPE, rank) for rank in source.ranks}
    found = {}
    for rank in target.ranks:
        reader = Transfer(source, target, SHAPE, rank)
        blocks = [senders[m.source].pack(m, shards[m.source]) for m in reader.received]
        found[rank] = reader.unpack(blocks, torch.float64, CPU)
    return found


def whole_of(shards: dict[int, Tensor], site: Site) -> Tensor:
    """Put together from the ranks that hold something of their own; equal ones are checked to be equal."""
    whole = torch.zeros(SHAPE, dtype=torch.float64)
    kinds = site.layout.states
    for rank, shard in shards.items():
        place = site.place(rank)
        twin = [0 if kind in (R, B) else n for n, kind in zip(place, kinds, strict=True)]
        number = reduce(lambda found, each: found * each[1] + each[0], zip(twin, site.sizes, strict=True), 0)
        torch.testing.assert_close(shard, shards[site.first + number])
        if number == rank - site.first:
            rows, columns = (
                torch.cat([torch.arange(start, start + count) for start, count in runs])
                for runs in site.runs(SHAPE, rank)
            )
            whole[rows.view(-1, 1), columns] += shard
    return whole


@st.composite
def sites(draw: st.DrawFn, first: int) -> Site:
    sizes = draw(st.sampled_from([(1,), (2,), (3,), (2, 2), (4,), (1, 2), (2, 1, 2)]))
    layouts = st.tuples(*(st.sampled_from(STATES) for _ in sizes)).map(Layout)
    return Site(first, sizes, draw(layouts.filter(lambda layout: layout.fits(SHAPE, sizes))))


@settings(deadline=None)
@given(sites(0), st.integers(0, 1).flatmap(lambda again: sites(0 if again else 16)))
def test_the_reader_holds_what_was_sent(source: Site, target: Site) -> None:
    whole = torch.randn(SHAPE, dtype=torch.float64)
    torch.testing.assert_close(whole_of(moved(shards_of(whole, source), source, target), target), whole)


@settings(deadline=None)
@given(sites(0), sites(16))
def test_the_gradient_comes_back_in_its_own_layout(source: Site, target: Site) -> None:
    gradient = torch.randn(SHAPE, dtype=torch.float64)
    ends = target.of_gradient(), source.of_gradient()
    back = moved(shards_of(gradient, ends[0]), *ends)
    assert back.keys() == set(source.ranks) and ends[1].layout == of_gradient(source.layout)
    torch.testing.assert_close(whole_of(back, ends[1]), gradient)


def test_equal_ends_send_to_one_reader_each() -> None:
    layout = Layout((S(0), P))
    found = list(messages(Site(0, (2, 2), layout), Site(4, (2, 2), layout), SHAPE))
    assert [(m.source, m.target) for m in found] == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_readers_ask_different_ranks_of_equal_ones() -> None:
    found = list(messages(Site(0, (2,), Layout((R,))), Site(2, (4,), Layout((S(0),))), SHAPE))
    assert [(m.source, m.target) for m in found] == [(0, 2), (1, 3), (0, 4), (1, 5)]
