"""One rank of the training run: `python -m shardwright.stages.train.worker WORK` under torchrun."""

from __future__ import annotations

import json
import os
import socket
import sys
import traceback
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from shardwright.pipeline.base.errors import ShardwrightError, TrainError
from shardwright.pipeline.base.files import told
from shardwright.pipeline.launch.rank import (
    STOPPED,
    end_after_cause,
    follow_parent,
    forget_error,
    report_error,
    write_result,
)
from shardwright.pipeline.user.batches import SampleError
from shardwright.stages.train.engines.engine import Engine, program_of
from shardwright.stages.train.job import Job
from shardwright.stages.train.loop import Loop
from shardwright.stages.train.ranks.joining import gathered, join, require_gpu
from shardwright.stages.train.ranks.peers import Peers
from shardwright.stages.train.ranks.watchdog import Watchdog, give_up, watch_process


def main(work: Path) -> None:
    follow_parent()
    job = json.loads((work / "job.json").read_text())
    rank = int(os.environ["RANK"])
    forget_error(work, rank)
    watchdog = watch_process(job["safety"]["hang_s"], work, rank)
    watchdog.beat("meeting the other ranks", slow=True)
    final = True
    try:
        if job["device"] == "cuda":
            require_gpu(f"{job['where']['cluster']}: device")
        final = False  # a rank that did not come may come when all are started again
        store = join(job["device"], timedelta(seconds=job["train"]["wait_s"]))
    except TrainError as error:
        report_error(work, rank, error.line(), final=final)
        raise SystemExit(1) from None
    try:
        with told(Path.cwd()):
            peers = meet_peers(store, work, watchdog) if store else None
            train(job, work, watchdog, peers)
        dist.barrier()
        if peers:
            peers.close()
    except SampleError as error:  # data that is read again may be there
        traceback.print_exc()  # of the user's code, for -v
        report_error(work, rank, error.line())
        raise SystemExit(1) from None
    except ShardwrightError as error:
        report_error(work, rank, error.line(), final=True)
        raise SystemExit(1) from None
    except Exception as error:  # the user's model and data run here; the traceback stays in the log
        report_error(work, rank, f"{type(error).__name__}: {error}")
        end_after_cause(error)
        raise
    finally:
        dist.destroy_process_group()
        watchdog.stop()


def meet_peers(store: dist.Store, work: Path, watchdog: Watchdog) -> Peers:
    """From now on this rank hears when the run is to end, and says what it does when another one waits too long."""
    rank = dist.get_rank()
    peers = Peers(store, rank, gathered(socket.gethostname()))
    peers.listen(lambda what: give_up(work, rank, what), lambda: watchdog.now[0])
    peers.heed_signals()
    watchdog.explain = peers.explain
    return peers


def train(job: Job, work: Path, watchdog: Watchdog, peers: Peers | None = None) -> None:
    agree(job["digests"])
    watchdog.beat("building the model", slow=True)
    engine = make_engine(job)
    result = Loop(engine, job, work, watchdog, peers).run()
    if not result and peers:
        if dist.get_rank() == 0:
            with suppress(OSError):  # the stage knows where it was asked itself
                (work / STOPPED).write_text(str(peers.signal))
        return
    if job["train"]["export"]:
        engine.export(Path(job["weights_path"]), watchdog.beating("a tensor of the exported weights", slow=True))
    watchdog.beat("the end", slow=True)
    if dist.get_rank() == 0:
        write_result(work, result, job.get("spare_result"))


def agree(digests: dict[str, str]) -> None:
    """Hosts may have files of their own: all ranks must train the same plan with the same settings."""
    everyone = gathered(digests)
    for rank, other in enumerate(everyone):
        differs = [file for file in everyone[0] | other if other.get(file) != everyone[0].get(file)]
        if differs:
            what = f"rank {rank} and rank 0 have read different files"
            remedy = "give all hosts the same conf/ and runs/, best on a file system that they share"
            raise TrainError(what, where=differs[0], remedy=remedy)


def make_engine(job: Job) -> Engine:
    """Each is imported where it is used: torch's schedules, for one, are slow to import."""
    if job["train"]["engine"] != "planned":
        from shardwright.stages.train.engines.baselines import ENGINES

        return ENGINES[job["train"]["engine"]](job)
    if hasattr(program_of(job), "PARTITIONS"):
        from shardwright.stages.train.engines.pipelined import PipelinedEngine

        return PipelinedEngine(job)
    from shardwright.stages.train.engines.planned import PlannedEngine

    return PlannedEngine(job)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
