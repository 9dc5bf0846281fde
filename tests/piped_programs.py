"""Pipelines drawn at random, written as programs; all their partitions one after another on the same ranks."""

from __future__ import annotations

import random
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.pipeline import runtime
from shardwright.pipeline.ir.graph import OpGraph
from shardwright.pipeline.ir.layout import Layout, R
from shardwright.pipeline.ir.names import look_up
from shardwright.pipeline.ir.plan import Partition, Plan, Prediction, Region
from shardwright.pipeline.ir.verify import verify_sharding
from shardwright.pipeline.ops.uneven import uneven_in
from shardwright.pipeline.runtime.programs.mesh import set_mesh
from shardwright.pipeline.runtime.programs.parameters import shard_of
from shardwright.pipeline.runtime.programs.source import load_program
from shardwright.pipeline.runtime.step.gradients import Gradients
from shardwright.pipeline.runtime.step.passes import StepCopies
from shardwright.pipeline.sharding.conversions import conversion_of, step_arguments
from shardwright.pipeline.sharding.partitions import part_of, restricted
from tests.plans import keepable, random_regions
from tests.ranks import AXIS

# ---- plans


def cut(graph: OpGraph, cuts: list[int], plans: list[Plan], draw: random.Random, micro_batches: int) -> Plan:
    """Each partition in the sharding of its own whole plan, with its own recompute; `cuts` are first links but 0."""
    ends = [0, *cuts, len(graph.chain)]
    partitions = []
    for first, end, plan in zip(ends, ends[1:], plans, strict=False):
        sharding = restricted(graph, plan.sharding, first, end - 1)
        verify_sharding(part_of(graph, first, end - 1), sharding, plan.sizes, uneven_in(graph).spots)
        regions = _regions(graph, plan, first, end - 1, draw)
        partitions.append(Partition(first, end - 1, plan.axes, sharding, regions, 1, 0, 0.0))
    written = [name for link in graph.chain for op in link.ops for name in graph.op(op).outputs]
    released = tuple(name for name in written if draw.random() < 0.3)
    nothing = Prediction(*[0] * 7)
    return Plan("cpu", 0, tuple(partitions), nothing, (), micro_batches, "1f1b", released=released)


def _regions(graph: OpGraph, plan: Plan, first: int, last: int, draw: random.Random) -> tuple[Region, ...]:
    links = keepable(graph, plan)

    def kept(region: Region) -> Region:
        names = [name for link in links[region.first : region.last + 1] for name in link]
        share = draw.choice([0.0, 0.4]) if region.recompute else 0.0
        own = tuple(name for name in names if draw.random() < share)
        return replace(region, inner=tuple(map(kept, region.inner)), kept=own)

    return tuple(map(kept, random_regions(first, last, draw, draw.randint(0, 2))))


def random_cuts(graph: OpGraph, count: int, draw: random.Random) -> list[int]:
    return sorted(draw.sample(range(1, len(graph.chain)), count - 1))


# ---- running them


class SubmeshPlan:
    """A partition on a rank, with its shards of its own parameters."""

    def __init__(self, partition: Any, truth: dict) -> None:
        self.axes, self.sizes = list(partition.MESH), tuple(partition.MESH.values())
        found = {name: look_up(partition.PARAMETERS, name) for name in truth["parameters"]}
        self.rows = {name: row for name, row in found.items() if row is not None}
        self.held = {
            name: nn.Parameter(shard_of(truth["parameters"][name], Layout.parse(row[0]), self.axes))
            for name, row in self.rows.items()
        }
        self.gradients = Gradients(self.held.values(), self.rows.values(), self.axes)
        self.updated = dict(zip(self.held, self.gradients.updated, strict=True))
        self.step = partition({**truth["constants"], **self.held})
        self.inputs = {name: Layout.parse(layout) for name, layout in partition.INPUTS.items()}

    def start(self, count: int) -> None:
        self.gradients.start(armed=count == 1)
        self.copies = StepCopies(self.step.copies() if hasattr(self.step, "copies") else {})

    def gradient(self, name: str) -> Tensor:
        """Of the whole parameter, as far as this partition has it."""
        return laid_out(self.updated[name].grad, Layout.parse(self.rows[name][2]), Layout((R,)), self.sizes)

    def forward(self, entering: dict[str, Tensor], batch: dict[str, Tensor], last: bool) -> list[Tensor]:
        own = {name: shard_of(batch[name], layout, self.axes) for name, layout in self.inputs.items()}
        named = {**own, **(self.copies.last() if last else self.copies.stand_ins)}
        x = [entering["x"]] if entering else []
        common = {name: tensor for name, tensor in entering.items() if name != "x"}
        found = self.step.forward(*x, **common, **named)
        return list(found) if isinstance(found, tuple) else [found]


def run_piped(folder: str) -> dict[str, str]:
    """On a rank: every program in the folder -> what is wrong with it, or ''."""
    errors = {}
    for path in sorted(Path(folder).glob("*.py")):
        try:
            compare(path, torch.load(path.parent / f"{path.name.partition('-')[0]}.truth"))
            errors[path.stem] = ""
        except Exception:  # shown by the test of that plan
            errors[path.stem] = traceback.format_exc()
    return errors


def compare(path: Path, truth: dict) -> None:
    """One step of all micro-batches: losses and all gradients are those of the unsplit module."""
    program, near = load_program(str(path)), truth["near"]
    set_mesh(program.PARTITIONS[0].MESH)
    shards = [SubmeshPlan(partition, truth) for partition in program.PARTITIONS]
    count = program.MICRO_BATCHES
    assert count == len(truth["batches"]) and len(program.SENT) == len(shards) - 1
    for shard in shards:
        shard.start(count)
    losses = []
    for number, batch in enumerate(truth["batches"]):
        last = number == count - 1
        for shard in shards if last else ():
            shard.gradients.arm()
        loss = _through(program, shards, batch, last)
        (loss / count).backward()
        losses.append(loss.detach())
    for shard in shards:
        shard.gradients.wait()
    for loss, expected in zip(losses, truth["losses"][0], strict=True):
        _near("loss", loss, expected, 0.0, near)
    _compare_gradients(program, shards, truth["gradients"][0], near)


def _through(program: Any, shards: list[SubmeshPlan], batch: dict[str, Tensor], last: bool) -> Tensor:
    """One micro-batch; what is sent is laid out for its reader."""
    entering: dict[str, Tensor] = {}
    for number, shard in enumerate(shards):
        found = shard.forward(entering, batch, last)
        if number == len(shards) - 1:
            break
        rows = program.SENT[number]
        sizes = tuple(program.PARTITIONS[number].MESH.values())
        for tensor, row in zip(found, rows.values(), strict=True):
            assert tuple(tensor.shape) == Layout.parse(row["from"]).local_shape(row["shape"], sizes), row
            assert str(tensor.dtype) == f"torch.{row['dtype']}" and tensor.requires_grad == row["gradient"], row
        ends = {name: (Layout.parse(row["from"]), Layout.parse(row["to"])) for name, row in rows.items()}
        entering = {name: laid_out(t, *own, sizes) for t, (name, own) in zip(found, ends.items(), strict=True)}
    (loss,) = found
    return loss


def laid_out(tensor: Tensor, source: Layout, target: Layout, sizes: tuple[int, ...]) -> Tensor:
    """On a mesh of one axis every layout is one step from any other."""
    if source == target:
        return tensor
    function = getattr(runtime, conversion_of(source, target, sizes).function)
    return function(tensor, axis=AXIS, **step_arguments(source, target, sizes))


def _compare_gradients(program: Any, shards: list[SubmeshPlan], truth: dict[str, Tensor], near: float) -> None:
    floor = 1e-3 * float(max(g.norm() for g in truth.values()))
    for name, expected in truth.items():
        holders = tuple(number for number, shard in enumerate(shards) if name in shard.rows)
        assert holders and (len(holders) == 1) == (name not in program.TIED), f"{name} is held by {holders}"
        assert program.TIED.get(name, holders) == holders
        found = sum(shards[number].gradient(name) for number in holders)
        _near(name, found, expected, floor, near)


def _near(name: str, found: Tensor, expected: Tensor, floor: float, near: float) -> None:
    assert found.shape == expected.shape, f"{name}: {tuple(found.shape)}, expected {tuple(expected.shape)}"
    error = (found - expected).norm() / max(float(expected.norm()), floor)
    assert error < near, f"{name} differs by {error:.1e} of its size"
