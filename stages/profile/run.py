"""Symbolic profile: what every op costs, and what the unsplit step does to a device's memory. Nothing is executed."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import torch

from shardwright.pipeline.base.errors import TraceError
from shardwright.pipeline.base.files import write_atomic
from shardwright.pipeline.base.log import QUIET, Log, get_log
from shardwright.pipeline.base.stage import Inputs, Result
from shardwright.pipeline.config import Config
from shardwright.pipeline.ir.graph import OpGraph
from shardwright.pipeline.ir.profile import Compiled, Profile, as_run
from shardwright.pipeline.ops.table import rule_of
from shardwright.pipeline.user.optimizer import build_optimizer
from shardwright.stages.profile.by_table import profile_graph, saved_bytes
from shardwright.stages.profile.costs import all_kernels, op_costs, value_types
from shardwright.stages.profile.optimizer import Build, optimizer_copies
from shardwright.stages.profile.picture import describe, draw_nothing, draw_step, table
from shardwright.stages.profile.step import profile_step

PICTURE, MODULES = "runs/profile/memory.png", "runs/profile/modules.md"


def run(inputs: Inputs, config: Config) -> Result:
    graph: OpGraph = inputs["graph"]
    device, precision = config.cluster.device.value, config.model.precision.value
    where = f"conf/train/{config.choices['train']}.yaml: optimizer"
    copies = optimizer_copies(config.train.optimizer, where, device)
    build = functools.partial(build_optimizer, config.train.optimizer, where)
    profile, why = make_profile(graph, device, precision, build, inputs.log)
    profile = replace(profile, optimizer_copies=copies)
    if config.model.compile:
        profile = replace(profile, compiled=compiled_blocks(graph, device, precision, inputs.log))
    unknown = sorted({op.target for op in graph.ops if rule_of(op) is None})
    for target in unknown:
        inputs.log.debug("%s has no rule: solve tries in which ways it can be split", target)
    files = tuple(inputs.root / name for name in (PICTURE, MODULES))
    draw = functools.partial(write_pictures, inputs.root, profile, why, config.choices["model"])
    return Result(profile, figures(profile, len(unknown)), files, draw=draw)


def make_profile(graph: OpGraph, device: str, precision: str, build: Build, log: Log) -> tuple[Profile, str]:
    """The profile, and why it is only the table's where the step cannot be run without memory."""
    from_table = profile_graph(graph, device, precision)
    try:
        step = profile_step(graph, device, "amp" if precision == "amp" else "native", build)
    except (NotImplementedError, RuntimeError) as error:  # an op that needs values cannot run without memory
        why = str(error).splitlines()[0]
        log.info("the unsplit step cannot be simulated, costs are those of the op table: %s", why)
        return from_table, why
    if step.optimizer.scaled:
        log.info("the optimizer's step is scaled from that of a small parameter: %s", step.optimizer.scaled)
    costs, types = op_costs(graph, step), value_types(graph, step)
    profile = replace(
        from_table,
        source="symbolic",
        ops=costs,
        saved_bytes=saved_bytes(as_run(graph, types), costs, from_table.storage),
        types=types,
        step=describe(graph, step),
        kernels=all_kernels(graph, step),
    )
    return profile, ""


def unsplit_profile(graph: OpGraph) -> Profile:
    """Of a graph in half precision on a GPU, without an optimizer's step."""
    no_step = functools.partial(torch.optim.SGD, lr=0.0)
    profile, why = make_profile(graph, "cuda", "bf16", no_step, get_log("price", QUIET))
    if profile.kernels is None:
        raise TraceError(f"its step cannot be simulated: {why}", where="the model", remedy="choose another")
    return profile


def compiled_blocks(graph: OpGraph, device: str, precision: str, log: Log) -> Compiled:
    """Blocks as they are compiled, measured where there is the device; else it is only known that they are."""
    from shardwright.stages.profile.compiled import measure_blocks  # torch's compiler is slow to import

    if device != "cuda" or not torch.cuda.is_available():
        log.info("compiled blocks cannot be measured here: they are priced as if they were not compiled")
        return Compiled("", (), ())
    try:
        return measure_blocks(graph, torch.device("cuda"), precision == "amp", told=log.debug)
    except (RuntimeError, AttributeError) as error:  # a block that does not fit alone, or cannot be run by itself
        log.warning("compiled blocks could not be measured (%s): priced as if not compiled", str(error).splitlines()[0])
        return Compiled("", (), ())


def write_pictures(root: Path, profile: Profile, why: str, model: str) -> None:
    step = profile.step
    title = f"{model}, unsplit, {profile.precision} on {profile.device}"
    picture = draw_step(step, title) if step else draw_nothing(title, why)
    text = table(step) if step else f"The unsplit step cannot be simulated: {why}\n"
    for name, content in ((PICTURE, picture), (MODULES, text.encode())):
        write_atomic(root / name, content)


def figures(profile: Profile, unknown: int) -> dict[str, float | int | str]:
    found: dict[str, float | int | str] = {
        "forward_gflops": round(sum(c.flops_forward for c in profile.ops.values()) / 1e9, 6),
        "backward_gflops": round(sum(c.flops_backward for c in profile.ops.values()) / 1e9, 6),
        "parameter_bytes": profile.parameter_bytes,
        "saved_bytes": profile.saved_bytes,
        "ops_without_rule": unknown,
        "source": profile.source,
    }
    if profile.step:
        found |= {
            "unsplit_peak_mb": round(profile.step.peak_bytes / 1e6, 3),
            "unsplit_peak_in": profile.step.peak_in,
            "kernels": sum(profile.step.kernels),
        }
    return found
