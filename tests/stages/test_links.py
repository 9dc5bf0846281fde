"""What a link costs in each way to run it: against the step as it is composed of kernels, and as it is measured."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

from shardwright.pipeline.cost import links
from shardwright.pipeline.cost import step as steps
from shardwright.pipeline.cost.chain_memory import growing
from shardwright.pipeline.cost.groups import Join
from shardwright.pipeline.cost.link_facts import LinkFacts
from shardwright.pipeline.cost.links import MOST_WAYS, LinkCosts, LinkWay, link_costs
from shardwright.pipeline.cost.step import Priced, StepPrice, Workload
from shardwright.pipeline.ir.graph import OpGraph, Role
from shardwright.pipeline.ir.plan import Plan, Prediction, Region, Sharding, path_name
from shardwright.pipeline.ir.profile import Compiled, CompiledBlock, CompiledWay, Profile, as_run
from shardwright.pipeline.ir.program import Convert, Program
from shardwright.pipeline.models import gpt, mlp
from shardwright.pipeline.ops.blocks import blocks_of
from shardwright.pipeline.runtime.step.memory import measure_peak
from shardwright.stages.checkpoint.recompute import rotor
from shardwright.stages.checkpoint.recompute.linearize import Linear, linearize
from shardwright.stages.checkpoint.recompute.released import LARGE, released
from shardwright.stages.checkpoint.recompute.rotor import fastest_within
from shardwright.stages.checkpoint.recompute.schedule import Keep, Schedule, full_recompute, no_recompute, scheduled
from shardwright.stages.checkpoint.recompute.schedule import Nesting as Nested
from shardwright.stages.checkpoint.recompute.simulate import simulate
from shardwright.stages.codegen.module import write_module
from shardwright.stages.profile.by_table import profile_graph
from shardwright.stages.profile.run import make_profile
from tests import plans
from tests.asked import mostly_long
from tests.graphs import preset, trace
from tests.unpipelined import replicated, whole_plan

# ---- models whose tensors fill what an allocator gives them, so that rounding does not show

WORDS, LENGTH, WIDTH, CLASSES = 512, 128, 128, 128
GPT = {"vocab_size": WORDS, "context": LENGTH, "width": WIDTH, "layers": 2, "heads": 4}
TEXT = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 2 * WIDTH}
Made = tuple[nn.Module, dict[str, Tensor]]


def tokens() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {name: torch.randint(WORDS, (4, LENGTH), generator=draw) for name in ("input_ids", "labels")}


def features() -> dict[str, Tensor]:
    return {"inputs": torch.randn(512, WIDTH), "targets": torch.randint(CLASSES, (512,))}


def images() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(8, 3, 64, 64), "labels": torch.randint(CLASSES, (8,))}


def family(task: str, family: str, batch: Callable[[], dict[str, Tensor]], **sizes: object) -> Made:
    hf = pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    return getattr(hf, f"{family}{task}")(getattr(hf, f"{family}Config")(**sizes)), batch()


MODELS: dict[str, Callable[[], Made]] = {
    "mlp": lambda: (mlp.build(features=WIDTH, width=256, classes=CLASSES, depth=4), features()),
    "gpt": lambda: (gpt.build(**GPT), tokens()),
    "tied": lambda: (gpt.build(**GPT, tie=True), tokens()),
    "gpt2": lambda: family(
        "LMHeadModel", "GPT2", tokens, n_layer=2, n_embd=WIDTH, n_head=4, vocab_size=WORDS, n_positions=LENGTH,
        use_cache=False,
    ),
    "bert": lambda: family("ForMaskedLM", "Bert", tokens, vocab_size=WORDS, **TEXT),
    "llama": lambda: family(
        "ForCausalLM", "Llama", tokens, vocab_size=WORDS, num_key_value_heads=2, use_cache=False, **TEXT
    ),
    "vit": lambda: family(
        "ForImageClassification", "ViT", images, image_size=64, patch_size=8, num_labels=CLASSES, **TEXT
    ),
    "resnet": lambda: family(
        "ForImageClassification", "ResNet", images, depths=[2, 2], hidden_sizes=[256, 512], embedding_size=128,
        layer_type="bottleneck", num_labels=CLASSES,
    ),
}  # fmt: skip


ON_GPU = ("gpt", "bert", "resnet")  # that are tried under autocast too


@functools.cache
def model_of(name: str) -> Made:
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    return model.train(), batch


@functools.cache
def graph_of(name: str) -> OpGraph:
    return trace(*model_of(name))


@dataclass(frozen=True)
class Case:
    priced: Priced
    linear: Linear

    @property
    def graph(self) -> OpGraph:
        return self.priced.graph

    @property
    def profile(self) -> Profile:
        return self.priced.profile

    @property
    def sharding(self) -> Sharding:
        return self.priced.sharding

    @property
    def program(self) -> Program:
        return self.priced.program

    @property
    def price(self) -> StepPrice:
        return self.priced.step

    @property
    def everything(self) -> int:
        return int(simulate(self.linear.chain, no_recompute(self.linear.chain).sequence).peak)

    def costs(self, join: bool = True) -> tuple[LinkCosts, ...]:
        return link_costs(self.priced, growing(self.priced.sharded), Join.NEEDLESS if join else Join.NONE)


@functools.cache
def profile_of(name: str, device: str, precision: str) -> Profile:
    profile, why = make_profile(graph_of(name), device, precision, torch.optim.AdamW, logging.getLogger())
    assert not why
    return profile


@functools.cache
def case(name: str, device: str, precision: str, copies: float = 2.0) -> Case:
    graph, profile = graph_of(name), profile_of(name, device, precision)
    graph = as_run(graph, profile.types)
    priced = Workload(graph, profile, preset(1), copies).priced(replicated(graph))
    return Case(priced, linearize(priced))


# --------------------------------------------------------------------------------- against the step that is composed


def before_the_chain(found: Case) -> int:
    """Bytes of what is computed before the chain for its links, which the step's line of time leaves out."""
    graph, storage = found.graph, found.profile.storage
    made = {storage[name] for op in graph.prologue for name in graph.op(op).outputs}
    read = {storage[name] for link in graph.chain for op in link.ops for name in graph.op(op).inputs}
    roots = {value.name for value in graph.values.values() if value.name in made & read}
    written = {name for op in graph.prologue for name in graph.op(op).outputs}
    return sum(graph.values[name].type.nbytes for name in roots & written)


@pytest.mark.parametrize(
    ("name", "precision"),
    mostly_long(itertools.product(MODELS, ("fp32", "amp")), lambda case: case[1] == "fp32" or case[0] in ON_GPU),
)
def test_keeping_everything_takes_what_the_step_takes(name, precision):
    """`Profile.step` is laid out on one line of time, kernel by kernel, without any chain.

    Links that are run as one hold the gradient that arrives until all of them have gone backward; in the step each lets
    go of its own.
    """
    found = case(name, "cuda", precision)
    step, linear = found.profile.step, found.linear
    assert step.peak_in == "backward"
    predicted = linear.fixed_bytes + found.everything - before_the_chain(found)
    if name in ("gpt", "tied", "gpt2", "bert"):
        assert predicted == step.peak_bytes
    elif name in ("llama", "vit"):  # a buffer or a bias is smaller than the least that is allocated
        assert predicted == pytest.approx(step.peak_bytes, rel=1e-3)
    else:
        arriving = max(own.output_bytes for own in linear.costs if own.last_link > own.first)
        assert step.peak_bytes * 0.999 <= predicted <= step.peak_bytes + arriving


@pytest.mark.parametrize("name", ["gpt", "bert", "resnet"])
def test_the_optimizer_s_peak_is_the_step_s(name):
    """Parameters, gradients and state, what the optimizer takes beside them, and the batch."""
    found = case(name, "cuda", "fp32")
    expected = found.price.resident_bytes + found.profile.step.optimizer_bytes
    inputs = sum(v.type.nbytes for v in found.graph.values.values() if v.role is Role.INPUT)
    assert found.linear.optimizer_peak == expected + inputs + before_the_chain(found)


def test_gradients_that_grow_are_no_part_of_what_is_fixed():
    found = case("gpt", "cuda", "fp32")
    parameters = sum(value.type.nbytes for value in found.graph.values.values() if value.role is Role.PARAMETER)
    assert sum(found.linear.chain.grown) == parameters
    inputs = sum(value.type.nbytes for value in found.graph.values.values() if value.role is Role.INPUT)
    assert found.linear.fixed_bytes == 3 * parameters + inputs + before_the_chain(found)
    tied = case("tied", "cuda", "fp32").linear
    table = WORDS * WIDTH * 4
    assert tied.chain.grown[-1] >= table and tied.chain.grown[0] < table  # the head is the first to have its gradient
    several = replace(found.priced.sharded, micro_batches=2)
    assert not growing(several)  # they add up over the passes, from the first on


# ------------------------------------------------------------------------------------------------ against measurement


def schedules(found: Case, shares: tuple[float, ...]) -> Iterator[Schedule]:
    chain = found.linear.chain
    slots = max(500, 20 * (chain.length + 1))
    least, most = rotor.tightest(chain, slots).memory, found.everything
    yield no_recompute(chain)
    yield full_recompute(chain)
    yield from (fastest_within(chain, int(least + share * (most - least)) + 1, slots) for share in shares)


def plan_of(found: Case, regions: tuple[Region, ...]) -> Plan:
    nothing = Prediction(0.0, 0, 0, 0.0, 0.0, 0.0, 0.0)
    freed = released(found.graph, found.profile)
    return replace(whole_plan((("d0", 1),), "cpu", 0, found.sharding, regions, nothing), released=freed)


def check_measured(name: str, schedule: Schedule, least: float = 0.98) -> str:
    """Runs the schedule's program on a CPU; its text."""
    found = case(name, "cpu", "fp32", copies=0.0)
    outcome = simulate(found.linear.chain, schedule.sequence)
    predicted = found.linear.fixed_bytes + int(outcome.peak)
    text = write_module(found.graph, plan_of(found, found.linear.regions(schedule.regions)))
    held = measured(name, text)
    # scalars such as the loss, and vectors such as a norm's statistics, may be beside it
    assert held <= predicted * 1.0002, f"{schedule.regions}: {held} of {predicted}"
    assert held >= predicted * least, f"{schedule.regions}: {held} of {predicted}"
    return text


def measured(name: str, source: str) -> int:
    model, batch = model_of(name)
    model.zero_grad(set_to_none=True)
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    namespace: dict = {}
    exec(compile(source, "module.py", "exec"), namespace)
    program = namespace["Program"](tensors)
    there = [*tensors.values(), *batch.values()]
    return measure_peak(lambda: program.forward(**batch).backward(), lambda: there, torch.device("cpu"))


@pytest.mark.parametrize(
    "name",
    mostly_long(["mlp", "gpt", "gpt2", "bert", "llama", "vit", "resnet"], lambda name: name not in ("gpt2", "bert")),
)
def test_a_step_holds_what_is_predicted(name):
    """The generated program on a CPU, under the schedules for several budgets: regions, results that are kept."""
    found = case(name, "cpu", "fp32", copies=0.0)
    least = 0.9 if name == "mlp" else 0.98
    texts = [check_measured(name, one, least) for one in schedules(found, (0.75, 0.5, 0.25, 0.0))]
    assert any("recompute(" in text for text in texts)
    assert name == "mlp" or any("kept(" in text for text in texts)


@pytest.mark.parametrize(
    ("name", "option"),
    mostly_long(
        itertools.product(["gpt", "bert", "llama", "resnet"], [1, 2, 3, 4]), lambda case: case[0] in ("gpt", "resnet")
    ),
)
def test_every_way_of_a_link_holds_what_is_predicted(name, option):
    """All links at once in their first, second... way."""
    chain = case(name, "cpu", "fp32", copies=0.0).linear.chain
    ways = [min(option, len(chain.options(link)) - 1) for link in range(chain.length)]
    regions = Nested((*(Keep(link, way) for link, way in enumerate(ways)), Keep(chain.length)))
    assert "kept(" in check_measured(name, scheduled(regions, chain))


# ------------------------------------------------------------------------------------------------------ ways of a link


def check_ways(costs: tuple[LinkCosts, ...], program: Program) -> int:
    """Links are there once and in order, each way keeps less and takes longer; the number of ways that keep a part."""
    assert [n for own in costs for n in range(own.first, own.last_link + 1)] == list(range(len(program.links)))
    for own in costs:
        steps = [step for link in program.links[own.first : own.last_link + 1] for step in link]
        names = {
            path_name(step.source.value, step.source.layout, step.target.layout)
            if isinstance(step, Convert)
            else step.op
            for step in steps
        }
        whole, *parts = own.ways
        assert whole.kept is None and own.last.kept is None and len(parts) <= MOST_WAYS
        assert own.last.saved <= whole.saved and own.last.backward == whole.backward
        for before, way in zip(own.ways, parts, strict=False):
            assert way.saved < before.saved and way.backward > before.backward
            assert way.kept and set(way.kept) <= names and len(set(way.kept)) == len(way.kept)
            assert way.saved >= own.output_bytes and way.forward == whole.forward
        for way in (*own.ways, own.last):
            assert min(way.forward_extra, way.backward_extra, way.saved) >= 0
    return sum(len(own.ways) - 1 for own in costs)


@pytest.mark.parametrize(
    ("name", "device", "precision"),
    mostly_long(
        ((name, *how) for name in MODELS for how in (("cuda", "fp32"), ("cuda", "amp"), ("cpu", "fp32"))),
        lambda case: case[2] == "fp32" or case[0] in ON_GPU,
    ),
)
def test_each_way_keeps_less_and_takes_longer(name, device, precision):
    found = case(name, device, precision)
    joined, alone = check_ways(found.costs(), found.program), check_ways(found.costs(join=False), found.program)
    assert len(found.costs(join=False)) == len(found.program.links) > len(found.costs())
    if name != "mlp":
        assert joined > 0 and alone > 0


@pytest.mark.parametrize("model", ["gpt", "tied", "odd", "ladder", "shared"])
def test_ways_of_sharded_links(model):
    """Priced by the op table, with conversions anywhere: those that move activations between ranks may be kept."""
    graph = plans.graph_of(model)
    profile, kept, ways = profile_graph(graph), set(), 0
    for seed in range(8):
        sharding = plans.random_plan(graph, 2, seed).sharding
        priced = Workload(graph, profile, preset(), 2.0).priced(sharding)
        costs = link_costs(priced)
        ways += check_ways(costs, priced.program)
        kept |= {name for own in costs for way in own.ways for name in way.kept or ()}
    assert ways > 0 and any(name not in {op.name for op in graph.ops} for name in kept)
    trained = [value.name for value in graph.of_role(Role.PARAMETER)]
    assert not any(name.startswith(tuple(f"{value}:" for value in trained)) for name in kept)


def test_a_rank_of_two_keeps_half():
    """Where the batch is split nothing is converted: each link's memory is its part of what the whole link held."""
    found = case("gpt", "cuda", "fp32")
    plan = plans.data_parallel(found.graph, 2)
    priced = Workload(found.graph, found.profile, preset(2), 2.0).priced(plan.sharding)
    for half, whole in zip(link_costs(priced), found.costs(), strict=True):
        assert half.ways[0].saved == pytest.approx(whole.ways[0].saved / 2, rel=0.01)
        assert half.last.saved == pytest.approx(whole.last.saved / 2, rel=0.01)
        assert half.ways[0].forward < whole.ways[0].forward


@functools.cache
def deep(kind: str) -> tuple[OpGraph, Profile]:
    """A model of four equal layers, of which the first two may be frozen."""
    torch.manual_seed(0)
    if kind == "t5":
        sizes = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 4, "num_heads": 4, "vocab_size": WORDS}
        model, batch = family("ForConditionalGeneration", "T5", tokens, decoder_start_token_id=0, **sizes)
    else:
        model, batch = gpt.build(**GPT | {"layers": 4}, tie=kind == "tied"), tokens()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(kind != "frozen" or not any(f".{n}." in name for n in range(2)))
    graph = trace(model, batch)
    profile, why = make_profile(graph, "cuda", "amp", torch.optim.AdamW, logging.getLogger())
    assert not why
    return as_run(graph, profile.types), profile


@pytest.mark.parametrize(
    ("kind", "split", "join"),
    [
        ("gpt", plans.data_parallel, Join.NEEDLESS),
        ("gpt", plans.zero, Join.NONE),
        ("gpt", plans.zero, Join.COMPILED),
        ("gpt", "random", Join.NEEDLESS),
        ("tied", plans.zero1, Join.NEEDLESS),
        ("frozen", plans.zero, Join.NEEDLESS),
        ("t5", plans.zero, Join.NEEDLESS),
    ],
)
def test_equal_links_are_priced_once_and_as_each_by_itself(kind, split, join, monkeypatch):
    graph, profile = deep(kind)
    plan = plans.random_plan(graph, 2, 0) if split == "random" else split(graph, 2)
    priced = Workload(graph, profile, preset(2), 2.0).priced(plan.sharding)
    made = []
    monkeypatch.setattr(links, "_costs", lambda *given, one=links._costs: made.append(given) or one(*given))
    shared, step = link_costs(priced, growing(priced.sharded), join), priced.step
    assert split == "random" or len(made) < len(shared)
    for module in (links, steps):
        monkeypatch.setattr(module, "likeness", lambda *_: object())
    alone = priced.with_sharding(plan.sharding)
    assert shared == link_costs(alone, growing(alone.sharded), join) and step == alone.step


def test_a_second_run_has_what_it_kept_from_its_beginning():
    """Beside what it needs for a moment before the kept result would be made."""
    lives = (("large", 10, 0, 1), ("kept", 4, 1, 2), ("other", 3, 1, 3))
    facts = LinkFacts((), {}, {}, 0, 10, 0, 0, 0, lives)
    assert facts.second_peak(()) == 10 and facts.second_peak({"other"}) == 13
    assert facts.second_peak({"kept"}) == 14 and facts.second_peak({"kept", "other"}) == 17
    assert replace(facts, lives=()).second_peak({"kept"}) == 10  # where it was not run, as priced


def test_joined_links_are_run_once_for_all_that_are_equal():
    kernels = case("bert", "cuda", "amp").profile.kernels
    assert kernels.joined and len(kernels.runs) < len(kernels.joined)
    places = [place for group in kernels.joined for place in range(group.first, group.last + 1)]
    assert places == sorted(set(places)) and {group.run for group in kernels.joined} == set(range(len(kernels.runs)))
    for group in kernels.joined:
        run = kernels.runs[group.run]
        assert all(held.died is None or held.born < held.died for held in run.held)
        assert set(run.saved) <= set(run.results)
        apart = [kernels.links[kernels.chain[n]] for n in range(group.first, group.last + 1)]
        assert [k.name for k in run.forward] == [k.name for link in apart for k in link.forward]


# ---------------------------------------------------------------------------------- regions, and values that are let go


def test_regions_of_a_schedule():
    """A link that keeps a part is a region with what it keeps; joined links stand for all of theirs."""

    def way(kept: tuple[str, ...] | None) -> LinkWay:
        return LinkWay(1.0, 1.0, 1, 0, 0, kept)

    def costs(first: int, last: int, *kept: tuple[str, ...]) -> LinkCosts:
        return LinkCosts(first, last, 1, 1, (way(None), *(way(names) for names in kept)), way(None), 1.0, 0)

    own = (costs(0, 0), costs(1, 2, ("a", "b"), ("a",)), costs(3, 3, ("c",)), costs(4, 4), costs(5, 5))
    linear = Linear(None, own, 0, 0, 0.0)
    one = [Region(n, n, False, ()) for n in range(6)]
    found = linear.regions(Nested((Keep(0), Keep(1, 2), Nested((Keep(2, 1), Keep(3))), Keep(4))))
    inner = (Region(3, 3, True, (one[3],), ("c",)), one[4])
    assert found == (one[0], Region(1, 2, True, (one[1], one[2]), ("a",)), Region(3, 4, True, inner), one[5])
    assert linear.regions(Nested((Keep(0), Keep(1), Keep(2), Keep(3), Keep(4)))) == tuple(one)


@pytest.mark.parametrize("name", mostly_long(["gpt2", "bert", "llama", "resnet"], lambda name: name in ON_GPU))
def test_released_values_are_large_and_nobody_s(name):
    found = case(name, "cuda", "amp")
    graph, storage = found.graph, found.profile.storage
    names = released(graph, found.profile)
    assert names and len(set(names)) == len(names)
    kept = {storage[value] for cost in found.profile.ops.values() for value in cost.saves}
    for link in graph.chain:
        written = [value for op in link.ops for value in graph.op(op).outputs]
        total = sum(graph.values[owner].type.nbytes for owner in {storage[value] for value in written})
        for value in written:
            large = graph.values[storage[value]].type.nbytes >= LARGE * total
            assert (value in names) is (large and storage[value] not in kept)


@pytest.mark.parametrize("share", [0.05, 0.3, 0.6, 0.95])
@pytest.mark.parametrize("name", ["gpt", "bert", "resnet"])
def test_the_fastest_within_a_budget(name, share):
    """In bytes it fits, and it is no slower than what slots alone would find."""
    from shardwright.stages.checkpoint.recompute.chain import discretise

    chain = case(name, "cuda", "amp").linear.chain
    slots = max(500, 20 * (chain.length + 1))
    least = rotor.tightest(chain, slots).memory
    room = int(least + share * (case(name, "cuda", "amp").everything - least)) + 1
    found = simulate(chain, fastest_within(chain, room, slots).sequence)
    plain = simulate(chain, rotor.schedule(rotor.solve(discretise(chain, room, slots))).sequence)
    assert found.peak <= room and found.time <= plain.time * (1 + 1e-9)


def test_compiled_blocks_are_planned_by_what_they_were_measured_to_take():
    found = case("gpt", "cuda", "amp")
    spans = blocks_of(found.graph)
    ways = tuple(
        CompiledWay(keeps, 1e-3, 3e-3 - 1e-3 * keeps, int(9e6 * keeps) + 10**6, int(9e6 * keeps), 10**7, 2 * 10**7)
        for keeps in (1.0, 0.5, 0.0)
    )
    blocks = tuple(CompiledBlock(first, last, 0) for first, last in spans)
    profile = replace(found.profile, compiled=Compiled("a card", blocks, (ways,)))
    linear = linearize(Workload(found.graph, profile, preset(1), 2.0).priced(found.priced.sharding), Join.COMPILED)
    chain = linear.chain
    assert linear.spans == spans and chain.length == len(spans) - 1
    assert set(chain.f) == {1e-3} and all(len(options) == 2 for options in chain.more)
    most = int(simulate(chain, no_recompute(chain).sequence).peak)
    kept = {}
    for room in (most, most - 10**7):
        schedule = fastest_within(chain, room, 500)
        assert simulate(chain, schedule.sequence).peak <= room
        kept[room] = {region.compiled for region in linear.regions(schedule.regions)}
    assert kept[most] == {1.0} and kept[most - 10**7] & {0.5, 0.0}
