"""The priced links of a sharded program as a chain of numbers for Rotor; the last link is the loss."""

from __future__ import annotations

from itertools import pairwise

from pipeline.cost.step import StepPrice
from stages.checkpoint.chain import Chain


def linearize(price: StepPrice) -> Chain | None:
    """None where the whole model is one link: there is nothing to choose."""
    links, loss = price.links[:-1], price.links[-1]
    if not links:
        return None
    return Chain(
        a=(*(link.input_bytes for link in links), loss.input_bytes),
        saved=tuple(max(link.memory.kept, after.input_bytes) for link, after in pairwise(price.links)),
        f=tuple(link.forward for link in links),
        b=(*(link.backward for link in links), loss.forward + loss.backward),
        ft=tuple(max(0, link.memory.forward_peak - link.memory.kept) for link in links),
        bt=(*(link.memory.backward_extra for link in links), _loss_temporaries(price)),
        ft_none=tuple(max(0, link.memory.dropped_peak - link.memory.output) for link in links),
    )


def _loss_temporaries(price: StepPrice) -> int:
    """The loss runs forwards and backwards at once: what it keeps is alive beside the gradient it makes."""
    loss = price.links[-1]
    return max(loss.memory.forward_peak, loss.memory.kept + loss.input_bytes + loss.memory.backward_extra)
