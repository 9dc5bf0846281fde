"""A transformer, a cluster and a layout in words, `name=value`: what `price` and `whatif` are asked about."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import gcd
from pathlib import Path
from typing import Any

from shardwright.pipeline.base.errors import ConfigError, ShardwrightError, nearest
from shardwright.pipeline.config import ClusterSource, Config, ModelSettings, listing, load_part
from shardwright.pipeline.config.schema import OverlapMode
from shardwright.pipeline.cost.pipelines.schedules import Pipeline
from shardwright.pipeline.layouts.machine import Machine, machine_of
from shardwright.pipeline.layouts.planner_stages import PlannerStages
from shardwright.pipeline.layouts.sizes import KNOWN, AttentionKernel, Transformer
from shardwright.pipeline.layouts.work import RecomputeMode

GPT = "shardwright.pipeline.models.gpt.build"
DEFAULT_CLUSTER = "dgx_a100_infiniband"  # where the project's own is measured
MOST = 10**7
FREE = "search"


class PriceError(ShardwrightError):
    """A word of the command line that cannot be."""


def _count(text: str) -> int:
    number = int(text)
    if not 1 <= number <= MOST:
        raise ValueError
    return number


@dataclass(frozen=True)
class Word:
    parse: Callable[[str], Any]  # ValueError or KeyError where it cannot be
    allowed: str


COUNT = Word(_count, f"a whole number from 1 to {MOST:,}")
YES = Word({"yes": True, "true": True, "no": False, "false": False}.__getitem__, "yes or no")
SCHEDULES = {own.value: own for own in (Pipeline.ONE_F_ONE_B, Pipeline.INTERLEAVED, Pipeline.GPIPE)}
LAYOUT = {
    "dp": COUNT,
    "tp": COUNT,
    "pp": COUNT,
    "micro_batch": COUNT,
    "schedule": Word(SCHEDULES.__getitem__, ", ".join(SCHEDULES)),
    "chunks": COUNT,
    "recompute": Word(RecomputeMode, ", ".join(RecomputeMode)),
    "zero": Word({str(level): level for level in range(4)}.__getitem__, "0, 1, 2 or 3"),
    "sequence_parallel": YES,
    "attention": Word(AttentionKernel, ", ".join(AttentionKernel)),
    "overlap": Word(OverlapMode, ", ".join(OverlapMode)),
}
SIZES = {
    **dict.fromkeys(("hidden", "layers", "heads", "kv_heads", "inner", "sequence", "vocabulary", "batch"), COUNT),
    **dict.fromkeys(("experts", "experts_per_token"), COUNT),
    "gated": YES,
    "tied": YES,
    "dropout": YES,
}
UNPLANNED = {"cp": "a sequence inside attention", "ep": "experts over devices of their own"}
NAMES = {"model": Word(str, "a model's name"), "cluster": Word(str, "a cluster's name"), "nodes": COUNT}
WORDS = {**LAYOUT, **SIZES, **NAMES}


@dataclass(frozen=True)
class Asked:
    free: bool
    layout: dict[str, tuple[Any, ...]]
    sizes: dict[str, Any]
    names: dict[str, Any]


def read_words(words: Sequence[str]) -> Asked:
    layout: dict[str, tuple[Any, ...]] = {}
    single: dict[str, Any] = {}
    for word in words:
        if word == FREE:
            continue
        name, equals, text = word.partition("=")
        if name in UNPLANNED:
            if text != "1":
                what = f"'{word}' is not possible: the planner does not split {UNPLANNED[name]}"
                raise PriceError(what, remedy=f"leave {name} out")
            continue
        if not equals or name not in WORDS:
            near = nearest(name, list(WORDS))
            meant = f"did you mean '{near}='? " if near else ""
            remedy = f"{meant}allowed are {FREE} and {', '.join(WORDS)}, with =value"
            raise PriceError(f"there is no word '{word}'", remedy=remedy)
        if name in layout or name in single:
            raise PriceError(f"'{name}' is given twice", remedy=f"combine values as {name}=1,2")
        if name in LAYOUT:
            layout[name] = tuple(_parsed(word, name, one) for one in text.split(","))
        else:
            single[name] = _parsed(word, name, text)
    sizes = {name: value for name, value in single.items() if name in SIZES}
    names = {name: value for name, value in single.items() if name in NAMES}
    return Asked(FREE in words, layout, sizes, names)


def _parsed(word: str, name: str, text: str) -> Any:
    try:
        return WORDS[name].parse(text)
    except (ValueError, KeyError):
        raise PriceError(f"'{word}' is not possible", remedy=f"{name} is {WORDS[name].allowed}") from None


@dataclass(frozen=True)
class ConfModel:
    """A file of conf/model that does not build our GPT: priced as it is."""

    name: str
    settings: ModelSettings
    batch: int

    def __str__(self) -> str:
        return self.name


def find_model(root: Path, asked: Asked, config: Config) -> Transformer | ConfModel:
    """A known one, one of conf/model, or sizes; sizes change those of a name."""
    name, sizes = asked.names.get("model"), asked.sizes
    if name is None and "hidden" in sizes:
        missing = [size for size in ("hidden", "layers", "heads", "batch") if size not in sizes]
        if missing:
            raise PriceError(f"a model without a name needs '{missing[0]}'", remedy=f"add {missing[0]}=...")
        model = Transformer(**{"sequence": 2048, "vocabulary": 51200, **sizes})
    else:
        named = KNOWN.get(name) if name else None
        found = named or _from_conf(root, name or config.choices["model"])
        if isinstance(found, ConfModel):
            return _as_asked(found, asked)
        model = replace(found, **sizes)
    if not model.batch:
        raise PriceError(f"the batch of '{name}' is not known", remedy="add batch=...")
    if "experts_per_token" in sizes and not model.experts:
        raise PriceError("'experts_per_token' is of a model with experts, and this has none", remedy="add experts=...")
    return model


def _from_conf(root: Path, name: str) -> Transformer | ConfModel:
    """Our GPT by its sizes, so that words can change them."""
    names = listing(root, "model")
    if name not in names:
        raise PriceError(f"there is no model '{name}'", remedy=f"choose one of: {', '.join([*KNOWN, *names])}")
    model: ModelSettings = load_part(root, "model", name)
    if model.module.get("_target_") != GPT:
        return ConfModel(name, model, gcd(*(spec.shape[0] for spec in model.batch.values())))
    sizes = {"hidden": "width", "layers": "layers", "heads": "heads", "sequence": "context", "vocabulary": "vocab_size"}
    batch = next(iter(model.batch.values())).shape[0]
    return Transformer(**{own: model.module[theirs] for own, theirs in sizes.items()}, dropout=False, batch=batch)


def _as_asked(model: ConfModel, asked: Asked) -> ConfModel:
    for word in (*(size for size in asked.sizes if size != "batch"), *asked.layout.keys() & {"attention"}):
        what = f"'{word}' is of a transformer by its sizes, and '{model.name}' is priced as it is"
        remedy = f"change conf/model/{model.name}.yaml, or give hidden, layers, heads and batch"
        raise PriceError(what, remedy=remedy)
    return replace(model, batch=asked.sizes.get("batch", model.batch))


def find_machine(
    root: Path, asked: Asked, config: Config, stages: PlannerStages, devices: int | None
) -> tuple[str, Machine]:
    """With `nodes` hosts, or as many as the devices need."""
    name = asked.names.get("cluster")
    if name is None:
        measured = config.cluster.source is ClusterSource.probe
        name = DEFAULT_CLUSTER if measured else config.choices["cluster"]
    known = listing(root, "cluster")
    if name not in known:
        raise PriceError(f"there is no cluster '{name}'", remedy=f"choose one of: {', '.join(known)}")
    written = load_part(root, "cluster", name)
    nodes = asked.names.get("nodes")
    if nodes is None and devices is not None and not written.per_host:
        nodes = -(-devices // written.devices)
    try:
        cluster = written if nodes is None else load_part(root, "cluster", name, nodes=nodes)
    except ConfigError as error:
        what = f"cluster '{name}' cannot have nodes={nodes}: {error.what}"
        raise PriceError(what, remedy="choose another") from error
    return name, machine_of(cluster, stages, f"conf/cluster/{name}.yaml")
