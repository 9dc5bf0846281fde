"""Over the plans of the frontier: the least predicted step time that fits the budget, and why the others lost."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pipeline.config import Checkpoint, Recompute
from pipeline.cost.resident import budget_of, gigabytes, resident_parts
from pipeline.cost.step import StepPrice, price_step
from pipeline.errors import SolveError
from pipeline.ir.cluster import Cluster, Mesh
from pipeline.ir.graph import OpGraph
from pipeline.ir.plan import Alternative, Frontier, Plan, Prediction, Region, Sharding
from pipeline.ir.profile import Profile
from pipeline.lowering import lower
from stages.checkpoint import rotor, schedule
from stages.checkpoint.chain import Chain
from stages.checkpoint.linearize import linearize
from stages.checkpoint.simulate import simulate
from stages.checkpoint.within import fastest_within


@dataclass(frozen=True)
class Candidate:
    """A plan of the frontier with its recompute schedule; without one where none fits."""

    point: int
    mesh: Mesh
    sharding: Sharding
    price: StepPrice
    fixed_bytes: int  # there whatever is recomputed
    regions: tuple[Region, ...] | None
    chain_seconds: float  # of one micro-batch
    peak_bytes: int  # of the schedule, or the least that any schedule needs
    consists: str = ""  # where none fits: of what that is made
    optimal_bytes: int | None = None  # where none fits: what the best schedule needs, if another was asked for

    @property
    def step_seconds(self) -> float:
        return self.price.seconds_with(self.chain_seconds)


def evaluate(
    graph: OpGraph, profile: Profile, cluster: Cluster, frontier: Frontier, number: int, settings: Checkpoint
) -> Candidate:
    sharding, mesh = frontier.points[number].sharding, frontier.meshes[frontier.points[number].mesh]
    cluster = cluster.on(mesh)
    program = lower(graph, sharding, frontier.micro_batches)
    price = price_step(graph, profile, cluster, sharding, program, frontier.optimizer_copies)
    linear = linearize(graph, profile, cluster, sharding, program, price)
    room, chain = frontier.budget_bytes - linear.fixed_bytes, linear.chain
    candidate = Candidate(number, mesh, sharding, price, linear.fixed_bytes, None, 0.0, 0)
    if chain is None:
        loss = price.links[0]
        need = loss.memory.kept + loss.memory.backward_extra
        regions = (Region(0, 0, False, ()),) if need <= room else None
        found = replace(
            candidate, regions=regions, chain_seconds=loss.forward + loss.backward, peak_bytes=linear.fixed_bytes + need
        )
        return found if regions else _refused(found, graph, cluster, frontier, None)
    try:
        best = _schedule(chain, room, settings)
    except rotor.InfeasibleBudget as refusal:
        found = replace(candidate, peak_bytes=linear.fixed_bytes + refusal.tightest)
        return _refused(found, graph, cluster, frontier, refusal.op)
    outcome = simulate(chain, best.sequence)
    found = replace(candidate, chain_seconds=outcome.time, peak_bytes=linear.fixed_bytes + int(outcome.peak))
    if found.peak_bytes <= frontier.budget_bytes:
        return replace(found, regions=linear.regions(best.regions))
    worst = max(outcome.steps, key=lambda step: step.held).op
    least = linear.fixed_bytes + rotor.tightest(chain, _slots(chain, settings)).memory
    return replace(_refused(found, graph, cluster, frontier, worst), optimal_bytes=least)


def _refused(
    candidate: Candidate, graph: OpGraph, cluster: Cluster, frontier: Frontier, op: schedule.Op | None
) -> Candidate:
    """With a word on what its least is made of: what is resident, and the activations as that op runs."""
    price = candidate.price
    parts = resident_parts(graph, candidate.sharding, cluster.sizes, frontier.optimizer_copies)
    largest = f" (the largest part: {parts[0].label} with {gigabytes(parts[0].nbytes)})" if parts else ""
    common = price.fixed_bytes - price.resident_bytes
    inside = candidate.peak_bytes - candidate.fixed_bytes
    link, forward = (op.link, op.kind is not schedule.Kind.B) if op else (0, False)
    when = f"when link {link} ({_module(graph, link)}) runs {'forward' if forward else 'backward'}"
    shared = f", {gigabytes(common)} activations and copies that several links share" if common else ""
    return replace(
        candidate,
        consists=f"{gigabytes(price.resident_bytes)} are parameters, gradients and optimizer state{largest}{shared}"
        f" and {gigabytes(inside)} {'other ' if common else ''}activations {when}",
    )


def _module(graph: OpGraph, link: int) -> str:
    """What the modules of a link's ops have in common, or the first of them."""
    names = [graph.op(name).module.split(".") for name in graph.chain[link].ops]
    same = [parts[0] for parts in zip(*names, strict=False) if len(set(parts)) == 1]
    return ".".join(same or names[0]) or "the model itself"


def _schedule(chain: Chain, room: int, settings: Checkpoint) -> schedule.Schedule:
    """What the user asked for. Keeping everything is tried first: rounding to slots may hide that it fits."""
    if settings.recompute is Recompute.full:
        return schedule.full_recompute(chain)
    everything = schedule.no_recompute(chain)
    peak = int(simulate(chain, everything.sequence).peak)
    if settings.recompute is Recompute.off or peak <= room:
        return everything
    slots = _slots(chain, settings)
    if room < rotor.tightest(chain).memory or not rotor.fits(chain, slots, room):
        least = rotor.tightest(chain, slots)  # in slots: the budget that is named must be accepted when it is set
        raise rotor.InfeasibleBudget(max(room, 0), replace(least, memory=min(least.memory, peak)))
    return fastest_within(chain, room, slots)


def _slots(chain: Chain, settings: Checkpoint) -> int:
    return max(500, settings.slots_per_link * (chain.length + 1))


def choose(
    candidates: list[Candidate], cluster: Cluster, frontier: Frontier, where: str, released: tuple[str, ...] = ()
) -> Plan:
    fitting = [c for c in candidates if c.regions is not None]
    if not fitting:
        raise _refusal(candidates, frontier, where)
    best = min(fitting, key=lambda c: (c.step_seconds, c.peak_bytes))
    assert best.regions is not None
    return Plan(
        axes=tuple((axis.name, axis.size) for axis in best.mesh.axes),
        device=cluster.device,
        budget_bytes=frontier.budget_bytes,
        sharding=best.sharding,
        regions=best.regions,
        prediction=_predict(best),
        alternatives=tuple(
            Alternative(c.point, c.step_seconds if c.regions is not None else None, c.peak_bytes) for c in candidates
        ),
        micro_batches=frontier.micro_batches,
        released=released,
    )


def _predict(best: Candidate) -> Prediction:
    price = best.price
    once = sum(link.forward + link.backward for link in price.links)
    return Prediction(
        step_seconds=best.step_seconds,
        peak_bytes=best.peak_bytes,
        resident_bytes=price.resident_bytes,
        compute_seconds=price.compute,
        communication_seconds=price.communication,
        recompute_seconds=price.micro_batches * max(0.0, best.chain_seconds - once),
        optimizer_seconds=price.optimizer,
    )


def _refusal(candidates: list[Candidate], frontier: Frontier, where: str) -> SolveError:
    least = min(candidates, key=lambda c: c.peak_bytes)
    optimal = min((c.optimal_bytes for c in candidates if c.optimal_bytes is not None), default=least.peak_bytes)
    better = f"set `recompute: optimal`, which needs {budget_of(optimal)}, " if optimal < least.peak_bytes else ""
    return SolveError(
        f"no plan fits {gigabytes(frontier.budget_bytes)}: the tightest feasible budget is "
        f"{budget_of(least.peak_bytes)}, of which {least.consists}",
        where=where,
        remedy=f"raise the budget to that, {better}or use more devices",
    )
