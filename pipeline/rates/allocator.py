"""What torch's allocator on a GPU may give a tensor beyond its bytes.

It gives a tensor a free part of its memory whole if less than `SPARE` would be left over. Sizes that are multiples of
what it asks the card for leave nothing over. Which part a tensor gets depends on all that was freed before, so each
that may take more is counted with all of it.
"""

from __future__ import annotations

SPARE = 1 << 20  # bytes: no less is split off
ASKED = 2 << 20  # bytes: the card is asked for multiples of these


def uneven(size: int) -> bool:
    """Of a tensor among the large ones, which are those that parts are left over of."""
    return size > SPARE and size % ASKED > 0


def spare(size: int) -> int:
    return SPARE if uneven(size) else 0
