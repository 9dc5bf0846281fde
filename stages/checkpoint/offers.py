"""Plans side by side: which is best, and in one line with numbers why each of the others lost."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from shardwright.pipeline.cost.resident import gigabytes
from shardwright.pipeline.ir.plan import Alternative, Prediction

MOST = 10  # alternatives that are kept
TELLING = 0.05  # of the difference: parts of it that are smaller are not told
PARTS = ("compute", "communication", "recompute", "optimizer", "bubble")


@dataclass(frozen=True)
class Offer:
    """A plan as it is compared with others."""

    what: str
    family: str  # the schedule of a pipeline; the best of each family is told
    kind: Hashable  # of offers of one kind only the best is told
    peak_bytes: int  # where it does not fit: the least that it needs
    prediction: Prediction | None  # None: it does not fit
    point: int | None = None  # on the frontier; None is a pipeline
    estimate: Prediction | None = None  # where a run measured this very plan: what it was priced at

    @property
    def rank(self) -> tuple[bool, float, int]:
        seconds = self.prediction.step_seconds if self.prediction else 0.0
        return self.prediction is None, seconds, self.peak_bytes


def alternatives(offers: Sequence[Offer], best: Offer, budget: int) -> tuple[Alternative, ...]:
    """The best that were not chosen, one of each kind; those that do not fit come last."""
    assert best.prediction is not None
    distinct: dict[Hashable, Offer] = {}
    for offer in sorted(offers, key=lambda one: one.rank):
        distinct.setdefault(offer.kind, offer)
    distinct.pop(best.kind)
    leaders: dict[str, Offer] = {}
    for offer in distinct.values():
        leaders.setdefault(offer.family, offer)
    others = [offer for offer in distinct.values() if offer not in leaders.values()]
    told = [*leaders.values(), *others][:MOST]
    return tuple(_told(offer, best.prediction, budget) for offer in sorted(told, key=lambda one: one.rank))


def _told(offer: Offer, best: Prediction, budget: int) -> Alternative:
    seconds = offer.prediction.step_seconds if offer.prediction else None
    return Alternative(offer.what, seconds, offer.peak_bytes, why_lost(offer, best, budget), offer.point)


def why_lost(offer: Offer, best: Prediction, budget: int) -> str:
    if offer.prediction is None:
        return f"needs {gigabytes(offer.peak_bytes - budget)} more than the budget of {gigabytes(budget)}"
    own, slower = offer.prediction, offer.prediction.step_seconds - best.step_seconds
    if slower <= 1e-9 * best.step_seconds:
        more = offer.peak_bytes - best.peak_bytes
        return f"as fast, and needs {gigabytes(more)} more" if more > 0 else "as fast, and came later"
    changes = {part: getattr(own, f"{part}_seconds") - getattr(best, f"{part}_seconds") for part in PARTS}
    telling = {part: change for part, change in changes.items() if abs(change) >= TELLING * slower}
    ordered = sorted(telling.items(), key=lambda one: -one[1])
    unit, scale = _unit(max(slower, *map(abs, telling.values())))
    shown = ", ".join(f"{change * scale:+.3g} {part}" for part, change in ordered)
    return f"{slower * scale:.3g} {unit} slower: {shown}"


def _unit(seconds: float) -> tuple[str, float]:
    """In which a time reads well."""
    return next(((unit, scale) for unit, scale in (("s", 1.0), ("ms", 1e3)) if seconds * scale >= 1), ("us", 1e6))
