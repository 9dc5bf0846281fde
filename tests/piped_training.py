"""Pipelines of random plans, trained by the stage's engine on real ranks, beside steps of the unsplit module."""

from __future__ import annotations

import copy
import functools
import inspect
import random
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.utils
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

from shardwright.pipeline.config import Config, DType, ModelSettings, TensorSpec, load_config
from shardwright.pipeline.cost.pipelines.schedules import Pipeline, orders
from shardwright.pipeline.ir.graph import OpGraph
from shardwright.pipeline.ir.plan import Partition as Planned
from shardwright.pipeline.ir.plan import Plan, Region
from shardwright.pipeline.ops.blocks import blocks_of
from shardwright.pipeline.ops.products import PRODUCTS, is_put_off, weights
from shardwright.pipeline.runtime.pipelining.deferred_weight_grads import Border
from shardwright.pipeline.runtime.pipelining.stage import RankPartition
from shardwright.pipeline.runtime.programs.parameters import shard_of
from shardwright.pipeline.runtime.programs.source import load_program
from shardwright.pipeline.sharding.slices import slices_of
from shardwright.pipeline.tracing.trace import trace
from shardwright.stages.codegen.partitions import write_partitions
from shardwright.stages.codegen.slices import graphs_of_slices
from shardwright.stages.train.engines.pipelined import PipelinedEngine
from shardwright.stages.verify import truth as verify_truth
from shardwright.stages.verify.compare import judge as judge_program
from shardwright.stages.verify.locate import Case as Verified
from shardwright.stages.verify.locate import Fault, locate
from tests.jobs import train_settings
from tests.piped_programs import cut, random_cuts
from tests.plans import FORCED, STEPS, batch_of, graph_of, module_of, random_plan

NEAR = {"": 1e-8, "amp": 3e-3, "bf16": 8e-3}  # losses; a step of bfloat16 is 4e-3 of a number


@dataclass(frozen=True)
class Case:
    """`devices` of each shard; `plans` is one of FORCED, or random ones by the seed."""

    model: str
    schedule: str
    devices: tuple[int, ...]
    chunks: int = 1
    micro_batches: int = 4
    plans: str = "random"
    seed: int = 0
    clip_norm: float | None = None
    precision: str = ""  # float64, or one of the configuration's, of a model in float32
    batch_norm: str = "exact"
    slices: int = 1  # micro-batches that have together one batch of the model
    grain: int = 1  # by which these differ, where the batch does not divide
    keeps_last: bool = False  # each partition is one region, but in the last micro-batch
    compiled: bool = False  # its functions are blocks, between which it is cut, and every other keeps little

    @property
    def name(self) -> str:
        sizes = "x".join(map(str, self.devices))
        counts = f"{sizes}-{self.chunks}-{self.micro_batches}"
        norms = "" if self.batch_norm == "exact" else self.batch_norm
        sliced = f"-{self.slices}ths" if self.slices > 1 else ""
        sliced += f"-by{self.grain}" if self.grain > 1 else ""
        sliced += "-last" * self.keeps_last + "-compiled" * self.compiled
        return f"{self.model}-{self.schedule}-{counts}-{self.plans}-{self.seed}{self.precision}{norms}{sliced}"

    @property
    def passes(self) -> int:
        return self.micro_batches // self.slices


@functools.cache
def plan_of(case: Case) -> Plan:
    """Of plans that a micro-batch can be split by."""
    graph, draw = graph_of_case(case), random.Random(case.seed)
    count = len(case.devices) * case.chunks
    devices = [case.devices[number % len(case.devices)] for number in range(count)]
    if case.plans == "random":
        plans = [random_plan(graph, size, 100 * case.seed + number) for number, size in enumerate(devices)]
    else:
        plans = [FORCED[case.plans](graph, size) for size in devices]
    blocks = [first for first, _ in blocks_of(graph)][1:]
    cuts = sorted(draw.sample(blocks, count - 1)) if case.compiled else random_cuts(graph, count, draw)
    plan = cut(graph, cuts, plans, draw, case.micro_batches)
    if case.compiled:
        plan = replace(plan, partitions=tuple(_of_blocks(graph, partition) for partition in plan.partitions))
    if case.keeps_last:
        plan = replace(plan, keeps_last=True, partitions=tuple(map(_as_one_region, plan.partitions)))
    return replace(plan, schedule=case.schedule, chunks=case.chunks, slices=samples_of(case))


def _as_one_region(partition: Planned) -> Planned:
    links = tuple(Region(link, link, False, ()) for link in range(partition.first, partition.last + 1))
    return replace(partition, regions=(Region(partition.first, partition.last, True, links),))


def _of_blocks(graph: OpGraph, partition: Planned) -> Planned:
    """Compiled, the first of them in a region."""
    spans = [span for span in blocks_of(graph) if partition.first <= span[0] <= partition.last]
    leaves = [Region(*span, False, (), (), (1.0, 0.3)[number % 2]) for number, span in enumerate(spans)]
    again = Region(*spans[0], True, (leaves[0],))
    return replace(partition, regions=(again, *leaves[1:]))


def samples_of(case: Case) -> tuple[int, ...]:
    """Of the micro-batches of a batch."""
    found = slices_of(len(next(iter(batch_of(case.model).values()))), case.slices, case.grain)
    assert found is not None
    return found


def graphs_of_case(case: Case) -> tuple[OpGraph, ...]:
    """For its micro-batches, the larger and the smaller ones."""
    if case.slices == 1:
        return (graph_of(case.model),)
    return graphs_of_slices(graph_of_samples(case.model), plan_of(case), config_of(case.model))


def graph_of_case(case: Case) -> OpGraph:
    """For a micro-batch, the smallest."""
    return graph_of(case.model) if case.slices == 1 else graph_of_samples(case.model, samples_of(case)[-1])


@functools.cache
def graph_of_samples(model: str, samples: int | None = None) -> OpGraph:
    return trace(config_of(model), samples)


def sliced_plan(model: str, slices: int, passes: int) -> Plan:
    return plan_of(Case(model, "1f1b", (1, 1), micro_batches=passes * slices, slices=slices))


def config_of(model: str) -> Config:
    """The project's, with this model."""
    module_of(model)  # once and for all, not on the meta device
    batch = {name: TensorSpec(list(t.shape), DType(str(t.dtype)[6:])) for name, t in batch_of(model).items()}
    module = {"_target_": "tests.piped_training.build", "model": model}
    return replace(load_config(Path(__file__).parents[1]), model=ModelSettings(module=module, batch=batch))


def passes_of(case: Case) -> list[dict[str, Tensor]]:
    """The batches of a step."""
    return [batch_of(case.model, number) for number in range(case.passes)]


def micro_batches_of(case: Case) -> list[dict[str, Tensor]]:
    """Of a step: each batch of the model in its parts, one after another."""
    return [
        {name: t.split(samples_of(case))[part] for name, t in batch.items()}
        for batch in passes_of(case)
        for part in range(case.slices)
    ]


def build(model: str, precision: str = "") -> nn.Module:
    found = copy.deepcopy(module_of(model))
    return found.float() if precision else found


class Rows(Dataset):
    """The rows of a step's batches, which come again in every step."""

    def __init__(self, model: str, micro_batches: int) -> None:
        self.batches = [batch_of(model, number) for number in range(micro_batches)]
        self.size = len(next(iter(self.batches[0].values())))

    def __len__(self) -> int:
        return self.size * len(self.batches)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return {name: t[number % self.size] for name, t in self.batches[number // self.size].items()}


def job_of(case: Case, path: Path) -> dict:
    batch = {n: {"shape": list(t.shape), "dtype": str(t.dtype)[6:]} for n, t in batch_of(case.model).items()}
    rows = {"_target_": "tests.piped_training.Rows", "model": case.model, "micro_batches": case.passes}
    return {
        "module_path": str(path),
        "model": {
            "precision": case.precision or "fp32",
            "module": {"_target_": "tests.piped_training.build", "model": case.model, "precision": case.precision},
            "batch": batch,
        },
        "data": {"dataset": rows, "held_out": rows, "shuffle": False, "seed": 0},
        "train": train_settings(
            steps=STEPS,
            seed=0,
            clip_norm=case.clip_norm,
            running_stats=case.batch_norm,
            evaluate={"every": STEPS, "batches": 1},
            optimizer={"_target_": "torch.optim.AdamW", "lr": 0.01, "weight_decay": 0.1, "eps": 1e-6},
        ),
        "where": {"model": "model", "data": "data", "train": "train"},
    }


def truth_of(case: Case) -> dict:
    """The plain loop of the unsplit module over whole batches; over micro-batches where each is a mean of its own."""
    model = build(case.model, case.precision)
    model = model.bfloat16() if case.precision == "bf16" else model
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=0.01, weight_decay=0.1, eps=1e-6
    )
    batches = micro_batches_of(case) if means_of_their_own(model, case) else passes_of(case)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        with statistics_once(model) if case.batch_norm == "deferred" else nullcontext():
            with torch.autocast("cpu", torch.bfloat16, enabled=case.precision == "amp"):
                found = [model(**batch) for batch in batches]
            mean(found, batches).backward()
        if case.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip_norm)
        optimizer.step()
        losses.append(float(mean(found, batches).detach()))
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}  # a forward pass changes buffers
    state = {
        f"optimizer/{name}/{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }
    with torch.no_grad():
        held_out = batches[: len(batches) // case.passes]  # one batch of the model
        evaluated = float(mean([model.eval()(**batch) for batch in held_out], held_out))
    told = {"losses": losses, "evaluated": evaluated, "weights": weights, "state": state}
    return told | {"names": dict(model.named_parameters())}


def means_of_their_own(model: nn.Module, case: Case) -> bool:
    """Batch norms, and losses that leave out some targets, do not tell the same of parts of a batch."""
    ignored = any(bool((t == -100).any()) for batch in passes_of(case) for t in batch.values())
    return ignored or any(isinstance(module, nn.BatchNorm2d) for module in model.modules())


def mean(losses: list[Tensor], batches: list[dict[str, Tensor]]) -> Tensor:
    """Over the samples of all batches."""
    counts = [len(next(iter(batch.values()))) for batch in batches]
    return sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)


@contextmanager
def statistics_once(model: nn.Module) -> Iterator[None]:
    """What its batch norms are given in several passes counts together, and once."""
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    before = [copy.deepcopy(norm.state_dict()) for norm in norms]
    given: dict[nn.Module, list[Tensor]] = {norm: [] for norm in norms}
    hooks = [norm.register_forward_pre_hook(lambda norm, read: given[norm].append(read[0].detach())) for norm in norms]
    yield
    for norm, state, hook in zip(norms, before, hooks, strict=True):
        hook.remove()
        norm.load_state_dict(state)
        once = copy.deepcopy(norm)
        once(torch.cat(given[norm]))
        norm.load_state_dict(once.state_dict())


def write_case(case: Case, folder: Path) -> None:
    plan = plan_of(case)
    graph, *smaller = graphs_of_case(case)
    (folder / f"{case.name}.py").write_text(write_partitions(graph, plan, "", *smaller))
    told = {"put_off": put_off_in(case), "put_off_by_last": put_off_in(case, last=True)}
    torch.save((case, truth_of(case) | told), folder / f"{case.name}.truth")


def put_off_in(case: Case, last: bool = False) -> list[list[str]]:
    """Of each partition: the products whose seconds the planned order has in W, by their weights."""
    graph, found = graph_of_case(case), []
    for partition in plan_of(case).partitions:
        regions = () if last and case.keeps_last else partition.regions
        again = {n for r in regions if r.recompute for n in range(r.first, r.last + 1)}
        links = [graph.chain[n] for n in range(partition.first, partition.last + 1) if n not in again]
        links = [] if case.compiled else links
        ops = [graph.op(name) for link in links for name in link.ops]
        own = [op for op in ops if is_put_off(graph, op, weights(graph))]
        found.append([graph.values[op.args.positional[PRODUCTS[op.target].weight].value].origin for op in own])
    return found


def train(folder: str) -> dict[str, str]:
    """On a rank: every program in the folder -> what is wrong with it, or ''."""
    errors = {}
    for path in sorted(Path(folder).glob("*.py")):
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "mkldnn_matmul failed")  # a CPU without units for bfloat16
                if "-compiled" in path.stem:
                    warnings.simplefilter("ignore")  # torch's own
                _train(path)
            errors[path.stem] = ""
        except Exception:  # shown by the test of that plan
            errors[path.stem] = traceback.format_exc()
            break  # the other ranks may wait for what this one did not send
    return errors


def judge(folder: str) -> dict[str, Fault | None]:
    """On a rank: program -> where `verify` finds it wrong; None where it is equal."""
    case, _ = torch.load(Path(folder) / "case.truth", weights_only=False)
    written = (Path(folder) / "right.py").read_text()
    found: dict[str, Fault | None] = {}
    for path in sorted(Path(folder).glob("*.py")):
        batches = [micro_batches_of(case)] * 2

        def truth(batches: list = batches) -> verify_truth.Truth:
            return verify_truth.truth_of(lambda: build(case.model), batches, _adamw, draw=False)

        verdict = judge_program(load_program(str(path), compiles=False), truth(), _adamw)
        first = verdict.first()
        graph, *smaller = graphs_of_case(case)
        told = Verified(graph, plan_of(case), written, path.read_text(), str(path), *smaller)
        wrong = first is not None and not verdict.equal
        found[path.stem] = locate(told, truth(), _adamw, first) if wrong else None
    return found


def _adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def _train(path: Path) -> None:
    from safetensors.torch import load_file

    case, truth = torch.load(path.with_suffix(".truth"), weights_only=False)
    engine, before = PipelinedEngine(job_of(case, path)), torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert engine.samples == case.passes * len(next(iter(batch_of(case.model).values())))
    assert engine.stream == engine.places.submesh
    watched = {partition.number: _watched(partition) for partition in engine.partitions}
    ran = _links_of_passes(engine)
    losses = []
    for step in range(STEPS):
        first, *later = engine.batches(step)
        losses.append(engine.step(engine.on_device(first), later))
        for partition in engine.partitions:
            products = [truth[key][partition.number] for key in ("put_off", "put_off_by_last")]
            _check_order(case, partition, watched[partition.number], *products)
            watched[partition.number].clear()
        if case.keeps_last:
            _check_last(case, ran)
        ran.clear()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"] - before
    assert (graphs > 0) is case.compiled, f"{graphs} graphs were compiled"
    expected = torch.tensor(truth["losses"], dtype=torch.float64)
    _near("losses", torch.tensor(losses, dtype=torch.float64), expected, NEAR[case.precision])
    if case.precision:
        return  # rounding is not alike, and grows
    evaluated = torch.tensor(engine.evaluate(), dtype=torch.float64)
    _near("loss as it evaluates", evaluated, torch.tensor(truth["evaluated"], dtype=torch.float64))
    for partition in engine.partitions:
        for name, tensor in partition.tensors.items():
            layout = engine.own[partition.number].stored.layout(name, tensor)
            _near(name, tensor.detach(), shard_of(truth["weights"][name], layout, engine.places.axes))
    _check_state(engine, truth)
    target = path.with_suffix(".safetensors")
    engine.export(target)
    torch.distributed.barrier()
    exported = load_file(target)
    assert exported.keys() == truth["weights"].keys()
    for name, tensor in exported.items():
        _near(name, tensor, truth["weights"][name])


Seen = tuple[str, int, set[str]]  # I or W, products that are put off, parameters to whose gradient it adds


def _watched(partition: RankPartition) -> list[Seen]:
    """What the schedule asks of a partition, and the gradients that come with it."""
    seen: list[Seen] = []

    def noting(phase: str, function: Callable[..., None]) -> Callable[..., None]:
        def noted(*arguments: Any) -> None:
            entries = partition.deferred[arguments[0]].entries if phase == "W" else []
            seen.append((phase, sum(not isinstance(entry, Border) for entry in entries), set()))
            function(*arguments)

        return noted

    partition.backward = noting("I", partition.backward)  # type: ignore[method-assign]
    partition.backward_weights = noting("W", partition.backward_weights)  # type: ignore[method-assign]
    for name, parameter in partition.parameters.items():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen[-1][2].add(name))
    return seen


def _check_order(
    case: Case, partition: RankPartition, seen: list[Seen], products: list[str], by_last: list[str]
) -> None:
    """Gradients of weights are made where the planned order has them: later, but in the first shard."""
    shard, phases = partition.number % len(case.devices), [phase for phase, _, _ in seen]
    assert partition.defers == (case.schedule == "zero_bubble" and shard > 0)
    if not partition.defers:
        assert phases == ["I"] * case.micro_batches
        return
    order = orders(Pipeline.ZERO_BUBBLE, len(case.devices), case.micro_batches).tasks[shard]
    assert phases == ["I" if task.phase == "B" else "W" for task in order if task.phase != "F"]
    *counts, of_last = (count for phase, count, _ in seen if phase == "W")
    assert set(counts) <= {len(products)} and of_last == len(by_last)
    if case.model == "gpt":  # each of its matrices is read once
        assert all(came.isdisjoint(products) for phase, _, came in seen if phase == "I")
        assert all(came.issuperset(products) for phase, _, came in seen if phase == "W")


Ran = tuple[str, int, list[str]]  # F or B of a micro-batch, and the links that it runs


def _links_of_passes(engine: PipelinedEngine) -> list[Ran]:
    """The functions of the program that are called from now on, forward and again in backward."""
    ran: list[Ran] = []

    def noting(phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(number: int, *arguments: Any, **named: Any) -> Any:
            ran.append((phase, number, []))
            return function(number, *arguments, **named)

        return noted

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def count(*arguments: Any) -> Any:
            if ran:  # it may be evaluating
                ran[-1][2].append(name)
            return function(*arguments)

        return count

    program = engine.places.written[0].forward.__globals__
    for name, function in [*program.items()]:
        if inspect.isfunction(function) and function.__globals__ is program:
            program[name] = counted(name, function)
    for stage in engine.pipeline.stages:
        stage.forward_one_chunk = noting("F", stage.forward_one_chunk)  # type: ignore[method-assign]
        stage.backward_one_chunk = noting("B", stage.backward_one_chunk)  # type: ignore[method-assign]
    return ran


def _check_last(case: Case, ran: list[Ran]) -> None:
    """The last micro-batch runs every link once, those before it run all of them once more in backward."""
    last = case.micro_batches - 1
    for number in range(case.micro_batches):
        forward, again = ([n for p, m, own in ran if (p, m) == (phase, number) for n in own] for phase in "FB")
        if case.model == "unet" and number < last:  # where its last link keeps nothing, a region ends before it
            assert not Counter(again) - Counter(forward) and len(forward) - len(again) <= case.chunks
            continue
        assert forward and sorted(again) == ([] if number == last else sorted(forward)), (number, forward, again)


def _check_state(engine: PipelinedEngine, truth: dict) -> None:
    """Every tensor is told, by a rank once; other holders of a tied one take again what the first has."""
    told = [held.name for held in engine.state()]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (engine.places.submesh, told))
    names = {name for _, own in everyone for name in own}
    assert len(told) == len(set(told)) and names >= {f"weights/{name}" for name in truth["names"]}
    assert {name for name in names if name.startswith("optimizer/")} == truth["state"].keys()
    for held in engine.state():
        if held.name.startswith("optimizer/"):
            whole = truth["state"][held.name]
            assert held.shape == whole.shape, held.name
            _near(held.name, held.tensor, shard_of(whole, held.layout, list(held.axes)))
    later = [(p, name) for p in engine.partitions for name in p.parameters if engine.places.owner(name) != p.number]
    before = {(p.number, name): _tensors(engine, p, name) for p, name in later}
    for partition, name in later:
        for tensor in _tensors(engine, partition, name, copies=False):
            tensor.fill_(7.0)
    engine.restored()
    for partition, name in later:
        for found, expected in zip(_tensors(engine, partition, name), before[partition.number, name], strict=True):
            _near(name, found, expected)


def _tensors(engine: PipelinedEngine, partition: RankPartition, name: str, copies: bool = True) -> list[Tensor]:
    """A parameter and its optimizer state."""
    state = engine.optimizer.state[partition.updated[name]].values()
    found = [partition.parameters[name].detach(), *state]
    return [tensor.clone() for tensor in found] if copies else found


def _near(name: str, found: Tensor, expected: Tensor, near: float = 1e-8) -> None:
    assert found.shape == expected.shape, f"{name}: {tuple(found.shape)}, expected {tuple(expected.shape)}"
    torch.testing.assert_close(
        found.double(), expected.double(), rtol=near, atol=1e-9, msg=lambda text: f"{name}: {text}"
    )
