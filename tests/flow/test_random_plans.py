"""Any valid sharding, with any recompute, is the same step: loss and every gradient equal those of the module.

Hypothesis draws strategies for each op, storage and recompute; the written program runs on real ranks in float64.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings

from shardwright.pipeline.ir.graph import Role
from shardwright.pipeline.ir.plan import Plan
from tests import plans
from tests.asked import asked, mostly_long
from tests.ranks import run_ranks

pytestmark = pytest.mark.flow

COUNTS = {
    2: {"gpt": 7, "tied": 6, "mlp": 4, "odd": 6, "names": 4, "ladder": 4, "shared": 4, "unet": 3, "uneven": 4},
    3: {"gpt": 3, "tied": 3, "mlp": 1, "odd": 3, "names": 2, "ladder": 2, "shared": 2, "unet": 1, "uneven": 2},
}
RANDOM = [
    (n, f"{model}-{number}") for n, counts in COUNTS.items() for model, c in counts.items() for number in range(c)
]
FORCED = [(n, f"{model}-{kind}") for n in COUNTS for model in ("gpt", "tied") for kind in plans.FORCED]


def short(case: tuple[int, str]) -> bool:
    """On two ranks all with a name, a drawn plan of each model and two of the GPT; on three ranks of few models."""
    ranks, (model, _, kind) = case[0], case[1].partition("-")
    if ranks == 3:
        return model in ("odd", "uneven") and kind == "0"
    return kind in ("0", "1" if model == "gpt" else "0") or (model == "gpt" and kind in plans.FORCED)


def plan_named(name: str, ranks: int) -> Plan:
    model, _, kind = name.partition("-")
    graph = plans.graph_of(model)
    if kind in plans.FORCED:
        return plans.FORCED[kind](graph, ranks)
    return drawn(model, ranks)[int(kind)]


@cache
def drawn(model: str, ranks: int) -> list[Plan]:
    """The same every time. They are run together, which is why hypothesis does not run them itself."""
    found: list[Plan] = []

    @settings(
        max_examples=COUNTS[ranks][model], derandomize=True, database=None, deadline=None, phases=[Phase.generate]
    )
    @given(plans.any_plan(plans.graph_of(model), ranks))
    def collect(plan: Plan) -> None:
        found.append(plan)

    collect()
    return found


WRONG = {
    "gradient_not_summed": ("data_parallel", '("R", "d0", "R")', '("R", "", "R")'),
    "gradient_too_large": ("megatron", " all_reduce(", " all_reduce_both("),
    "bias_on_every_rank": ("megatron", " mask(", " sum_gradient("),
    "mean_of_means": ("zero", "mean_cross_entropy(", "own_mean("),
}


def wrong_programs(ranks: int) -> dict[str, str]:
    """Programs that differ in one conversion from a right one."""
    found = {}
    for fault, (kind, right, wrong) in WRONG.items():
        _, source = plans.lowered("gpt", plan_named(f"gpt-{kind}", ranks))
        assert right in source
        source = source.replace(right, wrong).replace("import all", "import all_reduce_both, sum_gradient, all")
        own_mean = "def own_mean(x, y, axis):\n    return F.cross_entropy(x, y) / MESH[axis]\n"
        found[f"gpt-wrong_{fault}"] = f"{source}\n\n{own_mean}"
    return found


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory, request):
    """Writes all programs for a number of ranks and runs them in one group of processes."""
    found: dict[int, list[dict[str, str]]] = {}
    names = asked(request, "name")

    def of(ranks: int) -> list[dict[str, str]]:
        if ranks not in found:
            folder: Path = tmp_path_factory.mktemp(f"plans_{ranks}_")
            for model in COUNTS[ranks]:
                plans.save_truth(model, folder / f"{model}.truth")
            for n, name in [*RANDOM, *FORCED]:
                if n == ranks and name in names:
                    _, source = plans.lowered(name.partition("-")[0], plan_named(name, ranks))
                    (folder / f"{name}.py").write_text(source)
            for name, source in wrong_programs(ranks).items():
                (folder / f"{name}.py").write_text(source)
            found[ranks] = run_ranks(ranks, plans.run_programs, str(folder))
        return found[ranks]

    return of


@pytest.mark.parametrize(("ranks", "name"), mostly_long([*RANDOM, *FORCED], short))
def test_a_plan_trains_as_the_module_does(outcomes, ranks: int, name: str) -> None:
    for rank, errors in enumerate(outcomes(ranks)):
        assert not errors[name], f"rank {rank}:\n{errors[name]}"


@pytest.mark.parametrize("fault", WRONG)
@pytest.mark.parametrize("ranks", COUNTS)
def test_a_wrong_program_is_seen(outcomes, ranks: int, fault: str) -> None:
    errors = [found[f"gpt-wrong_{fault}"] for found in outcomes(ranks)]
    assert all("of its size" in error for error in errors), errors


@pytest.mark.parametrize("model", plans.MODELS)
def test_a_plan_for_one_rank(model: str, tmp_path: Path) -> None:
    _, source = plans.lowered(model, plans.random_plan(plans.graph_of(model), 1, seed=7))
    plans.run_alone(model, source, tmp_path)


@pytest.mark.long
def test_random_plans_use_every_conversion_and_nested_recompute() -> None:
    """What the random plans are worth: all of the table occurs in them."""
    from shardwright.pipeline.sharding.conversions import TABLE

    seen, nested, states, again, every = set(), 0, 0, 0, []
    for ranks, name in RANDOM:
        plan = plan_named(name, ranks)
        program, text = plans.lowered(name.partition("-")[0], plan)
        every.append(text)
        seen |= {"".join(c for c in pair if c in "RBSP") for pair in plans.conversions_in(program)}
        nested += any(inner.recompute for region in plan.regions for inner in region.inner)
        states += bool(plan.sharding.state)
        again += bool(plan.sharding.regathered) and any(region.recompute for region in plan.regions)
    assert len(set(every)) == len(RANDOM) and seen == set(TABLE)
    texts = "".join(every)
    assert nested >= 5 and states >= 20 and again >= 10
    kept = re.findall(r"= kept\(\s*([\w.]+)", texts)
    assert {"F.linear", "all_reduce", "all_gather", "reduce_scatter", "all_to_all"} <= set(kept) and len(kept) > 300
    assert len(re.findall(r"^    del ", texts, re.M)) > 100


# ---- plans that have a name


def summed(name: str) -> bool:
    model, _, kind = name.partition("-")
    graph = plans.graph_of(model)
    program, _ = plans.lowered(model, plans.FORCED[kind](graph, 2))
    return program.reduced == {v.name: (0,) for v in graph.of_role(Role.PARAMETER)}


def conversions(name: str) -> list[str]:
    model, _, kind = name.partition("-")
    program, _ = plans.lowered(model, plans.FORCED[kind](plans.graph_of(model), 2))
    return plans.conversions_in(program)


@pytest.mark.parametrize("model", ["gpt", "tied"])
def test_data_parallel_only_sums_gradients_and_the_loss(model: str) -> None:
    assert conversions(f"{model}-data_parallel") == ["P -> R"]
    assert summed(f"{model}-data_parallel")


def test_zero_gathers_each_parameter_once() -> None:
    graph = plans.graph_of("gpt")
    found = conversions("gpt-zero")
    assert found[-1] == "P -> R"
    assert len(found) == 1 + len(list(graph.of_role(Role.PARAMETER)))
    assert all(pair.endswith("-> B") and pair.startswith("S(") for pair in found[:-1])
    assert len(conversions("tied-zero")) == len(found) - 1, "the tied parameter is gathered once for both its uses"


def test_megatron_sums_twice_per_layer_each_way() -> None:
    found = conversions("gpt-megatron")
    layers = plans.GPT["layers"]
    assert found.count("P -> R") == 2 * layers
    assert found.count("R -> B") == 2 * layers
    assert found.count("R -> P") == 2 * layers, "the biases of out and down enter once"
    assert len(found) == 6 * layers


def test_a_split_sequence_scatters_sums_and_gathers() -> None:
    """Megatron's sums in two halves: what lies between the blocks is split, and no tensor is summed whole."""
    found = conversions("gpt-sequence")
    layers = plans.GPT["layers"]
    assert found.count("P -> S(1)") == 2 * layers
    assert found.count("S(1) -> B") == 2 * layers + 1, "the head reads it as well"
    assert not {"P -> R", "P -> B"} & set(found)
