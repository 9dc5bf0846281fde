"""Faults written by hand into a module.py: `verify` must find each, and name a line or an op.

One project, split as tensors, recomputed, of two passes a step; its program is edited once for each fault. The command
runs in this process, on two ranks that stay for all faults. That the unedited program passes is checked first.
"""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import re
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import chdir, redirect_stderr, redirect_stdout
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks import small_project
from benchmarks.attacks.outcome import TRACEBACK, Outcome

RANKS, LIMIT_S, COLLECTIVE_S = 2, 300, 60
MODULE = "runs/codegen/module.py"
Edits = tuple[tuple[str, str], ...]


def _import(name: str, module: str = "shardwright.pipeline.runtime") -> tuple[str, str]:
    return "from torch import Tensor\n", f"from torch import Tensor\nfrom {module} import {name}\n"


FAULTS: dict[str, Edits] = {
    # What the ranks tell one another
    "a gather is missing": (('all_gather(dropout, axis="d0", dim=1)', "torch.cat((dropout, dropout), 1)"),),
    "a sum is missing": (
        ('reduce_scatter(linear_2, axis="d0", dim=1)',
         "linear_2.chunk(2, 1)[torch.distributed.get_rank()].contiguous()"),
    ),
    "a sum too many": (
        _import("all_reduce"),
        ('class_split_cross_entropy(flatten_1, flatten, axis="d0")',
         'all_reduce(class_split_cross_entropy(flatten_1, flatten, axis="d0"), axis="d0")'),
    ),
    "shards in the wrong order": (
        ('all_gather(flatten_2, axis="d0", dim=2)',
         'torch.cat(all_gather(flatten_2, axis="d0", dim=2).chunk(2, 2)[::-1], 2)'),
    ),
    "a gradient is not summed in the middle": (('flatten_2_b = all_gather(', "flatten_2_b = gather("),),
    "a gradient is summed twice in the middle": (("x_r = gather(", "x_r = all_gather("),),
    "a parameter's gradient is not summed": (('"norm.weight": ("R", "d0", "R")', '"norm.weight": ("R", "", "R")'),),
    "a parameter's gradient is summed for no reason": (
        ('"down.bias": ("R", "", "R")', '"down.bias": ("R", "d0", "R")'),
    ),
    "a bias is added on every rank": (('mask(p["down.bias"], axis="d0")', 'p["down.bias"]'),),
    # Arithmetic
    "a wrong scale": (("matmul / 2.0 ", "matmul / 2.0001 "),),
    "a wrong dim": (("torch.softmax(masked_fill, -1)", "torch.softmax(masked_fill, -2)"),),
    "a bias is dropped": (('F.linear(layer_norm, p["qkv.weight"], p["qkv.bias"])',
                           'F.linear(layer_norm, p["qkv.weight"])'),),
    "operands are swapped": (("torch.matmul(transpose, transpose_2)",
                              "torch.matmul(transpose_2.mT, transpose.mT)"),),
    "a conjugate": (("view_as_complex_1 * unsqueeze_1 ", "view_as_complex_1 * unsqueeze_1.conj() "),),
    "the wrong half is gated": (("mul = silu * linear_1", "mul = linear * F.silu(linear_1)"),),
    "a wrong eps of a norm": (("(16,), None, 1e-05)", "(16,), None, 1e-06)"),),
    "a wrong eps of another norm": (('p["norm.bias"], 1e-05)', 'p["norm.bias"], 1e-06)'),),
    "a slice that is off by one": (("unbind_2.transpose(1, 2)", "unbind_2.transpose(1, 2).roll(1, 2)"),),
    "a mask that shows the next word": (("torch.triu(ones, 1)", "torch.triu(ones, 2)"),),
    "labels that are off by one": (("labels.flatten()", "labels.roll(1, 1).flatten()"),),
    "a residual is dropped": (("add = x + dropout_b", "add = dropout_b"),),
    "an added loss without its factor": (("mul = mean * 0.01", "mul = mean * 1.0"),),
    "a sum in place of a mean": (("torch.mean(square)", "torch.sum(square)"),),
    # Gradients alone
    "a branch is detached": (("F.silu(linear)", "F.silu(linear.detach())"),),
    "a value is detached before a norm": (("transpose = x_b.transpose", "transpose = x_b.detach().transpose"),),
    "no gradient through an addend": (("add = x + linear_1", "add = x.detach() + linear_1"),),
    "a parameter is detached": (('transpose_1 * p["scale"]', 'transpose_1 * p["scale"].detach()'),),
    "a second run that is another": (
        _import("replaying", "shardwright.pipeline.runtime.recompute.regions"),
        ("F.silu(linear)", "F.silu(linear) * (1.001 if replaying() else 1.0)"),
    ),
    # Types
    "a round trip through bfloat16": (
        ("silu = F.silu(linear)", "silu = F.silu(linear).to(torch.bfloat16).to(torch.float32)"),
    ),
    "a weight in float16": (('(rms_norm, p["up.weight"],', '(rms_norm, p["up.weight"].half().float(),'),),
    "a line that stores in bfloat16": (
        ("    mul = silu * linear_1", "    linear_1 = linear_1.bfloat16().float()\n    mul = silu * linear_1"),
    ),
    "wrong in float32 alone": (
        ("mul = silu * linear_1", "mul = silu * linear_1 * (1.001 if silu.dtype == torch.float32 else 1.0)"),
    ),
    "digits that float32 does not have": (
        ("F.rms_norm(x, (16,), None, 1e-05)", "F.rms_norm(x, (16,), None, 1e-05) + 4096.0 - 4096.0"),
    ),
    "a gradient that is wrong in float32 alone": (
        ("F.silu(linear)", "F.silu(linear.detach() if linear.dtype == torch.float32 else linear)"),
    ),
    # Random numbers and buffers
    "a dropout of another share": (("F.dropout(linear_2_s1, 0.1, True)", "F.dropout(linear_2_s1, 0.2, True)"),),
    "no dropout": (("F.dropout(linear_2_s1, 0.1, True)", "F.dropout(linear_2_s1, 0.1, False)"),),
    "a buffer that stays as it was": (('p["batch_norm.running_mean"],', 'p["batch_norm.running_mean"].clone(),'),),
    "another momentum": (("        True,\n        0.1,", "        True,\n        0.01,"),),
    "running statistics in training": (("        True,\n        0.1,", "        False,\n        0.1,"),),
    "a batch is counted twice": (('num_batches_tracked"].add_(1)', 'num_batches_tracked"].add_(2)'),),
    # What cannot run
    "a parameter on the wrong dim": (('"up.weight": ("S(0)", "", "S(0)")', '"up.weight": ("S(1)", "", "S(1)")'),),
}  # fmt: skip
SAMPLE = ("a round trip through bfloat16", "wrong in float32 alone")
NAMED = re.compile(r"module\.py, line \d+|^  op \w+|see its conversions", re.MULTILINE)


def attacks(folder: Path, sample: bool) -> Iterator[Outcome]:
    root = folder / "planted"
    make(root)
    text = (root / MODULE).read_text()
    with WarmRanks() as ranks:
        status, told = (0, "") if sample else verify(root, text, ranks)  # tests of verify have programs that pass
        if status:
            yield Outcome("the program as it was written", False, told[-400:])
        for fault in SAMPLE if sample else FAULTS:
            status, told = verify(root, edited(text, FAULTS[fault]), ranks, "1" if sample else "2")
            lines = [line for line in told.splitlines() if not line.startswith("[verify]")]
            held = status == 1 and bool(NAMED.search(told))
            yield Outcome(fault, held, " / ".join(lines[-4:]), traceback=TRACEBACK in told)


def edited(text: str, edits: Edits) -> str:
    for old, new in edits:
        assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in the program"
        text = text.replace(old, new)
    return text


def make(root: Path) -> None:
    """The project, with every stage before train done in this process."""
    from shardwright.stages.command_line import main

    with patch.object(small_project, "BEFORE_TRAIN", ()):
        small_project.make(root, {"accept_edited_module": True, "steps": 1, "gradient_accumulation": 2})
    shape = {"shape": [4, 8], "dtype": "int64"}
    module = {
        "module": {"_target_": "benchmarks.planted_model.Planted"},
        "batch": {"input_ids": shape, "labels": shape},
    }
    data = json.loads((root / "conf/data/small.yaml").read_text())
    files = {
        "model": module,
        "data": data | {"dataset": data["dataset"] | {"vocab_size": 32}},
        "solve": {"backend": "highs", "gap": 1e-3, "frontier_points": 1, "only": "tensor"},
        "checkpoint": {"recompute": "full"},
    }
    for group, content in files.items():
        (root / f"conf/{group}/small.yaml").write_text(json.dumps(content))
    with chdir(root):
        for stage in small_project.BEFORE_TRAIN:
            assert main([stage, "-q"]) == 0, stage


def verify(root: Path, text: str, ranks: WarmRanks, steps: str = "2") -> tuple[int, str]:
    """The status of `shardwright verify` on such a program, and what it prints."""
    from shardwright.stages.command_line import main

    (root / MODULE).write_text(text)
    told = io.StringIO()
    with (
        chdir(root),
        redirect_stdout(told),
        redirect_stderr(told),
        patch("shardwright.stages.verify.run.run_ranks", ranks.run),
    ):
        status = main(["verify", "--steps", steps])
    return status, told.getvalue()


class WarmRanks:
    """Processes that answer as those do that the command starts; after a program that fails others take their place."""

    def __enter__(self) -> WarmRanks:
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["torch", "torch._dynamo", "shardwright.stages.verify.worker"])
        self._start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()

    def _start(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.pipes, self.processes = [], []
        for rank in range(RANKS):
            here, there = self.context.Pipe()
            process = self.context.Process(target=_serve, args=(rank, self.folder.name, there), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def _stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()

    def run(self, module: str, job: dict[str, Any], count: int, limit: float | None) -> dict[str, Any]:
        from shardwright.pipeline.launch.work_folder import LaunchFailed

        assert (module, count) == ("shardwright.stages.verify.worker", RANKS)
        for pipe in self.pipes:
            pipe.send(job)
        answers = [pipe.recv() if pipe.poll(LIMIT_S) else {"error": "no answer"} for pipe in self.pipes]
        errors = [answer["error"] for answer in answers if "error" in answer]
        if errors:
            self._stop()
            self._start()
            raise LaunchFailed(errors[0])
        found: dict[str, Any] = answers[0]
        return found


def _serve(rank: int, folder: str, pipe: Any) -> None:
    import torch
    import torch.distributed as dist

    from shardwright.stages.verify.worker import failing_line
    from shardwright.stages.verify.worker import verify as verify_on_a_rank

    warnings.simplefilter("ignore")
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    timeout = timedelta(seconds=COLLECTIVE_S)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS, timeout=timeout)
    while True:
        try:
            job = pipe.recv()
        except EOFError:  # nobody asks any more
            return
        try:
            pipe.send(json.loads(json.dumps(verify_on_a_rank(job))))
        except Exception as error:  # a program that fails is one of the answers
            pipe.send({"error": f"{failing_line(error, job['module_path'])}{type(error).__name__}: {error}"})
