"""The models of examples/fit with small sizes: a plan of one takes seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "num_hidden_layers": 4, "vocab_size": 256, "max_position_embeddings": 4096, "num_local_experts": 4, "d_model": 64,
    "d_ff": 96, "d_kv": 16, "num_heads": 4, "num_layers": 5, "image_size": 32, "num_labels": 8,
}  # fmt: skip


def shrink(path: Path, to: Path, **changed: Any) -> None:
    """Keys that the file has, and some that are changed."""
    content = json.loads(path.read_text())
    to.write_text(json.dumps({**content, **{key: size for key, size in SIZES.items() if key in content}, **changed}))
