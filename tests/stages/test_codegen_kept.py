"""Lines of a program that keep results and let go of names, and what it computes before the chain, never in half."""

from __future__ import annotations

import ast
import random
import re
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.pipeline.ir.graph import OpGraph
from shardwright.pipeline.ir.plan import Plan, Region
from shardwright.pipeline.ops.table import rule_of
from tests import plans
from tests.graphs import gpt_graph, trace
from tests.programs import ODD, load, odd, odd_graph, plan_for, uniform, write
from tests.stages.test_codegen import ruff

SEEDS = range(6)


def whole(graph: OpGraph, regions: tuple[Region, ...], released: tuple[str, ...] = ()) -> Plan:
    return replace(plan_for(graph, uniform(graph, 1), 1, regions), released=released)


def products(graph: OpGraph, link: int) -> tuple[str, ...]:
    rules = {name: rule_of(graph.op(name)) for name in graph.chain[link].ops}
    return tuple(name for name, rule in rules.items() if rule is not None and rule.is_product)


# --------------------------------------------------------------------------------------------------------- kept lines


def test_what_a_region_keeps_is_called_through_kept():
    """Of two equal layers one keeps its products: they are two functions, and nothing else changes."""
    graph = gpt_graph()
    links = [n for n in range(len(graph.chain)) if len(products(graph, n)) == 2]  # the layers' second halves
    first, second = links[:2]
    one = [Region(n, n, False, ()) for n in range(len(graph.chain))]
    regions = list(one)
    regions[first] = Region(first, first, True, (one[first],), products(graph, first))
    regions[second] = Region(second, second, True, (one[second],))
    text = write(graph, whole(graph, tuple(regions)))
    assert "from shardwright.pipeline.runtime import kept, recompute, scope\n" in text
    kept = re.findall(r"= kept\(F\.linear, (\w+), p\[\"(\w+)\.weight\"\], p\[\"\w+\.bias\"\]\)  # R \[", text)
    assert len(kept) == 2 == text.count("kept(")
    assert text.replace("kept(F.linear, ", "F.linear(").count("F.linear(") == text.count("F.linear") > 4
    plain = write(graph, whole(graph, tuple(replace(region, kept=()) for region in regions)))
    assert "kept(" not in plain and "import recompute, scope\n" in plain
    functions = [len(re.findall(r"^def ", t, re.M)) for t in (text, plain)]
    assert functions[0] == functions[1] + 1


def test_a_product_that_is_written_as_an_expression_is_kept_as_one():
    graph = odd_graph("bare")
    (link,) = (n for n in range(len(graph.chain)) if products(graph, n))
    one = [Region(n, n, False, ()) for n in range(len(graph.chain))]
    one[link] = Region(link, link, True, (one[link],), products(graph, link))
    text = write(graph, whole(graph, tuple(one)))
    assert re.search(r"= kept\((lambda x|torch\.matmul)", text)
    check_step("bare", graph, whole(graph, tuple(one)))


# ---------------------------------------------------------------------------------------------------------- del lines


def check_names(text: str) -> int:
    """No function reads, passes on or returns what it has let go of; each is let go of once. How many there were."""
    found = 0
    for function in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)):
        gone: set[str] = set()
        assigned = {argument.arg for argument in function.args.args}
        for statement in function.body:
            names = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
            assert not gone & {name.id for name in names}, f"{function.name}: line {statement.lineno}"
            deleted = {name.id for name in names if isinstance(name.ctx, ast.Del)}
            assert deleted <= assigned and not deleted & {argument.arg for argument in function.args.args}
            gone |= deleted
            assigned |= {name.id for name in names if isinstance(name.ctx, ast.Store)}
        found += len(gone)
    return found


def random_texts(ranks: int) -> dict[str, str]:
    return {
        f"{model}_{seed}": plans.lowered(model, plans.random_plan(plans.graph_of(model), ranks, seed))[1]
        for model in plans.MODELS
        for seed in SEEDS
    }


@pytest.mark.parametrize("ranks", [1, 2])
def test_random_programs_are_clean_and_let_go_of_nothing_they_need(ranks, tmp_path):
    let_go = 0
    texts = random_texts(ranks)
    for name, text in texts.items():
        let_go += check_names(text)
        (tmp_path / f"{name}.py").write_text(text)
        assert max(map(len, text.splitlines())) <= 120, name
    assert ruff(tmp_path) == ""
    assert let_go > 200 and sum(text.count("kept(") for text in texts.values()) > 50


def test_names_go_right_after_their_last_use_and_not_before_the_end():
    """What ends a function goes by itself, what enters or leaves it is not its own."""

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            return (y + torch.exp(self.second(torch.tanh(y) * 2)) + y.cos()).square().mean()

    graph = trace(Chain(), {"x": torch.randn(4, 6)})
    values = tuple(name for link in graph.chain for op in link.ops for name in graph.op(op).outputs)
    regions = tuple(Region(n, n, False, ()) for n in range(len(graph.chain)))
    text = write(graph, whole(graph, regions, values))
    assert check_names(text) > 0
    for match in re.finditer(r"^( +)del (.+)\n", text, re.M):
        last = text[: match.start()].rstrip("\n").rpartition("\n")[2]
        assert all(re.search(rf"\b{name}\b", last) for name in match[2].split(", ")), match[0]
        assert not text[match.end() :].lstrip().startswith("return"), "the end of a function needs no line"
    assert "    del " not in write(graph, whole(graph, regions))


# ----------------------------------------------------------------------------------------------------------- execution


def check_step(name: str, graph: OpGraph, plan: Plan) -> None:
    """Loss and gradients are the module's, with the same random numbers."""
    model, batch = odd(name)
    parameters = [p for p in model.parameters() if p.requires_grad]
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    torch.manual_seed(3)
    wanted = model(**batch)
    gradients = torch.autograd.grad(wanted, parameters)
    torch.manual_seed(3)
    found = load(write(graph, plan))["Program"](tensors).forward(**batch)
    assert torch.equal(found, wanted)
    again = torch.autograd.grad(found, parameters)
    torch.testing.assert_close(again, gradients, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["gpt", "gpt_tied", "ladder_dropout", "shared_dropout", *ODD])
def test_a_program_that_keeps_and_lets_go_is_the_model(name, seed):
    graph, draw = odd_graph(name), random.Random(seed)
    last = len(graph.chain) - 1
    regions = plans.random_regions(0, last, draw, draw.randint(1, 3))
    check_step(name, graph, plans.with_kept(graph, whole(graph, regions), draw))


# ---------------------------------------------------------------------------------------------------- without autocast


class Rotary(nn.Module):
    """Angles and the head are computed in full precision whatever is around them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(16, 16), nn.Linear(16, 16)
        self.register_buffer("speeds", 0.7 ** torch.arange(16))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else nullcontext():
            angles = positions.unsqueeze(1) @ self.speeds.unsqueeze(0)
            wave = angles.cos()
        y = torch.tanh(self.layer(x) * wave)
        with torch.autocast("cpu", enabled=False):
            y = self.head(y)
        return F.mse_loss(y, x)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # where the processor has no bf16
@pytest.mark.parametrize("recomputes", [False, True])
def test_what_the_module_computes_without_autocast_is_so_computed(recomputes):
    torch.manual_seed(0)
    model, batch = Rotary(), {"x": torch.randn(32, 16), "positions": 1000 + 7.0 * torch.arange(32)}
    graph = trace(model, batch, amp=True)
    assert any("matmul" in graph.op(name).target or "mm" in graph.op(name).target for name in graph.prologue)
    last = len(graph.chain) - 1
    head = next(op.name for op in graph.ops if op.exact and op.name not in graph.prologue)
    regions = tuple(Region(n, n, False, ()) for n in range(len(graph.chain)))
    regions = (Region(0, last, True, regions, kept=(head,)),) if recomputes else regions
    text = write(graph, whole(graph, regions))
    assert text.count(" = without_autocast(") == 2 - recomputes
    assert text.count(" = kept(without_autocast, F.linear, ") == recomputes
    plain = re.sub(r"without_autocast(\(|, )", lambda found: "(lambda f, *a: f(*a))" + found[1], text)

    def gradients(loss: Tensor) -> list[Tensor]:
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    def found(source: str) -> list[Tensor]:
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            loss = load(source)["Program"](tensors).forward(**batch)
        return gradients(loss)

    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        wanted = model(**batch)
    assert all(map(torch.equal, found(text), gradients(wanted)))
    assert (found(plain)[0] - wanted).abs() > 1e-3, "in half precision the angles would be others"


def test_without_autocast_nothing_is_said_of_it():
    graph = gpt_graph()
    text = write(graph, whole(graph, tuple(Region(n, n, False, ()) for n in range(len(graph.chain)))))
    assert "autocast" not in text
