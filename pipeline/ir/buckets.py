"""Which gradients are summed by one collective: the runtime cuts its buckets so, and they are priced so."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

FIRST_BYTES = 1e6  # the first of each kind is small, so that its message leaves early
BUCKET_BYTES = 25e6


def bucket_members(
    members: Sequence[tuple[Hashable, float]], first: float = FIRST_BYTES, most: float = BUCKET_BYTES
) -> list[list[int]]:
    """Numbers of the members of each bucket. A member is what all of a bucket have in common, and its bytes.

    They follow the parameters in reverse, as backward finishes them; the order is that of the last gradient in each.
    """
    buckets: list[list[int]] = []
    filling: dict[Hashable, tuple[int, float]] = {}  # what is in common -> the bucket that takes members, its bytes
    for number in reversed(range(len(members))):
        key, nbytes = members[number]
        place, size = filling.get(key, (-1, 0.0))
        if place < 0 or size + nbytes > (most if place > 0 else first):
            place, size = len(buckets), 0.0
            buckets.append([])
        buckets[place].append(number)
        filling[key] = place, size + nbytes
    return sorted(buckets, key=lambda bucket: -bucket[-1])
