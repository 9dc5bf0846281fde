"""`shardwright verify`: right programs are found equal, wrong ones unequal, and the wrong line is named."""

from __future__ import annotations

import ast
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from hypothesis import given
from hypothesis import strategies as st

from shardwright.pipeline.base.stage import read
from shardwright.pipeline.config import load_config
from shardwright.pipeline.ir.graph import Role
from shardwright.pipeline.ir.layout import Layout, S
from shardwright.pipeline.ir.plan import Strategy
from shardwright.pipeline.ir.program import Call
from shardwright.pipeline.launch.work_folder import LaunchFailed
from shardwright.pipeline.ops.dims import strategies
from shardwright.pipeline.ops.table import rule_of, table
from shardwright.pipeline.sharding.conversions import gathered_together
from shardwright.pipeline.sharding.lowering import lower
from shardwright.stages.command_line import main
from shardwright.stages.verify import run as verify_run
from shardwright.stages.verify import worker
from shardwright.stages.verify.compare import Gap, everywhere
from shardwright.stages.verify.float64 import ANY, grouped_product, in_float32, in_float64, split_draws
from shardwright.stages.verify.locate import _is_lower
from shardwright.stages.verify.record import BEFORE, _steps_of, names_of
from shardwright.stages.verify.truth import ModuleKind
from shardwright.stages.verify.worker import AT, failing_line
from shardwright.stages.verify.worker import verify as verify_on_a_rank
from tests import plans, programs, shards, storage_plans
from tests.flow.project import TINY
from tests.graphs import trace
from tests.one_op import example, printed, run_printed, run_unsplit, t
from tests.ranks import run_ranks
from tests.simulated import one_after_another
from tests.verify_cases import COMPLEX, RANDOM, TRIED, Drawing, case_of, judge_all, noisy

SOURCE = Path(__file__).parents[2]
RANKS = 2
CHANGES: dict[str, dict[str, Any]] = {
    "solve": {"only": "tensor"},
    "checkpoint": {"recompute": "full"},
    "train": {"gradient_accumulation": 2, "accept_edited_module": True},
}
FILE = "runs/codegen/module.py"


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """A small GPT, split as tensors, recomputed, of two passes a step; all stages but train have run."""
    root = tmp_path_factory.mktemp("verify")
    shutil.copytree(SOURCE / "conf", root / "conf")
    (root / "code").mkdir()
    for group, content in TINY.items():
        (root / f"conf/{group}/tiny.yaml").write_text(yaml.safe_dump(content | CHANGES.get(group, {})))
    text = re.sub(rf"(?m)^({'|'.join(TINY)}): \S+", r"\1: tiny", (root / "conf/config.yaml").read_text())
    text = text.replace("code: pipeline/models", "code: code").replace("enabled: true", "enabled: false")
    (root / "conf/config.yaml").write_text(text)
    here = Path.cwd()
    os.chdir(root)
    try:
        for stage in ("trace", "profile", "cluster", "solve", "checkpoint", "codegen"):
            assert main([stage, "-q"]) == 0
    finally:
        os.chdir(here)
    return root


EDITS: dict[str, tuple[str, str, tuple[str, str, str, str]]] = {
    "a round trip through bfloat16": (
        "gelu = F.gelu(linear)",
        "gelu = F.gelu(linear).bfloat16().float()",
        ("gelu", "layers.0", "gelu = ", "a cast to bfloat16 that the model does not have"),
    ),
    "wrong in float32 alone": (
        "gelu = F.gelu(linear)",
        "gelu = F.gelu(linear) * (1.001 if linear.dtype == torch.float32 else 1)",
        ("gelu", "layers.0", "gelu = ", "in float64 all is equal, but in float32 the result of gelu differs"),
    ),
    "a factor": (
        "gelu = F.gelu(linear)",
        "gelu = F.gelu(linear) * 1.001",
        ("gelu", "layers.0", "gelu = ", "the result of gelu differs"),
    ),
    "a reduction is dropped": (
        'reduce_scatter(linear_1, axis="d0", dim=2)',
        "linear_1.chunk(2, 2)[torch.distributed.get_rank()].contiguous()",
        ("linear_5", "layers.0.down", "linear_1_s2 = ", "after its conversion P -> S(2)"),
    ),
    "a wrong dim": (
        "transpose = view.transpose(1, 2)",
        "transpose = view.transpose(1, 2).flip(2)",
        ("transpose", "layers.0.attention", "transpose = ", "the result of transpose differs"),
    ),
    "a constant": (
        'p["weight"], p["bias"], 1e-05)',
        'p["weight"], p["bias"], 1e-04)',
        ("layer_norm_4", "norm", "layer_norm = ", "the result of layer_norm_4 differs"),
    ),
    "a gradient that is not summed": (
        '"layers.*.norm_mlp.bias": ("R", "d0", "R")',
        '"layers.*.norm_mlp.bias": ("R", "", "R")',
        ("layer_norm_1", "layers.0.norm_mlp", "", "the gradient of layers.0.norm_mlp.bias is not: see its conversions"),
    ),
    "a gradient that is too small": (
        'x_b = all_gather(x, axis="d0", dim=2)  # S(2) -> B [12, 8, 16]\n    # here',
        'x_b = pipeline_gather(x, axis="d0", dim=2)\n    # here',
        ("add_4", "layers.1", "add = ", "the gradient of the result of add_4 is not: see what reads it, line"),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def judged(project) -> dict[str, dict[str, Any]]:
    """The program as it was written, and with each of the edits, in one group of ranks: text -> what a rank answers."""
    config, text = load_config(project), (project / FILE).read_text()
    _, found = read(("graph", "plan"), project)
    written = programs.write(found["graph"].body, found["plan"].body)
    jobs = {}
    for number, edited in enumerate([text, *(_edited(text, *edit[:2]) for edit in EDITS.values())]):
        path = project / f"{number}.py"
        path.write_text(edited)
        jobs[edited] = verify_run.job_of(project, config, 2, written) | {"module_path": str(path)}
    return run_ranks(RANKS, _verify_all, jobs)[0]


def _edited(text: str, old: str, new: str) -> str:
    assert old in text, old
    return text.replace(old, new).replace("import all_gather", "import gather as pipeline_gather, all_gather")


def _verify_all(jobs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {text: verify_on_a_rank(job) for text, job in jobs.items()}


# ---- the command


@pytest.fixture
def verify(project, judged, monkeypatch, capsys):
    """The command, with ranks that have answered already; its status and what it prints."""
    monkeypatch.chdir(project)
    answers = {text: dict(answer) for text, answer in judged.items()}

    def ranks(module: str, job: dict[str, Any], count: int, limit: float) -> dict[str, Any]:
        assert (module, count) == ("shardwright.stages.verify.worker", RANKS)
        answer = answers[Path(job["module_path"]).read_text()]
        if "error" in answer:
            raise LaunchFailed(answer["error"])
        return answer

    monkeypatch.setattr(verify_run, "run_ranks", ranks)
    text = (project / FILE).read_text()

    def run(edit: str = "", error: str = "", more: tuple[str, ...] = ()) -> tuple[int, list[str], list[str]]:
        edited = _edited(text, *EDITS[edit][:2]) if edit else text
        answers[edited] |= {"error": error} if error else {}
        (project / FILE).write_text(edited)
        try:
            status = main(["verify", "-q", "--steps", "2", *more])
        finally:
            (project / FILE).write_text(text)
        told = capsys.readouterr()
        return status, told.out.splitlines(), told.err.splitlines()

    return run


def test_a_right_program_is_equal(verify) -> None:
    status, lines, errors = verify()
    assert status == 0 and not errors
    assert lines[-1].startswith("equal: loss, 37 gradients; largest relative difference") and "1e-09" in lines[-1]
    assert any(re.match(r"loss +\d\.\de[-+]\d+ +1e-09 +\d", line) for line in lines)
    assert lines[-2] == "and 29 more, each nearer; --all shows them"


def test_every_gradient_is_shown_if_asked_for(verify, project) -> None:
    status, lines, _ = verify(more=("--all",))
    _, found = read(("graph",), project)
    names = {value.origin for value in found["graph"].body.of_role(Role.PARAMETER)}
    assert status == 0 and len(names) == 37
    assert {line.split()[2] for line in lines if line.startswith("gradient of ")} == names
    assert len(lines) == 1 + 1 + len(names) + 1 and "more" not in "".join(lines)


def test_what_is_said_of_random_numbers() -> None:
    result = {"casts": False, "as_written": True, "draws": True, "draw": False, "others": ["aten.rrelu_with_noise"],
              "norm_parts": []}  # fmt: skip
    told = verify_run._notes(result)
    assert "dropout is off on both sides" in told[0]
    assert told[1:] == ["numbers of one seed on both sides: aten.rrelu_with_noise"]
    assert len(verify_run._notes(result | {"others": []})) == len(verify_run._notes(result | {"draw": True})) == 1


def test_a_wrong_program_is_not(verify) -> None:
    status, lines, errors = verify("a factor")
    assert status == 1
    assert errors == ["[verify] warning: runs/codegen/module.py was edited by hand: verifying it as it is"]
    told = "\n".join(lines)
    assert re.search(r"^not equal: \d+ of 38 differ, the furthest by \d.\de-\d+, tolerance 1e-09$", told, re.MULTILINE)
    assert "op gelu, aten.gelu.default in layers.0 (gpt.py:" in told
    line = next(n for n, text in enumerate(Path(FILE).read_text().splitlines(), 1) if "F.gelu(" in text)
    assert f"{FILE}, line {line}: gelu = F.gelu(linear) * 1.001" in told
    assert re.search(r"largest difference 0\.00\d+ of values up to \d", told)


def test_a_program_that_does_not_run_is_not_equal(verify) -> None:
    status, lines, _ = verify("a factor", error=f"{AT}12: NameError: no_such")
    assert (status, lines[-1]) == (1, f"not equal: the program fails in {FILE}, line 12: NameError: no_such")


def test_ranks_that_fail_are_one_line(verify) -> None:
    status, _, errors = verify(error="it did not finish within 3 s")
    assert status == 2 and len(errors) == 1 and "did not finish within 3 s; raise timeout_s" in errors[0]


def test_the_line_of_a_program_that_fails() -> None:
    program: dict[str, Any] = {}
    exec(compile("def f():\n    g()\n\n\ndef g():\n    no_such\n", "module.py", "exec"), program)
    with pytest.raises(NameError) as caught:
        program["f"]()
    assert failing_line(caught.value, "module.py") == f"{AT}6: "
    assert failing_line(ValueError(), "module.py") == ""


@pytest.mark.parametrize(
    ("file", "old", "new", "told"),
    [
        ("conf/train/tiny.yaml", "accept_edited_module: true", "accept_edited_module: false", "does not match its dig"),
        ("conf/model/tiny.yaml", "layers: 2", "layers: 1", "other settings of model"),
        ("conf/solve/tiny.yaml", "only: tensor", "only: data", "other settings of solve"),
    ],
)
def test_a_mistake_is_one_line(project, verify, file: str, old: str, new: str, told: str) -> None:
    before = (project / file).read_text()
    assert old in before
    (project / file).write_text(before.replace(old, new))
    try:
        status, _, lines = verify("a factor")
    finally:
        (project / file).write_text(before)
    assert status == 2 and len(lines) == 1 and lines[0].startswith("error: ") and told in lines[0]


def test_nothing_to_verify_is_one_line(tmp_path, monkeypatch, capsys) -> None:
    shutil.copytree(SOURCE / "conf", tmp_path / "conf")
    (tmp_path / "pipeline/models").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert main(["verify", "-q"]) == 2
    line = capsys.readouterr().err.strip()
    assert "runs/trace/graph.json" in line and "dvc repro trace" in line and "\n" not in line


def test_a_difference_on_any_rank_is_known_to_all() -> None:
    assert run_ranks(RANKS, _differing) == [[Gap(2.0, 5.0), Gap(0.0, 0.0), Gap(1.0, 3.0)]] * RANKS


def _differing() -> list[Gap]:
    rank = dist.get_rank()
    return everywhere([Gap(2.0 * rank, 5.0), Gap(0.0, 0.0), Gap(1.0 - rank, 3.0)])


# ---- the first differing op


@pytest.mark.parametrize("name", EDITS)
def test_the_first_differing_op_is_named(project, judged, name: str) -> None:
    op, module, line, told = EDITS[name][2]
    answer = judged[_edited((project / FILE).read_text(), *EDITS[name][:2])]
    fault = answer["fault"]
    assert not answer["equal"]
    assert (fault["op"], fault["module"]) == (op, module), fault
    assert told in fault["what"] and fault["text"].startswith(line)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("cases")
    cases = {name: case_of(tried, folder / f"{n}.py") for n, (name, tried) in enumerate(TRIED.items())}
    return run_ranks(RANKS, judge_all, cases)[0]


@pytest.mark.parametrize(("name", "draws", "alike"), [("split", True, False), ("whole", True, True)])
def test_dropout(outcomes, name: str, draws: bool, alike: bool) -> None:
    """Whole it draws the module's own numbers, also a second time in a region; split it is off on both sides."""
    found = outcomes[f"dropout that is {name}"]
    assert found["equal"] and (found["draws"], found["draw"]) == (draws, alike)


@pytest.mark.parametrize("name", RANDOM)
def test_other_random_ops(outcomes, name: str) -> None:
    """Beside a dropout that is split they have the same numbers on both sides; else the module's own."""
    apart, alike = (outcomes[f"{kind} dropout and {name}"] for kind in ("split", "whole"))
    assert apart["equal"] and (apart["draws"], apart["draw"]) == (True, False), apart["fault"]
    assert alike["equal"] and (alike["draws"], alike["draw"]) == (True, True), alike["fault"]
    assert len(apart["others"]) == 1 and name.strip("_") in apart["others"][0]


@pytest.mark.parametrize("name", COMPLEX)
def test_complex_numbers_are_those_of_the_model(outcomes, name: str) -> None:
    """Gradients go through them, in shards and in summands; a conjugate that torch has not made yet is sent as one."""
    assert outcomes[name]["equal"], outcomes[name]["fault"]


def test_a_wrong_complex_value_is_named(outcomes) -> None:
    fault = outcomes["a wrong conjugate"]["fault"]
    assert fault["target"] == "aten.mul.Tensor" and "view_as_complex.conj() * unsq" in fault["text"]


def test_no_right_program_is_wrong_in_float32(outcomes) -> None:
    judged = {name: found["in_float32"] for name, found in outcomes.items() if found["equal"]}
    assert [name for name, right in judged.items() if right is False] == []
    assert sum(right is True for right in judged.values()) > 10


def test_statistics(outcomes) -> None:
    assert outcomes["statistics"]["equal"] and not outcomes["statistics"]["draws"]
    assert outcomes["statistics of rounding"]["equal"]
    wrong = outcomes["wrong statistics"]
    assert not wrong["equal"] and "gradient" not in wrong["kinds"]
    assert wrong["fault"]["op"] == "batch_norm" and "another norm.running_mean" in wrong["fault"]["what"]
    assert "batch_norm(" in wrong["fault"]["text"]


def test_statistics_of_each_rank(outcomes) -> None:
    """The module normalises each rank's samples apart; the fault is where the program does something else."""
    assert outcomes["statistics of each rank"]["equal"], outcomes["statistics of each rank"]["fault"]
    assert outcomes["deferred statistics of each rank"]["equal"]
    wrong = outcomes["wrong statistics of each rank"]
    assert wrong["kinds"] == {"buffer", "parameter"} or wrong["kinds"] == {"buffer"}
    assert "another norm.running_mean" in wrong["fault"]["what"] and "batch_norm(" in wrong["fault"]["text"]
    of_all = outcomes["each rank with statistics of all"]
    assert not of_all["equal"] and of_all["fault"]["op"] == "batch_norm"


def test_deferred_statistics(outcomes) -> None:
    assert outcomes["deferred statistics"]["equal"]
    wrong = outcomes["wrong deferred statistics"]
    assert wrong["kinds"] <= {"buffer"} and "another norm.running_mean" in wrong["fault"]["what"]


def test_an_optimizer_that_needs_whole_tensors_is_told(outcomes) -> None:
    assert "the optimizer's step 1 on shards" in outcomes["an optimizer of whole tensors"]["fault"]["what"]


def test_a_wrong_trace_is_told(outcomes) -> None:
    assert "the traced graph itself is not the module" in outcomes["a wrong trace"]["fault"]["what"]
    assert outcomes["a trace that cuts a gradient"]["fault"]["what"].endswith("another gradient of first.weight")


def test_compiled_blocks_are_compared_as_they_are_written(outcomes) -> None:
    """Several links are one function, some of them in regions."""
    assert outcomes["compiled blocks"]["equal"]
    wrong = outcomes["a wrong compiled block"]
    assert not wrong["equal"] and "tanh" in wrong["fault"]["op"] and "1.01 * torch.tanh(" in wrong["fault"]["text"]


def test_casts_are_found_by_running_the_module(outcomes) -> None:
    """As it is written the module has the rounding of float32; with its casts widened it has not."""
    found, beside = outcomes["casts"], outcomes["casts beside weights"]
    assert found["equal"] and found["casts"] and found["as_written"]
    assert found["tolerances"][1e-9] < 1e-12 < 1e-9 < found["tolerances"][1e-5] < 1e-5
    assert beside["equal"] and beside["casts"] and not beside["as_written"] and set(beside["tolerances"]) == {1e-9}
    assert not outcomes["statistics"]["casts"] and set(outcomes["statistics"]["tolerances"]) == {1e-9}


# ---- names, types, products


@pytest.mark.parametrize("schedule", programs.SCHEDULES)
@pytest.mark.parametrize("model", [*programs.ODD, "gpt", "gpt_tied", "ladder", "shared"])
def test_every_result_of_a_program_has_its_name(model: str, schedule: str) -> None:
    graph = programs.odd_graph(model)
    plan = programs.plan_for(graph, programs.uniform(graph, 2), 2, programs.SCHEDULES[schedule](graph))
    program = lower(graph, plan.sharding, plan.micro_batches)
    names = names_of(programs.write(graph, plan), program)
    readers = graph.consumers()
    for link, steps in enumerate((program.prologue, *program.links), BEFORE):
        named = {written.tensor for (number, _), written in names.items() if number == link}
        for step in steps:
            written = step.outputs if isinstance(step, Call) else (step.target,)
            assert {t for t in written if readers[t.value]} <= named


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ('a = all_gather(p["a"], axis="d0", dim=0)', 1),
        ('a, b, c = all_gather_together((p["a"], 0), (p["b"], 0, "R"), (p["c"], 1, 2), axis="d0")', 3),
        ('a, b = regather_together((p["a"], 0), (p["b"], 0), axis="d0")', 2),
        ('torch._foreach_add_([p["a.num_batches_tracked"], p["b.num_batches_tracked"]], 1)', 2),
    ],
)
def test_a_line_may_be_several_steps(text: str, count: int) -> None:
    (line,) = ast.parse(text).body
    assert _steps_of(line) == count


@pytest.mark.parametrize("way", ["zero2", "zero3"])
def test_what_one_collective_gathers_has_its_names(way: str) -> None:
    graph, plan = plans.graph_of("gpt"), storage_plans.plan_named("gpt", way)
    program = lower(graph, plan.sharding)
    names = names_of(programs.write(graph, plan), program)
    for link, steps in enumerate(program.links):
        copies = {step.target for run in gathered_together(graph, steps, plan.sizes) for step in run}
        assert copies <= {written.tensor for (number, _), written in names.items() if number == link}


def test_names_of_copies_that_are_made_once_a_step() -> None:
    graph = plans.graph_of("tied")
    plan = replace(plans.zero(graph, 2), micro_batches=3)
    program = lower(graph, plan.sharding, 3)
    names = names_of(programs.write_module(graph, plan), program)
    assert program.shared
    assert {convert.target for convert in program.shared} <= {w.tensor for (n, _), w in names.items() if n == BEFORE}


@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.integers(1, 3), st.integers(1, 3))
def test_a_product_of_groups(rows: list[int], k: int, n: int) -> None:
    """Rows, columns or what is summed in groups; the gradient of one form is another."""
    a, b = torch.randn(sum(rows), k).double(), torch.randn(len(rows), k, n).double()
    ends = torch.tensor(rows).cumsum(0).int()
    parts = torch.split(a, rows)
    wanted = torch.cat([part @ matrix for part, matrix in zip(parts, b, strict=True)])
    torch.testing.assert_close(grouped_product(a, b, ends), wanted)
    torch.testing.assert_close(grouped_product(b.mT, a.mT, ends), wanted.mT)
    torch.testing.assert_close(grouped_product(a.mT, a, ends), torch.stack([p.mT @ p for p in parts]))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_numbers_are_drawn_in_the_order_of_the_elements(order: tuple[int, ...]) -> None:
    """Not in that of the memory, which a conversion changes."""
    x = torch.ones(2, 3, 4).double()
    laid = x.permute(order).contiguous().permute([order.index(i) for i in range(3)])
    found = []
    for tensor in (x, laid):
        torch.manual_seed(3)
        with in_float64(widen=True, draws=True) as mode:
            found.append(torch.nn.functional.dropout(tensor, 0.5))
        assert mode.drew
    assert torch.equal(*found) and 0 in found[0]


def test_nothing_is_drawn_where_it_cannot_be_alike() -> None:
    with in_float64(widen=True, draws=False):
        assert torch.equal(torch.nn.functional.dropout(torch.ones(9), 0.5), torch.full((9,), 2.0))
        assert torch.equal(torch.rand(2), torch.full((2,), 0.5)) and not torch.randn_like(torch.ones(2)).any()
        assert torch.equal(torch.randint(3, 9, (2,)), torch.full((2,), 3)) and not torch.randint(9, (2,)).any()
        assert torch.equal(torch.randperm(4), torch.arange(4))


@pytest.mark.parametrize("target", sorted(target for target, rule in table().items() if rule.random))
def test_a_piece_of_what_may_be_split_is_a_shard_of_the_whole(target: str) -> None:
    """Where nothing is drawn, every op that a rule splits has a value that stands for it."""
    args = {"dropout": (t(4, 6), 0.5, True), "scaled_dot_product_attention": (*(t(4, 4, 4, 4),) * 3, None, 0.5)}
    args |= {"rand": ((4, 6),), "randn": ((4, 6),), "bernoulli": (t(4, 6, positive=True, grad=False),)}
    for name, gates in {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}.items():
        states = (t(2, 4, 6),) * 2 if name == "lstm" else t(2, 4, 6)
        weights = tuple(t(gates * 6, 6) for _ in range(4))
        args[name] = (t(3, 4, 6), states, weights, False, 2, 0.5, True, False, False)
    more = (0.4,) if target.endswith(".p") else ()
    it = example(target, *args.get(target.split(".")[1], (t(4, 6, grad=False),)), *more)
    with in_float64(widen=True, draws=False) as mode:
        made = run_unsplit(it.op, it.tensors)
        whole = made[0] if isinstance(made, tuple) else made
        for strategy in strategies(rule_of(it.op), it.view, 2):
            line, state = printed(it, strategy, 2), strategy.outputs[0].states[0]
            held = [shards.values(i.states[0], x, 2) for i, x in zip(strategy.inputs, it.tensors, strict=True)]
            found = one_after_another(2, lambda rank, line=line, held=held: run_printed(line, [x[rank] for x in held]))
            shards.check_values(state, [own[0] for own in found], whole, strategy.name, 1e-9)
    assert mode.drew and not mode.others


def test_no_other_op_takes_from_the_stream() -> None:
    """Where nothing is drawn from it: twice the same, and the stream is where it was."""
    with in_float64(widen=True, draws=False) as mode:
        before = torch.default_generator.get_state()
        for draw in RANDOM.values():
            y = torch.arange(-2.0, 4.0).expand(4, 6)  # above zero rrelu draws nothing
            assert torch.equal(draw(y), draw(y.t().contiguous().t()))
        assert torch.equal(before, torch.default_generator.get_state())
        torch.nn.functional.scaled_dot_product_attention(*torch.ones(3, 1, 1, 2, 8))
    assert len(mode.others) == len(RANDOM), "attention without dropout draws nothing"


def test_a_random_op_that_ones_own_rule_splits_cannot_be_compared() -> None:
    graph = trace(Drawing(noisy), {"x": torch.randn(4, 6)})
    (name,) = (op.name for op in graph.ops if "noisy" in op.target)
    whole = programs.uniform(graph, 2)
    assert split_draws(graph, [whole], ("shardwright_verify.noisy",)) == ""
    split = Strategy("a", (Layout((S(0),)),), (Layout((S(0),)),))
    apart = replace(whole, strategies={**whole.strategies, name: split})
    assert split_draws(graph, [apart], ("shardwright_verify.noisy",)) == "shardwright_verify.noisy.default"
    assert split_draws(graph, [apart], ()) == "", "it is found out by running the module"


def test_a_type_below_that_of_the_model_is_noted() -> None:
    """Also float32, of a model in float64: in float64 such a cast is widened, in float32 nothing of it is seen."""
    with in_float32(draws=False, path=ANY) as mode:
        torch.ones(2, dtype=torch.float64).float().double()
    assert set(mode.asked) == {(torch.float32, 1)}
    assert _is_lower(torch.bfloat16, torch.float32) and _is_lower(torch.float32, torch.float64)
    assert not _is_lower(torch.float32, torch.float32) and not _is_lower(torch.float64, torch.float32)
    assert _is_lower(torch.float16, torch.bfloat16) and not _is_lower(torch.complex64, torch.float32)


def test_casts_are_looked_at_where_numbers_cannot_be_compared(monkeypatch) -> None:
    fault = worker.Fault("a cast to bfloat16 that the model does not have")
    found = SimpleNamespace(step=None, asked=(), equal=False)
    monkeypatch.setattr(worker, "load_program", lambda *_, **__: None)
    monkeypatch.setattr(worker, "judge_in_float32", lambda *given: found if given[-1] == 1 else None)
    one_rank = SimpleNamespace(get_world_size=lambda: 1, all_gather_object=lambda found, own: found.__setitem__(0, own))
    monkeypatch.setattr(worker, "dist", one_rank)
    setting = SimpleNamespace(optimizer=None, module=None, batches=[[]])
    case = SimpleNamespace(path="")
    truth = SimpleNamespace(batch_norm="exact", kind=ModuleKind(False, True, True, ("aten.rrelu",)), draw=False)
    for told in (fault, None):
        monkeypatch.setattr(worker, "foreign_cast", lambda *_, told=told: told)
        result = worker._in_float32(setting, case, SimpleNamespace(judged=[]), truth)
        assert result["equal"] is (told is None) and result["float32"] is None


def test_types_are_widened() -> None:
    kept = torch.ones(2, 2)
    with in_float64(widen=True, draws=True) as mode:
        made = [torch.zeros(2, dtype=torch.float32), torch.tensor([1.5], dtype=torch.bfloat16), torch.ones(2).float()]
        assert all(t.dtype is torch.float64 for t in made) and mode.casts == {torch.float32}
        assert (kept @ torch.ones(2)).dtype is torch.float64
    assert torch.get_default_dtype() is torch.float32
