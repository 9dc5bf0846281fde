"""The report page of a deep plan in headless Chromium: bytes, and seconds until it is drawn and answers a click.

    python -m benchmarks.report_page [--layers 96] [--times 5] [--out page.html]

The plan is made without solving (data parallel, every link computed again); `facts_seconds` is what the page costs a
stage once the artifacts are read. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from shardwright.stages.report.facts import facts_of
from shardwright.stages.report.page import page_of
from tests.browser import find_browser, opened
from tests.report_sources import deep_sources, measured_of

MOST_BYTES, MOST_SECONDS = 5_000_000, 3.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=96)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--out", type=Path, help="where the page is kept")
    arguments = parser.parse_args()
    if find_browser() is None:
        raise SystemExit("no Chromium: `apt-get install chromium`")
    sources = deep_sources(arguments.layers)
    sources = replace(sources, report=measured_of(sources.plan))
    started = time.perf_counter()
    text = page_of(facts_of(sources))
    facts_seconds = time.perf_counter() - started
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.out or Path(folder) / "page.html"
        path.write_text(text, encoding="utf-8")
        size, seconds = path.stat().st_size, until_interactive(path, arguments.times)
    worst = max(seconds)
    print(f"{arguments.layers} layers: {size / 1e3:.0f} kB, interactive after {statistics.median(seconds):.2f} s "
          f"(worst {worst:.2f} s of {len(seconds)})")  # fmt: skip
    found = {
        "layers": arguments.layers,
        "bytes": size,
        "interactive_seconds": round(statistics.median(seconds), 3),
        "worst_seconds": round(worst, 3),
        "facts_seconds": round(facts_seconds, 3),
        "met": size < MOST_BYTES and worst < MOST_SECONDS,
    }
    print(json.dumps(found))


def until_interactive(path: Path, times: int) -> list[float]:
    """Each in a browser of its own: from the order to open the page until a click on it has done something."""
    found = []
    for _ in range(times):
        with opened() as page:
            started = time.perf_counter()
            page.open(path)
            before = page.ask("document.getElementById('theme').innerText")
            page.click("#theme")
            assert page.ask("document.getElementById('theme').innerText") != before
            found.append(time.perf_counter() - started)
            assert not page.problems, page.problems
    return found


if __name__ == "__main__":
    main()
