"""States and layouts: text, refusals, and the shapes of shards."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.pipeline.ir.layout import (
    AxisSplit,
    B,
    Layout,
    P,
    Place,
    R,
    S,
    State,
    at_places,
    replicated,
    without_gradient,
)
from tests.meshes import everywhere, own_shard, placed, spots

states = st.one_of(
    st.sampled_from([R, B, P]),
    st.builds(S, st.integers(0, 30)),
    st.builds(S, st.integers(0, 2), st.integers(1, 4), st.integers(0, 2)),
)
layouts = st.builds(Layout, st.lists(states, min_size=1, max_size=3).map(tuple))


@given(states)
def test_a_state_is_read_as_it_is_printed(state: State) -> None:
    assert State.parse(str(state)) == state
    assert State.parse(f"  {state} ") == state


@given(layouts)
def test_a_layout_is_read_as_it_is_printed(layout: Layout) -> None:
    assert Layout.parse(str(layout)) == layout
    assert Layout.from_json(layout.to_json()) == layout
    assert hash(Layout.parse(str(layout))) == hash(layout)


def test_a_hash_is_the_same_in_every_process() -> None:
    """It is kept, and sent to other processes with the layout."""
    code = "from shardwright.pipeline.ir.layout import Layout; print(hash(Layout.parse('S(0:2),R')))"
    known = {**os.environ, "PYTHONHASHSEED": "7"}
    other = subprocess.run([sys.executable, "-c", code], env=known, capture_output=True, text=True, check=True)
    assert int(other.stdout) == hash(Layout.parse("S(0:2),R"))


def test_text_of_states_and_layouts() -> None:
    assert [str(s) for s in (R, B, P, S(0), S(12))] == ["R", "B", "P", "S(0)", "S(12)"]
    assert str(Layout((S(0), R))) == "S(0),R"
    assert Layout.parse(" S(0) , R ") == Layout((S(0), R))
    assert str(replicated(2)) == "R,R"


@pytest.mark.parametrize("text", ["", "Q", "r", "S", "S()", "S(-1)", "S(0", "S0", "S(0)R", "R(0)", "S(1.0)", "S(a)"])
def test_what_is_no_state_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="use R, B"):
        State.parse(text)


@pytest.mark.parametrize(
    ("kind", "dim", "reason"),
    [("X", -1, "unknown state 'X'"), ("", -1, "unknown"), ("S", -1, "S needs a dim"), ("R", 0, "S needs a dim"),
     ("P", 3, "S needs a dim"), ("B", 1, "S needs a dim")],
)  # fmt: skip
def test_a_state_that_means_nothing_is_refused(kind: str, dim: int, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        State(kind, dim)


@pytest.mark.parametrize("text", ["S(0);R", "R B", "S(0),Q", "R,S", "R,,R", "R,", ",R", ",", "S(0:)", "S(:2)", "R'"])
def test_what_is_no_layout_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="cannot read the state"):
        Layout.parse(text)


@pytest.mark.parametrize("data", [None, 0, ["R"], {"states": ["R"]}])
def test_a_layout_in_json_is_text(data: object) -> None:
    with pytest.raises(ValueError, match="expected a layout"):
        Layout.from_json(data)


@pytest.mark.parametrize(
    ("text", "sizes", "local", "shards"),
    [
        ("R", (2,), (8, 12), 1),
        ("B", (2,), (8, 12), 1),
        ("P", (4,), (8, 12), 1),
        ("S(0)", (2,), (4, 12), 2),
        ("S(1)", (3,), (8, 4), 3),
        ("S(0),S(1)", (2, 3), (4, 4), 6),
        ("S(0),S(0)", (2, 4), (1, 12), 8),
        ("S(1),P", (4, 2), (8, 3), 4),
        ("S(0)", (1,), (8, 12), 1),
    ],
)
def test_shape_and_number_of_shards(text: str, sizes: tuple[int, ...], local: tuple[int, ...], shards: int) -> None:
    layout = Layout.parse(text)
    assert layout.local_shape((8, 12), sizes) == local
    assert layout.shards(sizes) == shards


def test_a_split_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dim 1 of \(8, 9\) does not divide by 2"):
        Layout.parse("S(1:2)").local_shape((8, 9), (2,))
    with pytest.raises(ValueError, match=r"does not divide by 4"):
        Layout.parse("S(0),S(0)").local_shape((8, 9), (4, 4))


def test_a_layout_of_another_mesh_is_refused() -> None:
    for ask in (lambda x: x.local_shape((8,), (2, 2)), lambda x: x.shards((2, 2))):
        with pytest.raises(ValueError, match="argument"):
            ask(Layout.parse("S(0)"))


@given(layouts)
def test_without_a_gradient_only_the_value_counts(layout: Layout) -> None:
    plain = without_gradient(layout)
    assert B not in plain.states
    assert all(a == b or (a, b) == (B, R) for a, b in zip(layout.states, plain.states, strict=True))
    assert without_gradient(plain) == plain


# ---- several axes on one dim


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("S(0)',S(0)", "S(0)',S(0)"),
        ("S(0),S(0)'", "S(0),S(0)"),
        ("S(0)',R", "S(0),R"),
        ("S(0)'',S(0),S(0)'", "S(0)',S(0),S(0)"),
        ("S(0)'',S(0)',S(0)", "S(0)'',S(0)',S(0)"),
        ("S(0)',S(0:2)", "S(0),S(0:2)"),
        ("S(1:2)'',S(0)',S(1:2)", "S(1:2)',S(0),S(1:2)"),
    ],
)
def test_primes_are_only_written_where_they_say_more_than_the_mesh(text: str, written: str) -> None:
    assert str(Layout.parse(text)) == written
    assert Layout.parse(text) == Layout.parse(written)


def test_the_order_of_axes_tells_layouts_apart() -> None:
    assert Layout.parse("S(0)',S(0)") != Layout.parse("S(0),S(0)")


@given(placed())
def test_a_layout_has_one_normal_form(case) -> None:
    shape, sizes, layout = case
    places = layout.places(sizes)
    assert layout.normal(sizes) == layout and layout.fits(shape, sizes)
    assert Layout.parse(str(layout)) == layout
    if all(size > 1 for size in sizes):  # a digit of size one has no place of its own
        longhand = (S(places[a].dim, places[a].outside) if a in places else s for a, s in enumerate(layout.states))
        assert Layout(tuple(longhand)).normal(sizes) == layout


def test_the_normal_form_by_hand() -> None:
    assert Layout.parse("S(0),S(0:2)").normal((2, 4)) == Layout.parse("S(0),S(0)")
    assert Layout.parse("S(0),S(0:4)").normal((2, 4)) == Layout.parse("S(0),S(0:4)")
    assert Layout.parse("S(0:4),S(0)").normal((2, 4)) == Layout.parse("S(0)',S(0)")


def indices(runs) -> list[int]:
    return [i for start, count in runs for i in range(start, start + count)]


@given(placed())
def test_the_ranks_hold_every_element_as_often_as_the_layout_says(case) -> None:
    shape, sizes, layout = case
    count = torch.zeros(shape, dtype=torch.int64)
    for at in everywhere(sizes):
        runs = layout.runs(shape, sizes, at)
        assert tuple(len(indices(dim)) for dim in runs) == layout.local_shape(shape, sizes)
        count[torch.meshgrid(*(torch.tensor(indices(dim)) for dim in runs), indexing="ij")] += 1
    copies = math.prod(n for n, state in zip(sizes, layout.states, strict=True) if state.kind != "S")
    assert (count == copies).all()
    assert math.prod(layout.local_shape(shape, sizes)) * layout.shards(sizes) == math.prod(shape)


@given(placed())
def test_a_shard_is_a_digit_of_the_index(case) -> None:
    """The dim's indices, kept where the digit that an axis takes is the rank's number on it."""
    shape, sizes, layout = case
    for at in everywhere(sizes):
        for dim, runs in enumerate(layout.runs(shape, sizes, at)):
            index = torch.arange(shape[dim])
            for axis, place in layout.places(sizes).items():
                if place.dim == dim:
                    inside = shape[dim] // (place.outside * sizes[axis])
                    index = index[index // inside % sizes[axis] == at[axis]]
            assert index.tolist() == indices(runs)
            assert all(a + n < b for (a, n), (b, _) in itertools.pairwise(runs)), "runs that touch are one"


@pytest.mark.parametrize(
    ("text", "shape", "sizes", "rank", "runs"),
    [
        ("S(0)", (8,), (2,), (1,), ((4, 4),)),
        ("S(0:3)", (12,), (2,), (1,), ((2, 2), (6, 2), (10, 2))),  # a fused qkv weight, split by heads
        ("S(0),S(0)", (8,), (2, 2), (1, 0), ((4, 2),)),
        ("S(0)',S(0)", (8,), (2, 2), (1, 0), ((2, 2),)),
        ("S(0),S(0:8)", (64,), (2, 4), (1, 3), ((38, 2), (46, 2), (54, 2), (62, 2))),  # 8 sequences of 8 tokens
        ("S(0:8),S(0)", (64,), (4, 2), (3, 1), ((38, 2), (46, 2), (54, 2), (62, 2))),
        ("R,P", (8,), (2, 2), (1, 1), ((0, 8),)),
    ],
)
def test_what_a_rank_holds(text: str, shape, sizes, rank, runs) -> None:
    assert Layout.parse(text).runs(shape, sizes, rank) == (runs,)


@pytest.mark.parametrize(
    ("text", "shape", "sizes", "fits"),
    [
        ("S(0)", (8,), (2,), True),
        ("S(0)", (9,), (2,), False),
        ("S(0)", (0,), (2,), False),
        ("S(1)", (8,), (2,), False),
        ("S(0:3)", (12,), (2,), True),
        ("S(0:3)", (8,), (2,), False),
        ("S(0:3)", (9,), (2,), False),
        ("S(0),S(0)", (8,), (2, 4), True),
        ("S(0),S(0)", (4,), (2, 4), False),
        ("S(0),S(0:3)", (24,), (2, 2), False),  # the halves of three parts are no parts
        ("S(0),S(0:6)", (24,), (2, 2), True),
        ("R,P", (), (2, 2), True),
    ],
)
def test_what_fits(text: str, shape, sizes, fits: bool) -> None:
    assert Layout.parse(text).fits(shape, sizes) is fits


def test_splits_follow_one_another() -> None:
    layout = Layout.parse("S(0:8),S(1),S(0)")
    assert layout.splits((4, 3, 2)) == (AxisSplit(2, 0, 1), AxisSplit(0, 0, 4), AxisSplit(1, 1, 1))
    assert layout.parts(0, (4, 3, 2)) == 4
    with pytest.raises(ValueError, match="cuts across"):
        Layout.parse("S(0),S(0:3)").splits((2, 2))


@given(placed(), st.data())
def test_a_local_split_is_said_of_the_whole(case, data) -> None:
    """One more axis splits what a rank holds: the nested layout says which elements those are."""
    shape, sizes, layout = case
    local = layout.local_shape(shape, sizes)
    size = data.draw(st.sampled_from([1, 2, 3]))
    spot = data.draw(st.sampled_from(spots(local, size)))
    state = S(spot.dim, spot.outside) if isinstance(spot, Place) else spot
    nested = layout.nested(state, (*sizes, size))
    if nested is None:
        assert state.kind == "S" and any(split.dim == state.dim for split in layout.splits(sizes))
        return
    assert nested.states[-1].kind == state.kind
    for at in everywhere((*sizes, size)):
        outer = layout.runs(shape, sizes, at[:-1])
        inner = Layout((state,)).runs(local, (size,), at[-1:])
        for dim, runs in enumerate(nested.runs(shape, (*sizes, size), at)):
            held = indices(outer[dim])
            assert indices(runs) == [held[i] for i in indices(inner[dim])]


def test_a_split_across_the_parts_of_a_rank_is_no_layout() -> None:
    """Of three parts of 4 a rank holds three of 2: half of those six is a part and a half."""
    assert Layout.parse("S(0:3)").nested(S(0), (2, 2)) is None
    assert Layout.parse("S(0:3)").nested(S(0, 3), (2, 2)) == Layout.parse("S(0:3),S(0:3)")
    assert Layout.parse("S(0)").nested(S(0, 4), (2, 4)) == Layout.parse("S(0),S(0:8)")
    assert Layout.parse("S(0:8)").nested(S(0), (4, 2)) == Layout.parse("S(0:8),S(0)")


# ---- finer layouts


@settings(max_examples=200, deadline=None)
@given(placed())
def test_the_digits_of_a_finer_layout(case) -> None:
    """Splitting a rank's shard at these digits gives its shard of the finer layout."""
    shape, sizes, finer = case
    finer = Layout(tuple(state if state.kind == "S" else R for state in finer.states))
    whole = torch.arange(math.prod(shape)).view(shape)
    split = [axis for axis, state in enumerate(finer.states) if state.kind == "S"]
    for count in range(len(split) + 1):
        for axes in itertools.combinations(split, count):
            places = {a: p for a, p in finer.places(sizes).items() if a not in axes}
            states = tuple(R if axis in axes else state for axis, state in enumerate(finer.states))
            coarse = at_places(states, places, sizes)
            digits = coarse.further(finer, sizes)
            assert sorted(digits) == list(axes)
            for at in everywhere(sizes):
                held = own_shard(whole, coarse, sizes, at)
                for axis, place in sorted(digits.items(), key=lambda item: -item[1].outside):
                    held = held.unflatten(place.dim, (place.outside, sizes[axis], -1))
                    held = held.select(place.dim + 1, at[axis]).flatten(place.dim, place.dim + 1)
                assert torch.equal(held, own_shard(whole, finer, sizes, at))


@pytest.mark.parametrize(
    ("coarse", "finer"),
    [("R,S(0)", "S(0),S(0)"), ("R,S(0)", "S(0),S(1)"), ("S(0),R", "R,R"), ("B,R", "S(0),R"), ("R,R", "B,S(0)")],
)
def test_what_is_not_finer(coarse: str, finer: str) -> None:
    with pytest.raises(ValueError, match=r"is not .* with more axes split"):
        Layout.parse(coarse).further(Layout.parse(finer), (2, 2))
