"""Every way to store parameters, alone and beside tensor parallelism, trains as the unsplit module does.

DDP, ZeRO-1, ZeRO-2's memory and ZeRO-3 on one to three axes, in float64 on real ranks: the losses of three steps of
AdamW with weight decay, all gradients and the parameters after them are the module's; the optimizer's state is the
shard's. So do steps of several micro-batches.
"""

from __future__ import annotations

import time
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest

from shardwright.pipeline.cost.step import Workload
from shardwright.pipeline.ir.graph import Role
from shardwright.pipeline.runtime.step.memory import Tally
from shardwright.stages.checkpoint.describe import describe
from tests import plans, storage_plans
from tests.asked import asked, mostly_long
from tests.programs import SCHEDULES
from tests.ranks import run_ranks
from tests.stages.test_codegen import ruff
from tests.storage_plans import NAMED, plan_named

pytestmark = pytest.mark.flow

MODELS = ("gpt8", "tied8", "mlp8")
RECOMPUTED = ("zero2", "zero3", "zero3_on_both", "zero3_tp", "zero3_also_on_tp", "ddp_zero1")
CASES = [(NAMED[name].sizes, f"{model}-{name}") for name in NAMED for model in MODELS]
CASES = [case for case in CASES if len(case[0]) < 3 or case[1].startswith("gpt8")]  # eight processes are many
CASES += [(NAMED[name].sizes, f"gpt8-{name}-{schedule}") for name in RECOMPUTED for schedule in ("threes", "deep")]
MICRO_BATCHED = [f"gpt8x3-{name}" for name in ("ddp", "zero1", "zero2-threes", "zero3", "zero3-deep", "zero3_tp")]
MICRO_BATCHED += [f"tied8x3-{name}" for name in ("zero1", "zero2", "zero2-threes", "zero3", "zero2_tp")]
MICRO_BATCHED += ["gpt8x3-zero1_also_on_tp", "mlp8x3-ddp_zero1"]
CASES += [(NAMED[case.split("-")[1]].sizes, case) for case in MICRO_BATCHED]
SHARDED = ("zero1", "zero2", "zero3", "zero3-deep", "ddp_zero1", "ddp_zero3", "zero1_tp", "zero3_tp")
CASES += [(NAMED[name.split("-")[0]].sizes, f"uneven-{name}") for name in SHARDED]  # shards that are not equal
SHORT = ("tied8-zero3", "tied8-zero2_tp", "mlp8-zero1", "mlp8-ddp_zero1", "gpt8-zero3-deep", "gpt8-ddp_zero1-threes")
SHORT += (
    "gpt8x3-zero2-threes",
    "gpt8x3-zero3_tp",
    "tied8x3-zero2",
    "uneven-zero1",
    "uneven-ddp_zero3",
    "uneven-zero3_tp",
)


def short(case: tuple[tuple[int, ...], str]) -> bool:
    """Each way of storing once, on up to two axes; the rest of what differs once or twice."""
    sizes, name = case
    return name in SHORT or (len(sizes) < 3 and name.removeprefix("gpt8-") in NAMED) or name == "gpt8-ddp_zero1_tp"


def source_of(case: str) -> str:
    counted, name, *schedule = case.split("-")
    model, _, micro_batches = counted.partition("x")
    regions = SCHEDULES[schedule[0]](plans.graph_of(model)) if schedule else ()
    plan = replace(plan_named(model, name, regions), micro_batches=int(micro_batches or 1))
    return plans.lowered(model, plan)[1]


WRONG = {  # a plan on one axis, what is right in its program, and what is not
    "sum_forgotten": ("zero1", '("R", "d0", "S(0)")', '("R", "", "S(0)")'),
    "gradient_not_scattered": ("zero3", " regather(", " gather("),
}


def wrong_programs() -> dict[str, str]:
    found = {}
    for fault, (name, right, wrong) in WRONG.items():
        source = source_of(f"gpt8-{name}")
        assert right in source
        source = source.replace(
            "from shardwright.pipeline.runtime",
            "from shardwright.pipeline.runtime import gather\nfrom shardwright.pipeline.runtime",
            1,
        )
        source = source.replace(right, wrong)
        found[f"gpt8-wrong_{fault}"] = source
    return found


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory, request):
    """Writes all programs for a mesh and runs them in one group of processes."""
    found: dict[tuple[int, ...], list[dict[str, str]]] = {}
    cases = asked(request, "case")

    def of(sizes: tuple[int, ...]) -> list[dict[str, str]]:
        if sizes not in found:
            folder: Path = tmp_path_factory.mktemp("storage_plans")
            plans.save_truth("uneven", folder / "uneven.truth")
            for model in MODELS:
                plans.save_truth(model, folder / f"{model}.truth")
                plans.save_truth(model, folder / f"{model}x3.truth", micro_batches=3)
            for mesh, case in CASES:
                if mesh == sizes and case in cases:
                    (folder / f"{case}.py").write_text(source_of(case))
            for case, source in wrong_programs().items() if sizes == (2,) else ():
                (folder / f"{case}.py").write_text(source)
            found[sizes] = run_ranks(prod(sizes), plans.run_programs, str(folder))
        return found[sizes]

    return of


@pytest.mark.parametrize(("sizes", "case"), mostly_long(CASES, short), ids=str)
def test_parameters_stored_in_any_way_train_as_the_module_does(outcomes, sizes: tuple[int, ...], case: str) -> None:
    for rank, errors in enumerate(outcomes(sizes)):
        assert not errors[case], f"rank {rank}:\n{errors[case]}"


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_program_is_seen(outcomes, fault: str) -> None:
    errors = [found[f"gpt8-wrong_{fault}"] for found in outcomes((2,))]
    assert all("of its size" in error for error in errors), errors


# ---- what autograd keeps


def bytes_after_forward(folder: str) -> dict[str, int]:
    """On a rank: what each program holds between forward and backward, parameters and the batch aside."""
    truths = {path.stem: plans.load_truth(path) for path in Path(folder).glob("*.truth")}
    found = {}
    for path in sorted(Path(folder).glob("*.py")):
        run = plans.prepare(path, truths[path.name.partition("-")[0]])
        resident = [*run.tensors.values(), *run.batch.values(), *run.gradients.buffers()]
        tally = Tally(resident)
        before = tally.peak
        with tally:
            loss = run.step.forward(**run.batch)
        found[path.stem] = settled(tally) - before
        loss.backward()
    return found


def settled(tally: Tally) -> int:
    """A thread that sent tensors lets go of them a little later than it says so, on a busy machine."""
    found = []
    for _ in range(20):
        time.sleep(0.01)
        found.append(tally.weigh())
    return min(found)


KEPT = ("ddp", "zero1", "zero2", "zero3")


@pytest.mark.parametrize("model", MODELS)
def test_a_regathered_copy_is_not_kept(model: str, tmp_path: Path) -> None:
    """What the ranks really hold after forward differs from way to way by just what the price says."""
    plans.save_truth(model, tmp_path / f"{model}.truth")
    graph, predicted = plans.graph_of(model), {}
    for name in KEPT:
        plan = plan_named(model, name)
        (tmp_path / f"{model}-{name}.py").write_text(plans.lowered(model, plan)[1])
        workload = Workload(graph, storage_plans.profile_of(model), storage_plans.cluster((2,)), 2, plan.micro_batches)
        price = workload.priced(plan.sharding).step
        predicted[name] = sum(link.memory.kept for link in price.links) + price.shared_bytes // 2
    for held in run_ranks(2, bytes_after_forward, str(tmp_path)):
        measured = {name: held[f"{model}-{name}"] for name in KEPT}
        assert measured["zero1"] == measured["ddp"] == measured["zero3"]
        assert measured["zero2"] - measured["zero3"] == predicted["zero2"] - predicted["zero3"] > 0
        assert predicted["zero1"] == predicted["ddp"] == predicted["zero3"]


# ---- what the programs say


@pytest.mark.parametrize("name", ["zero1", "zero3"])
def test_shards_that_do_not_divide_are_padded(name: str) -> None:
    """17 words on two ranks: room for nine on each."""
    rows, (_, text) = {"zero1": '("R", "d0", "S(0)")', "zero3": '("S(0)", "", "S(0)")'}, program_of("uneven", name)
    assert f'"token.weight": {rows[name]},' in text and f'"norm.bias": {rows[name]},' in text
    assert ("dim=0, size=17)  # S(0) -> B [17, 15]" in text) == (name == "zero3")


def test_the_text_is_clean(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    for case in asked(request, "case"):
        text = source_of(case)
        (tmp_path / f"{case}.py").write_text(text)
        assert max(map(len, text.splitlines())) <= 120, case
    assert ruff(tmp_path) == ""


def program_of(model: str, name: str):
    return plans.lowered(model, plan_named(model, name))


@pytest.mark.parametrize(
    ("name", "axes"),
    [("ddp", (0,)), ("zero1", (0,)), ("ddp_ddp", (0, 1)), ("zero1_on_both", (0, 1)), ("ddp_zero1", (0, 1)),
     ("ddp_tp", (0,)), ("zero1_tp", (0,)), ("zero1_also_on_tp", (0,)), ("ddp_zero2", (0,)), ("ddp_zero3", (0,)),
     ("ddp_zero1_tp", (0, 1)), ("ddp_zero3_tp", (0,))],
)  # fmt: skip
def test_gradients_are_summed_over_the_axes_of_the_batch_alone(name: str, axes: tuple[int, ...]) -> None:
    program, _ = program_of("gpt8", name)
    parameters = [v.name for v in plans.graph_of("gpt8").of_role(Role.PARAMETER)]
    assert program.reduced == dict.fromkeys(parameters, axes)


@pytest.mark.parametrize("name", ["ddp_tp", "zero1_tp", "zero1_also_on_tp"])
def test_beside_tensor_parallelism_only_activations_and_the_biases_of_rows_are_converted(name: str) -> None:
    program, _ = program_of("gpt8", name)
    values = plans.graph_of("gpt8").values
    converted = [values[step.source.value] for step in program.conversions()]
    origins = {value.origin for value in converted if value.role is Role.PARAMETER}
    rows = ("attention.out.bias", "down.bias")  # each is added once
    assert origins == {f"layers.{layer}.{row}" for layer in range(2) for row in rows}


@pytest.mark.parametrize(
    ("name", "stored"),
    [("ddp", "37xR;"), ("zero1", "37xR (state S(0));"), ("zero2", "37xS(0);"), ("zero3", "37xS(0) (regathered);")],
)
def test_a_plan_in_one_line(name: str, stored: str) -> None:
    assert f"parameters {stored}" in describe(plans.graph_of("gpt8"), plan_named("gpt8", name))


@pytest.mark.parametrize("model", ["gpt8", "tied8"])
def test_zero_3_gathers_in_every_link_and_zero_2_once(model: str) -> None:
    count = len(list(plans.graph_of(model).of_role(Role.PARAMETER)))
    kept, again = (program_of(model, name) for name in ("zero2", "zero3"))
    assert len([s for s in kept[0].conversions() if str(s.source.layout) == "S(0)"]) == count
    regathered = [s for s in again[0].conversions() if s.again]
    assert len(regathered) == count + (model == "tied8") and not again[0].shared
    assert "regather(" not in kept[1] and "all_gather(" not in again[1]
    assert "        with keep_shards():\n" in again[1] and "keep_shards" not in kept[1]
