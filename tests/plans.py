"""Plans drawn at random, written as programs and run on real ranks against the unsplit module."""

from __future__ import annotations

import copy
import random
import traceback
from bisect import bisect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from torch import Tensor, nn

from shardwright.pipeline.config import Only
from shardwright.pipeline.cost.step import Workload
from shardwright.pipeline.ir.graph import OpGraph, Role
from shardwright.pipeline.ir.layout import B, Layout, R, S
from shardwright.pipeline.ir.names import look_up
from shardwright.pipeline.ir.plan import Plan, Prediction, Region, Sharding, Strategy, path_name
from shardwright.pipeline.ir.program import Call, Convert, Program
from shardwright.pipeline.ir.verify import gathered, verify_graph, verify_sharding
from shardwright.pipeline.models import gpt, mlp
from shardwright.pipeline.ops.dims import strategies
from shardwright.pipeline.ops.mesh import view_op
from shardwright.pipeline.ops.table import rule_of
from shardwright.pipeline.ops.uneven import uneven_in
from shardwright.pipeline.runtime.programs.mesh import set_mesh
from shardwright.pipeline.runtime.programs.parameters import shard_of
from shardwright.pipeline.runtime.programs.source import load_program
from shardwright.pipeline.runtime.step.buckets import Row
from shardwright.pipeline.runtime.step.gradients import Gradients
from shardwright.pipeline.runtime.step.passes import run_passes
from shardwright.pipeline.sharding.lowering import lower
from shardwright.pipeline.tracing.chain import find_chain
from shardwright.pipeline.tracing.export import export_loss
from shardwright.pipeline.tracing.lower import lower as to_ops
from shardwright.pipeline.tracing.simplify import simplify
from shardwright.stages.codegen.module import write_module
from shardwright.stages.profile.by_table import profile_graph
from shardwright.stages.solve.problem.build import build, to_sharding
from shardwright.stages.solve.problem.constraints import UserConstraints
from shardwright.stages.solve.problem.storage import Stored, Way, storage_choices
from shardwright.stages.solve.search.decomposition import fastest
from shardwright.stages.solve.search.restricted import restrict
from tests import skips
from tests.graphs import preset, solve_settings
from tests.made import made_once
from tests.ranks import AXIS
from tests.unpipelined import whole_plan

T = TypeVar("T")

NEAR, NEAR_IN_FLOAT32 = 1e-9, 2e-6
FLOAT32_INSIDE = (
    "t5",
    "gpt2",
    "llama",
    "qwen2",
    "opt",
    "bert",
)  # whatever their type, norms or the loss are in float32


# ---- modules: sizes divide by 2 and by 3, and one or the other by neither


class Odd(nn.Module):
    """Ops without a rule, ops of several results, buffers, and parameters that are frozen, unused or read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 12)
        self.scale = nn.Parameter(torch.rand(6, 1))
        self.unused = nn.Parameter(torch.rand(4))
        self.frozen = nn.Parameter(torch.rand(12), requires_grad=False)
        self.register_buffer("curve", torch.rand(6, 12))

    def forward(self, inputs: Tensor, weights: Tensor) -> Tensor:
        h = torch.cumsum(self.inner(inputs), 2) * 0.3  # b s w
        left, right = h.split(6, dim=2)
        h = torch.cat((left.tanh() * self.scale, right + self.scale), 2) + self.frozen
        h = torch.relu(h.transpose(0, 1)).transpose(0, 1).view(6, 36, 2)  # contiguous again, unless it was converted
        h = h.reshape(6, 6, 12) * torch.softmax(self.curve * 2.0, 1)
        h = h - h.mean() + torch.logsumexp(h, dim=2, keepdim=True)
        (h,) = h.split(12, dim=2)
        h, scale = torch.broadcast_tensors(h, self.scale)
        return F.mse_loss(h * scale, inputs) + (h * weights.unsqueeze(1)).sum() * 0.01


class Names(nn.Module):
    """Names of inputs and modules that generated code uses for itself, or that fall together."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(6, 12)
        self.a = nn.ModuleDict({"b": nn.Linear(12, 12), "not-a-name": nn.Linear(12, 12)})
        self.a_b = nn.Linear(12, 12)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.LayerNorm(12)) for _ in range(2)])
        self.layers_a = nn.Linear(12, 12)
        self.forward_ = nn.Linear(12, 12)
        self.tensors = nn.Linear(12, 12)
        self.mask = nn.Linear(12, 12)

    def forward(self, x: Tensor, tokens: Tensor, mask: Tensor, p: Tensor) -> Tensor:
        y = self.tokens(tokens) + x.exp()
        for module in (self.a["b"], self.a_b, *self.layers, self.layers_a, self.tensors, self.forward_, self.mask):
            y = torch.tanh(module(y)) * mask
        y = self.a["not-a-name"](y) * p.transpose(0, 1)
        return F.mse_loss(y, x)


GPT = {"vocab_size": 12, "context": 6, "width": 12, "layers": 2, "heads": 6}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": lambda: gpt.build(**GPT),
    "tied": lambda: gpt.build(**GPT, tie=True),
    "mlp": lambda: mlp.build(features=12, width=6, classes=4, depth=2),
    "odd": Odd,
    "names": Names,
    "ladder": skips.Ladder,
    "shared": skips.Shared,
    "unet": skips.UNet,
}


GPT8 = {"vocab_size": 16, "context": 8, "width": 16, "layers": 2, "heads": 4}
EIGHTS: dict[str, Callable[[], nn.Module]] = {  # for meshes of 2 by 2 by 2: every size divides
    "gpt8": lambda: gpt.build(**GPT8),
    "tied8": lambda: gpt.build(**GPT8, tie=True),
    "mlp8": lambda: mlp.build(features=16, width=8, classes=8, depth=2),
}


UNEVEN = {"vocab_size": 17, "context": 8, "width": 15, "layers": 2, "heads": 3, "tie": True}
ODD_SIZES: dict[str, Callable[[], nn.Module]] = {"uneven": lambda: gpt.build(**UNEVEN)}  # but for the batch


class Family(nn.Module):
    """One of Hugging Face's (an optional dependency) without dropout; it returns its loss alone."""

    def __init__(self, name: str) -> None:
        super().__init__()
        from tests import families

        self.model = getattr(families, name)()
        for module in self.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            for attribute in ("attention_dropout", "dropout", "dropout_prob", "attn_dropout", "layerdrop", "drop_prob"):
                if isinstance(getattr(module, attribute, None), float):
                    setattr(module, attribute, 0.0)


class Text(Family):
    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, labels=labels).loss


class Images(Family):
    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        return self.model(pixel_values=pixel_values, labels=labels).loss


TEXTS = ("gpt2", "bert", "llama", "qwen2", "t5", "mixtral", "opt")
IMAGES = ("vit", "swin", "resnet")
OPTIONAL: dict[str, Callable[[], nn.Module]] = {
    **{name: partial(Text, name) for name in TEXTS},
    **{name: partial(Images, name) for name in IMAGES},
}


def batch_of(model: str, number: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(1 + number)
    if model in ("gpt", "tied", "gpt8", "tied8", "uneven"):
        words, shape = (16, (8, 8)) if model.endswith("8") else (12, (6, 6))
        words, shape = (17, (12, 8)) if model == "uneven" else (words, shape)
        ids, labels = torch.randint(words, shape), torch.randint(words, shape)
        labels[: 2 + number, :5] = -100  # so the ranks hold different numbers of targets
        return {"input_ids": ids, "labels": labels}
    if model in OPTIONAL:
        from tests.families import FAMILIES

        (batch,) = (batch for build, batch in FAMILIES.items() if build.__name__ == model)
        return {name: t.double() if t.is_floating_point() else t for name, t in batch.items()}
    if model in ("ladder", "shared", "unet"):
        batch = skips.images() if model == "unet" else skips.sequences()
        return {name: tensor.double() * (1 + number) for name, tensor in batch.items()}
    if model == "mlp8":
        return {"inputs": torch.randn(16, 16).double(), "targets": torch.randint(8, (16,))}
    if model == "mlp":
        return {"inputs": torch.randn(12, 12).double(), "targets": torch.randint(4, (12,))}
    inputs = torch.randn(6, 6, 12).double()
    if model == "odd":
        return {"inputs": inputs, "weights": torch.randn(6, 12).double()}
    return {"x": inputs, "tokens": torch.randint(6, (6, 6)), "mask": torch.rand(6, 12).double(),
            "p": torch.rand(6, 6, 1).double()}  # fmt: skip


@cache
def module_of(model: str) -> nn.Module:
    torch.manual_seed(0)
    return {**MODELS, **EIGHTS, **ODD_SIZES, **OPTIONAL}[model]().double().train()


@made_once
def graph_of(model: str) -> OpGraph:
    module, batch = module_of(model), batch_of(model)
    ops = to_ops(export_loss(module, batch), module, tuple(batch))
    graph = find_chain(simplify(ops) if model in OPTIONAL else ops)
    verify_graph(graph)
    return graph


# ---- plans


def plan_of(sharding: Sharding, regions: tuple[Region, ...], ranks: int) -> Plan:
    return whole_plan(((AXIS, ranks),), "cpu", 0, sharding, regions, Prediction(*[0] * 7))


def options_of(graph: OpGraph, ranks: int) -> dict[str, tuple[Strategy, ...]]:
    return {op.name: strategies(rule_of(op), view_op(graph, op), ranks) for op in graph.ops}


def splits(shape: tuple[int, ...], ranks: int) -> list[Layout]:
    return [Layout((S(d),)) for d, size in enumerate(shape) if size and size % ranks == 0]


class Draw(Protocol):
    """Of `random.Random` what plans are drawn with."""

    def choice(self, options: Sequence[T], /) -> T: ...
    def choices(self, options: Sequence[T], weights: Sequence[float], /) -> list[T]: ...
    def randint(self, low: int, high: int, /) -> int: ...
    def random(self) -> float: ...


class Drawn:
    """The same, by hypothesis."""

    def __init__(self, draw: DrawFn) -> None:
        self.draw = draw

    def choice(self, options: Sequence[T]) -> T:
        return self.draw(st.sampled_from(options))

    def choices(self, options: Sequence[T], weights: Sequence[float]) -> list[T]:
        ends = list(accumulate(round(10 * weight) for weight in weights))
        return [options[bisect(ends, self.randint(0, ends[-1] - 1))]]

    def randint(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))

    def random(self) -> float:
        return self.randint(0, 99) / 100


@st.composite
def any_plan(draw: DrawFn, graph: OpGraph, ranks: int) -> Plan:
    return plan_drawn_by(Drawn(draw), graph, ranks)


def random_plan(graph: OpGraph, ranks: int, seed: int) -> Plan:
    return plan_drawn_by(random.Random(seed), graph, ranks)


def plan_drawn_by(draw: Draw, graph: OpGraph, ranks: int) -> Plan:
    """Any strategy for any op; each plan likes some states more than others, so that runs of equal ones occur."""
    liking = {kind: draw.choice([0.1, 1.0, 5.0]) for kind in "RBSP"}

    def weight(layout: Layout) -> float:
        return liking[layout.states[0].kind]

    picked = {
        name: draw.choices(options, [weight(s.outputs[0]) for s in options])[0]
        for name, options in options_of(graph, ranks).items()
    }

    def source(shape: tuple[int, ...]) -> Layout:
        choices = [Layout((R,)), *splits(shape, ranks)]
        return draw.choices(choices, [weight(c) for c in choices])[0]

    inputs = {v.name: source(v.type.shape) for v in graph.of_role(Role.INPUT)}
    stored = random_storage(graph, options_of(graph, ranks), (ranks,), draw, source)
    regions = random_regions(0, len(graph.chain) - 1, draw, draw.randint(0, 3))
    return with_kept(graph, plan_of(sharding_of(graph, picked, stored, inputs, (ranks,)), regions, ranks), draw)


def random_storage(
    graph: OpGraph,
    options: dict[str, tuple[Strategy, ...]],
    sizes: tuple[int, ...],
    draw: Draw,
    source: Callable[[tuple[int, ...]], Layout],
) -> dict[str, Stored]:
    """Any of the solver's ways to store each parameter, or any other layout, which its readers then convert."""
    readers = graph.consumers()
    found = {}
    for value in graph.of_role(Role.PARAMETER):
        layout = source(value.type.shape)
        found[value.origin] = Stored(layout, layout, Way.regathered if draw.random() < 0.3 else Way.gathered)
        if draw.random() < 0.6:
            reading = [(op, i) for op in readers[value.name] for i, n in enumerate(op.inputs) if n == value.name]
            wanted = {s.inputs[i] for op, i in reading for s in options[op.name]}
            choices = storage_choices(value.type.shape, wanted, sizes, shards=True)
            way = draw.choice(sorted({choice.way for choice in choices}))
            found[value.origin] = draw.choice([choice for choice in choices if choice.way is way])
    return found


def sharding_of(
    graph: OpGraph,
    picked: dict[str, Strategy],
    stored: dict[str, Stored],
    inputs: dict[str, Layout],
    sizes: tuple[int, ...],
) -> Sharding:
    """Parameters that are to be regathered are so where somebody gathers them."""
    sharding = Sharding(
        picked,
        {name: way.layout for name, way in stored.items()},
        inputs,
        state={name: way.state for name, way in stored.items() if way.state != way.layout},
    )
    there = gathered(graph, sharding, sizes)
    again = tuple(name for name, way in stored.items() if way.way is Way.regathered and name in there)
    return replace(sharding, regathered=again)


def random_regions(first: int, last: int, draw: Draw, depth: int, inner: bool = False) -> tuple[Region, ...]:
    """Links one by one, and regions that recompute, nested up to a depth."""
    found = []
    while first <= last:
        end = draw.randint(first, last)
        whole = inner and not found and end == last  # a region that is its only inner region is one region
        if depth and not whole and draw.random() < 0.6:
            found.append(Region(first, end, True, random_regions(first, end, draw, depth - 1, inner=True)))
            first = end + 1
        else:
            found.append(Region(first, first, False, ()))
            first += 1
    return tuple(found)


def with_kept(graph: OpGraph, plan: Plan, draw: Draw) -> Plan:
    """Regions keep any of the results that they may keep; names of any values are given up after their last use."""
    links = keepable(graph, plan)

    def drawn(region: Region) -> Region:
        names = [name for link in links[region.first : region.last + 1] for name in link]
        share = draw.choice([0.0, 0.4, 1.0]) if region.recompute else 0.0
        kept = tuple(name for name in names if draw.random() < share)
        return replace(region, inner=tuple(map(drawn, region.inner)), kept=kept)

    written = [name for link in graph.chain for op in link.ops for name in graph.op(op).outputs]
    share = draw.choice([0.0, 0.3, 1.0])
    released = tuple(name for name in written if draw.random() < share)
    (only,) = plan.partitions
    return replace(plan, partitions=(replace(only, regions=tuple(map(drawn, only.regions))),), released=released)


def keepable(graph: OpGraph, plan: Plan) -> list[list[str]]:
    """Of each link: the products that no body replaces, and the conversions of what is no parameter."""

    def name(step: Call | Convert) -> str:
        if isinstance(step, Convert):
            trained = graph.values[step.source.value].role is Role.PARAMETER
            return "" if trained else path_name(step.source.value, step.source.layout, step.target.layout)
        rule = rule_of(graph.op(step.op))
        whole = not plan.sharding.strategies[step.op].body.strip(",")
        return step.op if rule is not None and rule.is_product and whole else ""

    return [[found for found in map(name, steps) if found] for steps in lower(graph, plan.sharding).links]


def follow(
    graph: OpGraph, ranks: int, read: Callable[[str], Layout], inputs: dict[str, Layout], storage: dict[str, Layout]
) -> Plan:
    """Each op in the strategy that takes most of its inputs as they come; `read` says how parameters come."""
    comes = {**inputs, **{v.name: Layout((R,)) for v in graph.of_role(Role.BUFFER)}}
    comes |= {v.name: read(v.origin) for v in graph.of_role(Role.PARAMETER)}
    picked = {}
    for op in graph.ops:
        options = strategies(rule_of(op), view_op(graph, op), ranks)
        fits = [sum(comes[n] == i for n, i in zip(op.inputs, s.inputs, strict=True)) for s in options]
        picked[op.name] = options[fits.index(max(fits))]
        comes |= dict(zip(op.outputs, picked[op.name].outputs, strict=True))
    links = tuple(Region(i, i, False, ()) for i in range(len(graph.chain)))
    return plan_of(Sharding(picked, storage, inputs), links, ranks)


def data_parallel(graph: OpGraph, ranks: int) -> Plan:
    inputs = {v.name: Layout((S(0),)) for v in graph.of_role(Role.INPUT)}
    storage = {v.origin: Layout((R,)) for v in graph.of_role(Role.PARAMETER)}
    return follow(graph, ranks, lambda name: Layout((B,)), inputs, storage)


def zero(graph: OpGraph, ranks: int) -> Plan:
    """As data parallel, with every parameter stored in shards of its last dim that divides."""
    inputs = {v.name: Layout((S(0),)) for v in graph.of_role(Role.INPUT)}
    storage = {v.origin: splits(v.type.shape, ranks)[-1] for v in graph.of_role(Role.PARAMETER)}
    return follow(graph, ranks, lambda name: Layout((B,)), inputs, storage)


def zero1(graph: OpGraph, ranks: int) -> Plan:
    """As data parallel, with the optimizer's state alone in shards of the last dim that divides, or uneven ones.

    A shard of another dim than the first does not lie in the parameter in one run, so it has memory of its own.
    """
    plan = data_parallel(graph, ranks)
    (only,) = plan.partitions
    shapes = {v.origin: v.type.shape for v in graph.of_role(Role.PARAMETER)}
    state = {name: (splits(shape, ranks) or [Layout((S(0),))])[-1] for name, shape in shapes.items()}
    return replace(plan, partitions=(replace(only, sharding=replace(only.sharding, state=state)),))


def megatron(graph: OpGraph, ranks: int) -> Plan:
    """Query, key, value and up by columns, out and down by rows; the rest replicated."""

    def stored(name: str) -> Layout:
        module, kind = name.split(".")[-2:]
        if module in ("query", "key", "value", "up"):
            return Layout((S(0),))
        return Layout((S(1),)) if module in ("out", "down") and kind == "weight" else Layout((R,))

    inputs = {v.name: Layout((R,)) for v in graph.of_role(Role.INPUT)}
    storage = {v.origin: stored(v.origin) for v in graph.of_role(Role.PARAMETER)}
    return follow(graph, ranks, stored, inputs, storage)


def sequence(graph: OpGraph, ranks: int) -> Plan:
    """What `only: sequence` leaves: tensor parallel, and what lies between the blocks split along the sequence."""
    cluster = preset(ranks)
    problem, choices = build(Workload(graph, profile_graph(graph), cluster, 2.0))
    hand = UserConstraints(
        graph, tuple(axis.name for axis in cluster.axes), solve_settings(only=Only.sequence), "conf/solve"
    )
    left = restrict(problem, hand.kept(choices))
    picked = left.expand(fastest(left.problem, seconds=5.0))
    links = tuple(Region(i, i, False, ()) for i in range(len(graph.chain)))
    return plan_of(to_sharding(graph, choices, picked), links, ranks)


FORCED = {"data_parallel": data_parallel, "zero": zero, "zero1": zero1, "megatron": megatron, "sequence": sequence}


def lowered(model: str, plan: Plan) -> tuple[Program, str]:
    graph = graph_of(model)
    verify_sharding(graph, plan.sharding, plan.sizes, uneven_in(graph).spots)
    program = lower(graph, plan.sharding, plan.micro_batches)
    return program, write_module(graph, plan)


# ---- running them


STEPS = 3


def optimizer_of(parameters: Iterable[nn.Parameter], near: float) -> torch.optim.Optimizer:
    """AdamW makes much of little, as of a bias before a norm: a large eps, and plain steps where norms are float32."""
    if near > NEAR:
        return torch.optim.SGD(parameters, lr=0.01, weight_decay=0.1)
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1, eps=1e-6)


def save_truth(model: str, path: Path, micro_batches: int = 1) -> None:
    """The module's tensors, a step's batches, and what unsplit steps make of them: losses, gradients, parameters."""
    module, batches = copy.deepcopy(module_of(model)), [batch_of(model, n) for n in range(micro_batches)]
    near = NEAR_IN_FLOAT32 if model in FLOAT32_INSIDE else NEAR
    named = dict(module.named_parameters())
    first = {n: p.detach().clone() for n, p in named.items() if p.requires_grad}
    constants = {**dict(module.named_buffers()), **{n: p for n, p in named.items() if not p.requires_grad}}
    constants = {n: t.detach().clone() for n, t in constants.items()}
    optimizer = optimizer_of([p for p in named.values() if p.requires_grad], near)
    losses, gradients = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append([])
        for batch in batches:
            loss = module(**batch)
            (loss / micro_batches).backward()
            losses[-1].append(loss.detach())
        gradients.append({n: p.grad.clone() for n, p in named.items() if p.grad is not None})
        optimizer.step()
    torch.save(
        {
            "parameters": first,
            "constants": constants,
            "batches": batches,
            "losses": losses,
            "gradients": gradients,
            "after": {n: named[n].detach() for n in first},
            "near": near,
        },
        path,
    )


def run_programs(folder: str) -> dict[str, str]:
    """On a rank: every program in the folder -> what is wrong with it, or ''."""
    truths = {path.stem: load_truth(path) for path in Path(folder).glob("*.truth")}
    errors = {}
    for path in sorted(Path(folder).glob("*.py")):
        try:
            _run(path, truths[path.name.partition("-")[0]])
            errors[path.stem] = ""
        except Exception:  # shown by the test of that plan
            errors[path.stem] = traceback.format_exc()
    return errors


def run_alone(model: str, source: str, folder: Path) -> None:
    """A program for one rank, in this process."""
    save_truth(model, folder / "truth")
    (folder / "program.py").write_text(source)
    _run(folder / "program.py", load_truth(folder / "truth"))


@dataclass
class Run:
    """A program on a rank with its shards of everything."""

    rows: dict[str, Row]
    axes: list[str]
    sizes: tuple[int, ...]
    held: dict[str, nn.Parameter]
    tensors: dict[str, Tensor]  # these and the constants
    batches: list[dict[str, Tensor]]  # of a step
    gradients: Gradients
    step: Any

    @property
    def batch(self) -> dict[str, Tensor]:
        return self.batches[0]

    def layout(self, name: str) -> Layout:
        return Layout.parse(self.rows[name][0])

    def state(self, name: str) -> Layout:
        return Layout.parse(self.rows[name][2])


def load_truth(path: Path) -> dict:
    return torch.load(path)


def prepare(path: Path, truth: dict) -> Run:
    program = load_program(str(path))
    set_mesh(program.MESH)
    axes = list(program.MESH)
    rows = {name: look_up(program.PARAMETERS, name) for name in truth["parameters"]}
    held = {n: nn.Parameter(shard_of(p, Layout.parse(rows[n][0]), axes)) for n, p in truth["parameters"].items()}
    tensors = {**truth["constants"], **held}
    layouts = {name: Layout.parse(layout) for name, layout in program.INPUTS.items()}
    batches = [{n: shard_of(b, layouts[n], axes) for n, b in batch.items()} for batch in truth["batches"]]
    gradients = Gradients(held.values(), rows.values(), axes)
    assert len(batches) == program.MICRO_BATCHES
    return Run(rows, axes, tuple(program.MESH.values()), held, tensors, batches, gradients, program.Program(tensors))


def _run(path: Path, truth: dict) -> None:
    run, near = prepare(path, truth), truth["near"]
    updated = dict(zip(run.held, run.gradients.updated, strict=True))
    optimizer = optimizer_of(run.gradients.updated, near)
    for number in range(STEPS):
        losses = run_passes(run.step, run.gradients, run.batches, len(run.batches))
        for loss, expected in zip(losses, truth["losses"][number], strict=True):
            _compare("loss", loss, expected, 0.0, near)
        _compare_gradients(run, updated, truth["gradients"][number], near)
        optimizer.step()
        run.gradients.publish()
    floor = 1e-3 * float(max(p.norm() for p in truth["after"].values()))
    for name, parameter in run.held.items():
        expected = shard_of(truth["after"][name], run.layout(name), run.axes)
        _compare(f"{name} at the end", parameter.detach(), expected, floor, near)
    for name, parameter in updated.items():
        shape = run.state(name).local_shape(tuple(truth["parameters"][name].shape), run.sizes)
        kept = [tuple(t.shape) for t in optimizer.state[parameter].values() if t.dim()]
        assert set(kept) <= {shape}, f"{name} has a state of {kept}, not {shape}"


def _compare_gradients(run: Run, updated: dict[str, nn.Parameter], truth: dict[str, Tensor], near: float) -> None:
    floor = 1e-3 * float(max(g.norm() for g in truth.values()))
    for name, parameter in updated.items():
        if name not in truth:
            assert parameter.grad is None or not parameter.grad.any(), f"{name} has a gradient"
        else:
            assert parameter.grad is not None, f"{name} has no gradient"
            _compare(name, parameter.grad, shard_of(truth[name], run.state(name), run.axes), floor, near)


def _compare(name: str, found: Tensor, expected: Tensor, floor: float, near: float) -> None:
    """Relative to its own size, or to the floor: the gradient of a key's bias is nothing but rounding."""
    assert found.shape == expected.shape, f"{name}: {tuple(found.shape)}, expected {tuple(expected.shape)}"
    error = (found - expected).norm() / max(float(expected.norm()), floor)
    assert error < near, f"{name} differs by {error:.1e} of its size"


def conversions_in(program: Program) -> list[str]:
    """`R -> B` for each conversion, in order."""
    steps = [*program.prologue, *program.shared, *(step for link in program.links for step in link)]
    return [f"{step.source.layout} -> {step.target.layout}" for step in steps if isinstance(step, Convert)]
