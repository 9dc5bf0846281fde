"""Whether written programs are the models they were written from: `python -m benchmarks.equality`.

    --models gpt2,bert,llama,qwen2,t5,vit,swin,resnet,mixtral,opt,deepseek_v2,mamba2,...   --ranks 2,3,4   --random 100
    --plans "solver,ddp,zero1,zero3,tensor,sequence,vocabulary,ddp x tensor"        --keep FOLDER for what differs

Twelve families of Hugging Face, a recommender of bags, recurrent language models and models with complex numbers
inside, all tiny, each on 2, 3 and 4 ranks (real processes, gloo) under the solver's own plan and under plans that are
forced on it: DDP, ZeRO-1, ZeRO-3, tensor parallel, the same with the sequence split in between, the vocabulary split,
and on four ranks data by tensor parallel; each without and with recompute. A kind that a model does not allow on so
many ranks is skipped, which is said with the reason. Then random plans of a small GPT, any valid strategy for any op,
on meshes of one and two axes. Three steps of AdamW in float64: the loss and all gradients, as `shardwright verify`
compares them (docs/verify.md). Last line: how many cases, how many of them are equal, and the largest difference over
its tolerance: 1e-9, and 1e-5 of the model as it is written where that casts to float32.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RANDOM_MESHES = [(2,), (4,), (3,), (2, 2)]


def main(arguments: list[str]) -> int:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.simplefilter("ignore")
    from benchmarks.equality_models import GPT, MODELS
    from benchmarks.equality_plans import NAMES, Case, Skipped, cases, random_cases
    from benchmarks.equality_ranks import Group

    known = [name for name in MODELS if name != GPT]  # of the last there are random plans
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(known), help="none: random plans alone")
    parser.add_argument("--ranks", default="2,3,4")
    parser.add_argument("--plans", default=",".join(NAMES))
    parser.add_argument("--random", type=int, default=100, help="random plans of a small GPT")
    parser.add_argument("--seed", type=int, default=0, help="of the random plans")
    parser.add_argument("--keep", type=Path, help="a folder for programs that differ")
    given = parser.parse_args(arguments)
    ranks = [int(part) for part in given.ranks.split(",")]
    models = [name for name in given.models.split(",") if name != "none"]
    unknown = [*(set(models) - set(known)), *(set(given.plans.split(",")) - set(NAMES))]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}")

    skipped: list[Skipped] = []

    def all_cases(count: int) -> Iterator[Case]:
        for model in models:
            for case in cases(model, count, tuple(given.plans.split(","))):
                if isinstance(case, Case):
                    yield case
                else:
                    skipped.append(case)
                    print(f"{case.label:48} skipped: {case.why}", flush=True)
        meshes = [mesh for mesh in RANDOM_MESHES if _size(mesh) in ranks]
        for case in random_cases(given.random, meshes, given.seed) if meshes else ():
            if case.ranks == count:
                yield case

    found: dict[str, dict[str, Any]] = {}
    start = time.perf_counter()
    for count in ranks:
        with Group(count) as group:
            for case, answer in group.judge(all_cases(count)):
                found[case.label] = answer
                _show(case.label, answer)
                if given.keep and not _equal(answer):
                    given.keep.mkdir(parents=True, exist_ok=True)
                    (given.keep / f"{case.label}.py").write_text(case.text)
    return _report(found, len(skipped), time.perf_counter() - start)


def _size(mesh: tuple[int, ...]) -> int:
    size = 1
    for axis in mesh:
        size *= axis
    return size


def _equal(answer: dict[str, Any]) -> bool:
    return "error" not in answer and answer["worst"] <= 1.0


def _show(label: str, answer: dict[str, Any]) -> None:
    if "error" in answer:
        print(f"{label:48} fails: {answer['error']}\n{answer.get('details', '')}", flush=True)
        return
    told = "" if _equal(answer) else "  NOT EQUAL"
    print(f"{label:48} {answer['worst']:9.2e} of {answer['tolerance']:g}  {answer['at']}{told}", flush=True)
    if told:
        fault = answer["fault"]
        print(f"    {fault['what']}\n    {fault['target']} in {fault['module']}: {fault['text']}", flush=True)


def _report(found: dict[str, dict[str, Any]], skipped: int, seconds: float) -> int:
    equal = sum(map(_equal, found.values()))
    worst = max((answer.get("worst", float("inf")) for answer in found.values()), default=0.0)
    print(f"{len(found)} cases in {seconds:.0f} s; {skipped} plans skipped")
    print(json.dumps({"cases": len(found), "equal": equal, "worst": float(f"{worst:.3g}")}))
    return 0 if found and equal == len(found) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
