"""Which message sizes of a collective are measured, without torch: from 1 KiB up to what the time allows.

Small messages tell the latency and large ones the bandwidth, so the two ends come first and what lies between them as
far as there is time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pipeline.ir.cluster import LinkCost

SMALLEST = 1024  # bytes
STEP = 4  # from one fitted size to the next; halfway lies one that is not fitted
PART = 0.5  # of the time, for the largest size


def farthest(links: Mapping[str, LinkCost], largest: float, budget: float, calls: int) -> int:
    """The largest size at which these links can be used so often in a part of the time."""
    nbytes = STEP * SMALLEST
    while STEP * nbytes <= largest and calls * sum(c.seconds(STEP * nbytes) for c in links.values()) <= PART * budget:
        nbytes *= STEP
    return nbytes


def ends_first(last: int) -> list[tuple[int, bool]]:
    """Sizes that double from the smallest to the last, and whether they are fitted: every second one is not."""
    count = (last // SMALLEST).bit_length()
    return [(SMALLEST << number, number % 2 == 0) for number in (0, count - 1, *_between(0, count - 1))]


def _between(first: int, last: int) -> Iterator[int]:
    """What lies between two numbers, the middles of the widest gaps first."""
    gaps = [(first, last)]
    for low, high in gaps:
        if high - low > 1:
            middle = (low + high) // 2
            yield middle
            gaps += [(low, middle), (middle, high)]
