"""Gathered parameters of which backward keeps the shard alone: what is kept, what is computed, what it costs."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from shardwright.pipeline import runtime
from shardwright.pipeline.runtime.context import step
from shardwright.pipeline.runtime.programs import collectives
from shardwright.pipeline.runtime.programs.mesh import MeshAxis
from shardwright.pipeline.runtime.recompute.regather import _source_of
from shardwright.pipeline.runtime.recompute.regions import recompute
from shardwright.pipeline.sharding.conversions import REGATHER, TABLE, entry_seconds
from tests.graphs import preset
from tests.meshes import Simulated, mesh, run_threads

ROWS = 4


def layers(x: Tensor, weights: list[Tensor], gather, dim: int, alive: list[StorageWeakRef]) -> Tensor:
    """Two layers, each with its weight gathered; each weight's memory is watched."""
    for weight in weights:
        whole = gather(weight, axis="d0", dim=dim)
        alive.append(StorageWeakRef(whole.untyped_storage()))
        x = torch.tanh(F.linear(x, whole) + whole.sum(1))  # `linear` keeps a view of it
    return x


def run(ranks: int, gather: str, dim: int, kept: bool) -> dict:
    torch.default_generator.manual_seed(ranks + dim)
    whole = torch.randn(2, 6, 6, dtype=torch.float64)
    inputs = torch.randn(ranks, ROWS, 6, dtype=torch.float64)

    def rank(at):
        shards = [w.chunk(ranks, dim)[at[0]].clone().requires_grad_() for w in whole]
        x = inputs[at[0]].clone().requires_grad_()
        watched: list[StorageWeakRef] = []
        if kept:
            with runtime.keep_shards():
                y = layers(x, shards, getattr(runtime, gather), dim, watched)
        else:
            y = layers(x, shards, getattr(runtime, gather), dim, watched)
        alive = sum(not memory.expired() for memory in watched)
        y.sum().backward()
        return alive, [x.grad, *(s.grad for s in shards)]

    return run_threads(rank, mesh(ranks))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("dim", [0, 1])
def test_the_gradients_are_those_of_a_kept_copy_and_only_the_shard_is_kept(ranks: int, dim: int) -> None:
    kept, dropped = run(ranks, "all_gather", dim, False), run(ranks, "regather", dim, True)
    for at, (alive, gradients) in dropped.items():
        assert alive == 0, "the gathered weights are still in memory after the forward pass"
        assert kept[at][0] == 2
        for found, expected in zip(gradients, kept[at][1], strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert not step.gathered


def saved_bytes(gather: str) -> int:
    """Bytes of all memory that autograd holds for backward, the input and the weights' own shards aside."""
    ranks, held = 2, {}

    def rank(at):
        shard = torch.randn(3, 6, requires_grad=True)
        x = torch.randn(ROWS, 6, requires_grad=True)
        own = {t.untyped_storage().data_ptr() for t in (shard, x)}
        found: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            memory = tensor.untyped_storage()
            if memory.data_ptr() not in own:
                found[memory.data_ptr()] = memory.nbytes()
            return tensor.detach()

        with torch.autograd.graph.saved_tensors_hooks(pack, Tensor.detach), runtime.keep_shards():
            y = F.linear(x, getattr(runtime, gather)(shard, axis="d0", dim=0))
        held[at] = sum(found.values())
        y.sum().backward()

    run_threads(rank, mesh(ranks))
    assert len(set(held.values())) == 1
    return held[0,]


def test_what_autograd_saves() -> None:
    assert saved_bytes("all_gather") == 4 * 6 * 6
    assert saved_bytes("regather") == 0


def test_without_the_context_it_is_an_all_gather() -> None:
    plain, again = run(2, "all_gather", 0, False), run(2, "regather", 0, False)
    for at, (alive, gradients) in again.items():
        assert alive == 2
        assert all(torch.equal(a, b) for a, b in zip(gradients, plain[at][1], strict=True))


def test_a_group_of_one_keeps_its_parameter() -> None:
    ((alive, _),) = run(1, "regather", 0, True).values()
    assert alive == 2  # the parameter itself


# ---- several tensors by one collective

SHAPES = ((6, 6), (6,), (4, 6), (12, 3))  # whole; each is split on its dim, the last on an inner factor
SPLITS = ((0, 1), (0, 1), (1, 1), (0, 2))


def shard_of(whole: Tensor, split: tuple[int, int], ranks: int, rank: int) -> Tensor:
    return collectives.local_shard(whole, MeshAxis(ranks, rank, None), *split).clone()


def mixed(x: Tensor, wholes: list[Tensor]) -> Tensor:
    """The first is read twice, the fourth by no op; of the second backward keeps nothing."""
    first, bias, second, _ = wholes
    return torch.tanh(F.linear(torch.tanh(F.linear(x, first, bias)) @ first, second))


MIXED = ("B", "R", "R", "B")  # what they become


def run_together(
    ranks: int, function: str, frozen: int = -1, calls: list[str] | None = None, to: tuple[str, ...] = ("B",) * 4
) -> dict:
    torch.default_generator.manual_seed(ranks)
    whole = [torch.randn(shape, dtype=torch.float64) for shape in SHAPES]
    inputs = torch.randn(ranks, ROWS, 6, dtype=torch.float64)

    def rank(at):
        shards = [shard_of(w, split, ranks, at[0]) for w, split in zip(whole, SPLITS, strict=True)]
        for number, shard in enumerate(shards):
            shard.requires_grad_(number != frozen)
        x = inputs[at[0]].clone().requires_grad_()
        given = [(shard, *split) for shard, split in zip(shards, SPLITS, strict=True)]
        with runtime.keep_shards():
            if function.endswith("_together"):
                told = [(*own, kind) if kind == "R" else own for own, kind in zip(given, to, strict=True)]
                wholes = list(getattr(runtime, function)(*told, axis="d0"))
            else:
                alone = [runtime.all_gather if kind == "B" else runtime.gather for kind in to]
                wholes = [
                    one(s, axis="d0", dim=dim, parts=parts) for one, (s, dim, parts) in zip(alone, given, strict=True)
                ]
            same = all(torch.equal(w.detach(), expected) for w, expected in zip(wholes, whole, strict=True))
            watched = [StorageWeakRef(w.untyped_storage()) for w in wholes]
            y = mixed(x, wholes)
            del wholes
        alive = [not memory.expired() for memory in watched]
        y.sum().backward()
        return same, alive, [x.grad, *(s.grad for s in shards)]

    if calls is None:
        return run_threads(rank, mesh(ranks))
    gather, scatter = Simulated.all_gather, Simulated.reduce_scatter
    with (
        mock.patch.object(Simulated, "all_gather", counted(gather, "gather", calls)),
        mock.patch.object(Simulated, "reduce_scatter", counted(scatter, "scatter", calls)),
    ):
        return run_threads(rank, mesh(ranks))


def counted(function, name: str, calls: list[str]):
    def call(output: Tensor, tensor: Tensor, group, **later):
        if group[1] == 0:
            calls.append(f"{name} {max(output.numel(), tensor.numel())}")
        return function(output, tensor, group, **later)

    return staticmethod(call)


@pytest.mark.parametrize("to", [("B",) * 4, MIXED, ("R",) * 4], ids="".join)
@pytest.mark.parametrize("function", ["all_gather_together", "regather_together"])
@pytest.mark.parametrize("frozen", [-1, 0, 2])
@pytest.mark.parametrize("ranks", [2, 3])
def test_together_is_the_same_as_one_by_one(ranks: int, frozen: int, function: str, to: tuple[str, ...]) -> None:
    alone, together = run_together(ranks, "one by one", frozen, to=to), run_together(ranks, function, frozen, to=to)
    needed = [True, False, True, False] if function == "all_gather_together" else [False] * 4
    for at, (same, alive, gradients) in together.items():
        assert same and alive == needed, "which of the gathered weights are in memory after the forward pass"
        for number, (found, expected) in enumerate(zip(gradients, alone[at][2], strict=True)):
            if expected is None:  # frozen, or read by no op: that one has zeros where it is summed
                assert found is None or (number == len(SHAPES) and not found.any())
            else:
                torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert not step.gathered


def test_together_is_one_collective_each_way() -> None:
    """All are gathered; again those of which backward keeps something; then the gradients of all are summed."""
    kept: list[str] = []
    again: list[str] = []
    run_together(2, "all_gather_together", calls=kept)
    run_together(2, "regather_together", calls=again)
    first, bias, second, unread = (torch.Size(shape).numel() for shape in SHAPES)
    every = first + bias + second + unread
    assert kept == [f"gather {every}", f"scatter {every}"]
    assert again == [f"gather {every}", f"gather {first + second}", f"scatter {every}"]


@pytest.mark.parametrize("function", ["all_gather_together", "regather_together"])
def test_what_is_large_is_moved_by_a_collective_of_its_own(function: str) -> None:
    calls: list[str] = []
    expected = run_together(2, function)
    first, bias, second, unread = (torch.Size(shape).numel() for shape in SHAPES)
    with mock.patch.object(collectives, "GATHERED_ALONE", 8 * unread):  # as large as the first
        found = run_together(2, function, calls=calls)
    gathers = [f"gather {n}" for n in (first, unread, bias + second)]
    again = [f"gather {n}" for n in (first, second)] if function == "regather_together" else []
    assert calls == [*gathers, *again, *(f"scatter {n}" for n in (first, unread, bias + second))]
    for at, (same, alive, gradients) in found.items():
        assert same and alive == expected[at][1]
        assert all(torch.equal(a, b) for a, b in zip(gradients, expected[at][2], strict=True))


@pytest.mark.parametrize("function", ["gather", "all_gather_together"])
def test_a_gradient_that_every_rank_has_whole_is_not_held_whole(function: str) -> None:
    def rank(at):
        shards = [torch.ones(3, 6, requires_grad=True) for _ in range(2)]
        if function == "gather":
            wholes = [runtime.gather(shard, axis="d0", dim=0) for shard in shards]
        else:
            wholes = runtime.all_gather_together(*((shard, 0, "R") for shard in shards), axis="d0")
        sum(w.square().sum() for w in wholes).backward()
        return [shard.grad.untyped_storage().nbytes() for shard in shards]

    assert set(map(tuple, run_threads(rank, mesh(2)).values())) == {(4 * 3 * 6, 4 * 3 * 6)}


def test_gradients_of_what_every_rank_reads_are_not_sent() -> None:
    """S -> R: each rank has the whole gradient. One collective gathers these with the others."""
    mixed: list[str] = []
    none: list[str] = []
    run_together(2, "all_gather_together", calls=mixed, to=MIXED)
    run_together(2, "all_gather_together", calls=none, to=("R",) * 4)
    first, bias, second, unread = (torch.Size(shape).numel() for shape in SHAPES)
    every = first + bias + second + unread
    assert mixed == [f"gather {every}", f"scatter {first + unread}"]
    assert none == [f"gather {every}"]


def test_a_row_of_each_rank_lies_in_memory_of_its_own() -> None:
    """Where it lies among what is gathered with it, it would lie elsewhere in backward, when others are."""

    torch.default_generator.manual_seed(7)  # one for all threads: they must not draw from it
    bias, gate = torch.randn(8, dtype=torch.float64), torch.randn(2, 6, dtype=torch.float64)
    x = torch.randn(ROWS, 6, dtype=torch.float64)

    def rank(at):
        shards = [bias.chunk(2)[at[0]].clone().requires_grad_(), gate.chunk(2)[at[0]].clone().requires_grad_()]
        own, whole = x.clone().requires_grad_(), x.clone().requires_grad_()
        with runtime.keep_shards():
            added, weight = runtime.regather_together((shards[0], 0), (shards[1], 0), axis="d0")
            y = F.linear(own, weight).sum() + added.sum()
            del added, weight
        y.backward()
        F.linear(whole, gate).sum().backward()
        return own.grad, whole.grad

    for found, expected in run_threads(rank, mesh(2)).values():
        torch.testing.assert_close(found, expected)


def test_each_type_has_its_own_collective() -> None:
    def rank(at):
        shards = [torch.full((3,), 1.0 + at[0], dtype=t, requires_grad=True) for t in (torch.float32, torch.float64)]
        found = runtime.regather_together((shards[0], 0), (shards[1], 0), axis="d0")
        sum(((w.double() ** 2).sum() for w in found), torch.zeros(())).backward()
        return [w.detach() for w in found], [s.grad for s in shards]

    for at, (wholes, gradients) in run_threads(rank, mesh(2)).items():
        for whole, gradient, dtype in zip(wholes, gradients, (torch.float32, torch.float64), strict=True):
            assert whole.dtype == gradient.dtype == dtype
            assert whole.tolist() == [1.0] * 3 + [2.0] * 3
            assert gradient.tolist() == [4.0 * (1 + at[0])] * 3


def test_a_second_backward_pass_gathers_once_more() -> None:
    calls: list[str] = []

    def rank(at):
        shards = [torch.randn(3, 6, dtype=torch.float64, requires_grad=True) for _ in range(2)]
        x = torch.randn(ROWS, 6, dtype=torch.float64, requires_grad=True)
        with runtime.keep_shards():
            first, second = runtime.regather_together((shards[0], 0), (shards[1], 0), axis="d0")
            y = F.linear(F.linear(x, first), second)
            del first, second
        y.sum().backward(retain_graph=True)
        once = [t.grad.clone() for t in (x, *shards)]
        y.sum().backward()
        return once, [t.grad for t in (x, *shards)]

    with mock.patch.object(Simulated, "all_gather", counted(Simulated.all_gather, "gather", calls)):
        for once, twice in run_threads(rank, mesh(2)).values():
            torch.testing.assert_close(twice, [2 * gradient for gradient in once])
    assert len(calls) > 2


# ---- several conversions one after another, and recompute regions around them


@pytest.mark.parametrize("dim", [0, 1])
def test_a_shard_of_what_was_gathered_is_converted_once_more(dim: int) -> None:
    """On the first dim the shard is a view: backward must make the shard again, not the whole that it lies in."""

    torch.default_generator.manual_seed(dim)
    shards = torch.randn(2, 3, 6, dtype=torch.float64)
    inputs = torch.randn(2, ROWS, 3 if dim else 6, dtype=torch.float64)

    def converted(shard: Tensor, again) -> Tensor:
        whole = again(runtime.all_gather, shard, axis="d0", dim=0)
        own = again(runtime.narrow, whole, axis="d0", dim=dim)
        return again(runtime.all_reduce_both, own, axis="d0")

    def gradients(again) -> dict:
        def rank(at):
            shard, x = shards[at[0]].clone().requires_grad_(), inputs[at[0]].clone().requires_grad_()
            with runtime.keep_shards():
                y = F.linear(x, converted(shard, again))
            y.square().sum().backward()
            return x.grad, shard.grad

        return run_threads(rank, mesh(2))

    plain = gradients(plainly)
    for at, found in gradients(runtime.again).items():
        for a, b in zip(found, plain[at], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert not step.gathered


def chain_of(x: Tensor, shard: Tensor, again, alive: list[StorageWeakRef]) -> Tensor:
    """A weight that two axes split: gathered on both, as a sum and as it is; nothing of the way is kept."""
    first = again(runtime.all_gather, shard, axis="d0", dim=0)
    whole = again(runtime.gather, first, axis="d1", dim=1)
    alive += [StorageWeakRef(tensor.untyped_storage()) for tensor in (first, whole)]
    return torch.tanh(F.linear(x, whole))


def run_chain(again, regions: int) -> dict:
    torch.default_generator.manual_seed(5)
    whole, inputs = torch.randn(6, 6, dtype=torch.float64), torch.randn(2, ROWS, 6, dtype=torch.float64)

    def rank(at):
        shard = whole.chunk(2, 0)[at[0]].chunk(2, 1)[at[1]].clone().requires_grad_()
        x = inputs[at[0]].clone().requires_grad_()
        watched: list[StorageWeakRef] = []

        def link(x: Tensor) -> Tensor:
            return chain_of(x, shard, again, watched)

        def body(x: Tensor) -> Tensor:
            return link(link(x)) if regions < 2 else link(recompute(link, x))

        with runtime.keep_shards():
            y = recompute(body, x) if regions else body(x)
        alive = sum(not memory.expired() for memory in watched)
        y.sum().backward()
        return alive, len(watched) // 2, [x.grad, shard.grad]

    return run_threads(rank, mesh(2, 2))


def plainly(conversion, x: Tensor, **arguments) -> Tensor:
    return conversion(x, **arguments)


@pytest.mark.parametrize(("regions", "runs"), [(0, 2), (1, 4), (2, 5)])
def test_a_way_of_several_steps_inside_recompute_regions(regions: int, runs: int) -> None:
    plain, again = run_chain(plainly, 0), run_chain(runtime.again, regions)
    for at, (alive, count, gradients) in again.items():
        assert alive == 0 and count == runs
        for found, expected in zip(gradients, plain[at][2], strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert not step.gathered


def test_a_region_that_runs_again_keeps_the_shards_alone() -> None:
    """Two layers in one region: what its second run gathers does not wait for the gradients to come."""
    assert set(region_peak("all_gather").values()) == {2}
    assert set(region_peak("regather").values()) == {0}


def region_peak(gather: str) -> dict:
    """The most of the weights that the region gathered which are alive when a layer's gradient comes."""

    def rank(at):
        shards = [torch.randn(3, 6, dtype=torch.float64, requires_grad=True) for _ in range(2)]
        x = torch.randn(ROWS, 6, dtype=torch.float64, requires_grad=True)
        watched: list[StorageWeakRef] = []
        seen: list[int] = []

        def layer(x: Tensor, shard: Tensor) -> Tensor:
            whole = getattr(runtime, gather)(shard, axis="d0", dim=0)
            watched.append(StorageWeakRef(whole.untyped_storage()))
            y = F.linear(x, whole)
            y.register_hook(lambda _: seen.append(sum(not memory.expired() for memory in watched)))
            return torch.tanh(y)

        def body(x: Tensor) -> Tensor:
            return layer(layer(x, shards[0]), shards[1])

        with runtime.keep_shards():
            y = recompute(body, x)
        watched.clear()
        y.sum().backward()
        return max(seen)

    return run_threads(rank, mesh(2))


def test_outputs_are_not_held_by_their_own_graph() -> None:
    """What is kept of an op's output must not hold the op: without backward nobody would let go of it."""
    with runtime.keep_shards():
        y = torch.tanh(torch.randn(4, requires_grad=True))
    memory = StorageWeakRef(y.untyped_storage())
    del y
    assert memory.expired()


def test_the_price_of_gathering_again() -> None:
    (axis,), compute = mesh(4), preset().compute
    once, again = (entry_seconds(entry, 1000, True, axis, compute) for entry in (TABLE["SB"], REGATHER))
    assert again.forward == once.forward
    assert again.backward == pytest.approx(once.backward + axis.links["all_gather"].seconds(1000))
    assert entry_seconds(REGATHER, 1000, False, axis, compute).backward == 0.0


def test_what_the_first_rank_is_given_unchanged_is_made_as_on_the_others() -> None:
    """Else that rank alone would gather it ahead of time, as if it were the parameter, and the others wait for ever."""

    def rank(at):
        bias = torch.ones(3, dtype=torch.float64, requires_grad=True)
        with runtime.keep_shards():
            masked = runtime.again(runtime.mask, bias, axis="d0")
            stored = isinstance(_source_of(masked), Tensor)
            whole = runtime.regather(masked, axis="d1", dim=0)
            (whole * 2).sum().backward()
        return stored, masked.detach(), bias.grad

    for at, (stored, masked, gradient) in run_threads(rank, mesh(2, 2)).items():
        assert not stored and torch.equal(masked, torch.full((3,), float(at[0] == 0), dtype=torch.float64))
        assert torch.equal(gradient, torch.full((3,), 4.0, dtype=torch.float64))
