"""What the generated program's step takes beside what people use today: `python -m benchmarks.overhead`.

    one rank     the unsplit program over the original module, GPT-2 small and ResNet-50 of transformers
    two ranks    processes (gloo), a small GPT in two sizes: the DDP program over torch's DDP (as it comes, and with
                 `gradient_as_bucket_view`), ZeRO-3 over FSDP2 (`fully_shard`), Megatron's tensor parallelism over
                 DTensor (`parallelize_module`)

All on CPUs in float32; for GPUs see benchmarks.gpu_path. Each figure is ours over theirs, of whole steps that are run
in turn (benchmarks.overhead_steps); a bar is met where the ratio is below it or within two standard errors. The losses
of both are compared in every pair. `--only plan --folder DIR` and `--only measure --folder DIR` do it in two parts.
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
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

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
from shardwright.pipeline.runtime.programs.source import load_program

BAR = 1.00  # of one rank
NEAR = 1e-4  # losses of a pair, relative


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
    found: Compared

    @property
    def met(self) -> bool:
        return self.found.ratio - self.found.noise <= self.bar and self.found.differ <= NEAR


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("plan", "measure"), help="one part, the other's files from the folder")
    parser.add_argument("--folder", type=Path, default=Path("runs/overhead"), help="where programs lie")
    parser.add_argument("--models", default=",".join(ONE_RANK), help="of one rank; empty for none")
    parser.add_argument("--peers", default="", help="of two ranks; by default all")
    parser.add_argument("--sizes", default=",".join(TWO_RANKS), help="of two ranks; empty for none")
    parser.add_argument("--pairs", type=int, default=40, help="of steps, for each figure")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    models, sizes = _listed(arguments.models), _listed(arguments.sizes)
    peers = _listed(arguments.peers) or list(PEERS)
    if arguments.only != "measure":
        plan(arguments.folder, models, sizes, {PEERS[name].family for name in peers})
    if arguments.only == "plan":
        return 0
    torch.set_num_threads(1)
    rows = one_rank(arguments.folder, models, arguments.pairs)
    rows += two_ranks(arguments.folder, peers, sizes, arguments.pairs) if sizes else []
    print(json.dumps({row.name: round(row.found.ratio, 4) for row in rows}))
    return 0 if all(row.met for row in rows) else 1


def _listed(names: str) -> list[str]:
    return [name for name in names.split(",") if name]


def plan(folder: Path, models: list[str], sizes: list[str], families: set[str]) -> None:
    from benchmarks import overhead_plans  # measuring needs none of what it imports

    for name in models:
        _program(folder, name).write_text(overhead_plans.one_rank(ONE_RANK[name]))
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


def one_rank(folder: Path, names: list[str], pairs: int) -> list[Row]:
    return [told(Row(name, BAR, _alone(name, _program(folder, name), pairs))) for name in names]


def _alone(name: str, path: Path, pairs: int) -> Compared:
    model, batch = build_one(ONE_RANK[name]), batch_one(ONE_RANK[name])
    ours = our_step(load_program(str(path)), model, batch)
    return compare(ours, plain_step(model, model.parameters(), batch), pairs)


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
            row = Row(f"{name}_{size}", peer.bar, compare(ours, peer.step(model, batch), pairs))
            rows.append(told(row) if rank == 0 else row)
    if rank == 0:
        (Path(meeting) / "rows.json").write_text(json.dumps([asdict(row) for row in rows]))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
