"""An optimizer's step on tensors without memory keeps and needs what the real one does."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from shardwright.pipeline.ir.graph import TensorType
from shardwright.pipeline.runtime.step.memory import measure_peak, storage_bytes
from shardwright.stages.profile.optimizer import OptimizerRun, optimizer_copies, run_optimizer
from shardwright.stages.profile.symbolic import rounded

SHAPES = {"embedding": (500, 64), "up": (64, 256), "down": (256, 64), "bias": (250,)}
optim = torch.optim


def parameters() -> dict[str, TensorType]:
    return {name: TensorType(shape, "float32") for name, shape in SHAPES.items()}


def size(name: str) -> int:
    return rounded(4 * torch.Size(SHAPES[name]).numel())


ALL = sum(size(name) for name in SHAPES)


def run(build, foreach: bool, **settings) -> OptimizerRun:
    return run_optimizer(functools.partial(build, **settings), parameters(), "cuda" if foreach else "cpu")


def peak(run: OptimizerRun) -> int:
    """Bytes of the step's own storages at its worst moment."""
    moments = range(len(run.kernels) + 1)
    return max(sum(s.size for s in run.storages if s.born <= m and (s.died is None or s.died > m)) for m in moments)


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize(
    ("build", "settings", "copies"),
    [
        (optim.AdamW, {}, 2),
        (optim.Adam, {}, 2),
        (optim.AdamW, {"amsgrad": True}, 3),
        (optim.NAdam, {}, 2),
        (optim.SGD, {"lr": 0.1, "momentum": 0.9}, 1),
        (optim.SGD, {"lr": 0.1}, 0),
        (optim.Adagrad, {}, 1),
        (optim.RMSprop, {}, 1),
        (optim.RMSprop, {"momentum": 0.9, "centered": True}, 3),
        (optim.Adadelta, {}, 2),
    ],
    ids=["adamw", "adam", "amsgrad", "nadam", "momentum", "sgd", "adagrad", "rmsprop", "centered", "adadelta"],
)
def test_the_state_is_so_many_copies_of_each_parameter(build, settings, copies, foreach):
    found = run(build, foreach, **settings)
    assert found.state == {name: copies * size(name) for name in SHAPES}


@pytest.mark.parametrize("build", [optim.AdamW, optim.Adam])
def test_foreach_needs_one_temporary_of_all_parameters(build):
    assert peak(run(build, foreach=True)) == ALL


def test_one_by_one_needs_no_more_than_the_largest_parameters():
    """A root and a quotient of one parameter, while the quotient of the one before is still there."""
    found = run(optim.AdamW, foreach=False)
    assert peak(found) == size("embedding") + 2 * size("up")
    assert not any(kernel.name.startswith("_foreach") for kernel in found.kernels)
    assert all(storage.died is not None for storage in found.storages[:-1]), "steps are counted on the host"


def test_many_equal_parameters_one_by_one_need_the_memory_of_three():
    many = {f"p{i}": TensorType((256, 256), "float32") for i in range(20)}
    assert peak(run_optimizer(optim.AdamW, many, "cpu")) == 3 * 4 * 256 * 256


def test_the_users_word_on_foreach_counts():
    def names(**settings):
        found = run_optimizer(functools.partial(optim.AdamW, **settings), parameters(), "cuda")
        return {kernel.name for kernel in found.kernels if kernel.name.startswith("_foreach")}

    assert names() and names(foreach=True) and not names(foreach=False)


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize(
    ("build", "settings", "copies", "moved"),
    [
        (optim.AdamW, {}, 2, 7),
        (optim.AdamW, {"amsgrad": True}, 3, 9),
        (optim.Adam, {}, 2, 7),
        (optim.SGD, {"lr": 0.1, "momentum": 0.9}, 1, 5),
        (optim.Adagrad, {}, 1, 5),
    ],
    ids=["adamw", "amsgrad", "adam", "momentum", "adagrad"],
)
def test_a_fused_step_is_one_kernel_that_moves_each_tensor_once(build, settings, copies, moved, foreach):
    found = run(build, foreach, **settings, fused=True)
    assert not found.scaled
    assert sum(found.state.values()) - copies * ALL in (0, 512 * len(SHAPES)), "counts of steps may lie on the GPU"
    fused = [kernel for kernel in found.kernels if kernel.name.startswith("_fused")]
    assert len(fused) == 1
    elements = sum(torch.Size(shape).numel() for shape in SHAPES.values())
    assert sum(k.read + k.written for k in fused) == pytest.approx(4 * moved * elements, rel=0.01)
    assert peak(found) <= 512 * len(SHAPES)


def test_a_capturable_step_is_taken_on_its_device():
    found = run(optim.AdamW, foreach=True, capturable=True)
    assert not found.scaled
    assert found.state == {name: 2 * size(name) + 512 for name in SHAPES}, "with its count of steps"


def test_an_optimizer_that_looks_at_values_is_scaled_from_a_small_step():
    found = run(optim.Adafactor, foreach=False)
    assert found.scaled and found.kernels
    rows, columns = SHAPES["embedding"]
    assert found.state["embedding"] == pytest.approx(rounded(4 * rows) + rounded(4 * columns), abs=512)
    assert found.state["bias"] == rounded(4 * 250)


class Hidden(torch.optim.Optimizer):
    """As a library's: its kernels are not torch's, and it keeps a byte for each element."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.detach().numpy()[...] -= 1
                if parameter not in self.state:
                    self.state[parameter] = {"own": torch.from_numpy(np.zeros(parameter.numel(), np.uint8))}


def test_kernels_that_torch_does_not_see_are_one_that_moves_all():
    found = run(Hidden, foreach=True)
    assert found.state == {name: rounded(torch.Size(shape).numel()) for name, shape in SHAPES.items()}
    elements = [torch.Size(shape).numel() for shape in SHAPES.values()]
    assert [kernel.written for kernel in found.kernels] == [4 * count + rounded(count) for count in elements]


class Silent(torch.optim.SGD):
    """Fails without a word where there are no values."""

    def step(self, closure=None):
        if not all(type(p.data) is torch.Tensor and p.device.type == "cpu" for p in self.param_groups[0]["params"]):
            raise ValueError
        return super().step(closure)


@pytest.mark.parametrize("dims", [0, 1, 5, 8])
def test_a_failure_without_a_word_and_any_number_of_dims(dims):
    kind = TensorType((2,) * dims, "float32")
    found = run_optimizer(functools.partial(Silent, lr=0.1, momentum=0.9), {"p": kind}, "cpu")
    assert found.scaled == "ValueError: " and found.kernels
    assert dims == 0 or dims > 5 or found.state == {"p": 512}


def test_the_state_has_the_parameters_type():
    mixed = {"full": TensorType((64, 64), "float32"), "half": TensorType((64, 64), "bfloat16")}
    found = run_optimizer(optim.AdamW, mixed, "cpu")
    assert found.state == {"full": 2 * 4 * 64 * 64, "half": 2 * 2 * 64 * 64}


def test_plain_sgd_needs_no_memory():
    found = run(optim.SGD, foreach=True, lr=0.1)
    assert peak(found) == 0 and found.kernels


def test_more_parameters_are_no_more_foreach_kernels():
    few, many = (
        run_optimizer(optim.AdamW, {f"p{i}": TensorType((8,), "float32") for i in range(n)}, "cuda").kernels
        for n in (2, 20)
    )
    assert len([k for k in few if "foreach" in k.name]) == len([k for k in many if "foreach" in k.name])


@pytest.mark.parametrize(
    "build",
    [optim.AdamW, functools.partial(optim.AdamW, foreach=True), functools.partial(optim.SGD, lr=0.1, momentum=0.9)],
    ids=["adamw", "foreach", "momentum"],
)
def test_the_peak_is_that_of_the_real_step_on_a_cpu(build):
    real = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES.values()]
    for parameter in real:
        parameter.grad = torch.randn_like(parameter)
    optimizer = build(real)
    optimizer.step()
    state = [t for of_one in optimizer.state.values() for t in of_one.values() if isinstance(t, torch.Tensor)]
    held = [*real, *(p.grad for p in real), *state]
    own = measure_peak(optimizer.step, lambda: held, torch.device("cpu")) - storage_bytes(held)
    assert peak(run_optimizer(build, parameters(), "cpu")) == pytest.approx(own, rel=0.02, abs=512)


@pytest.mark.parametrize(
    ("settings", "copies"),
    [
        ({"_target_": "torch.optim.AdamW", "lr": 1e-3}, 2.0),
        ({"_target_": "torch.optim.Adam", "amsgrad": True}, 3.0),
        ({"_target_": "torch.optim.SGD", "lr": 0.1}, 0.0),
        ({"_target_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9}, 1.0),
        ({"_target_": "torch.optim.Adagrad"}, 1.0),
    ],
)
def test_what_an_optimizer_keeps(settings, copies):
    assert optimizer_copies(settings, "conf/train/x.yaml: optimizer") == copies
