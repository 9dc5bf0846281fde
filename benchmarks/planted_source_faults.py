"""Whether the tests see faults: `python -m benchmarks.planted_source_faults [--tree FOLDER] [--only WORDS]`.

Each fault is one change of the source, in every room of pipeline/ and stages/, as a hand slips: a sum that is dropped,
an index that is one too large, a check that is skipped. Each is made in a copy of the tree, and the test files named
beside it are run there until one test fails; they are those that are the quickest to see it. A fault counts as caught
when a test fails and passes in the copy as it was. `--tree` plants the same faults in another checkout, such as one of
before its tests were changed: the same ones are to be caught. The last line is one JSON object; the exit status says
whether all were caught.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.flow.warm import Server

ROOT = Path(__file__).parents[1]
OPTIONS = ("-x", "-q", "-p", "no:cacheprovider", "--tb=no", "-W", "ignore::pytest.PytestAssertRewriteWarning")
FAILED = 1  # pytest's exit status
# What tests start themselves is a usual interpreter.
RUN = f"import sys, pytest\nsys.executable = {sys.executable!r}\nsys.exit(pytest.console_main())\n"


@dataclass(frozen=True)
class Fault:
    what: str
    file: str
    right: str  # stands once in the file
    wrong: str
    tests: str  # files below tests/; of one that takes long the test alone


FAULTS = (
    # ---- pipeline: base, config, launch, tracking, user
    Fault(
        "the lock is one that several may have",
        "pipeline/base/lock.py",
        "fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)",
        "pipeline/test_lock.py",
    ),
    Fault(
        "an artifact's digest is not compared",
        "pipeline/base/artifacts.py",
        'edited = header["digest"] != digest',
        "edited = False",
        "pipeline/test_artifacts.py",
    ),
    Fault(
        "artifacts of other settings are taken",
        "pipeline/base/artifacts.py",
        "if key in config and config[key] != digest:",
        "if key in config and not digest:",
        "pipeline/test_artifacts.py",
    ),
    Fault(
        "letters of a terminal's commands reach the terminal",
        "pipeline/base/errors.py",
        'line = printable(" ".join(without_secrets(text).split()))',
        'line = " ".join(without_secrets(text).split())',
        "stages/test_boundary.py",
    ),
    Fault(
        "a password is shown where its letters are encoded",
        "pipeline/base/secrets.py",
        "written = {secret, unquote(secret), quote(secret), ",
        "written = {secret, ",
        "pipeline/test_secrets.py",
    ),
    Fault(
        "a line that is half written is read",
        "pipeline/base/files.py",
        'if not line.endswith(b"\\n"):',
        "if not line:",
        "stages/test_train_run.py",
    ),
    Fault(
        "a resolver in conf/ that DVC cannot follow is allowed",
        "pipeline/config/load.py",
        "elif _RESOLVER.search(value) and not free:",
        "elif _RESOLVER.search(value) and free:",
        "pipeline/test_config_load.py",
    ),
    Fault(
        "the reason told is that of the rank that failed last",
        "pipeline/launch/work_folder.py",
        'for path in [*_by_age(work.glob("final-*.txt")), *errors]:',
        'for path in [*_by_age(work.glob("final-*.txt")), *reversed(errors)]:',
        "pipeline/test_launch.py",
    ),
    Fault(
        "headline metrics are not sent to MLflow",
        "pipeline/tracking/sender.py",
        " | numbered(entry.stage, entry.figures)",
        "",
        "pipeline/test_tracking.py",
    ),
    Fault(
        "points that were sent are sent again",
        "pipeline/tracking/sender.py",
        "state = replace(state, points=lines[-1][0])",
        "state = replace(state, points=lines[0][0])",
        "pipeline/test_tracking.py",
    ),
    Fault(
        "bfloat16 is written as float16",
        "pipeline/user/weights.py",
        'torch.bfloat16: "BF16"',
        'torch.bfloat16: "F16"',
        "pipeline/test_weights.py",
    ),
    Fault(
        "every epoch has the order of the first",
        "pipeline/user/batches.py",
        "manual_seed(seed * 1_000_003 + epoch)",
        "manual_seed(seed * 1_000_003)",
        "pipeline/test_batches.py",
    ),
    # ---- pipeline: ir, ops, sharding, rates, cost, tracing
    Fault(
        "a number that is true is read as one",
        "pipeline/ir/codec.py",
        "_expect(isinstance(data, kind) and (kind is bool or not isinstance(data, bool)), where",
        "_expect(isinstance(data, kind), where",
        "pipeline/test_codec.py",
    ),
    Fault(
        "a range of names ends one too late",
        "pipeline/ir/names.py",
        "return int(first) <= int(part) <= int(last) if ranged else mine == part",
        "return int(first) <= int(part) <= int(last) + 1 if ranged else mine == part",
        "pipeline/test_names.py stages/test_codegen_names.py",
    ),
    Fault(
        "a bias is added by every rank of a split product",
        "pipeline/ops/families/matmul.py",
        '"* k+, n k+, n -> * n", _linear_flops, "F.linear", addend=2)',
        '"* k+, n k+, n+ -> * n", _linear_flops, "F.linear")',
        "pipeline/test_ops_lines.py pipeline/test_ops.py",
    ),
    Fault(
        "a product counts half of its operations",
        "pipeline/ops/families/matmul.py",
        "return 2.0 * view.output.numel * view.inputs[-2].shape[-1]",
        "return 1.0 * view.output.numel * view.inputs[-2].shape[-1]",
        "pipeline/test_ops_lines.py",
    ),
    Fault(
        "uneven shards divide by what is split itself",
        "pipeline/ops/uneven.py",
        "divides = kind == DIVIDES and op.inputs[-1] not in (values if len(op.inputs) > 1 else ())",
        "divides = kind == DIVIDES",
        "pipeline/test_uneven.py",
    ),
    Fault(
        "B -> S takes no zeros around the gradient",
        "pipeline/sharding/conversions.py",
        '"BS": Conversion("narrow", "slice", "pad")',
        '"BS": Conversion("shard", "slice", "all_gather")',
        "pipeline/test_paths.py",
    ),
    Fault(
        "one slice more has one sample more",
        "pipeline/sharding/slices.py",
        "grain * (least + (place < more))",
        "grain * (least + (place <= more))",
        "stages/test_codegen_slices.py",
    ),
    Fault(
        "the ring over several axes is as soon as the quickest of them",
        "pipeline/rates/joined_axes.py",
        "max(link.latency / _rounds(collective, n) for link, n in own)",
        "min(link.latency / _rounds(collective, n) for link, n in own)",
        "pipeline/test_cost.py",
    ),
    Fault(
        "what a link holds while it is run counts no temporaries",
        "pipeline/cost/memory.py",
        "beside = _temporaries(step, storage)[0]",
        "beside = 0",
        "pipeline/test_cost.py",
    ),
    Fault(
        "what micro-batches before added up has no place",
        "pipeline/cost/step.py",
        "copies = 1 + moved + (self.program.micro_batches > 1)",
        "copies = 1 + moved",
        "pipeline/test_cost.py stages/test_links.py",
    ),
    Fault(
        "the card does not wait for sums of activations",
        "pipeline/cost/step_lines.py",
        "self.needed += beside",
        "pass",
        "pipeline/test_lines.py",
    ),
    Fault(
        "a gather forgets what the card waits for",
        "pipeline/cost/step_lines.py",
        "self.needed += self.add(",
        "self.needed = self.add(",
        "pipeline/test_lines.py",
    ),
    Fault(
        "of what runs beside computation one micro-batch is counted",
        "pipeline/cost/step_lines.py",
        "return self.micro_batches * own + sum(",
        "return own + sum(",
        "pipeline/test_lines.py",
    ),
    Fault(
        "more of backward waits for nothing than there is",
        "pipeline/cost/step_lines.py",
        "late = min(traffic.late, own) if",
        "late = traffic.late if",
        "pipeline/test_lines.py",
    ),
    Fault(
        "all of a product's backward waits for nothing",
        "pipeline/cost/traffic.py",
        "late = self.priced.op(name).backward / 2",
        "late = self.priced.op(name).backward",
        "pipeline/test_traffic.py",
    ),
    Fault(
        "a bucket leaves with its first gradient",
        "pipeline/cost/traffic.py",
        "least = min(least, *(first[name] for name in names))",
        "least = max(first[name] for name in names)",
        "pipeline/test_traffic.py",
    ),
    Fault(
        "replicas are next to each other",
        "pipeline/layouts/step.py",
        'axis("dp", layout.dp, layout.tp)',
        'axis("dp", layout.dp, 1)',
        "stages/test_price.py",
    ),
    Fault(
        "ZeRO-2 gathers parameters in each micro-batch",
        "pipeline/layouts/step.py",
        ".seconds(nbytes) if layout.zero == 3 else 0.0",
        ".seconds(nbytes) if layout.zero >= 2 else 0.0",
        "pipeline/test_layouts.py",
    ),
    Fault(
        "the optimizer of ZeRO updates what others update too",
        "pipeline/layouts/step.py",
        "own = nbytes / HALF / (layout.dp if layout.zero else 1)",
        "own = nbytes / HALF",
        "pipeline/test_layouts.py",
    ),
    Fault(
        "a tied embedding of a single stage counts twice",
        "pipeline/layouts/step.py",
        "if self.model.tied and layout.pp == 1:",
        "if self.model.tied and layout.pp == 0:",
        "pipeline/test_layouts.py",
    ),
    Fault(
        "the peak of a stage is that of its layers",
        "pipeline/layouts/step.py",
        "peak = max(held.peak, *(end.held[RecomputeMode.none].peak for end in ends), 0.0)",
        "peak = held.peak",
        "pipeline/test_layouts.py",
    ),
    Fault(
        "an interleaved stage holds what one of 1f1b does",
        "pipeline/layouts/step.py",
        "layout.pp * (1 + (layout.pp - 1) / (layout.pp * layout.chunks)))",
        "layout.pp)",
        "pipeline/test_layouts.py",
    ),
    Fault(
        "what does not fill a host has none",
        "pipeline/layouts/machine.py",
        "nodes=-(-devices // host)",
        "nodes=devices // host",
        "pipeline/test_layouts.py",
    ),
    Fault(
        "what an op keeps beside its tensors is whole on each rank",
        "pipeline/cost/memory.py",
        "cost.extra_saved // storage.sharded.shards_of(step.op)",
        "cost.extra_saved",
        "pipeline/test_cost.py",
    ),
    Fault(
        "small gradients are sent one after the other",
        "pipeline/cost/memory.py",
        "max([sum(size for size in sizes if size < GATHERED_ALONE), *sizes], default=0)",
        "max(sizes, default=0)",
        "pipeline/test_cost.py",
    ),
    Fault(
        "slices are held against the first of them",
        "pipeline/sharding/slices.py",
        "for samples in slices}",
        "for samples in slices[:1]}",
        "stages/test_pipeline_hand.py",
    ),
    Fault(
        "a gradient of several links is complete with the last that reads its parameter",
        "pipeline/cost/traffic.py",
        "for number in reversed(range(first, last + 1)):",
        "for number in range(first, last + 1):",
        "pipeline/test_traffic.py",
    ),
    Fault(
        "a bias that hides something is taken for none",
        "pipeline/tracing/simplify.py",
        "mask is not None and bool(thin(mask).all()) else None",
        "mask is not None else None",
        "stages/test_trace.py stages/test_trace_families.py",
    ),
    # ---- pipeline/runtime
    Fault(
        "an all-reduce is dropped",
        "pipeline/runtime/programs/collectives.py",
        "return _apply(x, axis, (_sum, is_last), (_nothing,))",
        "return _apply(x, axis, (_nothing,), (_nothing,))",
        "pipeline/test_paths.py pipeline/test_runtime.py",
    ),
    Fault(
        "the gradient of P -> S(d) stays a shard among zeros",
        "pipeline/runtime/programs/collectives.py",
        "(_sum_and_split, dim, parts), (_join, dim, parts, x.shape[dim]))",
        "(_sum_and_split, dim, parts), (_in_zeros, dim, parts, x.shape[dim]))",
        "pipeline/test_paths.py pipeline/test_runtime.py",
    ),
    Fault(
        "the last rank's part of a dim that does not divide is as long as the others'",
        "pipeline/runtime/programs/collectives.py",
        "return start, min(room(whole, count), whole - start)",
        "return start, room(whole, count)",
        "pipeline/test_uneven.py pipeline/test_runtime.py",
    ),
    Fault(
        "long sums go to the ranks of that number in the world",
        "pipeline/runtime/programs/collectives.py",
        "group_dst=(rank + 1) % size",
        "dst=(rank + 1) % size",
        "pipeline/test_runtime.py::test_an_axis_is_not_all_ranks",
    ),
    Fault(
        "a gradient of several passes is that of the last",
        "pipeline/runtime/step/buckets.py",
        "there.copy_(own) if first else there.add_(own)",
        "there.copy_(own)",
        "flow/test_storage_training.py",
    ),
    Fault(
        "statistics of micro-batches are combined without the distance of their means",
        "pipeline/runtime/step/running_stats.py",
        "squares = squares + part.squares + apart.square() * (before * part.numbers / count)",
        "squares = squares + part.squares",
        "pipeline/test_deferred.py",
    ),
    Fault(
        "the loss of uneven micro-batches counts each alike",
        "pipeline/runtime/step/slices.py",
        "return sum(loss * size for loss, size in pairs) / sum(size for _, size in pairs)",
        "return sum(loss for loss, _ in pairs) / len(pairs)",
        "pipeline/test_batches.py",
    ),
    Fault(
        "a second run of a region does not know that it is one",
        "pipeline/runtime/recompute/regions.py",
        "with setting(step.thread, replaying=True), shards(), drawn.again():",
        "with setting(step.thread, replaying=False), shards(), drawn.again():",
        "pipeline/test_deferred.py pipeline/test_kept.py",
    ),
    Fault(
        "a second run of a region draws other numbers",
        "pipeline/runtime/recompute/random_draws.py",
        "        now = self._states()\n        self._set(self.before)\n",
        "        now = self._states()\n",
        "pipeline/test_drawn.py pipeline/test_kept.py",
    ),
    Fault(
        "of summands that a reader is sent it takes the last",
        "pipeline/runtime/pipelining/transfer.py",
        "whole[at] = whole[at] + block.to(device) if self.sums else block.to(device)",
        "whole[at] = block.to(device)",
        "pipeline/test_transfer.py",
    ),
    Fault(
        "a weight's deferred gradient that comes in parts is its last part",
        "pipeline/runtime/pipelining/deferred_weight_grads.py",
        "self.gradients[number] = gradient if there is None else there + gradient",
        "self.gradients[number] = gradient",
        "pipeline/test_put_off.py",
    ),
    Fault(
        "a compiled variance is divided as if the mean were known",
        "pipeline/runtime/compiler/graph_passes.py",
        "1 / (count - (1 if correction is None else correction))",
        "1 / count",
        "pipeline/test_compiled_norms.py",
    ),
    # ---- stages: profile, cluster
    Fault(
        "what an optimizer holds for one parameter is there to the end",
        "stages/profile/optimizer.py",
        "ends = (min(s.died or 0, len(kernels)) for s in storages)",
        "ends = (len(kernels) for s in storages)",
        "stages/test_profile_optimizer.py",
    ),
    Fault(
        "a line through measurements begins on the wrong side",
        "stages/cluster/fit.py",
        "offset = max(mean_y - slope * mean_x, shortest[1] / 10)",
        "offset = max(mean_y + slope * mean_x, shortest[1] / 10)",
        "stages/test_cluster.py",
    ),
    # ---- stages: solve
    Fault(
        "a form that two readers take is made twice",
        "stages/solve/search/elimination.py",
        "total = total + np.where(again[None], 0.0, own)",
        "total = total + own",
        "stages/test_solve_core.py",
    ),
    Fault(
        "a bound leaves out what the budget pays back",
        "stages/solve/search/memory_price.py",
        "value = least - limit * sum(values)",
        "value = least",
        "stages/test_solve_core.py",
    ),
    Fault(
        "what a parameter's gradient takes in several passes has no place",
        "stages/solve/problem/parameters.py",
        "there = apart[:, None] | summed | (self.workload.micro_batches > 1)",
        "there = apart[:, None] | summed",
        "pipeline/test_traffic.py",
    ),
    Fault(
        "what backward keeps is there for one moment",
        "stages/solve/problem/build.py",
        "yield Holding(first, self.moments.backward(op.name) + 1, held)",
        "yield Holding(first, first + 1, held)",
        "pipeline/test_traffic.py",
    ),
    Fault(
        "what an op takes in its backward pass is there from its forward pass on",
        "stages/solve/problem/build.py",
        "(after, after + 1, cost.temporary_backward)",
        "(before, after + 1, cost.temporary_backward)",
        "stages/test_solve.py::test_the_problem_holds_what_an_op_takes_as_long_as_it_does",
    ),
    Fault(
        "a saved plan with parameters of other shapes is taken",
        "stages/solve/answer/saved.py",
        "    if misfits:\n",
        "    if misfits and not sharding:\n",
        "stages/test_solve_saved.py",
    ),
    Fault(
        "a GLPK plan that is not proven counts as optimal",
        "stages/solve/search/backends/glpk.py",
        'return objective if ended == "optimal" else _bound(log.read_text(), objective)',
        "return objective",
        "stages/test_solve_core.py",
    ),
    Fault(
        "two tables of the same two nodes of a large problem are one of them",
        "stages/solve/search/large/presolve.py",
        "new = matrix if old is None else old + matrix",
        "new = matrix",
        "stages/test_large.py",
    ),
    # ---- stages: checkpoint, codegen, verify
    Fault(
        "Rotor never recomputes up to the last link",
        "stages/checkpoint/recompute/kernels.py",
        "for j in range(i + 1, l + 1):",
        "for j in range(i + 1, l):",
        "stages/test_rotor.py",
    ),
    Fault(
        "one micro-batch fewer is in flight",
        "pipeline/cost/pipelines/schedules.py",
        "most[p] = max(most[p], now[p])",
        "most[p] = max(most[p], now[p] - 1)",
        "stages/test_pipelines.py stages/test_pipeline_hand.py",
    ),
    Fault(
        "a gradient that is sent back takes the way of the activation after it",
        "pipeline/cost/pipelines/play.py",
        'cut = message.partition - (message.phase == "B")',
        "cut = message.partition",
        "pipeline/test_handovers.py stages/test_pipelines.py",
    ),
    Fault(
        "partitions of a pipeline need no room for the parameters of their links",
        "stages/checkpoint/pipelines/partition_times.py",
        "left -= self.submesh.everywhere + (self.owned[l + 1] - self.owned[i])[:, None]",
        "left -= self.submesh.everywhere",
        "stages/test_partition.py",
    ),
    Fault(
        "a number that is added to a sum over the batch stays out of its growth",
        "stages/codegen/growth.py",
        "if op.args.get(n, name, None) != 0]",
        "if isinstance(op.args.get(n, name, None), Ref)]",
        "stages/test_growth.py",
    ),
    Fault(
        "verify takes the difference of its own rank for that of all",
        "stages/verify/compare.py",
        "    dist.all_reduce(furthest, op=dist.ReduceOp.MAX)\n",
        "",
        "stages/test_verify_command.py::test_a_difference_on_any_rank_is_known_to_all",
    ),
    # ---- stages: train
    Fault(
        "a resumed run begins with a new optimizer",
        "stages/train/snapshots/resume.py",
        "            if tensor.boxes:\n",
        '            if tensor.boxes and not tensor.name.startswith("optimizer/"):\n',
        "stages/test_snapshots.py",
    ),
    Fault(
        "a snapshot's files are not held against their digests",
        "stages/train/snapshots/manifest.py",
        "        if found != wanted:\n",
        "        if not found:\n",
        "stages/test_snapshot_files.py",
    ),
    Fault(
        "two boxes that touch share an element",
        "stages/train/snapshots/boxes.py",
        "low, high = max(start, other_start), min(start + size, other_start + other_size)",
        "low, high = max(start, other_start), min(start + size, other_start + other_size + 1)",
        "stages/test_snapshot_files.py stages/test_snapshot_plans.py",
    ),
    Fault(
        "a box is written by its first holder",
        "stages/train/snapshots/boxes.py",
        "rank = min(ranks, key=load.__getitem__)",
        "rank = min(ranks)",
        "stages/test_snapshot_files.py",
    ),
    Fault(
        "a snapshot may have infinite weights",
        "stages/train/snapshots/writer.py",
        'if name.split("/")[1] in self.trained and',
        "if name in self.trained and",
        "stages/test_snapshot_files.py",
    ),
    Fault(
        "a run that has taken all its steps is refused",
        "stages/train/snapshots/starting.py",
        "manifest.step_of(newest) > config.train.steps",
        "manifest.step_of(newest) >= config.train.steps",
        "stages/test_snapshot_files.py",
    ),
    Fault(
        "the run before goes when its first snapshot is reached",
        "stages/train/snapshots/manifest.py",
        "if max(map(step_of, kept), default=0) <= reached:",
        "if min(map(step_of, kept), default=0) <= reached:",
        "stages/test_snapshot_files.py",
    ),
    Fault(
        "a snapshot whose file is cut counts as there",
        "stages/train/snapshots/manifest.py",
        '.st_size == about["bytes"]',
        ".st_size >= 0",
        "stages/test_snapshot_files.py",
    ),
    Fault(
        "a warm-up ends one step late",
        "stages/train/loop.py",
        "return float((step + 1) / warm_up)",
        "return float(step / warm_up)",
        "stages/test_train_schedule.py",
    ),
    Fault(
        "what may take its time is ended as what may not",
        "stages/train/ranks/watchdog.py",
        "allowed, named = (SLOW * limit_s,",
        "allowed, named = (limit_s,",
        "stages/test_watchdog.py",
    ),
    Fault(
        "a step taken again after a restart is passed on again",
        "stages/train/journal.py",
        'if step["step"] < self.next:',
        'if step["step"] < 0:',
        "stages/test_train_run.py stages/test_snapshots.py",
    ),
    # ---- stages: commands
    Fault(
        "a user's mistake ends with status 1",
        "stages/command_line.py",
        '            print(f"error: {line}", file=sys.stderr)\n        return 2\n',
        '            print(f"error: {line}", file=sys.stderr)\n        return 1\n',
        "stages/test_check.py",
    ),
    Fault(
        "a module's name ends the script of the page",
        "stages/report/page.py",
        '.replace("<", "\\\\u003c")',
        "",
        "stages/test_report_facts.py stages/test_report_page.py",
    ),
    Fault(
        "the mean error is that of the steps that were fitted",
        "stages/calibrate.py",
        "(mean_error(steps, own, works) for",
        "(mean_error(fitted, own, works) for",
        "stages/test_calibrate.py",
    ),
    Fault(
        "measured steps have hidden nothing",
        "stages/calibrate.py",
        "arguments.vocabulary, OverlapMode(arguments.overlap))",
        "arguments.vocabulary)",
        "stages/test_calibrate.py",
    ),
    Fault(
        "a quote in a swept setting ends it",
        "stages/sweep/experiments.py",
        '.replace("\'", "\\\\\'")',
        "",
        "stages/test_sweep.py",
    ),
    Fault(
        "an option of two lines is written to the batch script",
        "stages/sbatch.py",
        "if not option.isprintable():",
        "if not option:",
        "stages/test_sbatch.py",
    ),
    Fault(
        "the largest batch that fits is looked for among all numbers",
        "stages/whatif/layouts.py",
        "if size <= most and size % step == 0]",
        "if size <= most]",
        "stages/test_whatif.py",
    ),
)


class Plantation:
    """A copy of a tree, and tests run in it by an interpreter that has imported the large libraries already."""

    def __init__(self, tree: Path, copy: Path) -> None:
        self.copy, self.server = copy, Server()
        listed = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
        names = subprocess.run(listed, cwd=tree, capture_output=True, check=True, text=True).stdout.split("\0")
        compiled = (path for room in ("pipeline", "stages", "tests") for path in (tree / room).rglob("__pycache__/*"))
        for source in (*(tree / name for name in filter(None, names)), *compiled):
            if source.is_file() or source.is_symlink():  # shardwright/ has links to the rooms
                target = copy / source.relative_to(tree)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target, follow_symlinks=False)
        (copy / "run_tests.py").write_text(RUN)

    def run(self, tests: Iterable[str]) -> tuple[int, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
        given = (*OPTIONS, *tests)
        try:
            status, out, err = self.server.run("run_tests", *given, folder=self.copy, environment=kept)
        except TimeoutError:
            return 0, "it did not end"
        return status, out + err

    def try_out(self, fault: Fault) -> tuple[str, str]:
        """The test that failed, or else why none did."""
        path = self.copy / fault.file
        text = path.read_text()
        if text.count(fault.right) != 1:
            return "", f"its text stands {text.count(fault.right)} times in {fault.file}"
        before = path.stat()
        path.write_text(text.replace(fault.right, fault.wrong))
        try:
            status, said = self.run(f"tests/{name}" for name in fault.tests.split())
        finally:
            path.write_text(text)
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", said, re.M)
        if status == FAILED and failed:
            return failed[1], ""
        last = (said.splitlines() or [""])[-1]
        return "", "every test passed" if status == 0 else f"pytest ended with status {status}: {last}"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout whose source and tests are tried")
    parser.add_argument("--only", default="", help="faults whose words or file have this in them")
    given = parser.parse_args(arguments)
    chosen = [fault for fault in FAULTS if given.only in fault.what or given.only in fault.file]
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        planted = Plantation(given.tree.resolve(), Path(folder) / "tree")
        caught = {}
        for fault in chosen:
            start = time.monotonic()
            test, why = planted.try_out(fault)
            took = f"{time.monotonic() - start:5.0f} s"
            print(f"{took}  {fault.what}: {test.partition('[')[0] or f'MISSED ({why})'}", flush=True)
            if test:
                caught[fault.what] = test
        sound, said = planted.run(caught.values()) if caught else (0, "")
    wrong = re.findall(r"^(?:FAILED|ERROR) (\S+)", said, re.M) if sound else []
    missed = [fault.what for fault in chosen if caught.get(fault.what, "") in ("", *wrong)]
    for test in wrong:
        print(f"{test} fails without a fault too")
    print(json.dumps({"faults": len(chosen), "caught": len(chosen) - len(missed), "missed": missed}))
    return 1 if missed or sound else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
