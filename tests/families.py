"""Tiny members of the model families that users bring, with random weights and a batch each."""

from __future__ import annotations

import torch
import transformers as hf

WORDS, LENGTH, SAMPLES, CLASSES = 64, 16, 4, 10
TEXT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": WORDS}
DECODER = {**TEXT, "intermediate_size": 64, "num_key_value_heads": 2, "use_cache": False}


def tokens() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {n: torch.randint(WORDS, (SAMPLES, LENGTH), generator=generator) for n in ("input_ids", "labels")}


def images(side: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "pixel_values": torch.randn(SAMPLES, 3, side, side, generator=generator),
        "labels": torch.randint(CLASSES, (SAMPLES,), generator=generator),
    }


def gpt2():
    config = hf.GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=WORDS, n_positions=32, use_cache=False)
    return hf.GPT2LMHeadModel(config)


def bert():
    return hf.BertForMaskedLM(hf.BertConfig(**TEXT, intermediate_size=64))


def llama():
    return hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER))


def qwen2():
    return hf.Qwen2ForCausalLM(hf.Qwen2Config(**DECODER))


def t5(layers=2, **more):
    sizes = {"d_model": 32, "num_layers": layers, "num_heads": 4, "d_kv": 8, "d_ff": 64, "vocab_size": WORDS}
    return hf.T5ForConditionalGeneration(
        hf.T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0, use_cache=False, **more)
    )


def vit():
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    return hf.ViTForImageClassification(hf.ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=CLASSES))


def swin():
    sizes = {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "patch_size": 4}
    return hf.SwinForImageClassification(hf.SwinConfig(**sizes, image_size=64, num_labels=CLASSES))


def resnet():
    sizes = {"depths": [1, 2], "hidden_sizes": [16, 32], "embedding_size": 8, "layer_type": "bottleneck"}
    return hf.ResNetForImageClassification(hf.ResNetConfig(**sizes, num_labels=CLASSES))


def mixtral():
    return hf.MixtralForCausalLM(hf.MixtralConfig(**DECODER, num_local_experts=4))


def opt():
    sizes = {**TEXT, "ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 32, "use_cache": False}
    return hf.OPTForCausalLM(hf.OPTConfig(**sizes))


FAMILIES = {
    gpt2: tokens(), bert: tokens(), llama: tokens(), qwen2: tokens(), t5: tokens(), mixtral: tokens(), opt: tokens(),
    vit: images(32), swin: images(64), resnet: images(32),
}  # fmt: skip
