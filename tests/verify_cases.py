"""Programs, right and wrong, that `verify` judges on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.complex_models import ComplexLayers, Fourier, Rotary
from shardwright.pipeline.ir.graph import OpGraph
from shardwright.pipeline.ir.plan import Plan, Region
from shardwright.pipeline.runtime.programs.source import load_program
from shardwright.pipeline.tracing.trace import with_norms_per_rank
from shardwright.stages.codegen.module import write_module
from shardwright.stages.verify.compare import judge
from shardwright.stages.verify.float32 import judge_in_float32
from shardwright.stages.verify.float64 import draws_alike
from shardwright.stages.verify.locate import Case, locate
from shardwright.stages.verify.truth import truth_of, with_parts
from tests import plans
from tests.graphs import trace
from tests.programs import Stateful, everything, kept, uniform
from tests.skips import Ladder, sequences


class Casting(nn.Module):
    """Casts to float32, as norms and losses of many models do; `beside` its weights, where only float64 fits."""

    def __init__(self, beside: bool) -> None:
        super().__init__()
        self.linear, self.beside = nn.Linear(6, 6), beside

    def forward(self, x: Tensor) -> Tensor:
        if self.beside:
            return F.linear(x.float(), self.linear.weight).square().mean()
        return torch.softmax(self.linear(x).float(), -1).square().mean()


class Copying(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return (self.last(y.clone()) + y).square().mean()


class Centred(nn.Module):
    """The second norm's running mean is nothing but rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.linear, self.last = nn.BatchNorm1d(6), nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return (self.last(self.linear(self.first(x))) * x).square().mean()


@torch.library.custom_op("shardwright_verify::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    """Nothing tells that it draws."""
    return x + torch.rand_like(x)


@noisy.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


noisy.register_autograd(lambda ctx, gradient: gradient)

# What takes from the generator and is never split, each of a tensor of rows; orders in memory are not the usual.
RANDOM: dict[str, Callable[[Tensor], Tensor]] = {
    "rrelu": lambda y: F.rrelu(y, training=True),
    "randint_like": lambda y: y * torch.randint_like(y, 1, 9),
    "multinomial": lambda y: y.gather(1, torch.multinomial(y.detach().abs() + 0.1, 3)),
    "normal": lambda y: y * torch.normal(y.detach(), 1.0),
    "poisson": lambda y: y * torch.poisson(y.detach().abs() + 1.0),
    "random_": lambda y: y * torch.zeros_like(y).random_(9),
    "bernoulli_": lambda y: y * torch.zeros_like(y).bernoulli_(torch.sigmoid(y.detach())),
    "native_dropout": lambda y: torch.native_dropout(y.t(), 0.3, True)[0].t(),
    "log_normal_": lambda y: y * torch.zeros_like(y).log_normal_(),
    "cauchy_": lambda y: y * torch.zeros_like(y).t().cauchy_().t(),
    "noisy": noisy,
}


class Drawing(nn.Module):
    """Dropout, which is split, and then another op that draws."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.draw = nn.Linear(6, 6), nn.Linear(6, 6), draw

    def forward(self, x: Tensor) -> Tensor:
        y = self.draw(self.last(F.dropout(self.first(x), 0.4)))
        return (y + F.dropout(y, 0.2)).square().mean()


class WholeTensor(torch.optim.SGD):
    """Its step is of the size of its learning rate, whatever the gradient: not element by element."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data -= group["lr"] * p.grad / p.grad.norm()


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def by_norm(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return WholeTensor(parameters, lr=1e-2)


def split(graph: OpGraph) -> Plan:
    return plans.data_parallel(graph, 2)


def whole(graph: OpGraph) -> Plan:
    return plans.plan_of(uniform(graph, 2, split=False), everything(graph), 2)


def whole_and_kept(graph: OpGraph) -> Plan:
    return plans.plan_of(uniform(graph, 2, split=False), kept(graph), 2)


def shards(graph: OpGraph) -> Plan:
    return plans.zero(graph, 2)


def cut_graph(graph: OpGraph) -> OpGraph:
    """As if the trace had read a detach: the loss is right, gradients are not."""
    return replace(
        graph,
        ops=tuple(
            replace(op, target="aten.detach.default") if op.target == "aten.clone.default" else op for op in graph.ops
        ),
    )


def wrong_graph(graph: OpGraph) -> OpGraph:
    """As if the trace had read another number than forward has."""
    ops = [replace(op, target="aten.sigmoid.default") if op.target == "aten.tanh.default" else op for op in graph.ops]
    return replace(graph, ops=tuple(ops))


@dataclass(frozen=True)
class Tried:
    build: Callable[[], nn.Module]
    batch: Callable[[], dict[str, Tensor]]
    plan: Callable[[OpGraph], Plan]
    edit: tuple[str, str] = ("", "")
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = adamw
    traced: Callable[[OpGraph], OpGraph] = lambda graph: graph
    passes: int = 1
    batch_norm: str = "exact"

    def batches(self) -> list[dict[str, Tensor]]:
        """Of a step; they have different means and spreads."""
        return [{name: x * (1 + n) + n for name, x in self.batch().items()} for n in range(self.passes)]


def rows() -> dict[str, Tensor]:
    return {"x": torch.randn(4, 6, generator=torch.Generator().manual_seed(5))}


def in_blocks(graph: OpGraph) -> Plan:
    """Two links are one compiled function, then one, then two in a region..."""
    spans, link, leaves = [2, 1], 0, []
    while link < len(graph.chain):
        last = min(link + spans[len(leaves) % 2], len(graph.chain)) - 1
        leaf = Region(link, last, False, (), (), 0.5)
        leaves.append(leaf if len(leaves) % 3 else Region(link, last, True, (leaf,)))
        link = last + 1
    return plans.plan_of(uniform(graph, 2), tuple(leaves), 2)


def tokens() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randint(12, (4, 12), generator=generator) for name in ("input_ids", "labels")}


def drawn(seed: int) -> Callable[[OpGraph], Plan]:
    """Any strategy for each op: complex numbers lie in shards and in summands."""
    return lambda graph: plans.random_plan(graph, 2, seed)


COMPLEX: dict[str, Tried] = {
    f"{build.__name__}, {name}": Tried(build, tokens, plan)
    for build in (Rotary, Fourier, ComplexLayers)
    for name, plan in {"shards": shards, "drawn": drawn(1), "drawn again": drawn(2)}.items()
}
TRIED: dict[str, Tried] = {
    **COMPLEX,
    "a wrong conjugate": Tried(Rotary, tokens, split, ("view_as_complex * unsq", "view_as_complex.conj() * unsq")),
    "compiled blocks": Tried(Ladder, sequences, in_blocks),
    "a wrong compiled block": Tried(Ladder, sequences, in_blocks, ("torch.tanh(", "1.01 * torch.tanh(")),
    "dropout that is split": Tried(lambda: Ladder(dropout=0.3), sequences, split),
    "dropout that is whole": Tried(lambda: Ladder(dropout=0.3), sequences, whole),
    **{f"split dropout and {name}": Tried(partial(Drawing, draw), rows, split) for name, draw in RANDOM.items()},
    **{f"whole dropout and {name}": Tried(partial(Drawing, draw), rows, whole) for name, draw in RANDOM.items()},
    # torch.utils.checkpoint ends a second run once backward has all it asks for; rrelu fills its noise after that.
    "whole dropout and rrelu": Tried(partial(Drawing, RANDOM["rrelu"]), rows, whole_and_kept),
    "statistics": Tried(Stateful, rows, split),
    "statistics of each rank": Tried(Stateful, rows, split, traced=with_norms_per_rank),
    "deferred statistics of each rank": Tried(
        Stateful, rows, split, traced=with_norms_per_rank, passes=3, batch_norm="deferred"
    ),
    "wrong statistics of each rank": Tried(
        Stateful, rows, split, ("True, 0.1, ", "True, 0.2, "), traced=with_norms_per_rank
    ),
    "each rank with statistics of all": Tried(
        Stateful, rows, split, ("0.1, 1e-05", '0.1, 1e-05, axis="d0"'), traced=with_norms_per_rank
    ),
    "statistics of rounding": Tried(Centred, rows, split),
    "deferred statistics": Tried(Stateful, rows, split, passes=3, batch_norm="deferred"),
    "wrong deferred statistics": Tried(
        Stateful, rows, split, ("True, 0.1, ", "True, 0.2, "), passes=3, batch_norm="deferred"
    ),
    "wrong statistics": Tried(Stateful, rows, split, ("True, 0.1, ", "True, 0.2, ")),
    "an optimizer of whole tensors": Tried(Ladder, sequences, shards, make=by_norm),
    "a wrong trace": Tried(Ladder, sequences, split, traced=wrong_graph),
    "a trace that cuts a gradient": Tried(Copying, rows, split, traced=cut_graph),
    "casts": Tried(lambda: Casting(beside=False), rows, split),
    "casts beside weights": Tried(lambda: Casting(beside=True), rows, split),
}


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build()


def case_of(tried: Tried, path: Path) -> Case:
    graph = tried.traced(trace(seeded(tried.build), tried.batch()))
    plan = replace(tried.plan(graph), micro_batches=tried.passes)
    written = write_module(graph, plan)
    assert tried.edit[0] in written
    text = written.replace(*tried.edit) if tried.edit[0] else written
    path.write_text(text)
    return Case(graph, plan, written, text, str(path))


def judge_all(cases: dict[str, Case]) -> dict[str, dict[str, Any]]:
    """On a rank: the verdict on each, and the fault where there is one."""
    return {name: judged(TRIED[name], case) for name, case in cases.items()}


def judged(tried: Tried, case: Case) -> dict[str, Any]:
    draw = draws_alike(case.graph, case.text)

    norms = list(case.norms.values())

    def build() -> nn.Module:
        return with_parts(seeded(tried.build), norms) if norms else seeded(tried.build)

    def truth():
        batches = [tried.batches()] * 3
        return truth_of(build, batches, tried.make, draw=draw, batch_norm=tried.batch_norm)

    known = truth()
    verdict = judge(load_program(case.path, compiles=False), known, tried.make)
    first = verdict.first()
    fault = None if verdict.equal or first is None else asdict(locate(case, truth(), tried.make, first))
    in_float32 = None
    if verdict.equal and not known.kind.others:
        given = tried.batches(), case.path, tried.make, tried.batch_norm
        in_float32 = judge_in_float32(build, *given).equal
    kinds = {d.kind for d in verdict.differences if d.over > 1.0}
    tolerances = {d.tolerance: d.relative for d in verdict.differences if d.kind == "loss"}
    found = {"equal": verdict.equal, "fault": fault, "draw": draw, "kinds": kinds, "tolerances": tolerances}
    found |= {"in_float32": in_float32}
    return found | asdict(known.kind)
