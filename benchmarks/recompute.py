"""Recompute on a GPU: our schedules beside what PyTorch offers: `python -m benchmarks.recompute`.

Models with random weights in bf16 autocast (float32 weights, AdamW). In this order:

    trace   the models as graphs
    peers   nothing recomputed; every block recomputed; `checkpoint_sequential` over the blocks with 2, 3... segments;
            `activation_memory_budget` of torch.compile at several fractions
    blocks  of each model, compiled: what they take and what they keep
    plan    for the peak of every peer, and for budgets from what keeping everything takes down to the tightest: our
            schedule within it, as a program of compiled blocks
    ours    those programs

Peak is the most that torch has allocated in a step, time the median step, steps following one another. Tracing and
planning need no GPU and the others torch and transformers alone, so each may run on a machine of its own:
`--only peers --folder DIR` and so on, with the same folder; where the GPU is there for minutes, `--only blocks --ways
keeps` and then `--ways cheapest` for a model. With `--eager` our programs are not compiled.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from benchmarks.measure_steps import image, locate, text
from benchmarks.recompute_report import EQUAL, report
from shardwright.pipeline.ir.codec import decode, encode
from shardwright.pipeline.ir.graph import OpGraph
from shardwright.pipeline.ir.profile import Compiled
from shardwright.pipeline.runtime import compiled
from shardwright.pipeline.runtime.programs.source import load_program
from shardwright.stages.profile.compiled import KEEPS, measure_blocks, worth_choosing

PARTS = ("trace", "peers", "blocks", "plan", "ours")
WAYS = {"keeps": {"cheapest": ()}, "cheapest": {"keeps": KEEPS[:1]}}
WARM_UP, STEPS = 3, 7
FRACTIONS = "1.0,0.8,0.5"  # of torch.compile's memory budget
BUDGETS = 8  # of ours, between keeping everything and the tightest
LIBRARIES = 73e6  # bytes that the card's libraries hold, on an H200
CLOSE = 1.03  # peers whose peaks are this close share a budget: the lower one


def row(family: str, task: str, config: dict[str, Any], batch: dict[str, Any], blocks: str) -> dict[str, Any]:
    return {
        "mode": "amp",
        "model_class": f"transformers.{family}{task}",
        "config_class": f"transformers.{family}Config",
        "config": config,
        "batch": batch,
        "blocks": blocks,  # the modules that are recomputed one by one: where they are, with * for a number
    }


MODELS = {
    "gpt2-medium": row(
        "GPT2", "LMHeadModel", {"n_layer": 24, "n_embd": 1024, "n_head": 16, "use_cache": False},
        text(16, 1024, 50257), "transformer.h.*",
    ),
    "resnet50": row(  # a batch of 256 takes the card 38 ms, and a host in Python 36 to 45
        "ResNet", "ForImageClassification", {"num_labels": 1000}, image(512, 224), "resnet.encoder.stages.*.layers.*"
    ),
    "llama": row(
        "Llama", "ForCausalLM",
        {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 16, "num_attention_heads": 32,
         "num_key_value_heads": 8, "vocab_size": 32000, "use_cache": False},
        text(8, 1024, 32000), "model.layers.*",
    ),
}  # fmt: skip


# -------------------------------------------------------------------------------------------------------- measuring


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, help="one part, the others from the folder")
    parser.add_argument("--folder", type=Path, default=Path("runs/recompute"), help="where results and programs lie")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--eager", action="store_true", help="our programs without torch.compile")
    parser.add_argument(
        "--ways", choices=WAYS, help="blocks with torch's choice of what they keep alone; then the other, added"
    )
    parser.add_argument("--fractions", default=FRACTIONS, help="memory budgets of torch.compile, which takes minutes")
    parser.add_argument(
        "--calibration", type=Path, help="a file of benchmarks.measure_steps; else the card is measured"
    )
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    folder, names = arguments.folder, arguments.models.split(",")
    folder.mkdir(parents=True, exist_ok=True)
    state = folder / "state.json"
    found: dict[str, Any] = json.loads(state.read_text()) if state.exists() else {"peers": {}, "ours": {}}
    parts = (arguments.only,) if arguments.only else PARTS
    for part in parts:
        for name in names:
            run_part(part, name, found, arguments)
            state.write_text(json.dumps(found))
    if "ours" in parts:
        print(report(found))
    return 0


def run_part(part: str, name: str, found: dict[str, Any], arguments: argparse.Namespace) -> None:
    folder: Path = arguments.folder
    if part == "trace":
        from benchmarks.profile_accuracy import trace_row  # measuring needs none of what it imports

        (folder / f"{name}.json").write_text(json.dumps(encode(trace_row(MODELS[name]))))
    elif part == "peers":
        if "calibration" not in found:
            found["calibration"] = _calibration(arguments.calibration)
        found["peers"].setdefault(name, {}).update(
            peers(name, [float(part) for part in arguments.fractions.split(",") if part])
        )
    elif part == "blocks" and not arguments.eager:
        amp, card = MODELS[name]["mode"] == "amp", torch.device("cuda")
        told = functools.partial(print, name, flush=True)
        blocks = measure_blocks(graph_of(name, folder), card, amp, told=told, **WAYS.get(arguments.ways, {}))
        if arguments.ways == "cheapest":
            blocks = with_ways_of(blocks, decode(Compiled, found["blocks"][name]))
        found.setdefault("blocks", {})[name] = encode(blocks)
        _forget()
    elif part == "plan":
        found["ours"][name] = plan_all(name, found, arguments)
    elif part == "ours":
        torch._dynamo.config.fail_on_recompile_limit_hit = True  # else it would go on without compiling
        torch._dynamo.config.recompile_limit = 64
        known: dict[bytes, Any] = {}  # several budgets may have one program
        for one in found["ours"][name]:
            source = folder / f"{one['name']}.py"
            known[source.read_bytes()] = known.get(source.read_bytes()) or ours(name, source)
            one["measured"] = known[source.read_bytes()]
            print(one["name"], one["measured"], flush=True)


def with_ways_of(blocks: Compiled, others: Compiled) -> Compiled:
    """Of one model: what both know, of which the first of each run is that in which all is kept."""
    runs = zip(blocks.runs, others.runs, strict=True)
    return replace(blocks, runs=tuple(worth_choosing([*own, *other[1:]]) for own, other in runs))


def graph_of(name: str, folder: Path) -> OpGraph:
    return decode(OpGraph, json.loads((folder / f"{name}.json").read_text()))


def _calibration(path: Path | None) -> Any:
    from benchmarks.measure_steps import calibrate

    return json.loads(path.read_text())["calibration"] if path else calibrate()


def build(model: dict[str, Any], device: str = "cuda") -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    with torch.device(device):
        module = locate(model["model_class"])(locate(model["config_class"])(**model["config"])).train()
    draw = torch.Generator().manual_seed(1)
    batch = {}
    for name, spec in model["batch"].items():
        if "float" in spec["dtype"]:
            batch[name] = torch.randn(spec["shape"], generator=draw).to(device)
        else:
            batch[name] = torch.randint(spec["high"], spec["shape"], generator=draw).to(device)
    return module, batch


def measure(loss_of: Callable[[], Tensor], parameters: list[nn.Parameter]) -> dict[str, float]:
    """The peak of a step in bytes, its milliseconds, and the loss of the first one."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-5)
    first = 0.0

    def step() -> float:
        nonlocal first
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            loss = loss_of()
        loss.backward()
        first = first or float(loss.detach())
        del loss
        optimizer.step()
        return first

    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
    for mark in marks[:-1]:  # the host runs ahead of the card, as in training
        mark.record()
        step()
    marks[-1].record()
    torch.cuda.synchronize()
    times = [start.elapsed_time(end) for start, end in pairwise(marks)]
    return {"peak": torch.cuda.max_memory_allocated(), "ms": statistics.median(times), "loss": first}


def blocks_of(module: nn.Module, pattern: str) -> list[tuple[nn.Module, str, nn.Module]]:
    """(its parent, its name there, block) in the order of the model."""
    wanted = pattern.split(".")
    found = []
    for name, block in module.named_modules():
        parts = name.split(".")
        if len(parts) == len(wanted) and all(w in ("*", p) for w, p in zip(wanted, parts, strict=True)):
            found.append((module.get_submodule(name.rpartition(".")[0]), parts[-1], block))
    return found


class Recomputed(nn.Module):
    """A block whose activations are dropped."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any, **named: Any) -> Any:
        return checkpoint(self.block, *args, use_reentrant=False, **named)


class Passed(nn.Module):
    """Stands for a block that has been run with the first one."""

    def forward(self, x: Any, *_: Any, **__: Any) -> Any:
        return x


class Sequential(nn.Module):
    """All blocks by `checkpoint_sequential`, where the first of them stands."""

    def __init__(self, blocks: list[nn.Module], segments: int) -> None:
        super().__init__()
        self.blocks, self.segments = nn.ModuleList(blocks), segments

    def forward(self, x: Tensor, *args: Any, **named: Any) -> Any:
        single = True

        def run(block: nn.Module, x: Tensor) -> Tensor:
            nonlocal single
            result = block(x, *args, **named)
            single = isinstance(result, Tensor)
            return result if single else result[0]

        functions = [functools.partial(run, block) for block in self.blocks]
        x = checkpoint_sequential(functions, self.segments, x, use_reentrant=False)
        return x if single else (x,)


def per_block(module: nn.Module, pattern: str) -> None:
    for parent, name, block in blocks_of(module, pattern):
        setattr(parent, name, Recomputed(block))


def sequential(module: nn.Module, pattern: str, segments: int) -> None:
    found = blocks_of(module, pattern)
    for number, (parent, name, _) in enumerate(found):
        setattr(parent, name, Passed() if number else Sequential([block for *_, block in found], segments))


def peers(name: str, fractions: list[float]) -> dict[str, Any]:
    model = MODELS[name]
    count = len(blocks_of(build(model)[0], model["blocks"]))
    ways: dict[str, Callable[[nn.Module], Any]] = {
        "none": lambda module: module,
        "per block": lambda module: per_block(module, model["blocks"]),
    }
    for segments in sorted({2, 3, 4, 5, 6, 8, count // 2, count}):
        ways[f"sequential {segments}"] = functools.partial(sequential, pattern=model["blocks"], segments=segments)
    ways |= {f"compile {part}": functools.partial(_compiled, fraction=part) for part in fractions}
    found = {}
    for label, change in ways.items():
        found[label] = _attempt(model, change)
        print(f"{name:12} {label:16} {found[label]}", flush=True)
    return found


def _compiled(module: nn.Module, fraction: float) -> Any:
    import torch._functorch.config as settings

    torch._dynamo.reset()
    settings.activation_memory_budget = fraction
    return torch.compile(module)


def _attempt(model: dict[str, Any], change: Callable[[nn.Module], Any]) -> dict[str, Any]:
    start = time.perf_counter()
    try:
        module, batch = build(model)
        changed = change(module)
        changed = module if changed is None else changed
        result = measure(lambda: changed(**batch).loss, list(module.parameters()))
    except Exception as error:  # a peer that cannot do a model says so
        result = {"error": f"{type(error).__name__}: {error}"[:300]}
    module = batch = changed = None  # type: ignore[assignment]
    _forget()
    return result | {"seconds": round(time.perf_counter() - start, 1)}


def _forget() -> None:
    gc.collect()
    torch.cuda.empty_cache()


_compiled_code: dict[tuple[CodeType, float, tuple[tuple[str, Any], ...]], Any] = {}


def compiled_once(function: FunctionType, keeps: float, **how: Any) -> Any:
    """As the runtime compiles it, but a function that several programs have once, and quickly: calls in Python."""
    code = function.__code__.replace(co_filename="", co_firstlineno=1)
    way = (code, keeps, tuple(sorted(how.items())))
    if way not in _compiled_code:
        _compiled_code[way] = compiled(function, keeps, "python", **how)
    return _compiled_code[way]


def load(path: Path) -> ModuleType:
    with patch("shardwright.pipeline.runtime.compiled", compiled_once):
        return load_program(str(path))


def ours(name: str, source: Path) -> dict[str, Any]:
    program = load(source)

    def change(module: nn.Module) -> Any:
        tensors = {**dict(module.named_buffers()), **dict(module.named_parameters())}
        running = program.Program(tensors)
        names = list(program.INPUTS)

        class Ours:
            def __call__(self, **batch: Tensor) -> Any:
                return type("Result", (), {"loss": running.forward(**{n: batch[n] for n in names})})

        return Ours()

    return _attempt(MODELS[name], change)


# --------------------------------------------------------------------------------------------------------- planning


def plan_all(name: str, found: dict[str, Any], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    from benchmarks.recompute_plans import Planner  # measuring needs none of what it imports

    folder: Path = arguments.folder
    blocks = None if arguments.eager else decode(Compiled, found["blocks"][name])
    planner = Planner(graph_of(name, folder), found["calibration"], blocks)
    wanted = {int(budget + LIBRARIES) for budget in planner.budgets(BUDGETS)}
    for budget in sorted(int(one["peak"] * EQUAL) for one in found["peers"][name].values() if "error" not in one):
        wanted |= set() if any(budget <= known < budget * CLOSE for known in wanted) else {budget}
    rows = []
    for budget in sorted(wanted, reverse=True):
        one = planner.schedule(int(budget - LIBRARIES))
        if one is not None:
            one |= {"name": f"{name}_{len(rows)}", "budget": budget}
            (folder / f"{one['name']}.py").write_text(one.pop("text"))
            rows.append(one)
            told = f"{budget / 1e9:8.2f} GB {one['predicted_ms']:8.1f} ms"
            print(f"{name:12}{told}  {one['regions'][:80]}", flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(main())
