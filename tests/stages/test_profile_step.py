"""The step on tensors without memory holds what the real step holds."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace
from itertools import chain
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from shardwright.pipeline.cost.unsplit import step_seconds
from shardwright.pipeline.ir.cluster import NO_HOST
from shardwright.pipeline.ir.graph import OpGraph, Role
from shardwright.pipeline.models.gpt import GPT
from shardwright.pipeline.models.mlp import MLP
from shardwright.pipeline.rates.kernels import Card, kernel_seconds
from shardwright.pipeline.runtime.step.memory import measure_peak
from shardwright.stages.profile.costs import all_kernels
from shardwright.stages.profile.link import meta
from shardwright.stages.profile.step import StepProfile, profile_step
from shardwright.stages.profile.symbolic import ALLOCATION, rounded
from shardwright.stages.profile.timeline import ACTIVATIONS, CLASSES, GRADIENTS, OTHER, PARAMETERS, STATE, TEMPORARIES
from tests.graphs import trace


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 16, 3)
        self.head = nn.Linear(16, 10)

    def forward(self, images, labels):
        x = torch.relu(self.norm(self.first(images)))
        x = (x[:, :, 1:-1, 1:-1] + self.second(x)).mean((2, 3))
        return nn.functional.cross_entropy(self.head(x), labels)


class Recurrent(nn.Module):
    """One layer that several links read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer, self.head = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, inputs, targets):
        x = self.first(inputs)
        for _ in range(4):
            x = torch.tanh(self.layer(x))
        return nn.functional.cross_entropy(self.head(x), targets)


def tokens(batch: int, length: int) -> dict[str, torch.Tensor]:
    return {name: torch.randint(500, (batch, length)) for name in ("input_ids", "labels")}


def vectors(rows: int) -> dict[str, torch.Tensor]:
    return {"inputs": torch.randn(rows, 64), "targets": torch.randint(10, (rows,))}


CASES = {
    "gpt": lambda: (GPT(vocab_size=500, context=64, width=64, layers=3, heads=4), tokens(8, 64)),
    "tied": lambda: (GPT(vocab_size=500, context=64, width=64, layers=2, heads=4, tie=True), tokens(8, 64)),
    "mlp": lambda: (MLP(64, 256, 10, 4), vectors(256)),
    "recurrent": lambda: (Recurrent(), vectors(256)),
    "images": lambda: (Images(), {"images": torch.randn(8, 3, 32, 32), "labels": torch.randint(10, (8,))}),
}


def real_peak(model: nn.Module, batch: dict[str, torch.Tensor]) -> int:
    """Bytes that one forward and backward pass of the real model adds, gradients included."""
    held = [*model.parameters(), *model.buffers(), *batch.values()]
    before = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}.values())
    return measure_peak(lambda: model(**batch).backward(), lambda: held, torch.device("cpu")) - before


@pytest.mark.parametrize("name", CASES)
def test_the_peak_is_that_of_the_real_step(name):
    model, batch = CASES[name]()
    found = profile_step(trace(model, batch), "cpu", "native").memory
    ours = found.backward_peak - found.resident
    # Convolutions on CPU work on reordered copies, which the meta device does not make.
    assert ours == pytest.approx(real_peak(model, batch), rel=0.2 if name == "images" else 0.05)


def test_gradients_are_left_after_backward():
    model, batch = CASES["tied"]()
    found = profile_step(trace(model, batch), "cpu", "native").memory
    gradients = sum(rounded(p.numel() * 4) for p in model.parameters())
    assert found.after_backward - found.resident == pytest.approx(gradients, abs=4 * ALLOCATION)


def test_a_deep_model_runs_no_more_kernels_than_a_shallow_one():
    """Equal links are run once, however many there are; what they hold is counted every time."""
    shallow, deep = (
        profile_step(trace(GPT(500, 64, 64, layers, 4), tokens(4, 64)), "cpu", "native") for layers in (2, 8)
    )
    assert len({id(link) for link in deep.runs}) == len({id(link) for link in shallow.runs})
    grown = deep.memory.after_forward - deep.memory.resident
    assert grown > 2 * (shallow.memory.after_forward - shallow.memory.resident)


def test_only_the_parameters_of_distinct_links_are_made():
    """Of the others the types are enough."""
    made = []
    for layers in (2, 8):
        graph = trace(GPT(500, 64, 64, layers, 4), tokens(4, 64))
        with patch("shardwright.stages.profile.link.meta", wraps=meta) as counted:
            profile_step(graph, "cpu", "native")
        made.append(counted.call_count)
    assert made[0] == made[1] > 0


def test_half_precision_and_autocast_hold_less_on_a_gpu():
    model, batch = CASES["gpt"]()
    graph = trace(model, batch)
    full, mixed = (profile_step(graph, "cuda", precision).memory for precision in ("native", "amp"))
    assert mixed.after_forward < full.after_forward and mixed.resident == full.resident


class Loss(nn.Module):
    """A loss with all its arguments, some by position."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 6)
        self.register_buffer("weight", torch.ones(6))

    def forward(self, x, y):
        loss = torch.ops.aten.cross_entropy_loss(self.layer(x), y, self.weight)
        return loss + nn.functional.cross_entropy(self.layer(x), y, ignore_index=2, label_smoothing=0.1)


def test_under_autocast_the_likelihood_runs_in_float32():
    graph = trace(Loss(), {"x": torch.randn(64, 8), "y": torch.randint(6, (64,))})
    kernels = [k for link in profile_step(graph, "cuda", "amp").runs for k in link.forward]
    assert [k.dtype for k in kernels if "_log_softmax" in k.name] == ["bfloat16", "bfloat16"]
    assert [k.dtype for k in kernels if "nll_loss" in k.name] == ["float32", "float32"]


def test_attention_on_a_gpu_keeps_no_matrix_of_scores():
    model = GPT(vocab_size=100, context=512, width=32, layers=1, heads=4)
    graph = trace(model, {name: torch.randint(100, (1, 512)) for name in ("input_ids", "labels")})
    kernels = [k.name for link in profile_step(graph, "cuda", "native").runs for k in link.forward]
    assert any("efficient_attention" in name for name in kernels) and not any("softmax.int" in n for n in kernels)


# ------------------------------------------------------------------------------------------------------- timeline


PROFILED = [
    ("gpt", "cpu", "native"), ("gpt", "cuda", "amp"), ("tied", "cuda", "native"), ("images", "cuda", "native"),
    ("recurrent", "cpu", "native"),
]  # fmt: skip


@functools.cache
def profiled(name: str, device: str, precision: str) -> tuple[OpGraph, StepProfile]:
    graph = trace(*CASES[name]())
    return graph, profile_step(graph, device, precision)


@pytest.fixture(params=PROFILED, ids="-".join)
def step(request) -> tuple[OpGraph, StepProfile]:
    return profiled(*request.param)


def test_classes_add_up_to_the_total_at_every_moment(step):
    timeline = step[1].timeline
    of_class = [timeline.curve(kind) for kind in CLASSES]
    total = timeline.curve()
    assert len(total) == timeline.length and {life.kind for life in timeline.lives} <= set(CLASSES)
    assert [sum(column) for column in zip(*of_class, strict=True)] == total
    moments = range(0, timeline.length, 7)
    assert [sum(life.size for life in timeline.alive(m)) for m in moments] == [total[m] for m in moments]


def test_every_shard_of_memory_lives_within_the_step(step):
    timeline = step[1].timeline
    for life in timeline.lives:
        assert life.size > 0 and 0 <= life.born < life.died <= timeline.length, life


def test_what_stays_is_resident_memory_and_gradients(step):
    graph, profile = step
    timeline, memory = profile.timeline, profile.memory
    last = {life.kind for life in timeline.alive(timeline.length - 1)}
    assert last <= {PARAMETERS, STATE, OTHER, GRADIENTS, TEMPORARIES}
    gradients = [life for life in timeline.lives if life.kind == GRADIENTS]
    assert all(life.died == timeline.length for life in gradients)
    parameters = [rounded(v.type.nbytes) for v in graph.of_role(Role.PARAMETER)]
    assert sorted(life.size for life in gradients) == sorted(parameters), "one for each, tied weights too"
    assert memory.after_backward == memory.resident + sum(parameters)
    before_optimizer = timeline.forward + timeline.backward
    assert timeline.curve()[before_optimizer] <= memory.optimizer_peak
    held = sum(life.size for life in timeline.alive(before_optimizer) if life.kind != TEMPORARIES)
    assert held == memory.after_backward


def test_resident_memory_is_parameters_state_inputs_and_buffers(step):
    graph, profile = step
    sizes = {role: sum(rounded(v.type.nbytes) for v in graph.of_role(role)) for role in Role}
    resident = 3 * sizes[Role.PARAMETER] + sizes[Role.BUFFER] + sizes[Role.INPUT]  # AdamW keeps two copies
    assert profile.memory.resident == resident
    at_start = {life.kind: 0 for life in profile.timeline.lives}
    for life in profile.timeline.alive(0):
        at_start[life.kind] += life.size
    assert at_start[PARAMETERS] == sizes[Role.PARAMETER] and at_start[STATE] == 2 * sizes[Role.PARAMETER]


def test_the_summary_is_read_off_the_curve(step):
    timeline, memory = step[1].timeline, step[1].memory
    curve, after = timeline.curve(), timeline.forward + timeline.backward
    assert memory.peak == max(curve) == max(memory.backward_peak, memory.optimizer_peak, max(curve[: timeline.forward]))
    assert memory.backward_peak == max(curve[timeline.forward : after])
    assert memory.optimizer_peak == max(curve[after:])
    assert memory.resident < memory.after_forward <= memory.backward_peak


def test_the_libraries_workspace_is_there_all_the_time():
    graph, plain = profiled("gpt", "cuda", "amp")
    more = profile_step(graph, "cuda", "amp", workspace=1 << 20)
    assert more.timeline.curve() == [size + (1 << 20) for size in plain.timeline.curve()]


def test_the_optimizer_is_the_users():
    graph, adam = profiled("gpt", "cuda", "amp")
    plain = profile_step(graph, "cuda", "amp", functools.partial(torch.optim.SGD, lr=0.1))
    parameters = sum(rounded(v.type.nbytes) for v in graph.of_role(Role.PARAMETER))
    assert adam.memory.resident - plain.memory.resident == 2 * parameters
    assert plain.memory.optimizer_peak == plain.memory.after_backward


def test_equal_links_share_a_run_and_each_holds_its_memory():
    """Layers are equal in all but their number: three of them hold three times what one adds."""
    held = {}
    for layers in (2, 3, 5):
        profile = profile_step(trace(GPT(500, 64, 64, layers, 4), tokens(4, 64)), "cuda", "native")
        assert len({id(run) for run in profile.runs}) < len(profile.runs)
        held[layers] = profile.memory.after_forward - profile.memory.resident
    assert held[5] - held[3] == 2 * (held[3] - held[2])


def test_memory_of_equal_links_belongs_to_modules_of_their_own():
    _, profile = profiled("gpt", "cuda", "amp")
    last = max(range(profile.timeline.forward), key=profile.timeline.curve().__getitem__)
    sizes = Counter()
    for life in profile.timeline.alive(last):
        if life.kind == ACTIVATIONS:
            sizes[life.module] += life.size
    assert sizes["layers.0.up"] == sizes["layers.1.up"] == sizes["layers.2.up"] > 0


def test_seconds_of_phases_are_positive_and_a_faster_card_is_faster():
    graph, profile = profiled("gpt", "cuda", "amp")
    card = Card({"bfloat16": 700e12, "float32": 50e12}, 4e12)
    idle = replace(card, host=NO_HOST)
    slow, fast = (step_seconds(graph, all_kernels(graph, profile), one) for one in (card, idle))
    for seconds in (slow, fast):
        assert min(seconds.forward, seconds.backward, seconds.optimizer) > 0
        assert seconds.step == seconds.forward + seconds.backward + seconds.optimizer
    assert fast.step < slow.step
    kernels = [*profile.prologue, *(k for run in profile.runs for k in (*run.forward, *run.backward))]
    every = [*kernels, *profile.optimizer.kernels]
    assert len(every) == len(profile.prologue) + profile.timeline.length
    assert fast.step == pytest.approx(sum(kernel_seconds(k, idle) for k in every))


# ------------------------------------------------------------------------------------------------ random modules


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x)


WIDTH, ROWS = 64, 128
SIMPLE = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "bare": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "gelu": nn.GELU,
    "tanh": nn.Tanh,
    "dropout": lambda: nn.Dropout(0.2),
    "norm": lambda: nn.LayerNorm(WIDTH),
}
NAMES = st.lists(st.sampled_from(sorted(SIMPLE)), min_size=1, max_size=4)
BLOCKS = st.lists(st.tuples(st.booleans(), NAMES), min_size=1, max_size=4)


class Random(nn.Module):
    """Layers in a row, some within a residual connection, between two linear layers.

    No module holds others in a row but the outermost: a module's caller keeps its input alive until it returns.
    """

    def __init__(self, blocks: list[tuple[bool, list[str]]]) -> None:
        super().__init__()
        made = [(skip, [SIMPLE[name]() for name in names]) for skip, names in blocks]
        inner = [[Residual(nn.Sequential(*layers))] if skip else layers for skip, layers in made]
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), *chain.from_iterable(inner), nn.Linear(WIDTH, 16))

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.layers(x), y)


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(BLOCKS)
def test_the_peak_of_any_chain_is_that_of_the_real_step(blocks):
    model, batch = Random(blocks), {"x": torch.randn(ROWS, WIDTH), "y": torch.randint(16, (ROWS,))}
    profile = profile_step(trace(model, batch), "cpu", "native")
    passes = profile.timeline.curve()[: profile.timeline.forward + profile.timeline.backward]
    ours = max(passes) - profile.memory.resident
    assert ours == pytest.approx(real_peak(model, batch), rel=0.02, abs=2 * ALLOCATION)
    assert all(life.born < life.died for life in profile.timeline.lives)
