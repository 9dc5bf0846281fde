"""One rank of the training run: `python -m stages.train.worker WORK` under torchrun."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from pipeline.errors import ShardwrightError
from pipeline.launch import follow_parent, forget_error, report_error, restart_count
from stages.train.loop import Loop
from stages.train.planned import Planned


def main(work: Path) -> None:
    follow_parent()
    job = json.loads((work / "job.json").read_text())
    join("gloo", timedelta(seconds=job["train"]["timeout_s"]))
    rank = dist.get_rank()
    forget_error(work, rank)
    try:
        engine = Planned(job)
        result = Loop(engine, job, work).run()
        if job["train"]["export"]:
            engine.export(Path(job["weights_path"]))
        if rank == 0:
            (work / "result.json").write_text(json.dumps(result))
        dist.barrier()
    except ShardwrightError as error:
        report_error(work, rank, error.line(), final=True)
        raise SystemExit(1) from None
    except Exception as error:  # the user's model and data run here; the traceback stays in the log
        report_error(work, rank, f"{type(error).__name__}: {error}")
        raise
    finally:
        dist.destroy_process_group()


def join(backend: str, timeout: timedelta) -> None:
    """As `init_process_group` does under torchrun, but for the names by which ranks find one another.

    After a restart torchrun gives the ranks the same store, where those that are gone have left their addresses.
    """
    store, rank, ranks = next(dist.rendezvous("env://", timeout=timeout))
    own = dist.PrefixStore(f"start {restart_count()}", store)
    dist.init_process_group(backend, store=own, rank=rank, world_size=ranks, timeout=timeout)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
