"""The training that the pipeline must reproduce, in plain PyTorch on one process: prints one loss a line.

Reads the configuration's YAML itself and knows nothing of plans, so a mistake of ours cannot hide in both.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import torch
from ruamel.yaml import YAML


def make(settings, *leading):
    module, name = settings["_target_"].rsplit(".", 1)
    arguments = {key: value for key, value in settings.items() if key != "_target_"}
    return getattr(importlib.import_module(module), name)(*leading, **arguments)


def read(group, root):
    yaml = YAML(typ="safe")  # 1.2, as DVC reads it: 1e-3 is a number
    choice = yaml.load(root / "conf/config.yaml")[group]
    return yaml.load(root / f"conf/{group}/{choice}.yaml")


def order(length, shuffle, seed, epoch):
    if not shuffle:
        return list(range(length))
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch)).tolist()


def samples(data, length):
    epoch = 0
    while True:
        yield from order(length, data.get("shuffle", False), data.get("seed", 0), epoch)
        epoch += 1


def in_precision(tensor, precision):
    return tensor.bfloat16() if precision == "bf16" and tensor.is_floating_point() else tensor


def main(root, steps):
    model_settings, data, train = (read(group, root) for group in ("model", "data", "train"))
    torch.manual_seed(train["seed"])
    precision = model_settings.get("precision", "fp32")
    model = make(model_settings["module"]).train()
    model = model.bfloat16() if precision == "bf16" else model
    dataset = make(data["dataset"])
    optimizer = make(train["optimizer"], model.parameters())
    size = next(iter(model_settings["batch"].values()))["shape"][0]
    indices = samples(data, len(dataset))
    passes = train["gradient_accumulation"]
    for _ in range(steps):
        optimizer.zero_grad()
        losses = []
        for _ in range(passes):
            rows = [dataset[next(indices)] for _ in range(size)]
            stacked = {name: torch.stack([row[name] for row in rows]) for name in model_settings["batch"]}
            batch = {name: in_precision(tensor, precision) for name, tensor in stacked.items()}
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "amp"):
                output = model(**batch)
            loss = output["loss"] if isinstance(output, dict) else output
            (loss / passes).backward()
            losses.append(loss.item())
        if train.get("clip_norm") is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), train["clip_norm"])
        optimizer.step()
        print(repr(sum(losses) / passes))


if __name__ == "__main__":
    main(Path.cwd(), int(sys.argv[1]))
