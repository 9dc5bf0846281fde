"""The table of what was predicted beside what was measured."""

from __future__ import annotations

from shardwright.pipeline.ir.plan import Prediction
from shardwright.pipeline.ir.report import Breakdown, Report
from shardwright.stages.summary import _compared
from shardwright.stages.train.measured import compare


def report(prediction: Prediction, breakdown: Breakdown | None) -> Report:
    rows = compare(prediction, 0.020, 8, [(1_000_000, 2_000_000), (3_000_000, 2_000_000)], breakdown)
    return Report(1, 2, (1.0,), (0.02,), 0.02, 400.0, (1_000_000, 3_000_000), 0.01, 1, False, compared=rows)


def test_rows_have_their_ratio_and_parts_are_shown_where_there_are_any() -> None:
    prediction = Prediction(0.010, 2_000_000, 0, 0.006, 0.0, 0.0, 0.0)
    rows = _compared(report(prediction, Breakdown(0.040, 0.024, 0.012, 0.001, 0.004)))
    assert rows == [
        ("step", "10.00 ms", "20.00 ms", "2.00"),
        ("- compute", "6.00 ms", "12.00 ms", "2.00"),
        ("- communication", "0.00 ms", "6.00 ms", "-"),
        ("- other", "0.00 ms", "2.00 ms", "-"),
        ("throughput", "800.0 samples/s", "400.0 samples/s", "0.50"),
        ("peak memory", "2.0 MB a rank", "3.0 MB a rank", "1.50"),
    ]
    piped = Prediction(0.010, 2_000_000, 0, 0.006, 0.0, 0.0, 0.0, bubble_seconds=0.004)
    rows = _compared(report(piped, Breakdown(0.040, 0.024, 0.004, 0.001, 0.004, 0.008)))
    assert rows[3] == ("- bubble", "4.00 ms", "4.00 ms", "1.00")
    assert [row[0] for row in _compared(report(prediction, None))] == ["step", "throughput", "peak memory"]
