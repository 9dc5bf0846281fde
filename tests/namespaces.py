"""Hosts made of network namespaces: every two are linked by a wire of their own, shaped with a token bucket."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager

OWN = "own0"  # the interface that holds a host's address


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)


def why_not() -> str:
    """Why hosts cannot be made here; empty where they can."""
    if not (shutil.which("ip") and shutil.which("tc")):
        return "`ip` and `tc` (iproute2) are needed"
    if os.geteuid() != 0:
        return "only root makes network namespaces"
    try:
        with hosts("why", 2, lambda a, b: 100):
            return ""
    except (subprocess.CalledProcessError, OSError) as error:
        return f"network namespaces with shaped links cannot be made: {getattr(error, 'stderr', '') or error}".strip()


def address(number: int) -> str:
    return f"10.213.0.{number + 1}"


@contextmanager
def hosts(name: str, count: int, megabits: Callable[[int, int], int]) -> Iterator[list[str]]:
    """Namespaces by name; `megabits` gives the rate between two of them."""
    made = [f"sw-{name}-{os.getpid()}-{number}" for number in range(count)]
    try:
        for number, space in enumerate(made):
            run("ip", "netns", "add", space)
            run("ip", "-n", space, "link", "set", "lo", "up")
            run("ip", "-n", space, "link", "add", OWN, "type", "bridge")
            run("ip", "-n", space, "addr", "add", f"{address(number)}/32", "dev", OWN)
            run("ip", "-n", space, "link", "set", OWN, "up")
        for a in range(count):
            for b in range(a + 1, count):
                _wire(made, a, b, megabits(a, b))
        yield made
    finally:
        for space in made:
            subprocess.run(["ip", "netns", "del", space], capture_output=True, timeout=120)


def _wire(made: list[str], a: int, b: int, megabits: int) -> None:
    ends = {a: f"to{b}", b: f"to{a}"}
    run("ip", "link", "add", ends[a], "netns", made[a], "type", "veth", "peer", "name", ends[b], "netns", made[b])
    for own, other in ((a, b), (b, a)):
        run("ip", "-n", made[own], "link", "set", ends[own], "up")
        via = ("dev", ends[own], "src", address(own))
        run("ip", "-n", made[own], "route", "add", f"{address(other)}/32", *via)
        shape = ("tbf", "rate", f"{megabits}mbit", "burst", "64kb", "latency", "100ms")
        run("ip", "netns", "exec", made[own], "tc", "qdisc", "add", "dev", ends[own], "root", *shape)
