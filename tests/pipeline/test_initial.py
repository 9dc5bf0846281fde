"""Initial values one at a time: the very bits of plain construction, without memory for all of them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("transformers", reason="the extra `hf` is not installed")

from shardwright.pipeline.models import gpt, mlp
from shardwright.pipeline.runtime.step import initial_values
from shardwright.pipeline.runtime.step.initial_values import Initial
from tests.families import FAMILIES


@pytest.fixture(autouse=True)
def give_back_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models of these tests are small."""
    monkeypatch.setattr(initial_values, "SMALL", 0)


def state(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def check_equal(build: Callable[[], nn.Module], whole: str = "", seed: int = 3) -> Initial:
    """Names, bits, types, gradients and the generator are those of plain construction, also the second time."""
    torch.manual_seed(seed)
    plain, after = build(), torch.get_rng_state()
    torch.manual_seed(seed)
    found = Initial(build)
    assert whole in found.whole and bool(found.whole) == bool(whole)
    assert torch.equal(torch.get_rng_state(), after)
    wanted, have = state(plain), state(found.module)
    assert list(have) == list(wanted)
    for tensors in (have, dict(reversed(have.items()))):
        for name, value in zip(tensors, found.values(tensors.values()), strict=True):
            assert value.dtype == wanted[name].dtype and value.stride() == wanted[name].stride()
            assert torch.equal(value, wanted[name].detach()), name
            assert have[name].requires_grad == wanted[name].requires_grad
            assert type(have[name]) is type(wanted[name])
    assert torch.equal(torch.get_rng_state(), after)
    return found


def small_gpt(tie: bool = False) -> nn.Module:
    return gpt.build(vocab_size=40, context=8, width=16, layers=2, heads=2, tie=tie)


@pytest.mark.parametrize("build", FAMILIES, ids=lambda build: build.__name__)
def test_models_of_transformers(build: Callable[[], nn.Module]) -> None:
    check_equal(build)


@pytest.mark.parametrize(
    "build",
    [
        small_gpt,
        lambda: small_gpt(tie=True),
        lambda: mlp.build(features=6, width=8, depth=2, classes=3),
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 2),
        lambda: nn.LSTM(4, 6, num_layers=2),
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2)).bfloat16(),
    ],
)
def test_models_of_torch(build: Callable[[], nn.Module]) -> None:
    check_equal(build)


# ------------------------------------------------------------------------------------------------ odd constructors


class Odd(nn.Module):
    def __init__(self, fill: Callable[[nn.Module], None]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        with torch.no_grad():
            fill(self)


def looks_at_values(m: nn.Module) -> None:
    """`trunc_normal_` draws until all values lie between its bounds."""
    nn.init.trunc_normal_(m.first.weight, 0, 1.0, -0.5, 0.5)
    nn.init.orthogonal_(m.second.weight)
    m.scale = float(m.first.weight.abs().max())
    m.second.weight.mul_(m.scale)
    if m.first.weight[0, 0] > 0:
        m.first.bias.normal_()


def changes_all_at_the_end(m: nn.Module) -> None:
    for p in m.parameters():
        p.data.mul_(0.5).add_(torch.randn(p.shape))
    m.first.weight.data[2].zero_()
    m.first.weight.data = m.first.weight.data.t().contiguous() + m.second.weight[:, :1]


def seeds_itself(m: nn.Module) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(11)
        m.first.weight.normal_()
    m.first.bias.uniform_()
    kept = torch.get_rng_state()
    m.second.weight.normal_()
    torch.set_rng_state(kept)
    m.second.bias.normal_(generator=torch.Generator().manual_seed(4))
    torch.randperm(5)


def copies(m: nn.Module) -> None:
    m.third = copy.deepcopy(m.first)
    m.register_buffer("table", copy.deepcopy(m.first.weight.data))
    m.fourth = nn.Linear(6, 6)
    m.fourth.weight = m.first.weight
    m.fourth.load_state_dict(m.second.state_dict())


def uses_arrays(m: nn.Module) -> None:
    array = np.arange(36.0, dtype=np.float32).reshape(6, 6)
    seen = torch.from_numpy(array)
    m.first.weight.copy_(seen)
    array += 1
    m.second.weight.add_(seen)
    m.register_buffer("seen", seen)
    m.register_buffer("listed", torch.tensor(m.second.weight.tolist()))
    m.listed[0] = 7
    m.second.bias.copy_(torch.from_numpy(m.first.bias.detach().numpy() * 2))


def other_default_type(m: nn.Module) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        m.third = nn.Linear(6, 6)
    finally:
        torch.set_default_dtype(torch.float32)


def shares_memory(m: nn.Module) -> None:
    flat = torch.randn(42)
    m.first.weight, m.first.bias = nn.Parameter(flat[:36].view(6, 6)), nn.Parameter(flat[36:])
    m.second.weight = nn.Parameter(flat[:36].view(6, 6).t(), requires_grad=False)
    flat.mul_(2)


def takes_storage(m: nn.Module) -> None:
    m.first.bias.set_(torch.arange(12.0).untyped_storage(), 3, (6,), (1,))
    m.second.bias.normal_()


@pytest.mark.parametrize(
    "fill",
    [
        looks_at_values,
        changes_all_at_the_end,
        seeds_itself,
        copies,
        uses_arrays,
        other_default_type,
        shares_memory,
        takes_storage,
    ],
)
def test_constructors_that_do_more(fill: Callable[[nn.Module], None]) -> None:
    check_equal(lambda: Odd(fill))


def writes_through_an_array(m: nn.Module) -> None:
    array = m.first.weight.numpy()
    m.second.weight.copy_(m.first.weight)
    array[:] = 3
    m.second.bias.copy_(m.first.weight[0])
    m.first.weight.add_(1)
    array[0] = 5


def resizes(m: nn.Module) -> None:
    grown = torch.zeros(3)
    grown.resize_(36).fill_(2)
    m.first.weight.copy_(grown.view(6, 6))


def is_sparse(m: nn.Module) -> None:
    m.first.weight.add_(m.second.weight.to_sparse().to_dense())


@pytest.mark.parametrize(
    ("fill", "why"),
    [
        (writes_through_an_array, "beside torch"),
        (resizes, "resizes"),
        (is_sparse, "sparse"),
    ],
)
def test_what_no_tape_holds_is_built_whole(fill: Callable[[nn.Module], None], why: str) -> None:
    check_equal(lambda: Odd(fill), whole=why)


def test_an_error_of_the_constructor_is_the_users() -> None:
    with pytest.raises(ValueError, match="must be a multiple"):
        Initial(lambda: gpt.build(vocab_size=4, context=4, width=3, layers=1, heads=2))


# ---------------------------------------------------------------------------------------------------- random programs

LENGTH = 12


def step(names: list[Tensor], kind: int, a: int, b: int) -> None:
    """One of the things that constructors do, to the tensors with these numbers."""
    x, y = names[a % len(names)], names[b % len(names)]
    match kind:
        case 0:
            x.normal_()
        case 1:
            x.uniform_(-1, 1)
        case 2:
            x[b % LENGTH :].normal_()
        case 3:
            x.add_(y)
        case 4:
            x.copy_(y)
        case 5:
            names.append(y * 2 + x)
        case 6:
            names.append(torch.cat([x, y])[LENGTH // 2 : -LENGTH // 2])
        case 7:
            names[a % len(names)] = torch.randn(LENGTH)
        case 8:
            x.mul_(float(y[0]))
        case 9:
            names.append(torch.empty(LENGTH).fill_(b))
        case 10:
            names.append(y.view(3, 4).t().reshape(LENGTH))
        case 11:
            names.append(torch.tensor(y.tolist()))
        case 12:
            names.append(x[:])
        case 13:
            torch.manual_seed(b)
        case 14:
            x.clamp_(y.min(), y.max())


class Drawn(nn.Module):
    def __init__(self, steps: list[tuple[int, int, int]]) -> None:
        super().__init__()
        names = [torch.randn(LENGTH), torch.zeros(LENGTH), torch.ones(LENGTH)]
        for given_step in steps:
            step(names, *given_step)
        for number, tensor in enumerate(names):
            self.register_buffer(f"x{number}", tensor)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 14), st.integers(0, 5), st.integers(0, 11)), max_size=25),
    st.sampled_from([0, 1.5]),
)
def test_random_constructors(steps: list[tuple[int, int, int]], room: float) -> None:
    before = initial_values.SMALL, initial_values.ROOM
    initial_values.SMALL, initial_values.ROOM = 0, room
    try:
        torch.manual_seed(1)
        wanted, after = state(Drawn(steps)), torch.get_rng_state()
        torch.manual_seed(1)
        found = Initial(lambda: Drawn(steps))
        assert not found.whole and torch.equal(torch.get_rng_state(), after)
        have = state(found.module)
        for name, value in zip(have, found.values(have.values()), strict=True):
            assert torch.equal(value, wanted[name]) or bool((value != value).any()), name
    finally:
        initial_values.SMALL, initial_values.ROOM = before


# ------------------------------------------------------------------------------------------------------------- memory


class Weigh(TorchDispatchMode):
    """The most bytes that storages had at once, by what they hold now and not when they were made."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, StorageWeakRef] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, Tensor):
                reference = StorageWeakRef(leaf.untyped_storage())
                self.seen.setdefault(reference.cdata, reference)
        alive = [torch.UntypedStorage._new_with_weak_ptr(key) for key in self.seen]
        self.seen = {key: self.seen[key] for key, s in zip(list(self.seen), alive, strict=True) if s is not None}
        self.peak = max(self.peak, sum(storage.nbytes() for storage in alive if storage is not None))
        return result


def biggest(module: nn.Module) -> int:
    return max(t.numel() * t.element_size() for t in state(module).values())


def deep_gpt() -> nn.Module:
    return gpt.build(vocab_size=64, context=64, width=64, layers=8, heads=2)


def deep_and_changed() -> nn.Module:
    """As many models do: everything is drawn a second time, then scaled."""
    model = deep_gpt()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    for parameter in model.parameters():
        parameter.data.mul_(0.5)
    return model


def deep_truncated() -> nn.Module:
    model = deep_gpt()
    for parameter in list(model.parameters())[::5]:
        nn.init.trunc_normal_(parameter, 0, 1.0, -2, 2)
    return model


@pytest.mark.parametrize("build", [deep_gpt, deep_and_changed, deep_truncated])
def test_few_tensors_are_in_memory_at_a_time(build: Callable[[], nn.Module]) -> None:
    with Weigh() as plain:
        module = build()
    largest = biggest(module)
    assert plain.peak > 20 * largest
    with Weigh() as found:
        values = Initial(build)
    states = sum(state.nbytes for entry in values._keeper.tape.entries for _, state in entry.states)
    slack = 64 * 1024 + states  # small tensors; states of the generator
    temporaries = 3 if build is deep_truncated else 0
    assert found.peak <= (1 + initial_values.ROOM + temporaries) * largest + slack
    shards = []
    with Weigh() as cutting:
        for value in values.values(state(values.module).values()):
            shards.append(value.flatten()[: value.numel() // 4].clone())
    held = sum(shard.numel() * shard.element_size() for shard in shards)
    assert held <= cutting.peak <= held + (1 + temporaries) * largest + slack
