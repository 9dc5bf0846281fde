"""States and layouts: text, refusals, and the shapes of pieces."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.ir.layout import B, Layout, P, R, S, State, replicated, without_gradient

states = st.one_of(st.sampled_from([R, B, P]), st.builds(S, st.integers(0, 30)))
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


@pytest.mark.parametrize("text", ["S(0);R", "R B", "S(0),Q", "R,S"])
def test_what_is_no_layout_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="cannot read the state"):
        Layout.parse(text)


@pytest.mark.parametrize("data", [None, 0, ["R"], {"states": ["R"]}])
def test_a_layout_in_json_is_text(data: object) -> None:
    with pytest.raises(ValueError, match="expected a layout"):
        Layout.from_json(data)


@pytest.mark.parametrize(
    ("text", "sizes", "local", "pieces"),
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
def test_shape_and_number_of_pieces(text: str, sizes: tuple[int, ...], local: tuple[int, ...], pieces: int) -> None:
    layout = Layout.parse(text)
    assert layout.local_shape((8, 12), sizes) == local
    assert layout.pieces(sizes) == pieces


@given(layouts, st.lists(st.integers(1, 4), min_size=3, max_size=3))
def test_pieces_make_up_the_whole(layout: Layout, sizes: list[int]) -> None:
    mesh = tuple(sizes[: len(layout.states)])
    shape = (math.prod(mesh),) * 31
    local = layout.local_shape(shape, mesh)
    assert math.prod(local) * layout.pieces(mesh) == math.prod(shape)


def test_a_split_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dim 1 of \(8, 9\) does not divide by 2"):
        Layout.parse("S(1)").local_shape((8, 9), (2,))
    with pytest.raises(ValueError, match=r"does not divide by 4"):
        Layout.parse("S(0),S(0)").local_shape((8, 9), (4, 4))


def test_a_layout_of_another_mesh_is_refused() -> None:
    for ask in (lambda x: x.local_shape((8,), (2, 2)), lambda x: x.pieces((2, 2))):
        with pytest.raises(ValueError, match="argument"):
            ask(Layout.parse("S(0)"))


@given(layouts)
def test_without_a_gradient_only_the_value_counts(layout: Layout) -> None:
    plain = without_gradient(layout)
    assert B not in plain.states
    assert all(a == b or (a, b) == (B, R) for a, b in zip(layout.states, plain.states, strict=True))
    assert without_gradient(plain) == plain
