"""Layers and ops that break planners: sizes among arguments, bags, recurrent layers, ops that crash when tried.

Each is a model of its own, which goes through every stage up to the generated program and must be split as is said; all
but the sample are verified too, on two processes.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import small_project
from benchmarks.attacks.outcome import TRACEBACK, Outcome
from shardwright.stages.command_line import main

LAYERS = '''
import os

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@torch.library.custom_op("layer_attacks::careful", mutates_args=())
def careful(x: Tensor, indices: Tensor, how: str) -> Tensor:
    """Takes indices that rise; what else it is given ends the process, or never ends."""
    if not bool((indices.diff() >= 0).all()):
        if how == "abort":
            os.abort()
        while how == "hang":
            pass
        raise SystemExit(3)
    return x * 2.0


@careful.register_fake
def _(x, indices, how):
    return torch.empty_like(x)


def _keep(ctx, inputs, output):
    pass


careful.register_autograd(lambda ctx, grad: (grad * 2.0, None, None), setup_context=_keep)


class Model(nn.Module):
    """A layer of some kind between an embedding and a loss."""

    def __init__(self, kind: str, **options) -> None:
        super().__init__()
        self.kind, self.words = kind, nn.Embedding(64, 8)
        made = 8
        if kind in ("LSTM", "GRU", "RNN"):
            self.layer = getattr(nn, kind)(8, 8, **options)
            made = 8 * (1 + self.layer.bidirectional) if not options.get("proj_size") else options["proj_size"]
        elif kind.endswith("Cell"):
            self.layer = getattr(nn, kind)(8, 8)
        elif kind == "EmbeddingBag":
            self.layer = nn.EmbeddingBag(64, 8, **options)
        elif kind == "ConvTranspose1d":
            self.layer = nn.ConvTranspose1d(8, 8, 3, padding=1, groups=options["groups"])
        self.options, self.head = options, nn.Linear(made, 64)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(input_ids)
        if self.kind in ("LSTM", "GRU", "RNN"):
            first = self.layer.batch_first
            x = self.layer(x if first else x.transpose(0, 1))[0]
            x = x if first else x.transpose(0, 1)
        elif self.kind.endswith("Cell"):
            state, rows = None, []
            for step in range(x.shape[1]):
                state = self.layer(x[:, step], state)
                rows.append(state[0] if isinstance(state, tuple) else state)
            x = torch.stack(rows, 1)
        elif self.kind == "EmbeddingBag":
            x = x + self.layer(input_ids).unsqueeze(1)
        elif self.kind == "offsets":
            bags = F.embedding_bag(input_ids.flatten(), self.words.weight, torch.arange(0, input_ids.numel(), 4))
            x = x + bags.mean()
        elif self.kind == "ConvTranspose1d":
            x = self.layer(x.transpose(1, 2)).transpose(1, 2)
        elif self.kind == "repeat_interleave":
            x = x.unflatten(-1, (4, 2)).repeat_interleave(3, dim=2, output_size=12).sum(-2)
            x = x.repeat_interleave(4, dim=-1, output_size=8)
        elif self.kind == "elu":
            x = torch.ops.aten.elu(x, 0.5, 1.1, 2)
        elif self.kind == "careful":
            x = torch.ops.layer_attacks.careful(x, torch.arange(6), self.options["how"])
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
'''


LAYOUT = re.compile(r"  # ([A-Z]\S*(?: -> \S+)?) \[")  # what stands behind a line of the program


@dataclass(frozen=True)
class Layer:
    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    only: str = "data"
    shows: str = ""  # the program has this call, and with it a dim that is split

    @property
    def name(self) -> str:
        return f"{self.kind} {self.options or ''} by {self.only}"


TWO = {"num_layers": 2, "bidirectional": True}
EVERY = [
    Layer("EmbeddingBag", {"mode": "max", "padding_idx": 1}, shows="F.embedding_bag("),
    Layer("careful", {"how": "abort"}),
    Layer("LSTM", {**TWO, "dropout": 0.1}, shows="torch.lstm("),
    Layer("repeat_interleave", only="tensor", shows="repeat_interleave("),
    Layer("LSTM", {"batch_first": True}, shows="torch.lstm("),
    Layer("LSTM", {"proj_size": 4}, shows="torch.lstm("),
    Layer("GRU", {**TWO, "batch_first": True}, shows="torch.gru("),
    Layer("RNN", {"nonlinearity": "relu"}, shows="torch.rnn_relu("),
    Layer("RNN", {"bias": False, "batch_first": True}, shows="torch.rnn_tanh("),
    *(Layer(f"{name}Cell", shows="_cell(") for name in ("LSTM", "GRU", "RNN")),
    *(Layer("EmbeddingBag", {"mode": mode}, shows="F.embedding_bag(") for mode in ("sum", "mean", "max")),
    *(Layer("EmbeddingBag", {"mode": mode}, only="tensor", shows="embedding_bag(") for mode in ("sum", "mean", "max")),
    Layer("EmbeddingBag", {"mode": "sum", "scale_grad_by_freq": True}),
    Layer("offsets"),
    Layer("ConvTranspose1d", {"groups": 2}, shows="F.conv_transpose1d("),
    Layer("ConvTranspose1d", {"groups": 2}, only="tensor"),
    Layer("elu", shows="aten.elu"),
    Layer("careful", {"how": "exit"}),
    Layer("careful", {"how": "hang"}),
]


def attacks(folder: Path, sample: bool) -> Iterator[Outcome]:
    (folder / "own").mkdir()
    (folder / "own/attacked_layers.py").write_text(LAYERS)
    for number, layer in enumerate(EVERY[:2] if sample else EVERY):
        yield _attacked(folder / str(number), layer, () if sample else ("verify",))


def _attacked(root: Path, layer: Layer, further: tuple[str, ...]) -> Outcome:
    _configure(root, layer)
    for stage in (*small_project.BEFORE_TRAIN, *further):
        status, err = _run(root, stage)
        if status:
            return Outcome(layer.name, False, f"{stage}: status {status}: {err.strip()[-600:]}", TRACEBACK in err)
    text = (root / "runs/codegen/module.py").read_text()
    layouts = (LAYOUT.search(after) for after in text.split(layer.shows or "def ")[1:])
    split = any("S(" in layout[1] for layout in layouts if layout)
    return Outcome(layer.name, split, "" if split else f"nothing is split where {layer.shows!r} stands")


def _configure(root: Path, layer: Layer) -> None:
    small_project.configure(root, {"steps": 1})
    shape = {"shape": [12, 8], "dtype": "int64"}
    module = {"_target_": "attacked_layers.Model", "kind": layer.kind, **layer.options}
    model = {"module": module, "batch": {"input_ids": shape, "labels": shape}}
    for name, change in (("model", model), ("solve", {"only": layer.only}), ("config", {"code": "../own"})):
        file = root / ("conf/config.yaml" if name == "config" else f"conf/{name}/small.yaml")
        file.write_text(json.dumps({**json.loads(file.read_text()), **change}))


def _run(root: Path, stage: str) -> tuple[int, str]:
    """In this process: an op that ends its process would end the benchmark."""
    here, path, err = os.getcwd(), list(sys.path), io.StringIO()
    try:
        os.chdir(root)
        with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
            try:
                status = main([stage, "-q"])
            except Exception as error:
                return 1, f"{TRACEBACK}: {type(error).__name__}: {error}"
        return status, err.getvalue()
    finally:
        os.chdir(here)
        sys.path[:] = path
