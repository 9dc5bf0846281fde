"""What `fit` is asked: a model and clusters, as settings of the project or of those that come with Shardwright."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from shardwright.pipeline.base.errors import ShardwrightError
from shardwright.pipeline.config import (
    ClusterSettings,
    ClusterSource,
    Config,
    ModelSettings,
    listing,
    load_part,
)
from shardwright.pipeline.config.schema import Precision
from shardwright.pipeline.models.from_config import batch_of

BUILD = "shardwright.pipeline.models.from_config.build"
WHERE = "fit"


class FitError(ShardwrightError):
    """A question that `fit` cannot answer."""


@dataclass(frozen=True)
class FitQuestion:
    """What is asked, in the words of the command line."""

    model: str  # a config.json, a file of conf/model, or the name of one
    clusters: tuple[str, ...] = ("dgx_h100",)
    batch: int | None = None  # samples of a step, on all devices together
    sequence: int | None = None
    precision: str = "amp"
    lora: int = 0
    devices: int | None = None  # of one host
    nodes: int | None = None
    memory_gb: float | None = None  # of a device

    @property
    def is_config(self) -> bool:
        return self.model.endswith(".json")


def home_of(root: Path) -> Path:
    return root if (root / "conf" / "config.yaml").is_file() else Path(__file__).resolve().parents[2]


def is_described(home: Path, name: str) -> bool:
    found: ClusterSettings = load_part(home, "cluster", name)
    return found.source is not ClusterSource.probe


def machine_of(home: Path, name: str, question: FitQuestion) -> ClusterSettings:
    known = listing(home, "cluster")
    if name not in known:
        raise FitError(f"there is no cluster '{name}'", where="--cluster", remedy=f"choose one of: {', '.join(known)}")
    given = {"devices": question.devices, "nodes": question.nodes, "memory_gb": question.memory_gb}
    found: ClusterSettings = load_part(home, "cluster", name, **{k: v for k, v in given.items() if v is not None})
    if found.source is ClusterSource.probe:
        what, remedy = f"'{name}' is measured, and `fit` needs a cluster that is described", "choose a preset: dgx_h100"
        raise FitError(what, where="--cluster", remedy=remedy)
    return found


def model_of(question: FitQuestion, home: Path, base: Config, batch: int) -> ModelSettings:
    if question.is_config:
        specs = batch_of(question.model, batch, question.sequence)
        module = {"_target_": BUILD, "file": question.model, "lora": question.lora}
        return ModelSettings(module, specs, Precision(question.precision))
    if question.lora or question.sequence:
        option = "--lora" if question.lora else "--sequence"
        what = f"{option} is for models of transformers"
        raise FitError(what, where=option, remedy="give a config.json, or change the module itself")
    name = Path(question.model).stem
    if name not in listing(home, "model"):
        what = f"'{question.model}' is neither a config.json nor a file of conf/model"
        known = ", ".join(listing(home, "model"))
        raise FitError(what, where=WHERE, remedy=f"give the path of a config.json, or one of: {known}")
    found: ModelSettings = load_part(home, "model", name)
    if question.batch is None:
        return found
    whole = next(iter(found.batch.values())).shape[0]
    specs = {
        own: replace(spec, shape=[spec.shape[0] // whole * batch, *spec.shape[1:]]) for own, spec in found.batch.items()
    }
    return replace(found, batch=specs)
