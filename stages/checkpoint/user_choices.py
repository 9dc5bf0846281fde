"""What the user fixes, by names of modules and numbers of blocks, in terms of links."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from shardwright.pipeline.base.errors import SolveError
from shardwright.pipeline.config import Checkpoint, Recompute
from shardwright.pipeline.cost.groups import Join
from shardwright.pipeline.ir.graph import OpGraph
from shardwright.stages.checkpoint.recompute.chain import Chain
from shardwright.stages.checkpoint.recompute.in_flight import drop_all, keep_all
from shardwright.stages.checkpoint.recompute.schedule import (
    Keep,
    Nesting,
    Schedule,
    full_recompute,
    no_recompute,
    scheduled,
)

Span = tuple[int, int]  # first and last link
SHOWN = 3  # names in a message


LINK_BY_LINK = (Recompute.full, Recompute.every)  # said of the links of the graph


def join_of(settings: Checkpoint, compiled: bool) -> Join:
    """Which links of the graph are one link of the chain, without a pipeline."""
    if settings.recompute in LINK_BY_LINK or (settings.recompute is Recompute.always and not compiled):
        return Join.NONE
    return Join.COMPILED if compiled else Join.NEEDLESS


def join_in_partitions(settings: Checkpoint, compiled: bool) -> Join:
    """The same with a pipeline: its cuts may lie between any of these."""
    return Join.COMPILED if compiled and settings.recompute not in LINK_BY_LINK else Join.NONE


def fixed_schedule(graph: OpGraph, chain: Chain, settings: Checkpoint, micro_batches: int) -> Schedule | None:
    """Of the whole chain, its last link the loss; None where the best is to be found.

    For `LINK_BY_LINK` each link of the chain is one of the graph.
    """
    loss, how = chain.length, settings.recompute
    assert how is not Recompute.except_last or micro_batches == 1, "else it needs a pipeline"
    if how is Recompute.full:
        return full_recompute(chain)
    if how is Recompute.every:
        return scheduled(_with_spans(spans_of(graph, settings), loss), chain)
    if how is Recompute.always:
        return scheduled(drop_all(0, loss, loss), chain)
    if how in (Recompute.off, Recompute.never, Recompute.except_last):
        return no_recompute(chain)
    return None


def _with_spans(spans: Sequence[Span], loss: int) -> Nesting:
    """Each span a region, all else kept."""
    lasts = dict(spans)
    steps: list[Keep | Nesting] = []
    link = 0
    while link <= loss:
        last = lasts.get(link)
        steps.append(Keep(link) if last is None else keep_all(link, last))
        link = link + 1 if last is None else last + 1
    return Nesting(tuple(steps))


def spans_of(graph: OpGraph, settings: Checkpoint) -> tuple[Span, ...]:
    """What `full` and `every` recompute, each span from its input; the loss is in none."""
    loss = len(graph.chain) - 1
    if settings.recompute is Recompute.full:
        return tuple((link, link) for link in range(loss))
    together = settings.every_blocks or 1
    found: list[Span] = []
    for run in block_runs([link.block for link in graph.chain[:loss]]):
        for number in range(0, len(run), together):
            some = run[number : number + together]
            found.append((some[0][0], some[-1][1]))
    return tuple(found)


# --------------------------------------------------------------------------------------------------------- blocks


def block_runs(kinds: Sequence[int]) -> list[list[Span]]:
    """Runs of repeated blocks: each a list of equal blocks that follow one another. Links that repeat nothing are left.

    A block may be several links: of `0 1 2 1 2 1 2 3` it is `1 2`. The longest run is taken first, of equally long ones
    that of the shortest blocks; then those before and after it. A chain without repetition has each link for a block.
    """
    runs = sorted(_runs(kinds, 0, len(kinds)))
    return runs or [[(link, link) for link in range(len(kinds))]]


def _runs(kinds: Sequence[int], start: int, stop: int) -> list[list[Span]]:
    begins = (
        (begin, size) for size in range(1, (stop - start) // 2 + 1) for begin in range(start, stop - 2 * size + 1)
    )

    def worth(one: tuple[int, int]) -> tuple[int, int, int]:
        begin, size = one
        return _repeated(kinds, begin, size, stop), -size, -begin

    begin, size = max(begins, key=worth, default=(start, 1))
    links = _repeated(kinds, begin, size, stop)
    if not links:
        return []
    run = [(first, first + size - 1) for first in range(begin, begin + links, size)]
    return [*_runs(kinds, start, begin), run, *_runs(kinds, begin + links, stop)]


def _repeated(kinds: Sequence[int], begin: int, size: int, stop: int) -> int:
    """Links of the blocks of that size that are equal to the one that begins there, itself included; 0: it is alone."""
    block, end = kinds[begin : begin + size], begin + size
    while end + size <= stop and kinds[end : end + size] == block:
        end += size
    return end - begin if end > begin + size else 0


# ----------------------------------------------------------------------------------------------------- boundaries


def boundary_places(graph: OpGraph, spans: Sequence[Span], names: Sequence[str], where: str) -> tuple[int, ...]:
    """The links of a chain with which partitions begin; `spans` are those of the graph for which each stands."""
    firsts = {first: place for place, (first, _) in enumerate(spans)}
    for name, link in zip(names, links := boundary_links(graph, names, where), strict=True):
        if link not in firsts:
            near = max(first for first in firsts if first < link)
            raise SolveError(
                f"{name} begins inside a block that is compiled as one function, links {near}..{_end(spans, near)}",
                where=where,
                remedy="name the module with which a block begins, or set `compile: false` in conf/model",
            )
    return tuple(firsts[link] for link in links)


def _end(spans: Sequence[Span], first: int) -> int:
    return next(last for begin, last in spans if begin == first)


def boundary_links(graph: OpGraph, names: Sequence[str], where: str) -> tuple[int, ...]:
    """The links with which partitions begin: for each module the first that has an op of it."""
    found = {name: _first_link(graph, name) for name in names}
    modules = _modules(graph)
    for name, link in found.items():
        if link is None:
            near = difflib.get_close_matches(name, modules, SHOWN) or modules[:SHOWN]
            raise SolveError(f"the model has no module {name}", where=where, remedy=f"near it: {', '.join(near)}")
        if link == 0:
            raise SolveError(
                f"{name} lies in the first link, with which the first partition begins",
                where=where,
                remedy="name modules where the others begin",
            )
    links = {name: link for name, link in found.items() if link is not None}
    for name, link in links.items():
        other = next(one for one in links if links[one] == link)
        if other != name:
            raise SolveError(f"{other} and {name} begin in the same link", where=where, remedy="name one of them")
    if sorted(links.values()) != list(links.values()):
        ordered = ", ".join(sorted(links, key=lambda name: links[name]))
        raise SolveError("the modules are not in the order in which they run", where=where, remedy=f"write {ordered}")
    return tuple(links.values())


def _first_link(graph: OpGraph, name: str) -> int | None:
    inside = f"{name}."
    for number, link in enumerate(graph.chain):
        if any(op.module == name or op.module.startswith(inside) for op in map(graph.op, link.ops)):
            return number
    return None


def _modules(graph: OpGraph) -> list[str]:
    """All modules that run in the chain, outer ones included."""
    found: dict[str, None] = {}
    for link in graph.chain:
        for op in link.ops:
            parts = graph.op(op).module.split(".")
            found |= {".".join(parts[: n + 1]): None for n in range(len(parts))}
    return [name for name in found if name]
