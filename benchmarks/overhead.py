"""What the generated program's step takes beside what people use today: `python -m benchmarks.overhead`.

    one rank     the unsplit program over the original module, GPT-2 small and ResNet-50 of transformers: on a CPU in
                 float32; with `--device cuda` in bfloat16 autocast, eager and compiled
    two ranks    CPU processes (gloo), a small GPT in two sizes: the DDP program over torch's DDP (as it comes, and with
                 `gradient_as_bucket_view`), ZeRO-3 over FSDP2 (`fully_shard`), Megatron's tensor parallelism over
                 DTensor (`parallelize_module`)

Each figure is ours over theirs, of whole steps that are run in turn (benchmarks.overhead_steps); a bar is met where the
ratio is below it or within two standard errors. The losses of both are compared in every pair. Planning needs no GPU
and measuring needs torch and transformers alone: `--only plan --folder DIR` here, `--only measure --folder DIR` there.
The last line is one JSON object, the ratios by name.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import nn

from benchmarks.overhead_models import ONE_RANK, TWO_RANKS, batch_one, batch_two, build_one, build_two
from benchmarks.overhead_steps import (
    Compared,
    Step,
    compare,
    ddp_step,
    fsdp_step,
    our_step,
    plain_step,
    tensor_step,
)
from pipeline.runtime.source import load_program

CPU_BAR, EAGER_BAR, COMPILED_BAR = 1.00, 1.01, 1.02
NEAR, NEAR_IN_HALF = 1e-4, 5e-2  # losses of a pair, relative


@dataclass(frozen=True)
class Peer:
    family: str  # of benchmarks.overhead_plans
    step: Callable[..., Step]
    bar: float


PEERS = {
    "ddp": Peer("ddp", ddp_step, 1.00),
    "ddp_bucket_view": Peer("ddp", partial(ddp_step, gradient_as_bucket_view=True), 1.05),
    "fsdp2": Peer("zero3", fsdp_step, 0.90),
    "dtensor": Peer("tensor", tensor_step, 0.90),
}


@dataclass(frozen=True)
class Row:
    name: str
    bar: float
    near: float
    found: Compared

    @property
    def met(self) -> bool:
        return self.found.ratio - self.found.noise <= self.bar and self.found.differ <= self.near


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("plan", "measure"), help="one part, the other's files from the folder")
    parser.add_argument("--folder", type=Path, default=Path("runs/overhead"), help="where programs lie")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of one rank; two ranks are on CPUs")
    parser.add_argument("--models", default=",".join(ONE_RANK), help="of one rank; empty for none")
    parser.add_argument("--peers", default="", help="of two ranks; by default all on a CPU, none on a GPU")
    parser.add_argument("--sizes", default=",".join(TWO_RANKS), help="of two ranks; empty for none")
    parser.add_argument("--pairs", type=int, default=40, help="of steps, for each figure")
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile on a GPU")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    models, sizes = _listed(arguments.models), _listed(arguments.sizes)
    peers = _listed(arguments.peers) or ([] if arguments.device == "cuda" else list(PEERS))
    if arguments.only != "measure":
        plan(arguments.folder, arguments.device, models, sizes, {PEERS[name].family for name in peers})
    if arguments.only == "plan":
        return 0
    torch.set_num_threads(1)
    rows = one_rank(arguments.folder, arguments.device, models, arguments.pairs, not arguments.no_compile)
    rows += two_ranks(arguments.folder, peers, sizes, arguments.pairs) if peers and sizes else []
    print(json.dumps({row.name: round(row.found.ratio, 4) for row in rows}))
    return 0 if all(row.met for row in rows) else 1


def _listed(names: str) -> list[str]:
    return [name for name in names.split(",") if name]


def plan(folder: Path, device: str, models: list[str], sizes: list[str], families: set[str]) -> None:
    from benchmarks import overhead_plans  # measuring needs none of what it imports

    for name in models:
        _program(folder, f"{name}_{device}").write_text(overhead_plans.one_rank(ONE_RANK[name], device))
        if device == "cuda":
            text = overhead_plans.one_rank(ONE_RANK[name], device, compiled=True)
            _program(folder, f"{name}_{device}_compiled").write_text(text)
    for size in sizes:
        for family in sorted(families):
            text = overhead_plans.two_ranks(TWO_RANKS[size], family)
            _program(folder, f"{family}_{size}").write_text(text)


def _program(folder: Path, name: str) -> Path:
    return folder / f"{name}.py"


def told(row: Row) -> Row:
    found = row.found
    line = f"{row.name:24}{found.ours_ms:10.2f} ms{found.theirs_ms:10.2f} ms{found.ratio:9.3f} ±{found.noise:.3f}"
    losses = f"{found.losses[0]:.6f} / {found.losses[1]:.6f}"
    print(f"{line}   at most {row.bar:.2f}   losses {losses}   {'' if row.met else 'NOT MET'}".rstrip(), flush=True)
    return row


# ---------------------------------------------------------------------------------------------------------- one rank


def one_rank(folder: Path, device: str, names: list[str], pairs: int, compiled: bool) -> list[Row]:
    rows = []
    for name in names:
        bar = EAGER_BAR if device == "cuda" else CPU_BAR
        near = NEAR_IN_HALF if device == "cuda" else NEAR
        forms = {f"{name}_{device}": (bar, False)}
        forms |= {f"{name}_{device}_compiled": (COMPILED_BAR, True)} if device == "cuda" and compiled else {}
        for form, (own_bar, own) in forms.items():
            rows.append(told(Row(form, own_bar, near, _alone(name, device, _program(folder, form), pairs, own))))
    return rows


def _alone(name: str, device: str, path: Path, pairs: int, compiled: bool) -> Compared:
    model: nn.Module = build_one(ONE_RANK[name], device)
    batch = batch_one(ONE_RANK[name], device)
    around = partial(torch.autocast, "cuda", torch.bfloat16) if device == "cuda" else nullcontext
    ours = our_step(load_program(str(path)), model, batch, around)
    theirs = plain_step(torch.compile(model) if compiled else model, model.parameters(), batch, around)
    return compare(ours, theirs, pairs)


# --------------------------------------------------------------------------------------------------------- two ranks


def two_ranks(folder: Path, peers: list[str], sizes: list[str], pairs: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as meeting:
        os.environ["OMP_NUM_THREADS"] = "1"
        processes.spawn(_rank, (meeting, folder, peers, sizes, pairs), nprocs=2)
        found: list[dict[str, Any]] = json.loads((Path(meeting) / "rows.json").read_text())
    return [Row(**{**row, "found": Compared(**row["found"])}) for row in found]


def _rank(rank: int, meeting: str, folder: Path, peers: list[str], sizes: list[str], pairs: int) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}/store", rank=rank, world_size=2)
    rows = []
    for size in sizes:
        model, batch = build_two(TWO_RANKS[size]), batch_two(TWO_RANKS[size])
        for name in peers:
            peer = PEERS[name]
            ours = our_step(load_program(str(_program(folder, f"{peer.family}_{size}"))), model, batch)
            row = Row(f"{name}_{size}", peer.bar, NEAR, compare(ours, peer.step(model, batch), pairs))
            rows.append(told(row) if rank == 0 else row)
    if rank == 0:
        (Path(meeting) / "rows.json").write_text(json.dumps([asdict(row) for row in rows]))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
