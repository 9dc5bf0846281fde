"""The machine as seconds and bytes: fits that recover known lines, presets by formula, and one real probe."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.pipeline.base.errors import ClusterError
from shardwright.pipeline.config import ClusterSettings as Settings
from shardwright.pipeline.config import ClusterSource, Device, Preset, Probe
from shardwright.pipeline.ir.cluster import COLLECTIVES, LATER, SEND, Cluster, Compute, Curve, LinkCost, Pace
from shardwright.pipeline.ir.codec import decode, encode
from shardwright.stages.cluster import compute_probe, link_probe
from shardwright.stages.cluster.fit import (
    fit_errors,
    fit_link,
    fit_links,
    in_a_step,
    least_squares_line,
    link_beyond,
    reduce_times,
)
from shardwright.stages.cluster.measure import OWN_LINKS, beside_arithmetic, make_cluster, measure
from shardwright.stages.cluster.meshes import FASTEST, LinkRates, group_links
from shardwright.stages.cluster.rounds import crossing_pairs, ends_first, farthest, pair_rounds
from shardwright.stages.cluster.run import figures, from_preset
from shardwright.stages.cluster.timing import Clock
from shardwright.stages.cluster.topology import fill_gaps
from tests.graphs import SILENT

SIZES = [1024 * 8**i for i in range(5)]


@pytest.mark.parametrize(("offset", "slope"), [(50e-6, 1e-9), (1e-3, 1e-12), (5e-6, 1e-8), (5000.0, 2.0)])
def test_the_line_is_recovered(offset, slope):
    found = least_squares_line([(x, offset + slope * x) for x in SIZES])
    if slope * SIZES[-1] > offset / 50:
        assert found == pytest.approx((offset, slope), rel=1e-6)
    else:  # the slope is lost in the offset: it is kept at a hundredth of the longest time
        assert found[0] == pytest.approx(offset, rel=0.02)


@pytest.mark.parametrize("seed", range(5))
def test_the_line_is_recovered_from_noise(seed):
    noise = random.Random(seed)
    points = [(x, (50e-6 + 1e-9 * x) * noise.uniform(0.95, 1.05)) for x in SIZES for _ in range(4)]
    offset, slope = least_squares_line(points)
    assert offset == pytest.approx(50e-6, rel=0.1) and slope == pytest.approx(1e-9, rel=0.1)


@pytest.mark.parametrize(
    "points",
    [
        [(1024, 1e-4)],
        [(1024, 1e-4), (1024, 2e-4)],
        [(1024, 3e-4), (8192, 2e-4), (65536, 1e-4)],  # falls
        [(1024, 1e-9), (8192, 1e-3)],
        [(1024, 1e-4), (8192, 1e-4)],
    ],
)
def test_both_are_positive_whatever_is_measured(points):
    offset, slope = least_squares_line(points)
    assert offset > 0 and slope > 0


def test_links_are_fitted_one_by_one():
    measured = {
        name: [{"bytes": float(x), "seconds": (n + 1) * (1e-5 + 1e-9 * x)} for x in SIZES]
        for n, name in enumerate(COLLECTIVES)
    }
    for n, (name, link) in enumerate(fit_links(measured).items()):
        assert name == COLLECTIVES[n]
        assert link.latency == pytest.approx((n + 1) * 1e-5) and link.bandwidth == pytest.approx(1e9 / (n + 1))
        for nbytes in (1024, 3000, 1e6, 1e9):
            assert link.seconds(nbytes) == pytest.approx((n + 1) * (1e-5 + 1e-9 * nbytes))


@given(st.lists(st.tuples(st.floats(1, 1e9), st.floats(1e-6, 10)), min_size=1, max_size=12))
def test_fitted_seconds_never_fall(points):
    link = fit_link(points)
    sizes = sorted([0.0, 1e10, *(size for size, _ in points), *(1.5 * size for size, _ in points)])
    seconds = [link.seconds(size) for size in sizes]
    assert all(b >= a * (1 - 1e-12) for a, b in pairwise(seconds)) and seconds[0] > 0


def test_messages_too_small_to_tell_the_bandwidth_leave_it_to_the_pairs():
    flat = fit_link([(1024.0, 1e-3), (4096.0, 1.1e-3), (16384.0, 1.2e-3)])
    steep = fit_link([(1024.0, 1e-3), (1e6, 1e-2)])
    slow = LinkCost(1e-3, 12.5e6)
    assert flat.seconds(1e6) < 0.02 and link_beyond(flat, slow).seconds(1e6) == pytest.approx(0.08, rel=0.03)
    assert link_beyond(flat, slow).points == flat.points
    assert link_beyond(steep, slow) == steep and link_beyond(flat, LinkCost(0.0, 1e15)) == flat


@given(
    st.lists(st.tuples(st.floats(1, 1e9), st.floats(1e-6, 10)), min_size=1, max_size=8),
    st.lists(st.tuples(st.floats(1, 1e9), st.floats(1e-6, 10)), min_size=1, max_size=8),
    st.floats(0, 1),
)
def test_in_a_step_a_collective_takes_longer_and_a_half_no_more_than_the_whole(points, others, apart):
    whole, half = fit_link(points), fit_link(others)
    found = in_a_step({"all_reduce": whole, "reduce_scatter": half, "all_gather": whole, "all_to_all": half}, apart)
    for size in {size for size, _ in (*points, *others)}:
        least = min(whole.seconds(size), half.seconds(size))
        assert found["reduce_scatter"].seconds(size) >= least * (1 - 1e-9) + apart
        assert found["reduce_scatter"].seconds(size) <= found["all_reduce"].seconds(size) * (1 + 1e-9)
    for name, link in (("all_reduce", whole), ("all_to_all", half)):
        for size, seconds in link.points:
            wanted = max(seconds, size / link.bandwidth) + apart
            assert found[name].seconds(size) == pytest.approx(wanted)


def test_a_burst_is_no_bandwidth():
    """64 KB that a shaped link lets through at once, and more that it does not."""
    burst = fit_link([(1024.0, 5e-4), (65536.0, 6e-4), (262144.0, 1e-2), (1048576.0, 4e-2)])
    link = in_a_step(dict.fromkeys(("all_reduce", "reduce_scatter", "all_gather"), burst), 0.0)["all_reduce"]
    assert link.seconds(65536) == pytest.approx(65536 / burst.bandwidth) and link.seconds(65536) > 2e-3
    assert link.seconds(1024) == 5e-4 and link.seconds(1048576) == pytest.approx(4e-2, rel=0.1)


def test_what_bytes_of_a_product_take_is_what_its_arithmetic_does_not():
    thin = [
        {"flops": 2e9, "bytes": 1e6, "forward": 3.0, "backward": 6.0},
        {"flops": 0, "bytes": 1e6, "forward": 1.0, "backward": 2.0},
    ]
    assert beside_arithmetic(thin, 1e9) == Pace(2.0 / 2e6, 4.0 / 4e6)
    assert beside_arithmetic(thin, 1e8) == Pace(0.0, 0.0) and beside_arithmetic([], 1e9) == Pace(0.0, 0.0)


@pytest.mark.parametrize(("without", "kept"), [(0.5, False), (0.95, True), (2.0, True)])
def test_onednn_is_left_where_torch_is_clearly_faster_without(monkeypatch, without, kept):
    """In the end it is as it was before: what follows asks for it."""
    usual = torch.backends.mkldnn.enabled
    monkeypatch.setattr(
        compute_probe, "_both", lambda *_: (0.5, 0.5 if torch.backends.mkldnn.enabled else without - 0.5)
    )
    assert compute_probe.onednn_is_faster(Clock("cpu", 1)) is kept
    assert torch.backends.mkldnn.enabled is usual


def test_a_dtype_that_switches_onednn_off_leaves_it_on(monkeypatch):
    def give_up(clock, sides, dtype):
        torch.backends.mkldnn.enabled = False
        return [{"flops": 1.0, "seconds": 1.0}]

    usual = torch.backends.mkldnn.enabled
    monkeypatch.setattr(compute_probe, "_products", give_up)
    assert compute_probe.half_products(Clock("cpu", 1), (8,), torch.bfloat16) == [{"flops": 1.0, "seconds": 1.0}]
    assert torch.backends.mkldnn.enabled is usual


@pytest.mark.parametrize("slow", [3.0, 50.0])
def test_times_that_others_disturbed_do_not_count(slow):
    found = reduce_times([1.0, 1.01, 0.99, 1.0, slow, 1.02, slow])
    assert found.seconds == pytest.approx(1.0, rel=0.02) and found.outliers == 2 and found.spread < 0.05


def test_errors_are_of_sizes_that_were_not_fitted():
    links = fit_links({"all_reduce": [{"bytes": 1.0, "seconds": 1.0}, {"bytes": 3.0, "seconds": 3.0}]})
    assert fit_errors(links, {"all_reduce": [{"bytes": 2.0, "seconds": 4.0}]}) == pytest.approx([0.5])


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 16])
def test_few_ranks_meet_each_other_once(count):
    rounds = pair_rounds(["h"] * count)
    pairs = [pair for part in rounds for pair in part]
    assert sorted(pairs) == [(a, b) for a in range(count) for b in range(a + 1, count)]
    assert all(len({rank for pair in part for rank in pair}) == 2 * len(part) for part in rounds)
    assert len(rounds) <= count


@given(st.lists(st.integers(1, 24), min_size=1, max_size=12))
def test_many_ranks_meet_in_few_rounds_and_all_are_connected(sizes):
    hosts = [f"h{number}" for number, size in enumerate(sizes) for _ in range(size)]
    count = len(hosts)
    rounds = pair_rounds(hosts)
    assert all(len({rank for pair in part for rank in pair}) == 2 * len(part) for part in rounds)
    assert len(rounds) <= 16 + 3 * math.ceil(math.log2(count + 1))
    known = [[None] * count for _ in range(count)]
    for a, b in (pair for part in rounds for pair in part):
        known[a][b] = known[b][a] = 10.0 if hosts[a] == hosts[b] else 1.0
    filled = fill_gaps(known)
    for a in range(count):
        for b in range(count):
            assert a == b or filled[a][b] == (10.0 if hosts[a] == hosts[b] else 1.0)


@pytest.mark.parametrize(("bandwidth", "last"), [(1e9, 1 << 20), (12.5e6, 1 << 18), (1e3, 1 << 12)])
def test_messages_reach_as_far_as_the_time_allows(bandwidth, last):
    links = {name: LinkCost(1e-4, bandwidth) for name in ("all_reduce", "all_gather")}
    assert farthest(links, largest=4e6, budget=1.0, calls=9) == last
    sizes = ends_first(last)
    assert [size for size, _ in sizes[:2]] == [1024, last] and sizes[0][1] and sizes[1][1]
    assert sorted(size for size, _ in sizes) == [1024 << n for n in range(len(sizes))]
    assert [fitted for _, fitted in sorted(sizes)] == [n % 2 == 0 for n in range(len(sizes))]


@pytest.mark.parametrize(
    ("hosts", "pairs"),
    [("aabbb", ((2, 0), (3, 1))), ("abbcc", ((1, 3), (2, 4))), ("aaaa", ()), ("abcd", ((0, 1),)), ("aab", ((0, 2),))],
)
def test_pairs_that_cross_at_once(hosts, pairs):
    assert crossing_pairs(hosts) == pairs


@pytest.mark.parametrize(("each", "uplink"), [(3.125e9, 12.5e9), (12e9, None)])
def test_an_uplink_is_what_pairs_reach_together(each, uplink):
    """Two hosts of four; in the rounds of pairs, two crossed at once on average."""
    hosts, alone = "aaaabbbb", 12.5e9
    across = alone / 2 if uplink else alone
    pairs = [
        {"a": a, "b": b, "latency": 1e-5, "bandwidth": 100e9 if hosts[a] == hosts[b] else across}
        for a in range(8) for b in range(a + 1, 8)
    ]  # fmt: skip
    crossing = {"ranks": [0, 4], "pairs": 4, "alone": alone, "each": each}
    sizes = [{"bytes": 1e6 * n, "flops": 1e9 * n, "seconds": 1e-3 * n} for n in (1, 2)]
    compute = {"matmul": sizes, "half": {}, "copy": sizes, "optimizer": sizes, "ops": {}, "processors": None}
    compute |= {"onednn": True, "flops": {}, "thin": None}
    found = {
        "ranks": [{"host": host, "device": "cpu", "memory_bytes": 1e9} for host in hosts], "pairs": pairs,
        "crossing": crossing, "axes": [], "compute": {**compute, "launch": 1e-6, "launch_backward": 1e-6},
        "seconds": 1.0, "rounds": 7, "outliers": 0, "spread": 0.0,
    }  # fmt: skip
    cluster = make_cluster(settings(source=ClusterSource.probe), found)
    assert cluster.group.bandwidth == pytest.approx(alone) and cluster.group.uplink == uplink
    by_shape = {mesh.sizes: mesh.axes for mesh in cluster.meshes}
    assert by_shape[2, 4][0].links[SEND].bandwidth == pytest.approx(uplink / 4 if uplink else alone)
    assert cluster.overlap.hidden == figures(cluster)["overlap"] == 0.0


def recorded(name: str) -> Cluster:
    """What was measured once between hosts of network namespaces: 400 megabits a second, or 100 where they are far."""
    found = json.loads((Path(__file__).parents[1] / f"recorded/{name}.json").read_text())
    return make_cluster(settings(source=ClusterSource.probe, memory_gb=None), found)


def test_four_hosts_are_found_as_they_are_linked():
    cluster = recorded("four_hosts")
    group, slow = cluster.group, 100e6 / 8
    assert len(cluster.hosts) == cluster.devices == 4
    assert group.kind == "cluster" and [member.ranks for member in group.members] == [(0, 1), (2, 3)]
    assert [member.kind for member in group.members] == ["switch", "switch"]
    assert group.bandwidth == pytest.approx(slow, rel=0.3) and group.uplink is None
    assert all(member.bandwidth == pytest.approx(4 * slow, rel=0.3) for member in group.members)
    outer, inner = next(mesh for mesh in cluster.meshes if len(mesh.axes) == 2).axes
    assert (outer.size, inner.size) == (2, 2) and outer.measured and inner.measured
    assert outer.links["all_reduce"].seconds(4e6) > 1.2 * inner.links["all_reduce"].seconds(4e6)


def test_two_devices_share_the_wire_of_their_host():
    cluster = recorded("two_hosts_of_two")
    group, slow = cluster.group, 100e6 / 8
    assert [member.ranks for member in group.members] == [(0, 1), (2, 3)] and group.kind == "cluster"
    assert group.bandwidth == pytest.approx(slow, rel=0.3) and group.uplink == pytest.approx(slow, rel=0.3)
    assert all(axis.measured for mesh in cluster.meshes for axis in mesh.axes)


class Busy(Clock):
    """Times of a wire that messages share, on a machine that others use: now and then for a while all takes longer."""

    def __init__(self, shared: bool, seed: int) -> None:
        super().__init__("cpu", 3)
        self.shared, self.draw = shared, random.Random(seed)
        self.slow, self.left = 1.0, 0.0

    def once(self, work, inner=1, together=True) -> float:
        pairs, message = work.args
        seconds = 1e-3 + len(message) / 12.5e6 * (len(pairs) if self.shared else 1)
        if self.left <= 0:  # what the others do changes every half a second or so
            self.left, self.slow = self.draw.uniform(0.2, 1.0), self.draw.choice([1.0, 1.0, 1.5, 3.0])
        self.left -= seconds * self.slow
        return seconds * self.slow * self.draw.uniform(1.0, 1.05)


@pytest.mark.parametrize("shared", [True, False])
def test_a_wire_that_is_shared_is_seen_on_a_busy_machine(monkeypatch, shared):
    """Alone and together are measured in turns: nobody is taken for slow because others were at work just then."""
    monkeypatch.setattr(link_probe, "_send_along", lambda pairs, message: None)
    monkeypatch.setattr(link_probe, "slowest", lambda times: times)
    for seed in range(200):
        found = link_probe.measure_crossing(Busy(shared, seed), ((0, 2), (1, 3)), 12.5e6, 8e6)
        assert (found["each"] <= OWN_LINKS * found["alone"]) is shared, seed


def test_an_axis_of_one_rank_costs_nothing():
    for links in (fit_links({}), group_links(1, LinkRates.alike(1.0, 1.0))):
        assert set(links) >= set(COLLECTIVES)
        assert all((link.latency, link.bandwidth) == (0.0, FASTEST) for link in links.values())


@pytest.mark.parametrize("size", [2, 3, 8])
def test_ring_links(size):
    latency, bandwidth, nbytes = 1e-5, 1e9, 1e6
    links = group_links(size, LinkRates.alike(latency, bandwidth))
    step = latency + nbytes / size / bandwidth  # one message of the ring: a submesh of the tensor
    assert set(links) == {*COLLECTIVES, SEND}
    assert links["all_reduce"].seconds(nbytes) == pytest.approx(2 * (size - 1) * step)
    assert links["all_gather"].seconds(nbytes) == pytest.approx((size - 1) * step)
    assert links["reduce_scatter"].seconds(nbytes) == pytest.approx((size - 1) * step)
    to_each = latency + nbytes / size**2 / bandwidth
    assert links["all_to_all"].seconds(nbytes) == pytest.approx((size - 1) * to_each)


@pytest.mark.parametrize("size", [2, 3, 4, 8, 64, 100])
def test_small_tensors_are_summed_in_a_tree(size):
    link = group_links(size, LinkRates.alike(1e-5, 1e9))["all_reduce"]
    tree = 2 * math.ceil(math.log2(size)) * 1e-5
    for nbytes in (0, 1e3, 1e4, 1e5, 1e6, 1e9):
        ring = 2 * (size - 1) * (1e-5 + nbytes / size / 1e9)
        assert link.seconds(nbytes) == pytest.approx(min(ring, tree + 2 * nbytes / 1e9))


def test_a_link_of_points():
    link = LinkCost(1.0, 10.0, ((10.0, 1.0), (20.0, 3.0)))
    assert [link.seconds(n) for n in (0, 10, 15, 20, 30)] == [1.0, 1.0, 2.0, 3.0, 4.0]
    with pytest.raises(ValueError, match="do not fall"):
        LinkCost(1.0, 10.0, ((10.0, 1.0), (20.0, 0.5)))
    with pytest.raises(ValueError, match="positive bandwidth"):
        LinkCost(1.0, 0.0)


def test_a_dtype_without_a_curve_is_as_its_like_or_as_float32():
    slow, fast = Curve((1.0,), (1.0,)), Curve((1.0,), (9.0,))
    compute = Compute(slow, 1.0, 0.0, 0.0, matmul_by_dtype={"bfloat16": fast})
    assert compute.matmul_of("float16") == compute.matmul_of("bfloat16") == fast
    assert compute.matmul_of("float32") == compute.matmul_of("float64") == slow


def settings(**changes) -> Settings:
    figures_ = Preset(matmul_gflops=50, memory_gbytes_per_s=10, launch_us=10, latency_us=50, link_gbytes_per_s=2)
    known = {"source": ClusterSource.preset, "device": Device.cpu, "devices": 2, "memory_gb": 4, "preset": figures_}
    return Settings(**{**known, **changes})


def test_a_preset():
    cluster = from_preset(settings(devices=4))
    assert (cluster.source, cluster.device, cluster.devices, cluster.sizes) == ("preset", "cpu", 4, (4,))
    assert cluster.memory_bytes == 4_000_000_000
    assert cluster.compute.matmul.at(1e9) == 50e9 and cluster.compute.memory_rate == 10e9
    assert cluster.compute.launch == pytest.approx(10e-6)
    assert cluster.axes[0].links == group_links(4, LinkRates.alike(50e-6, 2e9))
    assert figures(cluster)["matmul_gflops"] == 50
    assert decode(type(cluster), encode(cluster)) == cluster


def test_a_curve_is_interpolated_and_constant_outside():
    curve = Curve((10.0, 20.0), (1.0, 3.0))
    assert [curve.at(x) for x in (0, 10, 15, 20, 99)] == [1.0, 1.0, 2.0, 3.0, 3.0]


@pytest.mark.parametrize(("sizes", "rates"), [((), ()), ((1.0,), ()), ((2.0, 1.0), (1.0, 1.0)), ((1.0,), (0.0,))])
def test_a_curve_that_is_none(sizes, rates):
    with pytest.raises(ValueError, match="a curve needs"):
        Curve(sizes, rates)


@pytest.mark.flow
def test_a_real_probe_of_two_ranks(warm_python):
    probe = settings(source=ClusterSource.probe, memory_gb=None, probe=Probe(max_message_mb=0.1, repeats=3))
    cluster = measure(probe, "local_cpu", SILENT)
    assert (cluster.source, cluster.devices, cluster.sizes) == ("probe", 2, (2,))
    assert cluster.memory_bytes > 1e6
    compute = cluster.compute
    assert min(compute.matmul.rates) > 1e6 and compute.memory_rate > 1e6
    assert compute.launch > 0 and compute.launch_backward > 0
    assert set(cluster.axes[0].links) == {*COLLECTIVES, SEND, LATER} and cluster.axes[0].measured
    assert cluster.axes[0].links[LATER] == cluster.axes[0].links["all_reduce"]
    assert [len(host.ranks) for host in cluster.hosts] == [2] and cluster.group.kind == "host"
    assert cluster.measured.pairs == cluster.measured.rounds == 1 and cluster.measured.seconds > 0
    assert 0 <= cluster.overlap.hidden <= 1 and cluster.measured.fit_error > 0
    assert set(compute.matmul_by_dtype) == {"bfloat16"}
    assert all(link.latency > 0 and link.bandwidth > 0 for link in cluster.axes[0].links.values())
    told = figures(cluster)
    assert told.pop("kernels") == ("oneDNN's and torch's" if compute.onednn else "torch's own")
    assert all(value > 0 for name, value in told.items() if name != "overlap")
    assert decode(type(cluster), encode(cluster)) == cluster


@pytest.mark.flow
def test_a_probe_of_one_rank_with_memory_given(warm_python):
    probe = settings(source=ClusterSource.probe, devices=1, memory_gb=2, probe=Probe(repeats=3))
    cluster = measure(probe, "single_cpu", SILENT)
    assert cluster.memory_bytes == 2_000_000_000 and cluster.sizes == (1,)
    assert cluster.axes[0].links["all_reduce"].seconds(1e9) < 1e-5  # nothing is sent, nothing is measured


BARE = """
import sys

class Bare:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"omegaconf", "pyomo", "mlflow", "dvc", "yaml", "ruamel", "rich", "matplotlib"}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Bare())
"""


@pytest.mark.flow
def test_the_probe_by_hand_needs_torch_alone(tmp_path):
    """As docs/clusters.md has it for a machine without the rest; one device has no links to measure."""
    (tmp_path / "sitecustomize.py").write_text(BARE)
    job = {"device": "cpu", "host": "here", "max_message_bytes": 1e6, "repeats": 3, "budget_s": 2, "timeout_s": 500}
    (tmp_path / "job.json").write_text(json.dumps(job))
    command = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=1",
        "--module",
        "shardwright.stages.cluster.probe",
    ]
    root = Path(__file__).parents[2]
    known = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(root)])}
    done = subprocess.run(
        [sys.executable, *command, str(tmp_path)], cwd=root, env=known, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "result.json").read_text())
    cluster = make_cluster(settings(source=ClusterSource.probe, devices=1, memory_gb=None), found)
    assert (cluster.devices, cluster.overlap.hidden, cluster.measured.pairs) == (1, 0.0, 0)
    assert cluster.memory_bytes > 1e6 and min(cluster.compute.matmul_of("bfloat16").rates) > 0
    assert cluster.compute.flops and all(pace.forward > 0 < pace.backward for pace in cluster.compute.flops.values())


def test_a_probe_that_takes_too_long_names_its_file(warm_python):
    probe = settings(source=ClusterSource.probe, probe=Probe(timeout_s=0.2))
    with pytest.raises(ClusterError) as refusal:
        measure(probe, "local_cpu", SILENT)
    line = refusal.value.line()
    assert line.startswith("conf/cluster/local_cpu.yaml: the probe failed: it did not finish within 0.2 s; ")
    assert "probe.timeout_s" in line


def test_gpus_that_are_not_there_are_planned_for_but_not_measured(monkeypatch):
    assert from_preset(settings(device=Device.cuda)).device == "cuda"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ClusterError) as refusal:
        measure(settings(source=ClusterSource.probe, device=Device.cuda), "gpus", SILENT)
    line = refusal.value.line()
    assert line.startswith("conf/cluster/gpus.yaml: devices: got 2, and torch sees 1 GPUs on this machine; ")
    assert "source: preset" in line and "device: cpu" in line


def test_the_probe_of_what_cublas_keeps_has_a_product_with_a_bias_in_backward():
    class Biased(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            Biased.count += func is torch.ops.aten.addmm.default
            return func(*args, **(kwargs or {}))

    x = torch.randn(8, 8, requires_grad=True)
    with Biased():
        compute_probe.recomputed_products(x)
    assert Biased.count == 3  # both in forward; in backward the first alone
    assert x.grad is not None
