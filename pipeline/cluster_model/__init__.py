"""What a training step of a large transformer costs on a large cluster, by formula: no graph, no solver.

sizes.py      a transformer: parameters, FLOPs, the models that have names
layout.py     how it is laid out: dp, tp, pp, micro-batch, schedule, recompute, ZeRO
machine.py    what the devices and links of a described cluster reach
layer.py      seconds of one layer and of the two ends of the model
memory.py     bytes of one device
step.py       the step: stages, bubble, communication, optimizer
search.py     the fastest layout that fits
words.py      what is asked for, as words of the command line
calibrate.py  the shares that a card reaches, from measured steps
"""

from __future__ import annotations

from pipeline.cluster_model.layout import Attention, Layout, LayoutError, Recompute, Schedule
from pipeline.cluster_model.machine import Machine, Reached, machine_of
from pipeline.cluster_model.search import Wanted, search
from pipeline.cluster_model.sizes import KNOWN, Transformer
from pipeline.cluster_model.step import Price, price

__all__ = [
    "KNOWN",
    "Attention",
    "Layout",
    "LayoutError",
    "Machine",
    "Price",
    "Reached",
    "Recompute",
    "Schedule",
    "Transformer",
    "Wanted",
    "machine_of",
    "price",
    "search",
]
