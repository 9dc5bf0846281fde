"""Any model of `transformers` from its config.json, without weights: the class with a loss, what a step feeds it, LoRA.

As in conf/model:

    module:
      _target_: shardwright.pipeline.models.from_config.build
      file: path/to/config.json
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.pipeline.base.errors import ShardwrightError, nearest
from shardwright.pipeline.config import DType, TensorSpec

TOKENS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration", "ForTokenClassification")
WHOLE = ("ForSequenceClassification", "ForImageClassification")  # one label for a sample
TASKS = ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "IMAGE_CLASSIFICATION")  # where the file names no class
POSITIONS = ("max_position_embeddings", "n_positions", "max_sequence_length")
SEQUENCE = 2048  # where none is given and the model has room for it
IMAGE = 224


class ModelFileError(ShardwrightError):
    """A config.json from which no model with a loss can be built."""


def build(file: str, lora: int = 0) -> nn.Module:
    """The model, as its own library builds it; with adapters of rank `lora` on the layers of its blocks."""
    library, content = _library(file), read(Path(file))
    config = _config(library, content, file)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    model: nn.Module = getattr(library, class_of(library, content, file))(config)
    return with_adapters(model, lora, file) if lora else model


def read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelFileError(f"cannot be read: {error.strerror or error}", where=str(file)) from error
    except ValueError as error:
        raise ModelFileError(f"it is no JSON: {error}", where=str(file), remedy="give a model's config.json") from error
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        what, remedy = "it names no model_type", "give the config.json of a model of transformers"
        raise ModelFileError(what, where=str(file), remedy=remedy)
    return content


def class_of(library: Any, content: Mapping[str, Any], file: str) -> str:
    """The name of the class with a loss: as the file says, or what the library has for the type."""
    auto, kind = importlib.import_module("transformers.models.auto.modeling_auto"), content["model_type"]
    listed = [str(name) for name in content.get("architectures") or ()]
    for task in TASKS:
        found = getattr(auto, f"MODEL_FOR_{task}_MAPPING_NAMES").get(kind)
        listed += [found] if isinstance(found, str) else list(found or ())
    name = next((name for name in listed if name.endswith(TOKENS + WHOLE) and hasattr(library, name)), None)
    if name is None:
        what = f"no class of {kind} is known that takes tokens or images and returns a loss"
        remedy = "describe a module that does in conf/model, and name that file instead (`shardwright docs own-model`)"
        raise ModelFileError(what, where=f"{file}: architectures", remedy=remedy)
    return name


def batch_of(file: str, samples: int, sequence: int | None) -> dict[str, TensorSpec]:
    """What a step feeds the model."""
    library, content = _library(file), read(Path(file))
    config, name = _config(library, content, file), class_of(library, content, file)
    if name.endswith("ForImageClassification"):
        if sequence is not None:
            raise ModelFileError("a model of images has no sequence", where="--sequence", remedy="leave it out")
        size = getattr(config, "image_size", IMAGE)
        sizes = list(size) if isinstance(size, list | tuple) else [size, size]
        image = [samples, getattr(config, "num_channels", 3), *sizes]
        return {"pixel_values": TensorSpec(image, DType.float32), "labels": TensorSpec([samples], DType.int64)}
    room = next((value for key in POSITIONS if isinstance(value := getattr(config, key, None), int)), None)
    if sequence is not None and room is not None and sequence > room:
        what = f"a sequence of {sequence} is longer than the {room} positions that the model has"
        raise ModelFileError(what, where=file, remedy="give less with --sequence, or raise them in the file")
    length = sequence or min(SEQUENCE, room or SEQUENCE)
    labels = [samples] if name.endswith(WHOLE) else [samples, length]
    return {"input_ids": TensorSpec([samples, length], DType.int64), "labels": TensorSpec(labels, DType.int64)}


def _library(file: str) -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        what = f"models of transformers need that package: {error}"
        raise ModelFileError(what, where=file, remedy='`pip install "shardwright[hf]"`') from error


def _config(library: Any, content: Mapping[str, Any], file: str) -> Any:
    known = list(library.CONFIG_MAPPING)
    kind = content["model_type"]
    if kind not in known:
        near = nearest(kind, known)
        remedy = f"did you mean '{near}'?" if near else "install a version of transformers that has it"
        raise ModelFileError(f"transformers knows no model_type '{kind}'", where=file, remedy=remedy)
    given = {key: value for key, value in content.items() if key not in ("model_type", "auto_map")}
    try:
        return library.CONFIG_MAPPING[kind](**given)
    except Exception as error:  # theirs: one line, not our traceback
        what = f"{kind} cannot be configured so: {type(error).__name__}: {error}"
        raise ModelFileError(what, where=file, remedy="check its keys") from error


# ------------------------------------------------------------------------------------------------------------ adapters


class LowRank(nn.Module):
    """A linear layer that is not trained, with a product of two small ones beside it that is."""

    def __init__(self, base: nn.Module, rank: int) -> None:
        super().__init__()
        rows, columns = base.weight.shape if isinstance(base, nn.Linear) else reversed(base.weight.shape)  # type: ignore[union-attr]
        self.base = base
        kind = {"device": base.weight.device, "dtype": torch.float32}
        self.down = nn.Parameter(torch.empty(rank, columns, **kind))  # type: ignore[arg-type]
        self.up = nn.Parameter(torch.zeros(rows, rank, **kind))  # type: ignore[arg-type]
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    @property
    def weight(self) -> Tensor:
        """For layers that ask the type of their weight."""
        return self.base.weight  # type: ignore[return-value]

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.base(x)
        return found + F.linear(F.linear(x.to(self.down.dtype), self.down), self.up).to(found.dtype)


def with_adapters(model: nn.Module, rank: int, where: str) -> nn.Module:
    """On every linear layer of attention and feed-forwards: those inside lists of blocks. All else is frozen, and its
    values are in half precision, as nothing trains them."""
    model.requires_grad_(False).bfloat16()
    layers = list(_linear_layers(model))
    if not layers:
        raise ModelFileError("it has no blocks with linear layers for adapters", where=where, remedy="leave --lora out")
    for parent, name, layer in layers:
        setattr(parent, name, LowRank(layer, rank))
    return model


def _linear_layers(model: nn.Module, inside: bool = False) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    for name, child in model.named_children():
        if inside and type(child).__name__ in ("Linear", "Conv1D"):
            yield model, name, child
        else:
            yield from _linear_layers(child, inside or isinstance(model, nn.ModuleList))
