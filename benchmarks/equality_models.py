"""The models of benchmarks.equality, tiny, with random weights.

Twelve families of Hugging Face, two small GPTs, a recommender of bags of embeddings, two recurrent language models, and
three models with complex numbers inside.
Sizes divide by 2, by 3 and by 4, but for the key and value heads, which are four; and but for one of the GPTs, of which
no size but the batch's does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.complex_models import ComplexLayers, Fourier, Rotary

WORDS, LENGTH, SAMPLES, CLASSES = 96, 12, 12, 12
ODD_WORDS = 97
WIDTH, HEADS, INNER, LAYERS = 48, 12, 96, 2
STEPS = 3
TEXT = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "vocab_size": WORDS}
DECODER = {**TEXT, "intermediate_size": INNER, "num_key_value_heads": 4, "use_cache": False}


def text(number: int) -> dict[str, Tensor]:
    """Some targets are left out, of the first samples more: ranks then hold different numbers of them."""
    generator = torch.Generator().manual_seed(number)
    found = {n: torch.randint(1, WORDS, (SAMPLES, LENGTH), generator=generator) for n in ("input_ids", "labels")}
    found["labels"][: 2 + number, : LENGTH // 2] = -100
    return found


def image(side: int) -> Callable[[int], dict[str, Tensor]]:
    def batch(number: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(number)
        pixels = torch.randn(SAMPLES, 3, side, side, generator=generator)
        return {"pixel_values": pixels, "labels": torch.randint(CLASSES, (SAMPLES,), generator=generator)}

    return batch


def _hf(model: str, config: str, **values: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        found: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**values))
        return found

    return build


def _gpt() -> nn.Module:
    from shardwright.pipeline.models.gpt import GPT

    return GPT(vocab_size=12, context=12, width=12, layers=2, heads=12)


def _odd() -> nn.Module:
    from shardwright.pipeline.models.gpt import GPT

    return GPT(vocab_size=ODD_WORDS, context=12, width=35, layers=2, heads=5)


def _tokens(number: int, words: int = 12) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    found = {n: torch.randint(words, (12, 12), generator=generator) for n in ("input_ids", "labels")}
    found["labels"][: 2 + number, :5] = -100
    return found


def _odd_tokens(number: int) -> dict[str, Tensor]:
    return _tokens(number, ODD_WORDS)


class Recommender(nn.Module):
    """Bags of three kinds, one of them weighted, under a small network."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.EmbeddingBag(WORDS, WIDTH, mode="sum")
        self.liked = nn.EmbeddingBag(WORDS, WIDTH, mode="mean", padding_idx=0)
        self.best = nn.EmbeddingBag(WORDS, WIDTH, mode="max")
        self.first, self.last = nn.Linear(3 * WIDTH, INNER), nn.Linear(INNER, CLASSES)

    def forward(self, items: Tensor, weights: Tensor, labels: Tensor) -> Tensor:
        bags = [self.seen(items, per_sample_weights=weights), self.liked(items), self.best(items)]
        logits = self.last(nn.functional.relu(self.first(torch.cat(bags, 1))))
        return nn.functional.cross_entropy(logits, labels)


def _items(number: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    items = torch.randint(WORDS, (SAMPLES, LENGTH), generator=generator)
    items[:, : LENGTH // 3] *= torch.rand(SAMPLES, LENGTH // 3, generator=generator) < 0.5  # some are padding
    weights = torch.rand(SAMPLES, LENGTH, generator=generator)
    return {"items": items, "weights": weights, "labels": torch.randint(CLASSES, (SAMPLES,), generator=generator)}


class RecurrentLM(nn.Module):
    """The next word, by a recurrent layer."""

    def __init__(self, layer: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layer = layer(WIDTH, WIDTH, **options)
        self.head = nn.Linear(WIDTH * (2 if options.get("bidirectional") else 1), WORDS)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        given = self.words(input_ids)
        made, _ = self.layer(given if self.layer.batch_first else given.transpose(0, 1))
        logits = self.head(made if self.layer.batch_first else made.transpose(0, 1))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


Model = tuple[Callable[[], nn.Module], Callable[[int], dict[str, Tensor]]]  # what builds it, and batch number n
_T5 = {"d_model": WIDTH, "num_layers": LAYERS, "num_heads": HEADS, "d_kv": 4, "d_ff": INNER, "vocab_size": WORDS}
_VIT = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": INNER}
_SWIN = {"embed_dim": 24, "depths": [2, 2], "num_heads": [6, 12], "window_size": 4, "patch_size": 4}
_RESNET = {"depths": [1, 2], "hidden_sizes": [24, 48], "embedding_size": 12, "layer_type": "bottleneck"}
_OPT = {**TEXT, "ffn_dim": INNER, "word_embed_proj_dim": WIDTH, "max_position_embeddings": 32, "use_cache": False}
_GPT2 = {"n_layer": LAYERS, "n_embd": WIDTH, "n_head": HEADS, "vocab_size": WORDS, "n_positions": 32}
_DEEPSEEK = {
    **DECODER, "num_key_value_heads": HEADS, "q_lora_rank": 24, "kv_lora_rank": 24, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 8, "head_dim": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "moe_intermediate_size": 24, "first_k_dense_replace": 1,
}  # fmt: skip
_MAMBA = {
    "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "vocab_size": WORDS, "num_heads": HEADS, "head_dim": 8,
    "expand": 2, "n_groups": 4, "state_size": 12, "chunk_size": 6, "use_cache": False,
}  # fmt: skip
FAMILIES: dict[str, Model] = {
    "gpt2": (_hf("GPT2LMHeadModel", "GPT2Config", **_GPT2, use_cache=False), text),
    "bert": (_hf("BertForMaskedLM", "BertConfig", **TEXT, intermediate_size=INNER), text),
    "llama": (_hf("LlamaForCausalLM", "LlamaConfig", **DECODER), text),
    "qwen2": (_hf("Qwen2ForCausalLM", "Qwen2Config", **DECODER), text),
    "t5": (
        _hf("T5ForConditionalGeneration", "T5Config", **_T5, decoder_start_token_id=0, pad_token_id=0, use_cache=False),
        text,
    ),
    "vit": (_hf("ViTForImageClassification", "ViTConfig", **_VIT, image_size=24, patch_size=8, num_labels=CLASSES),
            image(24)),
    "swin": (_hf("SwinForImageClassification", "SwinConfig", **_SWIN, image_size=32, num_labels=CLASSES), image(32)),
    "resnet": (_hf("ResNetForImageClassification", "ResNetConfig", **_RESNET, num_labels=CLASSES), image(24)),
    "mixtral": (_hf("MixtralForCausalLM", "MixtralConfig", **DECODER, num_local_experts=4), text),
    "opt": (_hf("OPTForCausalLM", "OPTConfig", **_OPT), text),
}  # fmt: skip
FURTHER: dict[str, Model] = {
    "deepseek_v2": (_hf("DeepseekV2ForCausalLM", "DeepseekV2Config", **_DEEPSEEK), text),
    "mamba2": (_hf("Mamba2ForCausalLM", "Mamba2Config", **_MAMBA), text),
    "bags": (Recommender, _items),
    "lstm": (lambda: RecurrentLM(nn.LSTM, num_layers=LAYERS, batch_first=True), text),
    "gru": (lambda: RecurrentLM(nn.GRU, num_layers=LAYERS, bidirectional=True), text),
}  # fmt: skip
GPT, ODD = "gpt", "odd"
COMPLEX: dict[str, Model] = {
    "rotary": (Rotary, _tokens),
    "fourier": (Fourier, _tokens),
    "complex": (ComplexLayers, _tokens),
}
MODELS: dict[str, Model] = {**FAMILIES, **FURTHER, GPT: (_gpt, _tokens), ODD: (_odd, _odd_tokens), **COMPLEX}


def build(name: str) -> nn.Module:
    """With the same weights every time."""
    torch.manual_seed(0)
    return MODELS[name][0]()


def batches(name: str, passes: int = 1) -> list[list[dict[str, Tensor]]]:
    """Of each step, one for each of its passes."""
    batch = MODELS[name][1]
    return [[batch(step * passes + n) for n in range(passes)] for step in range(STEPS)]


def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)
