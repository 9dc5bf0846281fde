"""How a transformer is laid out on devices: rank = ((stage * dp) + replica) * tp + slice, slices nearest each other."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pipeline.base.errors import ShardwrightError
from pipeline.cluster_model.sizes import Transformer


class LayoutError(ShardwrightError):
    """Sizes that do not divide."""


class Recompute(StrEnum):
    none = "none"
    selective = "selective"  # the attention's square tensors
    full = "full"  # every layer, from its input


class Schedule(StrEnum):
    one_f_one_b = "1f1b"
    interleaved = "interleaved"
    gpipe = "gpipe"


class Attention(StrEnum):
    flash = "flash"  # one kernel that keeps no square tensor
    plain = "plain"  # products and softmax one after another


@dataclass(frozen=True)
class Layout:
    dp: int
    tp: int
    pp: int
    micro_batch: int
    batch: int  # sequences of a step, all devices together
    schedule: Schedule = Schedule.one_f_one_b
    chunks: int = 1  # pieces of the model on each stage, interleaved
    recompute: Recompute = Recompute.none
    zero: int = 0  # 1: optimizer state split over dp, 2: gradients too, 3: parameters too
    sequence_parallel: bool = False
    attention: Attention = Attention.flash

    @property
    def devices(self) -> int:
        return self.dp * self.tp * self.pp

    @property
    def micro_batches(self) -> int:
        return self.batch // (self.dp * self.micro_batch)

    @property
    def sliced(self) -> int:
        """Into how many parts tp cuts what it does not multiply: with sequence parallelism as many as the rest."""
        return self.tp if self.sequence_parallel else 1


def why_not(model: Transformer, layout: Layout) -> str | None:
    """What does not divide; None where all does."""
    rules = (
        (
            (layout.chunks > 1) != (layout.schedule is Schedule.interleaved),
            f"schedule={layout.schedule.value} with chunks={layout.chunks}: interleaved has 2 or more, others 1",
        ),
        (model.hidden % model.heads, f"hidden={model.hidden} is not a multiple of heads={model.heads}"),
        (model.heads % layout.tp, f"tp={layout.tp} does not divide heads={model.heads}"),
        (model.feed % layout.tp, f"tp={layout.tp} does not divide the {model.feed} columns of the feed-forward"),
        (model.layers < layout.pp, f"pp={layout.pp} is more than layers={model.layers}"),
        (
            layout.batch % (layout.dp * layout.micro_batch),
            f"dp={layout.dp} times micro_batch={layout.micro_batch} does not divide batch={layout.batch}",
        ),
        (layout.sequence_parallel and model.sequence % layout.tp, f"tp={layout.tp} does not divide the sequence"),
        (
            layout.chunks > 1 and model.layers % (layout.pp * layout.chunks),
            f"pp={layout.pp} times chunks={layout.chunks} does not divide layers={model.layers}",
        ),
        (
            layout.chunks > 1 and layout.micro_batches % layout.pp,
            f"interleaved needs micro-batches ({layout.micro_batches}) that are a multiple of pp={layout.pp}",
        ),
        (layout.chunks > 1 and layout.pp == 1, "interleaved needs pp of at least 2"),
    )
    return next((what for wrong, what in rules if wrong), None)


def check(model: Transformer, layout: Layout) -> None:
    what = why_not(model, layout)
    if what is not None:
        raise LayoutError(what, remedy="choose sizes that divide")


def stage_layers(model: Transformer, layout: Layout) -> tuple[int, ...]:
    """Layers of each stage; where they do not divide, the stages in the middle have one more."""
    least, more = divmod(model.layers, layout.pp)
    first = (layout.pp - more + 1) // 2
    return tuple(least + (1 if first <= stage < first + more else 0) for stage in range(layout.pp))
