"""Which pairs are measured at once, and which message sizes of a collective; without torch.

Up to ALL_PAIRS ranks every pair is measured, in n - 1 rounds (a tournament). Of more ranks, those at distances 1, 2,
4... are, in at most three rounds for each distance: O(log n). The rest follows from the network being nested
(`topology.fill_gaps`), because ranks of a host are numbered one after another; inside each host that is small enough
every pair is measured all the same, in all hosts at once, since islands may lie anywhere in it.

Sizes go from 1 KiB up to what the time allows. Small messages tell the latency and large ones the bandwidth, so the two
ends come first and what lies between them as far as there is time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest

from shardwright.pipeline.ir.cluster import LinkCost

ALL_PAIRS = 16
SMALLEST = 1024  # bytes
STEP = 4  # from one fitted size to the next; halfway lies one that is not fitted
PART = 0.5  # of the time, for the largest size

Round = tuple[tuple[int, int], ...]


def pair_rounds(hosts: Sequence[str]) -> list[Round]:
    """Rounds of disjoint pairs (lower rank first) for ranks on these hosts."""
    count = len(hosts)
    if count <= ALL_PAIRS:
        return tournament(list(range(count)))
    local = [tournament(ranks) for ranks in _inside(hosts) if len(ranks) <= ALL_PAIRS]
    together = [tuple(pair for part in parts for pair in part) for parts in zip_longest(*local, fillvalue=())]
    seen = {pair for part in together for pair in part}
    distances = (1 << power for power in range((count // 2).bit_length()))
    every = (part for distance in distances for part in _at_distance(count, distance))
    far = (tuple(pair for pair in part if pair not in seen) for part in every)
    return [*together, *(part for part in far if part)]


def crossing_pairs(hosts: Sequence[str]) -> Round:
    """As many disjoint pairs as there are from one host to another, the two with most devices."""
    first, *others = sorted(_inside(hosts), key=len, reverse=True)
    return tuple(zip(first, others[0], strict=False)) if others else ()


def _inside(hosts: Sequence[str]) -> list[list[int]]:
    """The ranks of each host."""
    return [[rank for rank, host in enumerate(hosts) if host == name] for name in dict.fromkeys(hosts)]


def tournament(ranks: list[int]) -> list[Round]:
    """Everyone meets everyone: one stays, the others go round the table."""
    table: list[int | None] = [*ranks, *([None] if len(ranks) % 2 else [])]
    found = []
    for _ in range(len(table) - 1):
        half = len(table) // 2
        sides = zip(table[:half], reversed(table[half:]), strict=True)
        found.append(tuple((min(a, b), max(a, b)) for a, b in sides if a is not None and b is not None))
        table = [table[0], table[-1], *table[1:-1]]
    return found


def _at_distance(count: int, distance: int) -> list[Round]:
    """The pairs (i, i + distance), around the end: no rank twice in a round."""
    rounds: list[dict[int, int]] = []
    for rank in range(count):
        a, b = sorted((rank, (rank + distance) % count))
        free = next((taken for taken in rounds if a not in taken and b not in taken), None)
        if free is None:
            rounds.append(free := {})
        free[a], free[b] = b, a
    return [tuple(sorted((a, b) for a, b in taken.items() if a < b)) for taken in rounds]


def farthest(links: Mapping[str, LinkCost], largest: float, budget: float, calls: int) -> int:
    """The largest size at which these links can be used so often in a part of the time."""
    nbytes = STEP * SMALLEST
    while STEP * nbytes <= largest and calls * sum(c.seconds(STEP * nbytes) for c in links.values()) <= PART * budget:
        nbytes *= STEP
    return nbytes


def ends_first(last: int) -> list[tuple[int, bool]]:
    """Sizes that double from the smallest to the last, and whether they are fitted: every second one is not."""
    count = (last // SMALLEST).bit_length()
    numbers, gaps = [0, count - 1], [(0, count - 1)]
    for low, high in gaps:  # the middles of the widest gaps first
        if high - low > 1:
            middle = (low + high) // 2
            numbers.append(middle)
            gaps += [(low, middle), (middle, high)]
    return [(SMALLEST << number, number % 2 == 0) for number in numbers]
