"""`sw.parallelize` in plain loops on two ranks, in float64: losses and weights are those of the unsplit loop."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim.lr_scheduler import StepLR

import shardwright as sw
from shardwright.pipeline.base import artifacts
from tests.api.small import BATCH, Classifier, planned
from tests.ranks import run_ranks

STEPS = 3
WIDE = {"x": BATCH["x"].double(), "y": BATCH["y"]}
ONE = {"source": "preset", "device": "cpu", "devices": 1, "memory_gb": 4}
PLANS: dict[str, dict[str, Any]] = {
    "data": {"only": "data"},
    "tied": {"only": "zero"},
    "zero1": {"constraints": {"*.weight": "zero1"}, "recompute": "full"},
    "zero3": {"constraints": {"*.weight": "zero3", "*.bias": "zero3"}},
    "tensor": {"constraints": {"up.weight": "S(0)", "mid.weight": "S(1)"}},
    "adding": {"only": "zero", "gradient_accumulation": 2},
    "pipeline": {"pipeline": "1f1b", "partitions": 2, "micro_batches": 2},
    "single": {"cluster": {**ONE, "preset": {"matmul_gflops": 10, "memory_gbytes_per_s": 10}}},
}
IN_A_LOOP = ("data", "tied", "zero1", "zero3", "tensor")
CLIPPED = ("zero1", "tensor")
SPLIT = ("zero1", "zero3", "tensor")
LIMIT = 0.1
Result = tuple[list[float], dict[str, Any]]  # losses; whole weights as numbers, which outlive the rank


class Tied(Classifier):
    """With a part that is frozen, two names of one parameter, and a buffer that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.mid.requires_grad_(False)
        self.again, self.norm = nn.Linear(32, 4, bias=False), nn.BatchNorm1d(32)
        self.again.weight = self.down.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        middle = self.norm(self.mid(self.up(x).relu())).relu()
        return F.cross_entropy(self.down(middle) + self.again(middle * middle), y)


def model(name: str = "") -> nn.Module:
    torch.manual_seed(0)
    return (Tied() if name == "tied" else Classifier()).double()


def batches() -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    drawn = [torch.randn(8, 16, generator=draw, dtype=torch.float64) for _ in range(STEPS)]
    return [{"x": x, "y": (BATCH["y"] + n) % 4} for n, x in enumerate(drawn)]


def adamw(own: nn.Module) -> torch.optim.Optimizer:
    """With two groups."""
    named = dict(own.named_parameters())
    biases = [p for name, p in named.items() if name.endswith("bias")]
    weights = [p for name, p in named.items() if not name.endswith("bias")]  # frozen ones too
    return torch.optim.AdamW([{"params": weights}, {"params": biases, "lr": 0.03}], lr=0.01, weight_decay=0.1)


def evaluated(own: nn.Module) -> float:
    own.eval()
    with torch.no_grad():
        found = float(own(**batches()[0]))
    own.train()
    return found


def loop(own: nn.Module, optimizer: torch.optim.Optimizer, clip: Callable[[float], Any] | None) -> list[float]:
    """A user's: the same for the unsplit module and for one that `parallelize` gave."""
    scheduler = StepLR(optimizer, 1, gamma=0.5)
    losses = []
    for batch in batches():
        loss = own(**batch)
        optimizer.zero_grad()
        losses.append(loss.item())
        loss.backward()
        if clip is not None:
            clip(LIMIT)
        optimizer.step()
        scheduler.step()
    return [*losses, evaluated(own)]


def adding(own: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Each step is that of the mean loss of two batches."""
    losses = []
    for number in range(STEPS):
        for batch in (batches()[number], batches()[0]):
            loss = own(**batch)
            losses.append(loss.item())
            (loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def scaled(own: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, spoils: bool) -> list[float]:
    """With a scaled loss; of the second step one gradient is infinite, where this rank `spoils` it."""
    losses = []
    for number, batch in enumerate(batches()):
        loss = own(**batch)
        optimizer.zero_grad()
        losses.append(loss.item())
        scaler.scale(loss).backward()
        if number == 1 and spoils:
            optimizer.param_groups[0]["params"][0].grad.view(-1)[0] = math.inf
        scaler.step(optimizer)
        scaler.update()
    return [*losses, scaler.get_scale()]


def unsplit(how: str, name: str = "") -> Result:
    own = model(name)
    optimizer = adamw(own)
    if how == "scaled":
        return scaled(own, optimizer, torch.amp.GradScaler("cpu"), True), own.state_dict()
    if how == "adding":
        return adding(own, optimizer), own.state_dict()
    clip = (lambda limit: nn.utils.clip_grad_norm_(own.parameters(), limit)) if how == "clipped" else None
    return loop(own, optimizer, clip), own.state_dict()


def stepped(own: sw.ParallelModule, optimizer: torch.optim.Optimizer, clip_norm: float | None) -> list[float]:
    scheduler = StepLR(optimizer, 1, gamma=0.5)
    losses = []
    for batch in batches():
        losses.append(own.step(batch, optimizer, clip_norm=clip_norm))
        scheduler.step()
    return [*losses, evaluated(own)]


def whole(own: sw.ParallelModule) -> dict[str, Any]:
    return {name: tensor.tolist() for name, tensor in own.state_dict(gathered=True).items()}


def told(call: Callable[[], Any]) -> str:
    with pytest.raises(sw.ShardwrightError) as refused:
        call()
    return refused.value.line()


# ---- what a rank does


def in_loops(files: dict[str, str]) -> dict[str, Result]:
    found: dict[str, Result] = {}
    for name in IN_A_LOOP:
        given = model(name)
        before = copy.deepcopy(given.state_dict())
        own, optimizer = sw.parallelize(given, adamw(given), sw.load(files[name]))
        losses = loop(own, optimizer, own.clip_grad_norm_ if name in CLIPPED else None)
        assert all(torch.equal(before[key], tensor) for key, tensor in given.state_dict().items()), "the user's own"
        assert {n for n, _ in own.named_parameters()} == {n for n, _ in given.named_parameters()}
        found[name] = losses, whole(own)
        again = model(name)
        own, optimizer = sw.parallelize(again, adamw(again), sw.load(files[name]))
        found[f"{name} stepped"] = (
            stepped(own, optimizer, LIMIT if name in CLIPPED else None),
            whole(own),
        )
    sharded = partial(ShardedGradScaler, process_group=torch.distributed.group.WORLD)
    for name in SPLIT:
        for scaler in (torch.amp.GradScaler("cpu"), sharded("cpu")):
            given = model()
            own, optimizer = sw.parallelize(given, adamw(given), sw.load(files[name]))
            losses = scaled(own, optimizer, scaler, torch.distributed.get_rank() == 0)
            found[f"scaled {name} {type(scaler).__name__}"] = losses, whole(own)
    given = model()
    own, optimizer = sw.parallelize(given, adamw(given), sw.load(files["data"]))
    found["torch clips"] = loop(own, optimizer, partial(nn.utils.clip_grad_norm_, [*own.parameters()])), whole(own)
    given = model()
    own, optimizer = sw.parallelize(given, adamw(given), sw.load(files["adding"]))
    found["adding"] = adding(own, optimizer), whole(own)
    return found


def as_pipeline(file: str) -> dict[str, Result]:
    found = {}
    for name, limit in (("free", None), ("clipped", LIMIT)):
        given = model()
        own, optimizer = sw.parallelize(given, adamw(given), sw.load(file))
        there = weakref.ref(given)
        del given
        gc.collect()
        assert there() is None, "weights that nobody needs any more"
        assert "model.step(batch, optimizer)" in told(lambda own=own: own(**batches()[0]))
        assert "model.step(batch, optimizer)" in told(optimizer.step)
        found[name] = stepped(own, optimizer, limit), whole(own)
    return found


def mistaken(file: str) -> None:
    plan, given, batch = sw.load(file), model(), batches()[0]
    other = nn.Linear(4, 4)
    assert "not of the model" in told(lambda: sw.parallelize(given, torch.optim.SGD(other.parameters()), plan))
    assert "it is a Linear, and the plan is for a Classifier" in told(lambda: sw.parallelize(other, adamw(other), plan))
    lacking = model()
    del lacking.up
    assert "up.weight is not there" in told(lambda: sw.parallelize(lacking, adamw(lacking), plan))
    narrow = Classifier()
    why = told(lambda: sw.parallelize(narrow, adamw(narrow), plan))
    assert "up.weight is float32 [32, 16], and float64 [32, 16] in the plan" in why
    taken = adamw(given)
    given(**batch).backward()
    taken.step()
    assert "taken steps" in told(lambda: sw.parallelize(given, taken, plan))
    lbfgs = torch.optim.LBFGS(given.parameters())
    assert "closure" in told(lambda: sw.parallelize(given, lbfgs, plan))
    own, optimizer = sw.parallelize(given, adamw(given), plan)
    assert "0 of the 1 backward passes" in told(optimizer.step)
    why = told(lambda: own(batch["x"][:4], batch["y"][:4]))
    assert "x is float64 [4, 16], and the plan is for float64 [8, 16]" in why
    assert "x is float32" in told(lambda: own(batch["x"].float(), batch["y"]))
    assert "y: in the plan's batch" in told(lambda: own(x=batch["x"]))
    assert "got 2, and a step of the plan has 1" in told(lambda: own.step([batch, batch], optimizer))
    assert "not the one that parallelize returned" in told(lambda: own.step(batch, taken))
    own(batch["x"], batch["y"]).backward()
    assert "zero_grad()" in told(lambda: own(**batch).backward())
    own.zero_grad()
    first, second = own(**batch), own(**batch)
    assert "run forward again" in told(first.backward)
    second.backward()
    assert "optimizer.step(closure): it takes no closure here" in told(lambda: optimizer.step(lambda: None))
    optimizer.step()


def norms_of_shards(files: dict[str, str]) -> None:
    """A norm over what this rank has is that of no gradient."""
    for name in SPLIT:
        given = model()
        own, optimizer = sw.parallelize(given, adamw(given), sw.load(files[name]))
        own(**batches()[0]).backward()
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        grads = [p.grad for p in stepped]
        for parameters in ([*own.parameters()], stepped):
            for more in ({}, {"foreach": True}, {"norm_type": math.inf}):
                call = partial(nn.utils.clip_grad_norm_, parameters, LIMIT, **more)
                assert "call model.clip_grad_norm_" in told(call)
        split = next(grad for grad in grads if type(grad) is not Tensor)
        for norm in (nn.utils.get_total_norm, torch._foreach_norm):
            assert "call model.clip_grad_norm_" in told(partial(norm, grads))
        for norm in (Tensor.norm, torch.norm, torch.linalg.norm, lambda grad: grad.data.norm(2)):
            assert "call model.clip_grad_norm_" in told(partial(norm, split))
        elsewhere = [p.grad for p in own.parameters() if not any(p is one for one in stepped)]
        assert len(elsewhere) >= (3 if name == "zero1" else 0)  # the optimizer has these weights' shards
        for grad in elsewhere:
            assert grad.shape and "optimizer.param_groups" in told(partial(grad.mul_, 2))
        nn.utils.clip_grad_value_(stepped, 1e9)  # what is done to each element is right
        own.clip_grad_norm_(LIMIT)
        assert own.clip_grad_norm_(LIMIT) <= LIMIT * (1 + 1e-6)
        optimizer.step()
        assert all(type(p.grad) in (Tensor, type(None)) for p in (*stepped, *own.parameters()))
        states = [one for state in optimizer.state.values() for one in state.values()]
        assert states and all(type(one) is Tensor for one in states)
        own(**batches()[1]).backward()
        own.step(batches()[1], optimizer)  # the gradients before it are dropped


def saving(files: dict[str, str], folder: str) -> dict[str, Result]:
    """Two steps under a plan, saved; the rest of each other plan goes on from there."""
    given = model()
    own, optimizer = sw.parallelize(given, adamw(given), sw.load(files["zero3"]))
    dcp.save({"model": own, "optimizer": optimizer}, checkpoint_id=f"{folder}/fresh")
    for batch in batches()[:2]:
        own.step(batch, optimizer)
    dcp.save({"model": own, "optimizer": optimizer}, checkpoint_id=f"{folder}/two")
    assert "needs all of a tensor" in told(lambda: own.state_dict()["up.weight"] + 1)
    split = own.state_dict()["up.weight"].full_tensor()
    gathered = own.state_dict(gathered=True)
    assert not gathered or torch.equal(split, gathered["up.weight"])
    found = {name: resumed(files[name], folder) for name in ("tensor", "data", "zero1", "pipeline")}
    return {**found, "fresh": resumed(files["tensor"], folder, 0)}


def resumed(file: str, folder: str, done: int = 2) -> Result:
    """After so many steps; on meta first, so that all comes from the checkpoint."""
    with torch.device("meta"):
        given = Classifier().double()
    own, optimizer = sw.parallelize(given, adamw(given), sw.load(file))
    state = {"model": own, "optimizer": optimizer}
    dcp.load(state, checkpoint_id=f"{folder}/{'two' if done else 'fresh'}")
    return [own.step(batch, optimizer) for batch in batches()[done:]][-1:], whole(own)


# ---- the tests


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Saved, as ranks read them."""
    folder = tmp_path_factory.mktemp("plans")
    for name, choices in PLANS.items():
        planned(model(name), WIDE, frontier_points=1, **choices).save(folder / name)
    return {name: str(folder / name) for name in PLANS}


def equal(found: Result, expected: Result) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=1e-10, atol=1e-12)
    assert list(found[1]) == list(expected[1])
    for name, tensor in expected[1].items():
        torch.testing.assert_close(
            torch.tensor(found[1][name], dtype=tensor.dtype), tensor, rtol=1e-9, atol=1e-11, msg=name
        )


def test_a_loop_goes_on_as_it_was(plans: dict[str, str]) -> None:
    first, second = run_ranks(2, in_loops, plans)
    for name in IN_A_LOOP:
        expected = unsplit("clipped" if name in CLIPPED else "free", name)
        equal(first[name], expected)
        equal(first[f"{name} stepped"], expected)
    equal(first["adding"], unsplit("adding"))
    equal(first["torch clips"], unsplit("clipped"))
    for name in (name for name in first if name.startswith("scaled")):
        equal(first[name], unsplit("scaled"))
    assert {name: losses for name, (losses, _) in second.items()} == {
        name: losses for name, (losses, _) in first.items()
    }
    assert not any(state for _, state in second.values())


def test_a_pipeline_steps_as_a_whole(plans: dict[str, str]) -> None:
    first, second = run_ranks(2, as_pipeline, plans["pipeline"])
    for name, found in first.items():
        equal(found, unsplit(name))
        assert second[name][0] == found[0]


def test_norms_of_shards_are_refused(plans: dict[str, str]) -> None:
    run_ranks(2, norms_of_shards, plans)


def test_mistakes_are_told_in_one_line(plans: dict[str, str]) -> None:
    run_ranks(2, mistaken, plans["data"])


def test_a_checkpoint_of_torch_is_loaded_under_any_plan_and_without_one(plans: dict[str, str], tmp_path: Path) -> None:
    first, _ = run_ranks(2, saving, plans, str(tmp_path))
    own = model()
    optimizer = adamw(own)
    for batch in batches()[:2]:
        loss = own(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    state = {f"model.{name}": torch.empty_like(tensor) for name, tensor in own.state_dict().items()}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(state, checkpoint_id=tmp_path / "two", no_dist=True)
    for name, tensor in own.state_dict().items():
        torch.testing.assert_close(state[f"model.{name}"], tensor, rtol=1e-9, atol=1e-11)
    loss = own(**batches()[2])
    loss.backward()
    optimizer.step()
    for found in (*first.values(), *run_ranks(1, resumed, plans["single"], str(tmp_path))):
        equal(found, ([loss.item()], own.state_dict()))


def test_one_process_needs_no_launcher_but_the_right_number_of_ranks(plans: dict[str, str]) -> None:
    found = run_ranks(1, alone, plans)[0]
    equal(found, unsplit("free"))


def with_code(plan: sw.ModelPlan) -> sw.ModelPlan:
    """As a file from elsewhere may be, its digest included."""
    text, above = f"import os\n{plan.program}", [plan.made["graph"], plan.made["plan"]]
    return replace(plan, made={**plan.made, "module": artifacts.make("module", text, above, {})})


def alone(files: dict[str, str]) -> Result:
    torch.distributed.destroy_process_group()
    given = model()
    many, optimizer = sw.load(files["data"]), adamw(given)
    why = told(partial(sw.parallelize, given, optimizer, many))
    assert "the plan is for 2 devices, and 1 rank runs" in why and "torchrun --nproc-per-node=2" in why
    one = sw.load(files["single"])
    assert "its program is not the one" in told(partial(sw.parallelize, given, optimizer, with_code(one)))
    own, optimizer = sw.parallelize(given, optimizer, one)
    there = weakref.ref(given)
    del given
    gc.collect()
    assert there() is None, "weights that nobody needs any more"
    return loop(own, optimizer, None), whole(own)
