"""`shardwright check`: what later stages would refuse, found before anything runs, and told all at once.

It imports what `_target_` names, builds the model without memory, takes a step of the optimizer on one parameter, reads
one item of the data and counts devices. What only the traced graph or the plan tells is left to the stages.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from math import gcd, prod
from pathlib import Path
from typing import Any

from shardwright.pipeline.base.artifacts import load_saved
from shardwright.pipeline.base.errors import (
    ArtifactError,
    ConfigError,
    Mistakes,
    ShardwrightError,
    SolveError,
    TraceError,
    TrainError,
    nearest,
)
from shardwright.pipeline.base.instantiate import add_code_path, instantiate
from shardwright.pipeline.base.log import Log
from shardwright.pipeline.config import PIPELINE_AXIS, ClusterSource, Config, Device, Draft, TrainEngine, saved_file

EVERY_AXIS = ("d0", "d1", "d2")  # as the meshes of a cluster name theirs
RESUMED = re.compile(r"step-\d+")


def check(root: Path, draft: Draft, log: Log) -> None:
    """Raises all that is wrong: with the files of a configuration, and with what they name."""
    mistakes, config = draft.mistakes, draft.config
    folder = Mistakes()
    with folder.gather():
        add_code_path(root, config.code)
    mistakes.add(folder.found)

    def there(part: Any, key: str) -> bool:
        """Whether a target can be there although the user's folder is not: that folder is what is told then."""
        if part is None or not folder.found:
            return part is not None
        return importlib.util.find_spec(str(getattr(part, key)["_target_"]).split(".")[0]) is not None

    sound, model = draft.sound, None
    if there(sound.model, "module"):
        from shardwright.pipeline.tracing.build import build_module

        with mistakes.gather():  # built on the meta device, or for real where it must be
            model = build_module(sound.model.module, f"{file_of(sound, 'model')}: module")
            sound, odd = _as_taken(sound, model)
            mistakes.add(odd)
    if there(sound.train, "optimizer"):
        with mistakes.gather():
            _optimizer(sound)
    if there(sound.data, "dataset"):
        mistakes.add(_data(sound))
    for judge, groups in SETTINGS:
        if draft.has(*groups):
            mistakes.add(judge(config, root))
    if model is not None:
        mistakes.add(one for judge, groups in NAMES if draft.has(*groups) for one in judge(config, root, model))
    mistakes.refuse()
    _tell_what_cannot_train(config, log)


def file_of(config: Config, group: str) -> str:
    return f"conf/{group}/{config.choices[group]}.yaml"


def _raised(*calls: Any) -> Iterator[ShardwrightError]:
    """What these calls raise, one after another."""
    for call in calls:
        mistakes = Mistakes()
        with mistakes.gather():
            call()
        yield from mistakes.found


# ------------------------------------------------------------------------------------------------------ the user's code


def _as_taken(config: Config, model: Any) -> tuple[Config, list[TraceError]]:
    """With the tensors of the batch that `forward` takes, by which data is judged; and what is wrong with others."""
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):  # of a scripted module
        return config, []
    free = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    where, given = f"{file_of(config, 'model')}: batch", config.model.batch
    odd = [] if any(p.kind is p.VAR_KEYWORD for p in parameters) else [name for name in given if name not in free]
    lacks = [p.name for p in parameters if p.name in free and p.default is p.empty and p.name not in given]
    told, forward = [], f"`forward` of {type(model).__name__}"
    for name in odd:
        near = nearest(name, lacks or free)
        remedy = f"did you mean '{near}'?" if near else f"it takes {', '.join(free) or 'nothing'}"
        told.append(TraceError(f"{forward} takes no {name}", where=f"{where}.{name}", remedy=remedy))
    for name in lacks[len(odd) :]:  # a name that is misspelt is one mistake
        told.append(TraceError(f"{forward} needs {name}", where=where, remedy="add its shape and type"))
    taken = {name: spec for name, spec in given.items() if name not in odd}
    return replace(config, model=replace(config.model, batch=taken)), told


def _optimizer(config: Config) -> None:
    from shardwright.pipeline.user.optimizer import try_optimizer

    where, schedule = file_of(config, "train"), config.train.schedule
    device = config.cluster.device.value if config.cluster else "cpu"
    optimizer, _ = try_optimizer(config.train.optimizer, f"{where}: optimizer", device)
    moves = schedule.warm_up > 0 or schedule.decay.value != "none"
    if moves and not all("lr" in group for group in optimizer.param_groups):
        what = f"{type(optimizer).__name__} has no learning rate `lr`"
        raise TrainError(what, where=f"{where}: schedule", remedy="leave `schedule` out, or name another optimizer")


def _data(config: Config) -> Iterator[ShardwrightError]:
    """The data that is trained on, and the data that is not where it is read."""
    import torch

    sets = {"dataset": config.data.dataset}
    if config.data.held_out is not None and config.train is not None and config.train.evaluate.every:
        sets["held_out"] = config.data.held_out
    with torch.random.fork_rng(devices=[]):
        yield from _raised(*(partial(_check_data_set, config, key, settings) for key, settings in sets.items()))


def _check_data_set(config: Config, key: str, settings: Mapping[str, Any]) -> None:
    from shardwright.pipeline.user.batches import length_of, sample_mistakes

    where = f"{file_of(config, 'data')}: {key}"
    dataset = instantiate(settings, where)
    length = length_of(dataset, where)
    try:
        item = dataset[0]
    except (Exception, SystemExit) as error:  # the user's data set: one line, not our traceback
        what = f"its first item cannot be read: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        raise TrainError(what, where=where, remedy="see its `__getitem__`") from error
    if config.model is None or not config.model.batch:  # that has been refused
        return
    specs = config.plain("model.batch")
    odd = list(sample_mistakes(item, specs))
    if odd:
        raise TrainError("; ".join(odd), where=where, remedy="choose data and model that belong together")
    size = next(iter(specs.values()))["shape"][0]
    if key == "held_out" and length < size:
        what = f"it has {length} samples, and a batch of the model {size}"
        raise TrainError(what, where=where, remedy="hold out more of them")


def _own_ops(config: Config, root: Path) -> Iterator[ShardwrightError]:
    from shardwright.pipeline.user.own_ops import know_own_ops

    return _raised(lambda: know_own_ops(config, None))


# ------------------------------------------------------------------------------------------------ devices and settings


def _devices(config: Config, root: Path) -> Iterator[ShardwrightError]:
    """A cluster that is measured must be there; one that is described may be anywhere."""
    if config.cluster.source is not ClusterSource.probe:
        return iter(())
    from shardwright.stages.cluster.measure import check_devices

    return _raised(lambda: check_devices(config.cluster, file_of(config, "cluster")))


def _mesh(config: Config, root: Path) -> Iterator[ShardwrightError]:
    """Sizes that do not multiply to the devices there are; a pipeline on one device; more memory than a device has."""
    solve, where, devices = config.solve, file_of(config, "solve"), config.cluster.all_devices
    if solve.mesh and prod(solve.mesh.values()) != devices:
        sizes = " x ".join(map(str, solve.mesh.values()))
        what = f"{sizes} is {prod(solve.mesh.values())} devices, and the cluster has {devices}"
        yield SolveError(what, where=f"{where}: mesh", remedy="name axes whose sizes multiply to that")
    budget, memory = solve.memory_budget_gb, config.cluster.memory_gb
    if budget is not None and memory is not None and budget > memory:
        what = f"got {budget:g}, and `memory_gb` of {file_of(config, 'cluster')} gives a device {memory:g}"
        remedy = "lower it, or set null to use what the device has"
        yield SolveError(what, where=f"{where}: memory_budget_gb", remedy=remedy)
    pipeline = config.checkpoint.pipeline.value
    if pipeline not in ("off", "solve") and devices == 1:
        what = "a pipeline needs several devices, and the cluster has one"
        yield SolveError(what, where=f"{file_of(config, 'checkpoint')}: pipeline", remedy="set `pipeline: off`")
    partitions = config.checkpoint.partitions
    if partitions is not None and partitions > devices > 1 and pipeline not in ("off", "solve", "interleaved"):
        what = f"got {partitions}, and the cluster has {devices} devices"
        remedy = "lower it: with this schedule a device has one partition"
        yield SolveError(what, where=f"{file_of(config, 'checkpoint')}: partitions", remedy=remedy)


def _solver(config: Config, root: Path) -> Iterator[ShardwrightError]:
    """The program that solves, the saved plan, and what the constraints' lines say."""
    solve, where = config.solve, file_of(config, "solve")
    if solve.glpsol is not None and solve.backend.value == "glpk":
        from shardwright.stages.solve.search.backends.glpk import find_glpsol

        yield from _raised(lambda: find_glpsol(solve.glpsol, where))
    if solve.constraints:
        from shardwright.stages.solve.problem.constraints import parse

        axes = _axes(config)
        yield from _raised(*(partial(parse, {name: text}, axes, where) for name, text in solve.constraints.items()))
    if solve.plan is not None and (root / saved_file(solve.plan)).is_file():
        yield from _raised(lambda: _saved_plan(config, root, saved_file(solve.plan)))


def _axes(config: Config) -> tuple[str, ...]:
    """The names of a mesh that is given; else all that a mesh of so many devices may have."""
    if config.solve.mesh:
        own = {name: size for name, size in config.solve.mesh.items() if name != PIPELINE_AXIS}
        return tuple(name for name, size in own.items() if size > 1) or tuple(own)[:1]
    factors, left = 0, config.cluster.all_devices
    for prime in range(2, left + 1):
        while left % prime == 0:
            factors, left = factors + 1, left // prime
    return EVERY_AXIS[: max(1, min(config.solve.most_axes, factors))]


def _saved_plan(config: Config, root: Path, file: str) -> None:
    body = load_saved(file, root, ("plan", "frontier")).body
    if hasattr(body, "pipelined") and body.pipelined:
        what = f"the saved plan is a pipeline of {len(body.partitions)} partitions, and one without is needed"
        raise ArtifactError(what, where=file, remedy="save runs/solve/frontier.json instead, or set `plan: null`")
    every = [body.sizes] if hasattr(body, "pipelined") else [body.meshes[point.mesh].sizes for point in body.points]
    devices = config.cluster.all_devices
    for sizes in every:
        if prod(sizes) != devices:
            what = f"the saved plan is for {prod(sizes)} devices, and the cluster has {devices}"
            raise ArtifactError(what, where=file, remedy="save one of this cluster, or set `plan: null`")


def _micro_batches(config: Config, root: Path) -> Iterator[ShardwrightError]:
    asked, passes = config.checkpoint.micro_batches, config.train.gradient_accumulation
    batch = gcd(*(spec.shape[0] for spec in config.model.batch.values()))
    where = f"{file_of(config, 'checkpoint')}: micro_batches"
    if not isinstance(asked, int):
        return
    if asked % passes or asked // passes > batch:
        each = "each of which is cut into as many parts"
        what = f"got {asked}, and a step has {passes} passes of {batch} samples, {each}"
        yield SolveError(what, where=where, remedy=f"use a multiple of {passes}, and at most {passes * batch}")
    elif batch % (asked // passes) and config.checkpoint.pipeline.value == "off":
        what = f"got {asked}, and without a pipeline the {batch} samples of a pass are cut equally"
        remedy = f"use {passes} times a number that divides {batch}, or set `pipeline`"
        yield SolveError(what, where=where, remedy=remedy)


def _engine(config: Config, root: Path) -> Iterator[ShardwrightError]:
    from shardwright.stages.train.run import check_batch

    ranks = 1 if config.train.engine is TrainEngine.single else config.cluster.all_devices
    return _raised(lambda: check_batch(config, ranks))


def _resume(config: Config, root: Path) -> Iterator[ShardwrightError]:
    resume = config.train.resume
    if resume in ("auto", "never"):
        return
    folder, where = root / resume, f"{file_of(config, 'train')}: resume"
    if not RESUMED.fullmatch(folder.name) or not folder.is_dir():
        remedy = "give auto, never or a folder such as runs/train/snapshots/0123456789ab/step-000040"
        yield TrainError(f"there is no snapshot {resume}", where=where, remedy=remedy)


def _tell_what_cannot_train(config: Config, log: Log) -> None:
    """Planning for devices that are elsewhere is no mistake; training here would be."""
    if config.cluster.source is ClusterSource.probe or config.cluster.device is not Device.cuda:
        return
    import torch

    if not torch.cuda.is_available():
        log.info("the cluster is of GPUs, and this machine has none: all stages but train run here")


# ------------------------------------------------------------------------------------------------- names of the model


def _constrained(config: Config, root: Path, model: Any) -> Iterator[ShardwrightError]:
    parameters, modules = _names(model)
    solve, where = config.solve, file_of(config, "solve")
    for pattern in solve.constraints or {}:
        if not any(fnmatchcase(name, pattern) for name in (*parameters, *modules)):
            yield _no_such(pattern, f"{where}: constraints.{pattern}", (*parameters, *modules))
    if solve.shard_only and not any(fnmatchcase(name, solve.shard_only) for name in modules):
        yield _no_such(solve.shard_only, f"{where}: shard_only", modules)


def _boundaries(config: Config, root: Path, model: Any) -> Iterator[ShardwrightError]:
    _, modules = _names(model)
    for name in config.checkpoint.boundaries or ():
        if name not in modules:
            yield _no_such(name, f"{file_of(config, 'checkpoint')}: boundaries", modules)


def _weights(config: Config, root: Path, model: Any) -> Iterator[ShardwrightError]:
    """The file has the model's names and shapes."""
    if config.train.init_from is None or not (root / config.train.init_from).is_file():
        return  # that has been told
    from shardwright.pipeline.user.weights import match_names, open_weights
    from shardwright.stages.train.engines.tensors import state_names

    path, where = root / config.train.init_from, f"{file_of(config, 'train')}: init_from"
    named = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    shapes = {name: tuple(tensor.shape) for name, tensor in named.items()}
    yield from _raised(lambda: match_names(open_weights(path, where), state_names(model, named), shapes, where))


def _names(model: Any) -> tuple[list[str], list[str]]:
    """Of its parameters and of its modules."""
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return parameters, [name for name, _ in model.named_modules(remove_duplicate=False) if name]


def _no_such(name: str, where: str, known: Iterable[str]) -> ConfigError:
    near = get_close_matches(name, list(known), n=1)
    remedy = f"did you mean {near[0]!r}?" if near else "names are those of the model's named_modules()"
    return ConfigError(f"no parameter or module is called {name!r}", where=where, remedy=remedy)


# What is asked of the files of these groups together, and of the model's names.
SETTINGS: tuple[tuple[Callable[[Config, Path], Iterator[ShardwrightError]], tuple[str, ...]], ...] = (
    (_own_ops, ("model",)),
    (_devices, ("cluster",)),
    (_mesh, ("cluster", "solve", "checkpoint")),
    (_solver, ("cluster", "solve")),
    (_micro_batches, ("model", "checkpoint", "train")),
    (_engine, ("model", "cluster", "train")),
    (_resume, ("train",)),
)
NAMES: tuple[tuple[Callable[[Config, Path, Any], Iterator[ShardwrightError]], tuple[str, ...]], ...] = (
    (_constrained, ("solve",)),
    (_boundaries, ("checkpoint",)),
    (_weights, ("train",)),
)
