"""Measures training steps on this machine's GPU: `python -m benchmarks.measure_steps --out FILE [--rows FILE]`.

Writes the file that `benchmarks.profile_accuracy` reads: memory and time of steps of models with random weights, and
the card's calibration. Rows are taken from a file of the same form, or are the ones below. Train mode, dropout as in
the config, the model's own loss, AdamW(foreach=True), gradients set to None before each step; mode fp32 is float32 (no
tf32), amp float32 weights under bfloat16 autocast, bf16 bfloat16 weights and float inputs.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

MODES = ("fp32", "amp", "bf16")
WARM_UP, STEPS = 3, 6
CLASSES = 1000  # of images


def text(batch: int, length: int, words: int) -> dict[str, Any]:
    return {n: {"shape": [batch, length], "dtype": "int64", "high": words} for n in ("input_ids", "labels")}


def image(batch: int, side: int) -> dict[str, Any]:
    return {
        "pixel_values": {"shape": [batch, 3, side, side], "dtype": "float32"},
        "labels": {"shape": [batch], "dtype": "int64", "high": CLASSES},
    }


ROWS = [
    ("llama-small", "Llama",
     {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, "num_attention_heads": 16,
      "num_key_value_heads": 4, "vocab_size": 32000}, text(8, 1024, 32000)),
    ("llama-1b", "Llama",
     {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
      "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True}, text(2, 2048, 128256)),
    ("qwen2-small", "Qwen2",
     {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 8, "num_attention_heads": 14,
      "num_key_value_heads": 2, "vocab_size": 32000}, text(8, 1024, 32000)),
    ("qwen2-0.5b", "Qwen2",
     {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
      "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True}, text(4, 1024, 151936)),
    ("gpt2-medium", "GPT2", {"n_layer": 24, "n_embd": 1024, "n_head": 16}, text(4, 1024, 50257)),
    ("gpt2-large", "GPT2", {"n_layer": 36, "n_embd": 1280, "n_head": 20}, text(2, 1024, 50257)),
    ("opt-125m", "OPT", {}, text(8, 1024, 50272)),
    ("opt-350m", "OPT",
     {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "ffn_dim": 4096,
      "word_embed_proj_dim": 512, "do_layer_norm_before": False}, text(4, 1024, 50272)),
    ("pythia-160m", "GPTNeoX",
     {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
      "vocab_size": 50304}, text(8, 1024, 50304)),
    ("gpt-neo", "GPTNeo",
     {"hidden_size": 768, "num_layers": 12, "num_heads": 12, "attention_types": [[["global", "local"], 6]]},
     text(4, 1024, 50257)),
    ("gemma2", "Gemma2",
     {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 8,
      "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 64000}, text(4, 1024, 64000)),
    ("phi", "Phi",
     {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 16,
      "vocab_size": 51200}, text(4, 1024, 51200)),
    ("mixtral-small", "Mixtral",
     {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 8,
      "num_key_value_heads": 2, "vocab_size": 32000, "num_local_experts": 4}, text(8, 512, 32000)),
    ("mixtral-8x", "Mixtral",
     {"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 8, "num_attention_heads": 16,
      "num_key_value_heads": 4, "vocab_size": 32000, "num_local_experts": 8}, text(4, 1024, 32000)),
    ("bert-large", "Bert",
     {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
     text(16, 512, 30522)),
    ("roberta", "Roberta", {"vocab_size": 50265, "max_position_embeddings": 514}, text(16, 512, 50265)),
    ("distilbert", "DistilBert", {}, text(32, 512, 30522)),
    ("t5-small", "T5", {"decoder_start_token_id": 0, "pad_token_id": 0}, text(16, 512, 32128)),
    ("t5-base", "T5",
     {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "decoder_start_token_id": 0, "pad_token_id": 0},
     text(8, 512, 32128)),
    ("bart-base", "Bart",
     {"d_model": 768, "encoder_layers": 6, "decoder_layers": 6, "encoder_attention_heads": 12,
      "decoder_attention_heads": 12, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072}, text(8, 512, 50265)),
    ("vit-base", "ViT", {}, image(64, 224)),
    ("vit-large", "ViT",
     {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
     image(32, 224)),
    ("deit", "DeiT", {}, image(64, 224)),
    ("swin-tiny", "Swin", {}, image(64, 224)),
    ("swin-base", "Swin", {"embed_dim": 128, "depths": [2, 2, 18, 2], "num_heads": [4, 8, 16, 32]}, image(32, 224)),
    ("resnet18", "ResNet",
     {"depths": [2, 2, 2, 2], "hidden_sizes": [64, 128, 256, 512], "layer_type": "basic"}, image(128, 224)),
    ("resnet101", "ResNet", {"depths": [3, 4, 23, 3]}, image(64, 224)),
    ("convnext", "ConvNext", {}, image(64, 224)),
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=Path, help="a file of the same form: its rows are measured again")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = json.loads(arguments.rows.read_text())["rows"] if arguments.rows else list(default_rows())
    result: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": importlib.import_module("transformers").__version__,
        "calibration": calibrate(),
        "rows": [],
    }
    for row in rows:
        try:
            row["measured"] = measure(row)
        except Exception as error:  # one model that fails must not lose the others
            row["error"] = f"{type(error).__name__}: {error}"[:300]
        result["rows"].append(row)
        print(row["name"], row["mode"], row.get("measured", row.get("error")), flush=True)
        arguments.out.write_text(json.dumps(result, indent=1))


def default_rows() -> Iterator[dict[str, Any]]:
    for name, family, values, batch in ROWS:
        images = "pixel_values" in batch
        config = values | (
            {"num_labels": CLASSES}
            if images
            else {}
            if family in ("Bert", "Roberta", "DistilBert")
            else {"use_cache": False}
        )
        for mode in MODES:
            yield {"name": name, "mode": mode, "model_class": f"transformers.{family}{_task(family, images)}",
                   "config_class": f"transformers.{family}Config", "config": config, "batch": batch}  # fmt: skip


def _task(family: str, images: bool) -> str:
    if images:
        return "ForImageClassification"
    if family in ("T5", "Bart"):
        return "ForConditionalGeneration"
    if family in ("Bert", "Roberta", "DistilBert"):
        return "ForMaskedLM"
    return "LMHeadModel" if family == "GPT2" else "ForCausalLM"


def locate(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def make_batch(specs: dict[str, Any], mode: str) -> dict[str, torch.Tensor]:
    batch = {}
    for name, spec in specs.items():
        if spec["dtype"].startswith("int"):
            batch[name] = torch.randint(spec["high"], spec["shape"], device="cuda")
        else:
            batch[name] = torch.randn(spec["shape"], device="cuda", dtype=torch.bfloat16 if mode == "bf16" else None)
    return batch


def measure(row: dict[str, Any]) -> dict[str, Any]:
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    model = locate(row["model_class"])(locate(row["config_class"])(**row["config"])).cuda().train()
    if row["mode"] == "bf16":
        model = model.bfloat16()
    batch = make_batch(row["batch"], row["mode"])
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for _ in range(WARM_UP):
        step(model, batch, optimizer, row["mode"])
    memory = step(model, batch, optimizer, row["mode"])
    times = [step(model, batch, optimizer, row["mode"]) for _ in range(STEPS)]
    found = {name: value for name, value in memory.items() if name.endswith("_bytes")}
    for name in ("fwd_ms", "bwd_ms", "opt_ms", "step_ms"):
        found[name] = statistics.median(t[name] for t in times)
    parameters = list(model.parameters())
    return {
        "params": sum(p.numel() for p in parameters),
        "param_bytes": sum(p.numel() * p.element_size() for p in parameters),
        **found,
    }


def step(model: Any, batch: dict[str, torch.Tensor], optimizer: Any, mode: str) -> dict[str, float]:
    """Times are the card's own, between events: the host waits for the card before the step, not within it."""
    optimizer.zero_grad(set_to_none=True)
    allocated, peak = torch.cuda.memory_allocated, torch.cuda.max_memory_allocated
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    found: dict[str, float] = {"resident_bytes": allocated()}
    marks = [mark()]
    with torch.autocast("cuda", torch.bfloat16, enabled=mode == "amp"):
        loss = model(**batch).loss
    marks.append(mark())
    found |= {"after_fwd_bytes": allocated(), "fwd_peak_bytes": peak()}
    torch.cuda.reset_peak_memory_stats()
    loss.backward()
    marks.append(mark())
    found |= {"bwd_peak_bytes": peak(), "after_bwd_bytes": allocated()}
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    marks.append(mark())
    found["opt_peak_bytes"] = peak()
    found["step_peak_bytes"] = max(found["fwd_peak_bytes"], found["bwd_peak_bytes"], found["opt_peak_bytes"])
    torch.cuda.synchronize()
    spans = [before.elapsed_time(after) for before, after in pairwise(marks)]
    return found | dict(zip(("fwd_ms", "bwd_ms", "opt_ms"), spans, strict=True)) | {"step_ms": sum(spans)}


def mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def calibrate() -> dict[str, Any]:
    rates = {}
    for dtype in (torch.bfloat16, torch.float32):
        for side in (256, 512, 1024, 2048, 4096, 8192):
            a = torch.randn(side, side, device="cuda", dtype=dtype)
            seconds = timed(lambda a=a: a @ a)
            rates[f"{side}_{str(dtype).removeprefix('torch.')}"] = round(2 * side**3 / seconds / 1e12, 2)
    x = torch.randn(1 << 28, device="cuda")
    copy = 2 * 4 * x.numel() / timed(lambda: x.clone()) / 1e12
    tiny = torch.ones(16, device="cuda")
    return {
        "matmul_tflops": rates,
        "copy_tb_per_s": round(copy, 3),
        "launch_us": round(1e6 * timed(lambda: tiny + 1, 200), 2),
    }


def timed(work: Callable[[], object], repeats: int = 20) -> float:
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats


if __name__ == "__main__":
    main()
