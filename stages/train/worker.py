"""One rank of the training run: `python -m stages.train.worker WORK` under torchrun."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from pipeline.errors import ShardwrightError
from pipeline.launch import follow_parent, report_error
from stages.train.engine import Engine
from stages.train.loop import Loop
from stages.train.piped import Piped, is_pipeline
from stages.train.planned import Planned


def main(work: Path) -> None:
    follow_parent()
    job = json.loads((work / "job.json").read_text())
    dist.init_process_group("gloo", timeout=timedelta(seconds=job["train"]["timeout_s"]))
    rank = dist.get_rank()
    try:
        engine: Engine = Piped(job) if is_pipeline(job["module_path"]) else Planned(job)
        result = Loop(engine, job, work).run()
        if job["train"]["export"]:
            engine.export(Path(job["weights_path"]))
        if rank == 0:
            (work / "result.json").write_text(json.dumps(result))
        dist.barrier()
    except ShardwrightError as error:
        report_error(work, rank, error.line())
        raise SystemExit(1) from None
    except Exception as error:  # the user's model and data run here; the traceback stays in the log
        report_error(work, rank, f"{type(error).__name__}: {error}")
        raise
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
