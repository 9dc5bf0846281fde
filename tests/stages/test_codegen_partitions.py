"""Pipelines as programs: partitions run one after another are the unsplit module, and the text says how they follow."""

from __future__ import annotations

import ast
import random
import subprocess
import sys
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch

from shardwright.pipeline.base import artifacts
from shardwright.pipeline.base.stage import Inputs
from shardwright.pipeline.config import load_config
from shardwright.pipeline.ir.graph import OpGraph, Role, TensorType, Value
from shardwright.pipeline.ir.layout import Layout, R, S
from shardwright.pipeline.ir.names import look_up
from shardwright.pipeline.ir.plan import Partition, Plan, Region
from shardwright.pipeline.ir.verify import InvalidSharding
from shardwright.pipeline.runtime.programs.source import load_program
from shardwright.pipeline.runtime_names import NAMES
from shardwright.pipeline.sharding.lowering import home_layouts
from shardwright.pipeline.sharding.partitions import crossing, part_of
from shardwright.stages.codegen import run as codegen
from shardwright.stages.codegen.partitions import sent_row, write_partitions
from tests.graphs import GRAPHS, SILENT, gpt_graph
from tests.piped_programs import compare, cut, random_cuts, run_piped
from tests.pipeline_plans import plan_with_pipelines
from tests.plans import data_parallel, graph_of, random_plan, save_truth
from tests.programs import functions, load, plan_for, uniform
from tests.ranks import run_ranks

PROJECT = Path(__file__).parents[2]


# --------------------------------------------------------------------------------------------------- equal, as it runs


def written(model: str, ranks: int, seed: int, folder: Path, micro_batches: int = 2) -> Path:
    """A random pipeline of a model, of which every partition has a random plan of its own."""
    graph, draw = graph_of(model), random.Random(seed)
    count = min(draw.choice([2, 3, 4]), len(graph.chain))
    plans = [random_plan(graph, ranks, 100 * seed + n) for n in range(count)]
    plan = cut(graph, random_cuts(graph, count, draw), plans, draw, micro_batches)
    path = folder / f"{model}-{ranks}-{seed}.py"
    path.write_text(write_partitions(graph, plan))
    if not (folder / f"{model}.truth").exists():
        save_truth(model, folder / f"{model}.truth", micro_batches)
    return path


@pytest.mark.parametrize("model", ["gpt", "tied", "ladder", "shared", "unet", "names", "odd", "mlp"])
def test_partitions_on_one_rank_are_the_unsplit_module(model: str, tmp_path: Path) -> None:
    for seed in range(3):
        compare(written(model, 1, seed, tmp_path), torch.load(tmp_path / f"{model}.truth"))


def test_one_micro_batch_needs_no_copies(tmp_path: Path) -> None:
    path = written("tied", 1, 1, tmp_path, micro_batches=1)
    compare(path, torch.load(tmp_path / "tied.truth"))
    assert load_program(str(path)).MICRO_BATCHES == 1 and "def copies" not in path.read_text()


def test_every_link_may_be_a_partition(tmp_path: Path) -> None:
    """A common value passes through partitions that do not read it."""
    graph, draw = graph_of("ladder"), random.Random(0)
    links = len(graph.chain)
    plan = cut(graph, list(range(1, links)), [data_parallel(graph, 1)] * links, draw, 2)
    (tmp_path / "ladder.py").write_text(write_partitions(graph, plan))
    save_truth("ladder", tmp_path / "ladder.truth", 2)
    compare(tmp_path / "ladder.py", torch.load(tmp_path / "ladder.truth"))
    through = [
        name
        for number in range(1, links - 1)
        for name in set(crossing(graph, number)[1:]) & set(crossing(graph, number + 1)[1:])
        if name not in graph.reads_common(graph.chain[number])
    ]
    assert through


def test_an_encoders_output_crosses_cuts(tmp_path: Path) -> None:
    """On one rank nothing is added in another order: T5's norms, in float32 by themselves, come out alike too."""
    pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    path = written("t5", 1, 0, tmp_path)
    compare(path, torch.load(tmp_path / "t5.truth") | {"near": 1e-9})
    assert "final_layer_norm_mul" in load_program(str(path)).SENT[0]


TRIED = [(model, seed) for model in ("gpt", "tied", "ladder", "shared") for seed in range(2)]


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory) -> dict[str, str]:
    """All programs on the same two ranks; what is wrong with each."""
    folder = tmp_path_factory.mktemp("piped")
    for model, seed in TRIED:
        written(model, 2, seed, folder)
    found = run_ranks(2, run_piped, str(folder))
    return {name: error or found[1][name] for name, error in found[0].items()}


@pytest.mark.parametrize(("model", "seed"), TRIED)
def test_partitions_on_two_ranks_are_the_unsplit_module(model: str, seed: int, on_two_ranks: dict[str, str]) -> None:
    assert on_two_ranks[f"{model}-2-{seed}"] == ""


def test_a_wrong_program_is_seen(tmp_path: Path) -> None:
    path = written("gpt", 1, 0, tmp_path)
    truth, text = torch.load(tmp_path / "gpt.truth"), path.read_text()
    path.write_text(text.replace("F.gelu(linear)", "F.gelu(linear) * (1 + 1e-7)"))
    with pytest.raises(AssertionError, match="differs by"):
        compare(path, truth)


# ------------------------------------------------------------------------------------------------------------ the text

Case = tuple[OpGraph, Plan, str]


@pytest.fixture(scope="module")
def chosen() -> Case:
    """What the stages would make of a GPT with tied embeddings: graph, plan, program."""
    graph, plan = GRAPHS["gpt_tied"](), plan_with_pipelines("gpt_tied", pipeline="interleaved")
    return graph, plan, write_partitions(graph, plan)


@pytest.fixture(scope="module")
def cases(chosen: Case) -> dict[str, Case]:
    """That, and pipelines of random plans."""
    found = {"chosen": chosen}
    for model in ("tied", "shared", "unet", "names", "odd", "mlp"):
        graph, draw = graph_of(model), random.Random(3)
        plans = [random_plan(graph, 2, n) for n in range(3)]
        plan = cut(graph, random_cuts(graph, 3, draw), plans, draw, 2)
        found[model] = graph, plan, write_partitions(graph, plan)
    return found


def test_the_text_is_clean(cases, tmp_path: Path) -> None:
    for name, (_, _, text) in cases.items():
        (tmp_path / f"{name}.py").write_text(text)
        assert max(map(len, text.splitlines())) <= 120 and text.endswith(")\n")
        (node,) = (
            n
            for n in ast.parse(text).body
            if isinstance(n, ast.ImportFrom) and n.module == "shardwright.pipeline.runtime"
        )
        assert {alias.name for alias in node.names} <= set(NAMES)
    options = ["--select", "E,F,I,UP,B,RUF,W", "--line-length", "120", "--target-version", "py311"]
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", *options, str(tmp_path)]
    asked = subprocess.run(command, capture_output=True, text=True)
    assert asked.returncode == 0, asked.stdout


def test_the_same_plan_gives_the_same_bytes(cases) -> None:
    for graph, plan, text in cases.values():
        again = OpGraph.from_json(graph.to_json())
        assert write_partitions(again, plan) == text


def test_how_partitions_follow_one_another_is_told(cases) -> None:
    for name, (graph, plan, text) in cases.items():
        program = load(text)
        assert program["SCHEDULE"] == plan.schedule and program["MICRO_BATCHES"] == plan.micro_batches
        assert program["SLICES"] == (plan.slices or (graph.batch,)) and "SMALLER" not in program
        assert len(program["PARTITIONS"]) == len(plan.partitions) == len(program["DEVICES"]) * plan.chunks
        for number, (one, part) in enumerate(zip(program["PARTITIONS"], plan.partitions, strict=True)):
            assert one.__name__ == f"Partition{number}" and dict(part.axes) == one.MESH
            several = f"Links {part.first} to {part.last}."
            assert one.__doc__ == (several if part.last > part.first else f"Link {part.first}.")
            assert program["DEVICES"][number % len(program["DEVICES"])] == prod(one.MESH.values()), name
    assert "partition n is on submesh n % 2" in cases["chosen"][2]


def test_what_is_sent_has_the_layouts_of_both_ends(cases) -> None:
    for graph, plan, text in cases.values():
        sent = load(text)["SENT"]
        for number, rows in enumerate(sent):
            crosses = crossing(graph, plan.partitions[number + 1].first)
            assert len(rows) == len(crosses) and next(iter(rows)) == "x"
            ends = []
            for part in plan.partitions[number : number + 2]:
                ends.append(home_layouts(part_of(graph, part.first, part.last), part.sharding))
            for value, row in zip(crosses, rows.values(), strict=True):
                assert (row["from"], row["to"]) == (str(ends[0][value]), str(ends[1][value]))
                assert row["shape"] == graph.values[value].type.shape and row["gradient"] == graph.values[value].grad
    assert any(len(rows) > 1 for rows in load(cases["shared"][2])["SENT"])


def test_what_is_sent_is_told_in_short_lines() -> None:
    value = Value("h", TensorType((131072, 131072, 131072), "bfloat16"), Role.RESULT, "h", True)
    layouts = [Layout((state, S(1), S(2))) for state in (S(0), R)]
    short, long = sent_row("x", value, *layouts), sent_row("decoder_final_layer_norm_mul", value, *layouts)
    assert len(short) > 1 or len(short[0]) <= 120
    assert len(long) == 7 and max(map(len, long)) <= 120
    row = ast.literal_eval("{" + "".join(long) + "}")["decoder_final_layer_norm_mul"]
    assert row["shape"] == value.type.shape and row["to"] == "R,S(1),S(2)" and row["gradient"] is True


def test_every_parameter_is_in_the_partitions_that_read_it(cases) -> None:
    for name, (graph, plan, text) in cases.items():
        program = load(text)
        for value in graph.of_role(Role.PARAMETER):
            readers = {op.name for op in graph.ops if value.name in op.inputs}
            holders = []
            for number, part in enumerate(plan.partitions):
                own = {op for link in graph.chain[part.first : part.last + 1] for op in link.ops}
                row = look_up(program["PARTITIONS"][number].PARAMETERS, value.origin)
                assert (row is not None) == bool(own & readers)
                assert row is None or row[0] == str(part.sharding.storage[value.origin])
                holders += [number] if row is not None else []
            assert program["TIED"].get(value.origin, tuple(holders)) == tuple(holders)
            assert (value.origin in program["TIED"]) == (len(holders) > 1), name
    assert load(cases["chosen"][2])["TIED"].keys() == {"token.weight"}


def test_equal_layers_of_all_partitions_share_functions_and_rows() -> None:
    texts = []
    for layers in (4, 6):
        graph = gpt_graph(layers)
        boundaries = [number for number, link in enumerate(graph.chain) if _module(graph, link.ops[0]) == "layers.2"]
        plan = cut(graph, boundaries[:1], [data_parallel(graph, 2)] * 2, random.Random(0), 1)
        parts = tuple(replace(part, regions=_plain(part)) for part in plan.partitions)
        texts.append(write_partitions(graph, replace(plan, partitions=parts, released=())))
    shallow, deep = texts
    assert functions(shallow) == functions(deep) and len(functions(deep)) == 7
    rows = [load(text)["PARTITIONS"][1].PARAMETERS for text in texts]
    assert len(rows[0]) == len(rows[1]) and "layers.2-5.up.weight" in rows[1] and "layers.2-3.up.weight" in rows[0]


def _module(graph: OpGraph, op: str) -> str:
    return ".".join(graph.op(op).module.split(".")[:2])


def _plain(part: Partition) -> tuple[Region, ...]:
    return tuple(Region(n, n, False, ()) for n in range(part.first, part.last + 1))


def test_regions_are_named_after_the_links_of_the_model() -> None:
    graph = graph_of("gpt")
    plan = cut(graph, [4], [data_parallel(graph, 1)] * 2, random.Random(0), 1)
    last = len(graph.chain) - 1
    again = Region(5, last - 1, True, tuple(Region(n, n, False, ()) for n in range(5, last)))
    first, second = plan.partitions
    regions = (Region(4, 4, False, ()), again, Region(last, last, False, ()))
    text = write_partitions(graph, replace(plan, partitions=(first, replace(second, regions=regions))))
    inside = text[text.index("class Partition1") :]
    assert inside.count("recompute(") == 1 and f"x = recompute(self.links_5_to_{last - 1}, x)" in inside


def test_a_last_micro_batch_that_keeps_everything_is_told() -> None:
    plan = plan_with_pipelines("gpt", pipeline="gpipe", recompute="except_last", partitions=2)
    first, second = plan.partitions
    text = write_partitions(GRAPHS["gpt"](), plan)
    assert f"x = recompute_except_last(self.links_0_to_{first.last}, " in text
    assert f"x = recompute_except_last(self.links_{second.first}_to_{second.last - 1}, x)" in text
    assert "The last micro-batch of a step keeps everything" in text and "recompute(" not in text
    always = write_partitions(GRAPHS["gpt"](), replace(plan, keeps_last=False))
    assert "last micro-batch" not in always and always.count("x = recompute(self.") == 2


def test_a_partition_takes_of_the_batch_what_it_reads(chosen: Case) -> None:
    first, *between, last = load(chosen[2])["PARTITIONS"]
    assert list(first.INPUTS) == ["input_ids"] and list(last.INPUTS) == ["labels"]
    assert not any(part.INPUTS for part in between)
    assert (
        "torch.arange" in chosen[2] and chosen[2].count("torch.arange") == 1
    )  # positions are made where they are read


# ----------------------------------------------------------------------------------------------------- what is refused


def inputs_of(folder: Path, graph: OpGraph, plan: Plan) -> Inputs:
    bodies = {"graph": graph, "plan": plan}
    return Inputs(folder, {kind: artifacts.make(kind, body, [], {}) for kind, body in bodies.items()}, SILENT, None)


def test_the_stage_writes_pipelines_and_programs(chosen: Case, tmp_path: Path) -> None:
    graph, plan, text = chosen
    given = inputs_of(tmp_path, graph, plan)
    result = codegen.run(given, load_config(PROJECT))
    told = f"\n\nThe plan's digest is {given.artifacts['plan'].digest}."
    assert told in result.body and result.body.replace(told, "") == text
    assert result.figures["functions"] == len(functions(text))
    alone = plan_for(graph, uniform(graph, 2), 2)
    whole = codegen.run(inputs_of(tmp_path, graph, alone), load_config(PROJECT)).body
    assert whole.count("\nclass ") == 1 and "\nclass Program:\n    def __init__" in whole and "PARTITIONS" not in whole


def test_a_partition_with_a_strategy_too_few_is_refused(chosen: Case, tmp_path: Path) -> None:
    graph, plan, _ = chosen
    first, *others = plan.partitions
    sharding = replace(first.sharding, strategies=dict(list(first.sharding.strategies.items())[1:]))
    damaged = replace(plan, partitions=(replace(first, sharding=sharding), *others))
    with pytest.raises(InvalidSharding, match="every op has a strategy"):
        codegen.run(inputs_of(tmp_path, graph, damaged), load_config(PROJECT))
