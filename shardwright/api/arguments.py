"""Arguments of `plan` as a checked configuration: the defaults are those of the package's own conf/ files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypedDict

from torch import nn

import shardwright
from shardwright.api.given import ArgumentError, Batch, GivenModule, GivenOptimizer, OptimizerLike, specs_of
from shardwright.pipeline.base.errors import ConfigError, ShardwrightError, refuse, shown, suggestion
from shardwright.pipeline.config import ClusterSettings, Config, ModelSettings, listing
from shardwright.pipeline.config.consistency import CHECKS, check_checkpoint, check_cluster
from shardwright.pipeline.config.load import build, choices_remedy
from shardwright.pipeline.config.schema import Checkpoint, Data, Root, Solve, Train
from shardwright.pipeline.config.source import Key, Source, dotted, parse, read

PACKAGE = Path(shardwright.__file__).parent  # its conf/ has the presets
STANDS_IN = "torch.nn.Module"  # for what is given, while texts are checked
CHOSEN = {"solve": "highs", "checkpoint": "rotor", "train": "adamw"}  # of the package's files
SCHEMAS = {"model": ModelSettings, "cluster": ClusterSettings, "solve": Solve, "checkpoint": Checkpoint, "train": Train}
ClusterLike = str | Path | Mapping[str, Any]


PrecisionName = Literal["fp32", "bf16", "amp"]


class PlanChoices(TypedDict, total=False):
    """What `plan` takes beside its first arguments; each is a key of the configuration (docs/configuration.md)."""

    devices: int
    nodes: int
    precision: PrecisionName
    compile: bool
    cuda_graphs: bool | Literal["auto"]
    batch_norm: Literal["whole", "per_rank"]
    ops: Mapping[str, str]
    only: Literal["any", "data", "zero", "tensor", "sequence"]
    mesh: Mapping[str, Any]
    shard_only: str
    search: Literal["ilp", "dp", "large"]
    backend: Literal["highs", "glpk"]
    time_limit_s: float
    frontier_points: int
    recompute: Literal["optimal", "full", "every", "off", "always", "except_last", "never"]
    every_blocks: int
    pipeline: Literal["off", "solve", "gpipe", "1f1b", "interleaved", "zero_bubble"]
    partitions: int
    boundaries: list[str]
    micro_batches: int | Literal["solve"] | None
    gradient_accumulation: int


GROUP_OF = {
    **dict.fromkeys(("devices", "nodes"), "cluster"),
    **dict.fromkeys(("precision", "compile", "cuda_graphs", "batch_norm", "ops"), "model"),
    **dict.fromkeys(("only", "mesh", "shard_only", "search", "backend", "time_limit_s", "frontier_points"), "solve"),
    **dict.fromkeys(
        ("recompute", "every_blocks", "pipeline", "partitions", "boundaries", "micro_batches"), "checkpoint"
    ),
    "gradient_accumulation": "train",
}
KEYS = {"memory_budget_gb": "memory_gb", "module": "model"}  # of a file -> the argument, where they differ


@dataclass(frozen=True, eq=False)
class ArgumentSource(Source):
    """Keys that arguments have given, in place of a file; a mistake is told by the name of the argument."""

    marks: dict[Key, Any] = field(default_factory=dict)

    def where(self, key: Key = ()) -> str:
        return self.name

    def error(self, key: Key, what: str, remedy: str | None = None) -> ConfigError:
        named = (KEYS.get(str(key[0]), key[0]), *key[1:]) if key else ()
        return ConfigError(what, where=dotted(named) or self.name, remedy=remedy)


@dataclass(frozen=True)
class PlanRequest:
    """The arguments of `plan`."""

    model: nn.Module
    batch: Batch
    cluster: ClusterLike
    memory_gb: float | None = None
    optimizer: OptimizerLike | None = None
    constraints: Mapping[str, str] | None = None
    choices: Mapping[str, Any] = field(default_factory=dict)

    def config(self) -> Config:
        for name in self.choices:
            if name not in GROUP_OF:
                remedy = suggestion(name, [*GROUP_OF], "there are: ")
                raise ArgumentError("there is no such argument", where=str(name), remedy=remedy)
        model = GivenModule(self.model)
        model()  # where it cannot be copied, that is the first thing to know
        wanted = {"memory_budget_gb": self.memory_gb, "constraints": _plain(self.constraints)}
        name, cluster = cluster_source(self.cluster, self._of("cluster"))
        sources = {
            "model": self._source("model", {"module": {"_target_": STANDS_IN}, "batch": specs_of(self.batch)}),
            "cluster": cluster,
            "solve": self._source("solve", wanted),
            "checkpoint": self._source("checkpoint", {}),
            "train": self._source("train", {}),
        }
        parts = {group: build(SCHEMAS[group], source) for group, source in sources.items()}
        refuse(check_cluster(parts["cluster"], sources["cluster"]))
        refuse(check_checkpoint(parts["checkpoint"], sources["checkpoint"]))
        parts["model"] = replace(parts["model"], module={"_target_": model})
        if self.optimizer is not None:
            parts["train"] = replace(parts["train"], optimizer={"_target_": GivenOptimizer(self.optimizer)})
        chosen: dict[str, Any] = {"model": type(self.model).__name__, "data": "given", "cluster": name, **CHOSEN}
        root = Root(**chosen, code=".")
        config = Config(root=root, data=Data(dataset={"_target_": STANDS_IN}), **parts)
        for together, _ in CHECKS:
            refuse(together(config, lambda group: sources.get(group) or ArgumentSource(group, (), {})))
        return config

    def _of(self, group: str) -> dict[str, Any]:
        return {name: _plain(value) for name, value in self.choices.items() if GROUP_OF[name] == group}

    def _source(self, group: str, given: dict[str, Any]) -> Source:
        chosen = CHOSEN.get(group)
        file = read(PACKAGE, f"conf/{group}/{chosen}.yaml", (group,)).data if chosen else {}
        return ArgumentSource(group, (), {**file, **given, **self._of(group)})


def cluster_source(given: ClusterLike, changed: Mapping[str, Any]) -> tuple[str, Source]:
    """Its name, and its settings: those of a preset, of a file or a mapping."""
    if isinstance(given, Mapping):
        return "given", ArgumentSource("cluster", (), {**_plain(given), **changed})
    if not isinstance(given, str | Path):
        what = f"got {shown(given)}, expected the name of a preset, a file or a mapping"
        raise ArgumentError(what, where="cluster")
    if isinstance(given, Path) or given.endswith((".yaml", ".yml")):
        path = Path(given)
        try:
            found = parse(str(path), (), path.read_bytes())
        except OSError as error:
            raise ArgumentError(f"{path} cannot be read: {error.strerror or error}", where="cluster") from error
        refuse(found.broken)
        return path.stem, ArgumentSource("cluster", (), {**found.data, **changed})
    names = listing(PACKAGE, "cluster")
    if given not in names:
        raise ArgumentError(f"there is no preset {shown(given)}", where="cluster", remedy=choices_remedy(given, names))
    data = read(PACKAGE, f"conf/cluster/{given}.yaml", ("cluster",)).data
    return given, ArgumentSource("cluster", (), {**data, **changed})


def _plain(value: Any) -> Any:
    """Mappings and sequences as YAML has them."""
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, tuple | list) else value


@contextmanager
def arguments_named(call: str) -> Iterator[None]:
    """What a stage says of a file of conf/ is said of the arguments of a call such as `sw.plan`."""
    try:
        yield
    except ShardwrightError as error:
        for one in error.every():
            one.where = _argument(one.where or "", call)
            one.what = one.what.replace("memory_budget_gb", "memory_gb")
            if one.remedy:
                one.remedy = one.remedy.replace("memory_budget_gb", "memory_gb")
        raise


def _argument(where: str, call: str) -> str:
    if where.startswith(f"{call}: "):
        return where
    found = re.match(r"conf/(\w+)/[^:]*\.yaml(?::\d+:\d+)?(?:: (.+))?$", where)
    name = (found[2] or found[1]) if found else where
    first, dot, rest = name.partition(".")
    name = f"{KEYS.get(first, first)}{dot}{rest}"
    return f"{call}: {name.removeprefix('conf/')}" if name else call
