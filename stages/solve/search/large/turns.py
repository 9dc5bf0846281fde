"""Which kind of turn is next: among all choices, or among few. By what each has gained lately for its work."""

from __future__ import annotations

FADING = 0.5  # what was gained before the last turn counts this much less with each
LEAST = 0.15  # share of the turns that either kind gets: what gives nothing now may give something later


class Turns:
    """Work is counted and not timed: equal searches take equal turns."""

    def __init__(self) -> None:
        self.rates = {False: 0.0, True: 0.0}  # few: gained per work, lately
        self.taken = 0

    def few(self, chance: float) -> bool:
        """`chance`: a random number below 1. The first two turns are one of each."""
        if self.taken < 2:
            return self.taken == 1
        return chance < self.share

    @property
    def share(self) -> float:
        """Of the turns among few."""
        total = sum(self.rates.values())
        return min(1 - LEAST, max(LEAST, self.rates[True] / total)) if total else 0.5

    def note(self, few: bool, gain: float, work: int) -> None:
        self.taken += 1
        for kind, rate in self.rates.items():
            self.rates[kind] = FADING * rate
        self.rates[few] += max(0.0, gain) / max(1, work)
