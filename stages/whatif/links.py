"""A cluster whose links are slower (or faster): its figures are scaled, wherever in it they stand."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

from pipeline.ir.cluster import Group, LinkCost

T = TypeVar("T")


@dataclass(frozen=True)
class Slower:
    bandwidth: float = 1.0  # times that of now
    latency: float = 1.0

    def __str__(self) -> str:
        parts = {"bandwidth": self.bandwidth, "latency": self.latency}
        return ", ".join(f"{factor:g} of the {name}" for name, factor in parts.items() if factor != 1) or "as they are"


def slower(value: T, factor: Slower) -> T:
    """Every link inside a cluster, a mesh or a part of them."""
    return _scaled(value, factor)  # type: ignore[no-any-return]


def _scaled(value: Any, factor: Slower) -> Any:
    if isinstance(value, LinkCost):
        return _link(value, factor)
    if isinstance(value, Group):
        value = replace(
            value,
            bandwidth=value.bandwidth * factor.bandwidth,
            latency=value.latency * factor.latency,
            uplink=None if value.uplink is None else value.uplink * factor.bandwidth,
        )
    if is_dataclass(value) and not isinstance(value, type):
        inner = {field.name: _scaled(getattr(value, field.name), factor) for field in fields(value)}
        return replace(value, **inner)
    if isinstance(value, tuple):
        return tuple(_scaled(item, factor) for item in value)
    if isinstance(value, dict):
        return {name: _scaled(item, factor) for name, item in value.items()}
    return value


def _link(link: LinkCost, factor: Slower) -> LinkCost:
    """Of measured points the first counts as latency, what comes on top of it as bytes on the way."""
    start = link.points[0][1] if link.points else 0.0
    points = tuple(
        (nbytes, start * factor.latency + (seconds - start) / factor.bandwidth) for nbytes, seconds in link.points
    )
    return LinkCost(link.latency * factor.latency, link.bandwidth * factor.bandwidth, points)
