"""Published runs that prices of given layouts are held against."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.pipeline.config.schema import OverlapMode
from shardwright.pipeline.cost.pipelines.play import Load, simulate
from shardwright.pipeline.cost.pipelines.schedules import Pipeline, orders
from shardwright.pipeline.layouts.sizes import KNOWN, AttentionKernel, ParallelLayout, Transformer
from shardwright.pipeline.layouts.work import RecomputeMode


@dataclass(frozen=True)
class MegatronRow:
    name: str
    model: Transformer
    layout: ParallelLayout
    teraflops: float  # of one GPU, with what is computed again


def _row(name: str, devices: int, tp: int, pp: int, micro_batch: int, teraflops: float) -> MegatronRow:
    model = KNOWN[name]
    layout = ParallelLayout(
        devices // (tp * pp),
        tp,
        pp,
        micro_batch,
        model.batch,
        recompute=RecomputeMode.full,
        attention=AttentionKernel.plain,
        overlap=OverlapMode.none,
    )
    return MegatronRow(name, model, layout, teraflops)


# Narayanan et al., SC21: A100 80GB, sequences of 2048, vocabulary 51,200, full recompute, 1F1B, 8 HDR cards in a node.
MEGATRON = (
    _row("gpt_1.7b", 32, 1, 1, 16, 137),
    _row("gpt_7.5b", 128, 4, 1, 16, 142),
    _row("gpt_39b", 512, 8, 2, 4, 138),
    _row("gpt_145b", 1536, 8, 8, 2, 148),
)


@dataclass(frozen=True)
class Speed:
    """A pipeline of `devices` stages with whole blocks in each; one device runs without it."""

    devices: int
    micro_batches: int
    blocks: int
    speed: float  # published, in any unit


# Huang et al., GPipe, table 2: Transformer-48 on TPUs, throughput relative to two stages with one micro-batch.
GPIPE = tuple(
    Speed(devices, micro_batches, 48, speed)
    for micro_batches, speeds in ((1, (1.0, 1.07, 1.3)), (4, (1.7, 3.2, 4.8)), (32, (1.8, 3.4, 6.3)))
    for devices, speed in zip((2, 4, 8), speeds, strict=True)
)
# Kim et al., torchgpipe: ResNet-101, samples a second; micro-batches as in its own benchmark; blocks taken as equal.
TORCHGPIPE = (
    Speed(1, 1, 33, 95.9),
    Speed(2, 1667, 33, 135.5),
    Speed(4, 256, 33, 266.0),
    Speed(8, 150, 33, 411.7),
)


def predicted_speed(row: Speed) -> float:
    """Steps a second where a forward pass of all blocks takes a second and a backward pass two."""
    if row.devices == 1:
        return 1 / 3
    least, more = divmod(row.blocks, row.devices)
    part = [(least + (stage < more)) / row.blocks / row.micro_batches for stage in range(row.devices)]
    loads = [Load(forward=own, backward=3 * own, early=own) for own in part]  # what runs again does not wait
    return 1 / simulate(orders(Pipeline.GPIPE, row.devices, row.micro_batches), loads).seconds


def relative_errors(table: Sequence[Speed]) -> list[float]:
    """Of predicted speeds in the unit of the table, which is the median of published over predicted."""
    ratios = [predicted_speed(row) / row.speed for row in table]
    return [ratio / statistics.median(ratios) - 1 for ratio in ratios]
