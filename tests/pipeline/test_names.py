"""Names of parameters: patterns and ranges stand for just the names that they were made of."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardwright.pipeline.ir.names import look_up, pattern, ranges

PARTS = st.sampled_from(["layers", "up", "0", "1", "2", "3", "10", "11", "07", "a-b"])
NAMES = st.lists(PARTS, min_size=1, max_size=4).map(".".join)


@given(st.dictionaries(NAMES, st.sampled_from(["R", "S"]), max_size=12), NAMES)
def test_ranges_hold_every_name_and_no_other(table: dict[str, str], other: str) -> None:
    written = ranges(table)
    assert {name: look_up(written, name) for name in table} == table
    assert look_up(written, other) == table.get(other)
    assert len(written) <= len(table)


def test_runs_of_numbers_are_one_entry() -> None:
    rows = {f"layers.{n}.up.weight": "S" if n == 5 else "R" for n in (*range(8), 9)} | {"norm": "R", "list.0": "R"}
    assert ranges(rows) == {
        "layers.0-4.up.weight": "R",
        "layers.6-7.up.weight": "R",
        "layers.9.up.weight": "R",
        "layers.5.up.weight": "S",
        "norm": "R",
        "list.0": "R",
    }


def test_inner_numbers_stay() -> None:
    rows = {f"layers.{n}.experts.{m}.up": "R" for n in range(3) for m in range(2)}
    assert ranges(rows) == {"layers.0-2.experts.0.up": "R", "layers.0-2.experts.1.up": "R"}


def test_a_pattern_stands_for_every_number() -> None:
    assert pattern("layers.3.up.weight") == "layers.*.up.weight"
    assert look_up({"layers.*.up": 1, "layers.2.up": 2}, "layers.3.up") == 1
    assert look_up({"layers.*.up": 1, "layers.2.up": 2}, "layers.2.up") == 2
    assert look_up({"layers.*.up": 1}, "layers.up") is None


def test_a_range_stands_for_its_ends_and_no_further() -> None:
    written = {"layers.2-4.up": 1}
    assert [look_up(written, f"layers.{n}.up") for n in range(1, 6)] == [None, 1, 1, 1, None]
