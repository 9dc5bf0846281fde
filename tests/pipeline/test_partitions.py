"""Partitions as graphs: together they are the model, and each has what it needs and no more."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shardwright.pipeline.ir.graph import Role
from shardwright.pipeline.ir.layout import P
from shardwright.pipeline.ir.program import Convert, Step, Tensor
from shardwright.pipeline.ir.verify import InvalidSharding, verify_sharding
from shardwright.pipeline.sharding.lowering import home_layouts, lower
from shardwright.pipeline.sharding.partitions import crossing, part_of, restricted
from tests.graphs import trace
from tests.plans import graph_of, random_plan


@settings(deadline=None, max_examples=30)
@given(st.sampled_from(["tied", "shared", "ladder", "mlp"]), st.integers(0, 10**6))
def test_parts_are_the_model(model: str, seed: int) -> None:
    graph, draw = graph_of(model), random.Random(seed)
    cuts = sorted(draw.sample(range(1, len(graph.chain)), draw.randint(1, len(graph.chain) - 1)))
    spans = [(first, end - 1) for first, end in pairwise([0, *cuts, len(graph.chain)])]
    parts = [part_of(graph, *span) for span in spans]
    counts = Counter(op.name for part in parts for op in part.ops)
    assert set(counts) == {op.name for op in graph.ops}
    assert all(count == 1 or name in graph.prologue for name, count in counts.items())
    for part, (first, _) in zip(parts, spans, strict=True):
        entering = [value.name for value in part.of_role(Role.ENTERS)]
        assert sorted(entering) == sorted(crossing(graph, first))
        known = {value.name for value in part.values.values() if value.role is not Role.RESULT}
        for op in part.ops:
            assert known.issuperset(op.inputs)
            known.update(op.outputs)
        assert part.output in known
    for part, (_, last) in zip(parts, spans, strict=True):
        assert known_to(part).issuperset(crossing(graph, last + 1))  # what leaves is written here, or has entered


def known_to(part) -> set[str]:
    return {value.name for value in part.values.values() if value.role in (Role.RESULT, Role.ENTERS)}


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10**6))
def test_a_partition_keeps_the_layouts_of_its_plan(seed: int) -> None:
    """What enters lies as the plan of the whole model has it, summands and all; no other op matters."""
    graph, draw = graph_of("shared"), random.Random(seed)
    plan = random_plan(graph, 2, seed)
    first = draw.randint(1, len(graph.chain) - 1)
    last = draw.randint(first, len(graph.chain) - 1)
    own, sharding = part_of(graph, first, last), restricted(graph, plan.sharding, first, last)
    verify_sharding(own, sharding, plan.sizes)
    whole, home = home_layouts(graph, plan.sharding), home_layouts(own, sharding)
    assert {name: home[name] for name in crossing(graph, first)} == {n: whole[n] for n in crossing(graph, first)}
    ends = last == len(graph.chain) - 1
    program = lower(own, sharding, to_loss=ends)
    assert program.output.value == own.output and (ends or program.output.layout == home[own.output])
    assert len(program.links) == last - first + 1


def test_what_enters_must_have_a_layout() -> None:
    graph = graph_of("shared")
    sharding = restricted(graph, random_plan(graph, 2, 0).sharding, 1, 2)
    name = crossing(graph, 1)[0]
    del sharding.inputs[name]
    with pytest.raises(InvalidSharding, match=f"{name} is not both an input of the graph and stored"):
        verify_sharding(part_of(graph, 1, 2), sharding, (2,))


class Counted(nn.Module):
    """Batch norms count their batches, which nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def test_what_changes_a_buffer_before_the_chain_is_done_once() -> None:
    graph = trace(Counted(), {"x": torch.rand(8, 4)})
    middle = len(graph.chain) // 2
    parts = [part_of(graph, 0, middle - 1), part_of(graph, middle, len(graph.chain) - 1)]
    changing = [op.name for op in graph.ops if op.mutates]
    assert changing and Counter(op.name for part in parts for op in part.ops if op.mutates) == Counter(changing)


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(["tied", "shared", "ladder", "mlp"]), st.integers(0, 10**6))
def test_partial_sums_that_are_read_in_one_way_do_not_cross_a_cut(model: str, seed: int) -> None:
    """A link ends just after its collective: one that is made again from there does not repeat it."""
    graph = graph_of(model)
    sharding = random_plan(graph, 2, seed).sharding
    home, program = home_layouts(graph, sharding), lower(graph, sharding)
    for number, (link, reader) in enumerate(pairwise(graph.chain)):
        ops = [graph.op(name) for name in reader.ops]
        wanted = {
            layout
            for op in ops
            for name, layout in zip(op.inputs, sharding.strategies[op.name].inputs, strict=True)
            if name == link.output
        }
        (written,) = {
            layout
            for op in map(graph.op, link.ops)
            for name, layout in zip(op.outputs, sharding.strategies[op.name].outputs, strict=True)
            if name == link.output
        }
        sums = P in written.states and len(wanted) == 1 and P not in next(iter(wanted)).states
        assert home[link.output] == (wanted.pop() if sums else written)
        here, there = (_converted(program.links[n], link.output) for n in (number, number + 1))
        if sums:
            assert there == []
            assert here and here[-1].target == Tensor(link.output, home[link.output])
            first, last = part_of(graph, 0, number), part_of(graph, number + 1, len(graph.chain) - 1)
            own = restricted(graph, sharding, 0, number)
            assert home_layouts(first, own)[link.output] == home[link.output] == own.inputs[link.output]
            assert lower(first, own, to_loss=False).output == here[-1].target
            assert (
                restricted(graph, sharding, number + 1, len(graph.chain) - 1).inputs[link.output] == home[link.output]
            )
            assert link.output in {value.name for value in last.of_role(Role.ENTERS)}


def _converted(steps: tuple[Step, ...], name: str) -> list[Convert]:
    return [step for step in steps if isinstance(step, Convert) and step.source.value == name]


def test_a_model_split_so_that_sums_lie_between_links() -> None:
    """Megatron's pair of products in an MLP: the sum is in the link of the second product."""
    graph = graph_of("mlp")
    found = 0
    for seed in range(40):
        sharding = random_plan(graph, 2, seed).sharding
        for link, steps in zip(graph.chain[:-1], lower(graph, sharding).links, strict=False):
            found += any(step.source.layout.states == (P,) for step in _converted(steps, link.output))
    assert found
