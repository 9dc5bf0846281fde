"""The topology as nested boxes and the fitted curves as lines: a picture, as PNG."""

from __future__ import annotations

from io import BytesIO
from typing import Any

from shardwright.pipeline.ir.cluster import COLLECTIVES, SEND, Cluster, Group

LEAST_LABELLED, WIDE = 0.06, 0.25  # shares of the picture's width
PLACES = (0.01, 0.1, 0.455, 0.81), (0.53, 0.1, 0.46, 0.81)  # to find them takes longer than to draw
MOST_BOXES = 64  # devices drawn one by one; larger groups are drawn as one box
COLORS = {"cluster": "#f3f4f6", "switch": "#e2e8f0", "host": "#cfe0f1", "island": "#d5ead9", "device": "#3b6ea5"}
LINES = {
    "all_reduce": "#b5544d", "all_gather": "#3b6ea5", "reduce_scatter": "#5c9e6f", "all_to_all": "#c97b3d",
    SEND: "#6b7280",
}  # fmt: skip
SMALLEST, LARGEST, STEPS = 1024.0, 2**30, 61


def draw_cluster(cluster: Cluster, title: str) -> bytes:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5))
    left, right = (figure.add_axes(place) for place in PLACES)
    group = cluster.group or Group("device", (0,), 1.0, 0.0)
    names = {host.ranks: host.name for host in cluster.hosts}
    scale = min(1.0, MOST_BOXES / len(group.ranks))
    width = _box(left, group, 0.0, 0, scale, len(group.ranks), names)
    left.set_xlim(-0.1, width + 0.1)
    left.set_ylim(-0.2, _depth(group) + 0.6)
    left.axis("off")
    left.set_title("who is linked how", fontsize=9)
    _curves(right, cluster)
    figure.suptitle(f"{title}: {cluster.devices} devices, {cluster.source}", fontsize=10)
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=110, metadata={"Software": None})
    return buffer.getvalue()


def _depth(group: Group) -> int:
    return 1 + max((_depth(member) for member in group.members), default=0 if len(group.ranks) == 1 else 1)


def _box(
    axes: Any, group: Group, left: float, level: int, scale: float, total: int, names: dict[tuple[int, ...], str]
) -> float:
    """Draws a group with what is in it; the right edge."""
    from matplotlib.patches import Rectangle

    bottom, top = 0.05 * level, _depth(group)
    width = len(group.ranks) * scale
    inset = 0.04 * scale
    box = (left + inset, bottom), width - 2 * inset, top - 0.1
    axes.add_patch(Rectangle(*box, facecolor=COLORS.get(group.kind, "#ffffff"), edgecolor="#6b7280", linewidth=0.6))
    drawn = width / (scale * total)  # share of the picture
    if len(group.ranks) > 1 and drawn > LEAST_LABELLED:
        fast = group.bandwidth >= 1e8
        rate = f"{group.bandwidth / 1e9:.3g} GB/s" if fast else f"{group.bandwidth / 1e6:.3g} MB/s"
        words = (names.get(group.ranks, group.kind), rate, f"{group.latency * 1e6:.3g} us")
        label = ("  " if drawn > WIDE else "\n").join(words)
        size = 8 if drawn > WIDE else 6
        axes.text(left + width / 2, bottom + top - 0.15, label, ha="center", va="top", fontsize=size)
    elif len(group.ranks) == 1 and scale == 1.0:
        axes.text(left + width / 2, bottom + 0.3, str(group.ranks[0]), ha="center", fontsize=7, color="white")
    members = group.members
    if not members and len(group.ranks) > 1 and scale == 1.0:
        members = tuple(Group("device", (rank,), 1.0, 0.0) for rank in group.ranks)
    at = left
    for member in members:
        at = _box(axes, member, at, level + 1, scale, total, names)
    return left + width


def _curves(axes: Any, cluster: Cluster) -> None:
    axis = cluster.axes[0]
    if axis.size == 1:
        axes.text(0.5, 0.5, "one device sends nothing", ha="center", transform=axes.transAxes)
        axes.axis("off")
        return
    ratio = (LARGEST / SMALLEST) ** (1 / (STEPS - 1))
    sizes = [SMALLEST * ratio**n for n in range(STEPS)]
    for name in (*COLLECTIVES, SEND):
        link = axis.links.get(name)
        if link is None:
            continue
        axes.plot(sizes, [link.seconds(size) for size in sizes], color=LINES[name], linewidth=1, label=name)
        known = link.points if axis.measured else ()
        axes.plot([x for x, _ in known], [y for _, y in known], ".", color=LINES[name], markersize=4)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.minorticks_off()  # a third of the time
    axes.set_xlabel("bytes of the unsplit tensor")
    axes.set_ylabel("seconds")
    how = "measured" if axis.measured else "by formula"
    error = f", off by {cluster.measured.fit_error:.0%} on other sizes" if axis.measured and cluster.measured else ""
    axes.set_title(f"all {axis.size} devices, {how}{error}", fontsize=9)
    axes.legend(loc="upper left", fontsize=7)  # more bytes take more seconds: nothing is there
