"""What conf/train says of a run: keys that go together, there and with conf/data."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pipeline.base.errors import ConfigError
from pipeline.config.schema import BatchNorm, Config, Decay, TrainEngine
from pipeline.config.source import Source


def _check_schedule(config: Config, source_of: Callable[[str], Source]) -> Iterator[ConfigError]:
    schedule, steps = config.train.schedule, config.train.steps
    key = ("schedule", "until")
    if schedule.decay is Decay.none:
        if schedule.until is not None:
            yield source_of("train").error(key, "is not read with `decay: none`", "set `decay` to linear or cosine")
        return
    until = steps if schedule.until is None else schedule.until
    if until <= schedule.warm_up:
        what = "`steps`" if schedule.until is None else "`until`"
        reason = f"got {schedule.warm_up}, and by {what} the decay ends at step {until}"
        yield source_of("train").error(("schedule", "warm_up"), reason, "warm up over fewer steps")


def _check_evaluate(config: Config, source_of: Callable[[str], Source]) -> Iterator[ConfigError]:
    if config.train.evaluate.every and config.data.held_out is None:
        file = f"conf/data/{config.choices['data']}.yaml"
        reason = f"got {config.train.evaluate.every}, and {file} has no `held_out` data"
        yield source_of("train").error(("evaluate", "every"), reason, "give it `held_out`, or set 0 here")


def _check_trace(config: Config, source_of: Callable[[str], Source]) -> Iterator[ConfigError]:
    step, steps = config.train.trace_step, config.train.steps
    if step is not None and step >= steps:
        reason = f"got {step}, and the {steps} steps are counted from 0"
        yield source_of("train").error(("trace_step",), reason, "set it to an earlier step, or null")


def _check_batch_norm(config: Config, source_of: Callable[[str], Source]) -> Iterator[ConfigError]:
    """The other engines run the user's own module, whose batch norms do as torch has them."""
    engine = config.train.engine
    if config.train.batch_norm is BatchNorm.deferred and engine is not TrainEngine.planned:
        reason = f"'deferred' is for the plan's program, and `engine` is {engine.value}"
        yield source_of("train").error(("batch_norm",), reason, "set it to exact, or `engine: planned`")


# What the files of these groups say together; `source_of` reads the file of a group once more, to name the line.
TRAINING_CHECKS = (
    (_check_schedule, ("train",)),
    (_check_evaluate, ("train", "data")),
    (_check_trace, ("train",)),
    (_check_batch_norm, ("train",)),
)
