"""What a link of the sharded program costs in each way to run it: all kept for backward, some of it, or nothing.

A link that keeps only the results of some steps (products, collectives) runs a second time in its backward pass, up to
the last step that keeps anything; the steps whose results are kept are not computed again, and a product that is the
last to keep something only has its arguments made (`pipeline.runtime.kept` and `recompute`).
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardwright.pipeline.cost.groups import Join, LinkGroup, groups_of, likeness
from shardwright.pipeline.cost.link_facts import ChainFacts, LinkFacts, LinkHost, StepFacts
from shardwright.pipeline.cost.step import Priced
from shardwright.pipeline.ir.profile import CompiledWay
from shardwright.pipeline.rates.compute import Seconds

MOST_WAYS = 8  # of keeping a part of a link
WORTH = 0.02  # of what a link keeps: a way that saves less than this on the one before is left out


@dataclass(frozen=True)
class Lines:
    """Seconds of a link's two passes on the two lines on which a step is played: the device, and the host that issues
    its kernels."""

    device: Seconds
    host: Seconds


@dataclass(frozen=True)
class LinkWay:
    """One way to run a link with its backward to come. Bytes as in `stages.checkpoint.recompute.chain`.

    Seconds are those of the line that takes longer.
    """

    forward: float
    backward: float  # what is computed again included
    saved: int  # with its output
    forward_extra: int  # at its forward peak beyond what it keeps
    backward_extra: int  # at its backward peak beyond what it keeps and the gradients at its two ends
    kept: tuple[str, ...] | None = None  # steps whose results are not computed again; None: nothing is
    compiled: float | None = None  # the part that it keeps of what it would keep for backward, where it is compiled
    cheapest: bool = False  # and what it does not keep is what takes least to make again
    lines: Lines | None = None  # of a GPU whose host is known

    @property
    def device(self) -> Seconds:
        return self.lines.device if self.lines else Seconds(self.forward, self.backward)


@dataclass(frozen=True)
class LinkCosts:
    """Of one link, or of several that are taken as one."""

    first: int
    last_link: int
    input_bytes: int
    output_bytes: int
    ways: tuple[LinkWay, ...]  # all kept, then less and less
    last: LinkWay  # all kept, but run again as the last link of a region: its output is not made
    dropped: float  # seconds of a forward pass that keeps nothing, of the line that takes longer
    dropped_extra: int  # bytes at its peak beyond its output
    dropped_host: float = 0.0  # seconds of the host, for what the second run asks of it as well


def link_costs(priced: Priced, growing: Container[str] = (), join: Join = Join.NEEDLESS) -> tuple[LinkCosts, ...]:
    """Of every link of the chain, or of several that are taken as one.

    `growing` are the parameters whose gradients appear in backward; those of others are there all the time.
    """
    facts, compiled = ChainFacts(priced, growing), priced.profile.compiled
    measured = compiled is not None and join is Join.COMPILED and bool(compiled.runs)
    runs = {block.first: block.run for block in compiled.blocks} if compiled and measured else {}
    unread, found = facts.unread_bytes(), list[LinkCosts]()
    known: dict[Hashable, tuple[LinkGroup, LinkCosts]] = {}
    for group in groups_of(priced.graph, priced.profile, join):
        run = runs.get(group.first)
        own = likeness(priced.sharded, priced.ops, group.first, group.last, growing), group.run_number, run
        if own not in known:
            if compiled and run is not None:
                costs = _measured(group, facts, compiled.runs[run])
            else:
                costs = _costs(group, facts.link(group))
                costs = _unmeasured(costs) if join is Join.COMPILED else costs
            known[own] = group, _beside(costs, unread)
        found.append(_as_of(facts, *known[own], group))
    return tuple(found)


def _as_of(facts: ChainFacts, equal: LinkGroup, costs: LinkCosts, group: LinkGroup) -> LinkCosts:
    """The costs of a group as those of another that is equal, by the names of its own steps."""
    if group.first == equal.first:
        return costs
    both = zip(facts.steps(equal), facts.steps(group), strict=True)
    names = {facts.name(there): facts.name(here) for there, here in both}
    ways = (way if way.kept is None else replace(way, kept=tuple(names[n] for n in way.kept)) for way in costs.ways)
    return replace(costs, first=group.first, last_link=group.last, ways=tuple(ways))


def _beside(costs: LinkCosts, nbytes: int) -> LinkCosts:
    """With what the names of the program hold until its forward pass returns."""
    ways = tuple(replace(way, forward_extra=way.forward_extra + nbytes) for way in costs.ways)
    return replace(costs, ways=ways, dropped_extra=costs.dropped_extra + nbytes)


# ------------------------------------------------------------------------------------------------------- compiled


def _unmeasured(costs: LinkCosts) -> LinkCosts:
    """A block whose compiled form was not measured: as it would be without, and all of it kept or nothing."""
    return replace(costs, ways=(replace(costs.ways[0], compiled=1.0),))


def _measured(group: LinkGroup, facts: ChainFacts, runs: Sequence[CompiledWay]) -> LinkCosts:
    part, held = facts.share(group)
    moved, output = facts.moved(group), facts.sharded.local_bytes(group.link.output)
    input_bytes = facts.input_bytes(group)

    def way(run: CompiledWay, saved: float) -> LinkWay:
        nbytes = round(held * saved)
        return LinkWay(
            forward=part.forward * run.forward + moved.forward,
            backward=part.backward * run.backward + moved.backward,
            saved=nbytes,
            forward_extra=max(0, round(held * run.forward_peak) - nbytes),
            backward_extra=max(0, round(held * run.backward_peak) - nbytes - input_bytes - output),
            compiled=run.keeps,
            cheapest=run.cheapest,
        )

    whole = way(runs[0], runs[0].saved)
    return LinkCosts(
        first=group.first,
        last_link=group.last,
        input_bytes=input_bytes,
        output_bytes=output,
        ways=(whole, *(way(run, run.saved) for run in runs[1:])),
        last=way(runs[0], runs[0].saved_alone),
        dropped=whole.forward,
        dropped_extra=max(0, round(held * runs[0].forward_peak) - output),
    )


# -------------------------------------------------------------------------------------------------------- the ways


def _costs(group: LinkGroup, link: LinkFacts) -> LinkCosts:
    output, host = sum(link.output.values()), link.host
    everything = {**link.kept, **link.output}
    whole = _way(link, everything, link.seconds, Seconds(host.forward, host.backward))
    again = computed_again(link.steps)
    # The host's seconds for what a link keeps in a region are those of its first run, which is in any region.
    second = Seconds(host.forward * len(again) / max(1, len(link.steps)) + host.region, host.backward)
    ends = replace(link, backward_peak=link.peak_again)
    last = _way(ends, link.kept, Seconds(sum(again.values()), link.seconds.backward), second)
    dropped = host.forward + 3 * host.saved
    return LinkCosts(
        first=group.first,
        last_link=group.last,
        input_bytes=link.input_bytes,
        output_bytes=output,
        ways=(whole, *_partial(link, whole)),
        last=last,
        dropped=max(link.seconds.forward, dropped),
        dropped_extra=max(0, link.dropped_peak - output),
        dropped_host=dropped,
    )


def computed_again(steps: tuple[StepFacts, ...]) -> dict[StepFacts, float]:
    """The steps that a second run computes, and for how long: it ends where nothing more is kept."""
    last = max((n for n, step in enumerate(steps) if step.keeps), default=-1)
    found = {step: step.seconds for step in steps[: last + 1]}
    if last >= 0 and not steps[last].keeps_result and steps[last].costly:
        found[steps[last]] = steps[last].spared
    return found


def _way(
    link: LinkFacts,
    saved: Mapping[Any, int],
    device: Seconds,
    host: Seconds,
    kept: Sequence[StepFacts] | None = None,
) -> LinkWay:
    nbytes, out = sum(saved.values()), sum(link.output.values())
    ends = link.input_bytes + out
    peak = link.backward_peak if kept is None else link.peak_again
    if kept is not None:
        present = {owner for step in kept for owner in (*step.results, *step.private)}
        peak = max(peak, link.second_peak(present) + out)
    return LinkWay(
        forward=max(device.forward, host.forward),
        backward=max(device.backward, host.backward),
        saved=nbytes,
        forward_extra=max(0, link.forward_peak - nbytes),
        backward_extra=max(0, peak - ends - nbytes),
        kept=None if kept is None else tuple(step.name for step in kept),
        lines=Lines(device, host) if link.host != LinkHost() else None,
    )


def _partial(link: LinkFacts, whole: LinkWay) -> list[LinkWay]:
    """Ways that keep some results, from much to little; none that is no better than another in time and bytes."""
    again = computed_again(link.steps)
    costly = [step for step in again if step.costly and step.seconds > step.spared and again[step] > step.spared]
    ways = [_keeping(link, chosen, again) for chosen in _choices(link, costly) if chosen]
    found: list[LinkWay] = []
    before = whole
    for way in sorted(ways, key=lambda way: (way.backward, way.saved)):
        if way.backward > whole.backward and way.saved <= before.saved - WORTH * whole.saved:
            found.append(way)
            before = way
    return _thinned(found, MOST_WAYS)


def _choices(link: LinkFacts, costly: list[StepFacts]) -> list[list[StepFacts]]:
    """What to keep of the costly steps: all, and less and less, the cheapest for its bytes left out first; collectives
    alone, attention alone, and these two."""
    found = [
        [step for step in costly if step.collective],
        [step for step in costly if step.attends],
        [step for step in costly if step.collective or step.attends],
    ]
    left = costly
    while left:
        found.append(left)
        worst = min(left, key=lambda step: _worth(link, left, step))
        left = [step for step in left if step is not worst]
    return found


def _keeping(link: LinkFacts, chosen: list[StepFacts], again: Mapping[StepFacts, float]) -> LinkWay:
    saved: dict[Any, int] = dict(link.output)
    for step in chosen:
        saved |= {**step.results, **step.private}
    repeated = sum(step.spared if step in chosen else seconds for step, seconds in again.items())
    host, part = link.host, (len(again) - len(chosen)) / max(1, len(link.steps))
    forward = host.forward + host.saved + host.region / 2 + host.kept * len(chosen)
    backward = host.backward + part * host.forward + 2 * host.saved + host.region / 2
    device = Seconds(link.seconds.forward, link.seconds.backward + repeated)
    return _way(link, saved, device, Seconds(forward, backward), chosen)


def _worth(link: LinkFacts, chosen: list[StepFacts], step: StepFacts) -> float:
    """Seconds for each byte that keeping the step's result spares."""
    others = {owner for other in chosen if other is not step for owner in (*other.results, *other.private)}
    own = {**step.results, **step.private}
    freed = sum(size for owner, size in own.items() if owner not in others and owner not in link.output)
    return (step.seconds - step.spared) / freed if freed else float("inf")


def _thinned(ways: list[LinkWay], most: int) -> list[LinkWay]:
    if len(ways) <= most:
        return ways
    return [ways[round(n * (len(ways) - 1) / (most - 1))] for n in range(most)]
