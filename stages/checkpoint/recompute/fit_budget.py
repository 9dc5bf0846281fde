"""The fastest schedule that the simulator, in bytes, lets into a budget.

Slots are rounded up for every tensor that is held, so a schedule takes less than its slots say. One table for somewhat
more than the budget has the schedules that do not fit by their slots, but do in bytes.
"""

from __future__ import annotations

from stages.checkpoint.recompute import rotor
from stages.checkpoint.recompute.chain import Chain, discretise
from stages.checkpoint.recompute.schedule import Schedule
from stages.checkpoint.recompute.simulate import simulate

BEYOND = 1.08  # of the budget: more than rounding loses with the default number of slots


def fastest_within(chain: Chain, room: int, slots: int) -> Schedule:
    """For a room in which the chain fits in slots (`rotor.fits`)."""
    table = rotor.solve(discretise(chain, int(room * BEYOND), slots))
    for point in reversed(rotor.curve(table)):
        found = rotor.schedule(table, point.memory)
        if simulate(chain, found.sequence).peak <= room:
            return found
    return rotor.schedule(rotor.solve(discretise(chain, room, slots)))
