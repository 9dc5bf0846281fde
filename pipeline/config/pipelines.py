"""What conf/checkpoint says of pipelines: keys that go together, there and with those of conf/solve and conf/train.

Whether a pipeline exists (its boundaries, numbers of micro-batches, memory) is for the stages to say, which know the
model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pipeline.base.errors import ConfigError
from pipeline.config.schema import Checkpoint, Config, Pipeline, Recompute
from pipeline.config.source import Source

PIPELINE_AXIS = "pp"  # in `mesh` of conf/solve: partitions of equal meshes
OFF, SOLVED, INTERLEAVED = Pipeline("off"), Pipeline("solve"), Pipeline("interleaved")
LAST_ALONE = "set it to never, which needs no more memory without a pipeline, always or optimal"
NAMED = "one of solve, gpipe, 1f1b, interleaved, zero_bubble"


def check_checkpoint(settings: Checkpoint, source: Source) -> Iterator[ConfigError]:
    if settings.every_blocks is not None and settings.recompute is not Recompute.every:
        yield source.error(("every_blocks",), f"is not read with `recompute: {settings.recompute}`", "leave it out")
    for key in ("partitions", "boundaries"):
        if getattr(settings, key) is not None and settings.pipeline is OFF:
            yield source.error((key,), "is for pipelines, and `pipeline` is off", f"set `pipeline` to {NAMED}")
    names = settings.boundaries or []
    twice = next((name for number, name in enumerate(names) if name in names[:number]), None)
    if twice is not None:
        yield source.error(("boundaries",), f"names {twice} twice", "name each module once")
    if names and settings.partitions not in (None, len(names) + 1):
        reason = f"got {settings.partitions}, and `boundaries` makes {len(names) + 1}"
        yield source.error(("partitions",), reason, "leave one of them out")


def _check_mesh(config: Config, source_of: Callable[[str], Source]) -> Iterator[ConfigError]:
    pieces = (config.solve.mesh or {}).get(PIPELINE_AXIS, 1)
    settings, file = config.checkpoint, f"conf/checkpoint/{config.choices['checkpoint']}.yaml"
    key = ("mesh", PIPELINE_AXIS)
    if pieces > 1 and settings.pipeline is OFF:
        yield source_of("solve").error(
            key, f"got {pieces}, and `pipeline` in {file} is off", f"set that to {NAMED}, or leave {PIPELINE_AXIS} out"
        )
        return
    if pieces > 1 and config.solve.plan is not None:
        reason = f"got {pieces}, and `plan` names a saved plan, which is of all devices"
        yield source_of("solve").error(key, reason, "leave one of them out")
    asked = settings.partitions or (len(settings.boundaries) + 1 if settings.boundaries else None)
    chunked = settings.pipeline in (INTERLEAVED, SOLVED) and asked is not None and asked % pieces == 0
    if pieces > 1 and asked not in (None, pieces) and not chunked:
        what = "partitions" if settings.partitions else "boundaries"
        yield source_of("solve").error(key, f"got {pieces}, and `{what}` in {file} makes {asked}", "let them agree")


def _check_pieces(config: Config, source_of: Callable[[str], Source]) -> Iterator[ConfigError]:
    """A pipeline that is asked for needs plans of fewer devices than all."""
    if config.checkpoint.pipeline in (OFF, SOLVED):
        return
    solve, asked = config.solve, f"`pipeline: {config.checkpoint.pipeline}`"
    if solve.mesh and solve.mesh.get(PIPELINE_AXIS, 1) == 1:
        reason = f"is a mesh of all devices, and {asked} asks for partitions"
        yield source_of("solve").error(("mesh",), reason, f"add {PIPELINE_AXIS}: the number of them, or set null")
    elif not solve.mesh and solve.piece_meshes == 0:
        reason = f"got 0, and {asked} needs plans of fewer devices"
        yield source_of("solve").error(("piece_meshes",), reason, "set it to 1 or more")


def _check_last(config: Config, source_of: Callable[[str], Source]) -> Iterator[ConfigError]:
    """Without a pipeline the last micro-batch would need as much as if none recomputed, and the others take longer."""
    settings = config.checkpoint
    passes = settings.micro_batches if isinstance(settings.micro_batches, int) else config.train.micro_batches
    if settings.recompute is Recompute.except_last and settings.pipeline is OFF and passes > 1:
        reason = f"'except_last' with {passes} micro-batches is for pipelines, and `pipeline` is off"
        yield source_of("checkpoint").error(("recompute",), reason, LAST_ALONE)


# What the files of these groups say together; `source_of` reads the file of a group once more, to name the line.
PIPELINE_CHECKS = (
    (_check_mesh, ("solve", "checkpoint")),
    (_check_pieces, ("solve", "checkpoint")),
    (_check_last, ("checkpoint", "train")),
)
