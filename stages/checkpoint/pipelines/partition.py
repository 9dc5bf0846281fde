"""Cut a model into partitions for a pipeline: where, on how many devices each, by which plan, with which recompute.

On plain numbers, in four steps; `partition` is the table of contents:

    1. `tasks`    (search_space.py) one search for each division, number of micro-batches and schedule. A `Division`
                  (search_inputs.py) is the devices cut into submeshes: any composition of `devices`, or `sizes` alone;
                  with the plans that submeshes may take (`SubmeshPlan`) and the link between neighbours.
    2. `PartitionTimes` (partition_times.py) seconds of every run of links as a partition, by plan and number in
                  flight: the best recompute within the memory that is left, by tables over what is held and runs
                  (in_flight_dp.py).
    3. `search`   (cuts.py) the best ways to cut, by an estimate of the step (schedules.py): Alpa's dynamic program.
    4. `plan_of`  (refine.py) the best few in full: recompute in finer slots, then the schedule played
                  (play.simulate). The shortest step wins.

A partition's micro-batches in flight follow from the schedule and its place: `1f1b` from its number from the end alone;
`gpipe` has all; `interleaved` and `zero_bubble` are searched for each number of partitions by itself (the likeliest of
many: `Effort.most_tasks`). Partitions of an interleaved pipeline that lie on the same devices have plans of one mesh,
and each has an equal share of the memory.

It is filled from artifacts by pipelined.py and submesh_costs.py.
"""

from __future__ import annotations

import math
from itertools import groupby

from shardwright.pipeline.cost.pipelines.schedules import StepWeights
from shardwright.stages.checkpoint.pipelines.cuts import NEARLY, Cuts, search
from shardwright.stages.checkpoint.pipelines.infeasibility import nothing
from shardwright.stages.checkpoint.pipelines.refine import PipelinePlan, plan_of
from shardwright.stages.checkpoint.pipelines.search_inputs import Division, Effort, Reshard, SearchInputs, UserChoices
from shardwright.stages.checkpoint.pipelines.search_space import SearchTask, tasks

ROUGH_GAP = 0.02  # of the first search
FAR = 1.1  # times the best rough estimate: not looked at more closely


def partition(
    divisions: tuple[Division, ...],
    memory: int,
    wishes: UserChoices = UserChoices(),  # noqa: B008
    effort: Effort = Effort(),  # noqa: B008
    reshard: Reshard | None = None,
) -> list[PipelinePlan]:
    """The best plans found, shortest step first; PartitionError where there is none.

    `memory` is in bytes of a device; `reshard` adds to what the link between two submeshes takes.
    """
    given = SearchInputs(divisions, memory, wishes, effort, reshard)
    plans: dict[object, PipelinePlan] = {}
    refused: list[str] = []
    every = list(tasks(given, refused))
    for _, family in groupby(every, key=lambda task: task.family):
        known = math.inf
        for task in promising(list(family), effort.most_tasks):
            for cuts in ways_to_cut(task, effort, known):
                known = min(known, cuts.estimate)
                plans.setdefault((task.family, task.chunks, cuts.firsts, cuts.plans), plan_of(task, cuts))
    if not plans:
        raise nothing(given, bool(every), refused)
    return sorted(plans.values(), key=lambda plan: (plan.seconds, plan.estimate, plan.firsts))


def promising(family: list[SearchTask], most: int) -> list[SearchTask]:
    """Of the tasks of one schedule so many, by what they reach with little recompute to choose from."""
    if len(family) <= most:
        return family
    known, ranks = math.inf, []
    for number, task in enumerate(family):
        found = search(task.field(roughly=True), task.weights, ROUGH_GAP, 1, known)
        estimate = found[0].estimate if found else math.inf
        known = min(known, estimate * FAR)
        ranks.append((estimate, number))
    return [family[number] for _, number in sorted(ranks)[:most]]


def ways_to_cut(task: SearchTask, effort: Effort, known: float = math.inf) -> list[Cuts]:
    """With little recompute to choose from first: no partition of a better plan is slower than that plan allows."""
    weights = task.weights
    known *= 1 + NEARLY
    rough = search(task.field(roughly=True), weights, ROUGH_GAP, 1, known)
    known = rough[0].estimate if rough else known
    slowest = slowest_of(task, weights, known)
    return search(task.field(slowest), weights, effort.gap, effort.candidates, known, slowest)


def slowest_of(task: SearchTask, weights: StepWeights, known: float) -> float:
    """No plan with an estimate as good as that has a slower partition."""
    if not weights.credit:
        return known / (weights.sum + weights.peak) * (1 + 1e-9)
    chains = ((own.submesh.weight, own.chain) for own in task.times)
    falls = any(
        weights.credit * weight > min(o.f + o.b for o in chain.options(i))
        for weights_made, chain in chains
        for i, weight in enumerate(weights_made)
    )
    return math.inf if falls or not weights.peak else known / weights.peak * (1 + 1e-9)
