"""The models of benchmarks.gpu_path as a user's own code: what builds them, their data, and what PyTorch offers them.

`build` is what the conf/model files of that benchmark name. The environment variable `WAY` says how a peer runs the
module: as its users would write it, in the function that builds it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

from benchmarks.measure_steps import image, locate, text

WAY = "GPU_PATH_WAY"
EAGER_WAYS = ("plain", "per block")
COMPILED_WAYS = ("compile", "compile, reduce-overhead", "compile, half the activations", "compile, per block")
WAYS = (*EAGER_WAYS, *COMPILED_WAYS)
SAMPLES = 8  # of the data that differ; drawn once, as a step must not wait for them


def _row(family: str, task: str, config: dict[str, Any], batch: dict[str, Any]) -> dict[str, Any]:
    return {
        "model_class": f"transformers.{family}{task}",
        "config_class": f"transformers.{family}Config",
        "config": config,
        "batch": batch,
    }


MODELS: dict[str, dict[str, Any]] = {
    "gpt2-medium": _row(
        "GPT2", "LMHeadModel", {"n_layer": 24, "n_embd": 1024, "n_head": 16, "use_cache": False},
        text(16, 1024, 50257),
    ),
    "llama-1b": _row(
        "Llama", "ForCausalLM",
        {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
         "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True, "use_cache": False},
        text(4, 1024, 128256),
    ),
    "qwen3-0.6b": _row(
        "Qwen3", "ForCausalLM",
        {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
         "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True,
         "use_cache": False},
        text(8, 1024, 151936),
    ),
    "bert-large": _row(
        "Bert", "ForMaskedLM",
        {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
        text(32, 512, 30522),
    ),
    "vit-large": _row(
        "ViT", "ForImageClassification",
        {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096,
         "num_labels": 1000},
        image(64, 224),
    ),
    "t5-base": _row(
        "T5", "ForConditionalGeneration",
        {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "decoder_start_token_id": 0,
         "pad_token_id": 0, "use_cache": False},
        text(16, 512, 32128),
    ),
    "mixtral-small": _row(
        "Mixtral", "ForCausalLM",
        {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 8,
         "num_key_value_heads": 2, "vocab_size": 32000, "num_local_experts": 4, "use_cache": False},
        text(16, 1024, 32000),
    ),
    "resnet50": _row("ResNet", "ForImageClassification", {"num_labels": 1000}, image(256, 224)),
    "gpt2-tiny": _row(  # to try the benchmark itself
        "GPT2", "LMHeadModel",
        {"n_layer": 3, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 32, "use_cache": False,
         "embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0},
        text(8, 32, 64),
    ),
}  # fmt: skip


def build(name: str) -> nn.Module:
    row = MODELS[name]
    model: nn.Module = locate(row["model_class"])(locate(row["config_class"])(**row["config"]))
    way = os.environ.get(WAY, "plain")
    if way.endswith("per block"):
        recompute_blocks(model)
    if way.startswith("compile"):
        return compiled(model, way)
    return model


def compiled(model: nn.Module, way: str) -> nn.Module:
    if "half" in way:
        import torch._functorch.config as settings

        settings.activation_memory_budget = 0.5
    found: Any = torch.compile(model, mode="reduce-overhead" if "reduce-overhead" in way else None)
    return found  # type: ignore[no-any-return]


class Recomputed(nn.Module):
    """A block whose activations are dropped."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def __getattr__(self, name: str) -> Any:
        """Models ask their layers for what they are, such as `attention_type`."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("block"), name)

    def forward(self, *args: Any, **named: Any) -> Any:
        return checkpoint(self.block, *args, use_reentrant=False, **named)


def recompute_blocks(model: nn.Module) -> None:
    for parent, name in list(_numbered(model)):
        setattr(parent, name, Recomputed(getattr(parent, name)))


def _numbered(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """The outermost modules of lists: layers, as users see them; not the parts of a `Sequential`."""
    for name, child in module.named_children():
        if isinstance(module, nn.ModuleList) and next(child.parameters(), None) is not None:
            yield module, name
        else:
            yield from _numbered(child)


class Drawn(Dataset[dict[str, Tensor]]):
    """A few random samples of a model's batch, over and over."""

    def __init__(self, name: str, samples: int = 100_000) -> None:
        self.samples, self.specs = samples, MODELS[name]["batch"]

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self._drawn(index % SAMPLES)

    @functools.cache  # noqa: B019  -- as long as the run
    def _drawn(self, index: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(index)
        found = {}
        for name, spec in self.specs.items():
            shape = spec["shape"][1:]
            real = "float" in spec["dtype"]
            found[name] = (
                torch.randn(shape, generator=draw) if real else torch.randint(spec["high"], shape, generator=draw)
            )
        return found
