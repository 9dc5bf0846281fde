"""Keys that go together: in one file of conf/cluster or conf/checkpoint, and in files of several groups.

Whether a pipeline exists (its boundaries, numbers of micro-batches, memory) is for the stages to say, which know the
model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from shardwright.pipeline.base.errors import ConfigError
from shardwright.pipeline.config.schema import (
    MOST_DEVICES,
    BatchNorm,
    Checkpoint,
    ClusterSettings,
    ClusterSource,
    Config,
    Decay,
    Pipeline,
    Recompute,
    TrainEngine,
)
from shardwright.pipeline.config.source import Key, Source, dotted

SourceOf = Callable[[str], Source]  # reads the file of a group once more, to name the line

PIPELINE_AXIS = "pp"  # in `mesh` of conf/solve: partitions of equal meshes
OFF, SOLVED, INTERLEAVED = Pipeline("off"), Pipeline("solve"), Pipeline("interleaved")
LAST_ALONE = "set it to never, which needs no more memory without a pipeline, always or optimal"
NAMED = f"one of {', '.join(own for own in Pipeline if own is not OFF)}"


def check_cluster(cluster: ClusterSettings, source: Source) -> Iterator[ConfigError]:
    """A cluster that is measured says who takes part; one that is not measured is described in full."""
    if cluster.source is not ClusterSource.probe:
        yield from list(_check_hosts_described(cluster, source)) or _check_figures(cluster, source)
        return
    if cluster.nodes > 1 or cluster.per_host:
        key = "per_host" if cluster.per_host else "nodes"
        yield source.error((key,), "'probe' counts the hosts that join", "name them in `probe.hosts`")
    if twice := _twice(cluster.probe.hosts):
        remedy = "name each host once, `devices` counts its devices"
        yield source.error(("probe", "hosts"), f"names {twice} twice", remedy)


def _check_hosts_described(cluster: ClusterSettings, source: Source) -> Iterator[ConfigError]:
    sizes = cluster.host_sizes
    if cluster.per_host and cluster.nodes not in (1, len(sizes)):
        reason = f"got {cluster.nodes}, and `per_host` lists {len(sizes)} hosts"
        yield source.error(("nodes",), reason, "leave it out, `per_host` counts the hosts")
    if cluster.per_host and cluster.devices != max(sizes):
        reason = f"got {cluster.devices}, and the largest host of `per_host` has {max(sizes)}"
        yield source.error(("devices",), reason, f"write {max(sizes)}, or leave `per_host` out where hosts are alike")
    if sum(sizes) > MOST_DEVICES:
        yield source.error(("devices",), f"got {sum(sizes)} devices, expected at most {MOST_DEVICES}")


def _check_figures(cluster: ClusterSettings, source: Source) -> Iterator[ConfigError]:
    preset, sizes = cluster.preset, cluster.host_sizes
    island = preset.island or max(sizes)
    figures: dict[Key, float | None] = {
        ("memory_gb",): cluster.memory_gb,
        ("preset", "matmul_gflops"): preset.matmul_gflops,
        ("preset", "memory_gbytes_per_s"): preset.memory_gbytes_per_s,
    }
    if max(sizes) > 1 and island > 1:
        figures[("preset", "latency_us")] = preset.latency_us
        figures[("preset", "link_gbytes_per_s")] = preset.link_gbytes_per_s
    if max(sizes) > island:
        figures[("preset", "cross_gbytes_per_s")] = preset.cross_gbytes_per_s
    if len(sizes) > 1:
        figures[("preset", "network_latency_us")] = preset.network_latency_us
        figures[("preset", "network_gbytes_per_s")] = preset.network_gbytes_per_s
    missing = [dotted(key) for key, value in figures.items() if value is None]
    if missing:
        remedy = "give a number, or set `source: probe` to measure"
        yield source.error(("source",), f"'{cluster.source.value}' needs {', '.join(missing)}", remedy)


def _twice(names: list[str] | None) -> str | None:
    return next((name for number, name in enumerate(names or []) if name in (names or [])[:number]), None)


def check_checkpoint(settings: Checkpoint, source: Source) -> Iterator[ConfigError]:
    if settings.every_blocks is not None and settings.recompute is not Recompute.every:
        yield source.error(("every_blocks",), f"is not read with `recompute: {settings.recompute}`", "leave it out")
    for key in ("partitions", "boundaries"):
        if getattr(settings, key) is not None and settings.pipeline is OFF:
            yield source.error((key,), "is for pipelines, and `pipeline` is off", f"set `pipeline` to {NAMED}")
    names = settings.boundaries or []
    if twice := _twice(names):
        yield source.error(("boundaries",), f"names {twice} twice", "name each module once")
    if names and settings.partitions not in (None, len(names) + 1):
        reason = f"got {settings.partitions}, and `boundaries` makes {len(names) + 1}"
        yield source.error(("partitions",), reason, "leave one of them out")


def _check_mesh(config: Config, source_of: SourceOf) -> Iterator[ConfigError]:
    groups = (config.solve.mesh or {}).get(PIPELINE_AXIS, 1)
    settings, file = config.checkpoint, f"conf/checkpoint/{config.choices['checkpoint']}.yaml"
    key = ("mesh", PIPELINE_AXIS)
    if groups > 1 and settings.pipeline is OFF:
        remedy = f"set that to {NAMED}, or leave {PIPELINE_AXIS} out"
        yield source_of("solve").error(key, f"got {groups}, and `pipeline` in {file} is off", remedy)
        return
    if groups > 1 and config.solve.plan is not None:
        reason = f"got {groups}, and `plan` names a saved plan, which is of all devices"
        yield source_of("solve").error(key, reason, "leave one of them out")
    asked = settings.partitions or (len(settings.boundaries) + 1 if settings.boundaries else None)
    chunked = settings.pipeline in (INTERLEAVED, SOLVED) and asked is not None and asked % groups == 0
    if groups > 1 and asked not in (None, groups) and not chunked:
        what = "partitions" if settings.partitions else "boundaries"
        yield source_of("solve").error(key, f"got {groups}, and `{what}` in {file} makes {asked}", "let them agree")


def _check_submeshes(config: Config, source_of: SourceOf) -> Iterator[ConfigError]:
    """A pipeline that is asked for needs plans of fewer devices than all."""
    if config.checkpoint.pipeline in (OFF, SOLVED):
        return
    solve, asked = config.solve, f"`pipeline: {config.checkpoint.pipeline}`"
    if solve.mesh and solve.mesh.get(PIPELINE_AXIS, 1) == 1:
        reason = f"is a mesh of all devices, and {asked} asks for partitions"
        yield source_of("solve").error(("mesh",), reason, f"add {PIPELINE_AXIS}: the number of them, or set null")
    elif not solve.mesh and solve.submeshes == 0:
        reason = f"got 0, and {asked} needs plans of fewer devices"
        yield source_of("solve").error(("submeshes",), reason, "set it to 1 or more")


def _check_last(config: Config, source_of: SourceOf) -> Iterator[ConfigError]:
    """Without a pipeline the last micro-batch would need as much as if none recomputed, and the others take longer."""
    settings = config.checkpoint
    passes = settings.micro_batches if isinstance(settings.micro_batches, int) else config.train.gradient_accumulation
    if settings.recompute is Recompute.except_last and settings.pipeline is OFF and passes > 1:
        reason = f"'except_last' with {passes} micro-batches is for pipelines, and `pipeline` is off"
        yield source_of("checkpoint").error(("recompute",), reason, LAST_ALONE)


def _check_train(config: Config, source_of: SourceOf) -> Iterator[ConfigError]:
    train, schedule = config.train, config.train.schedule
    until = train.steps if schedule.decay_steps is None else schedule.decay_steps
    if schedule.decay is Decay.none and schedule.decay_steps is not None:
        reason, remedy = "is not read with `decay: none`", "set `decay` to linear or cosine"
        yield source_of("train").error(("schedule", "decay_steps"), reason, remedy)
    elif schedule.decay is not Decay.none and until <= schedule.warm_up:
        what = "`steps`" if schedule.decay_steps is None else "`decay_steps`"
        reason = f"got {schedule.warm_up}, and by {what} the decay ends at step {until}"
        yield source_of("train").error(("schedule", "warm_up"), reason, "warm up over fewer steps")
    if train.evaluate.every and config.data is not None and config.data.held_out is None:
        file = f"conf/data/{config.choices['data']}.yaml"
        reason = f"got {train.evaluate.every}, and {file} has no `held_out` data"
        yield source_of("train").error(("evaluate", "every"), reason, "give it `held_out`, or set 0 here")
    if train.trace_step is not None and train.trace_step >= train.steps:
        reason = f"got {train.trace_step}, and the {train.steps} steps are counted from 0"
        yield source_of("train").error(("trace_step",), reason, "set it to an earlier step, or null")
    # The other engines run the user's own module, whose batch norms do as torch has them.
    if train.running_stats is BatchNorm.deferred and train.engine is not TrainEngine.planned:
        reason = f"'deferred' is for the plan's program, and `engine` is {train.engine.value}"
        yield source_of("train").error(("running_stats",), reason, "set it to exact, or `engine: planned`")


# What the files of these groups say together.
CHECKS = (
    (_check_mesh, ("solve", "checkpoint")),
    (_check_submeshes, ("solve", "checkpoint")),
    (_check_last, ("checkpoint", "train")),
    (_check_train, ("train",)),
)
