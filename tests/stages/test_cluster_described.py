"""Clusters that are described instead of measured: every shipped file, hosts of any sizes, the same artifact."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from shardwright.pipeline.base.stage import Inputs
from shardwright.pipeline.config import ClusterSettings as Settings
from shardwright.pipeline.config import ClusterSource, Device, Preset, Simulate, load_config
from shardwright.pipeline.cost.step import Workload
from shardwright.pipeline.cost.unsplit import card_of
from shardwright.pipeline.ir.cluster import COLLECTIVES, SEND
from shardwright.pipeline.ir.codec import decode, encode
from shardwright.pipeline.ir.layout import Layout, P, R
from shardwright.pipeline.sharding.paths import Paths
from shardwright.stages.cluster.described import describe_compute, from_preset, simulate
from shardwright.stages.cluster.meshes import LinkRates, group_links
from shardwright.stages.cluster.picture import draw_cluster
from shardwright.stages.cluster.run import run
from shardwright.stages.cluster.topology import partition_of
from shardwright.stages.command_line import main
from tests.graphs import SILENT, mlp_graph, profile_of
from tests.unpipelined import replicated

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(path.stem for path in (ROOT / "conf/cluster").glob("*.yaml"))
FIGURES = {
    "matmul_gflops": 1000, "half_gflops": 8000, "memory_gbytes_per_s": 500, "latency_us": 3, "link_gbytes_per_s": 100,
    "network_latency_us": 15, "network_gbytes_per_s": 20, "network_cards": 2,
}  # fmt: skip


def described(source: ClusterSource = ClusterSource.preset, noise: float = 0.1, **changes) -> Settings:
    figures = {**FIGURES, **changes.pop("figures", {})}
    known = {"device": Device.cuda, "devices": 4, "memory_gb": 80}
    return Settings(source=source, preset=Preset(**figures), simulate=Simulate(noise=noise), **{**known, **changes})


@pytest.fixture
def project(tmp_path):
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    return tmp_path


def choose(project: Path, name: str) -> Settings:
    path = project / "conf/config.yaml"
    path.write_text(path.read_text().replace("cluster: local_cpu", f"cluster: {name}"))
    return load_config(project).cluster


@pytest.mark.parametrize("name", FILES)
def test_every_shipped_file(project, name):
    settings = choose(project, name)
    text = (project / f"conf/cluster/{name}.yaml").read_text()
    assert f"`{name}`" in (ROOT / "docs/clusters.md").read_text()
    assert f"`cluster: {name}`" in text and f"cluster={name}`" in text
    if settings.source is ClusterSource.probe:
        return
    cluster = (simulate if settings.source is ClusterSource.simulate else from_preset)(settings)
    assert cluster.devices == sum(settings.host_sizes) == sum(len(host.ranks) for host in cluster.hosts)
    assert cluster.sizes == (cluster.devices,) and cluster.axes[0].name == "d0"
    assert decode(type(cluster), encode(cluster)) == cluster


def test_the_files_that_people_need_are_there():
    cards = {"h200", "h100", "a100_80", "a100_40", "v100", "l4", "rtx_4090"}
    boxes = {
        "p3_16xlarge",
        "dgx_a100",
        "dgx_h100",
        "dgx_a100_infiniband",
        "dgx_h100_infiniband",
        "p3_16xlarge_ethernet",
    }
    assert cards | boxes | {"p3_16xlarge_ethernet", "preset_cpu", "two_laptops", "simulated"} <= set(FILES)


def test_a_users_own_file_is_found(project):
    text = (project / "conf/cluster/dgx_a100_infiniband.yaml").read_text()
    (project / "conf/cluster/ours.yaml").write_text(text.replace("nodes: 4", "nodes: 3"))
    assert from_preset(choose(project, "ours")).devices == 24


def test_hosts_on_a_network():
    cluster = from_preset(described(nodes=3))
    group = cluster.group
    assert [host.ranks for host in cluster.hosts] == [tuple(range(n, n + 4)) for n in (0, 4, 8)]
    assert (group.kind, group.bandwidth, group.uplink) == ("cluster", 10e9, 20e9)
    assert [(m.kind, m.bandwidth, m.latency) for m in group.members] == [("host", 100e9, 3e-6)] * 3
    by_hosts = next(mesh for mesh in cluster.meshes if mesh.sizes == (3, 4))
    assert by_hosts.axes[0].links == group_links(
        3, LinkRates.alike(15e-6, 20e9 / 4)
    )  # four groups share the host's cards
    assert by_hosts.axes[1].links == group_links(4, LinkRates.alike(3e-6, 100e9))
    out = 20e9 / 4 * 11 / 8  # of each device, of whose 11 messages 8 leave the host
    assert cluster.axes[0].links == group_links(12, LinkRates(15e-6, around=20e9, one=10e9, each=out))


def test_each_candidate_mesh_prices_conversions_and_steps(project):
    """What planning loops over: an all-reduce costs on each axis what that axis says, and a whole step has a price."""
    cluster = from_preset(choose(project, "dgx_h100_infiniband"))
    candidates = cluster.mesh_candidates()
    assert {len(mesh.axes) for mesh in candidates} == {1, 2, 3} and candidates[0].axes == cluster.axes
    assert [mesh.sizes for mesh in cluster.mesh_candidates(1)] == [(32,)]
    graph = mlp_graph()
    for mesh in candidates:
        whole = Layout((R,) * len(mesh.axes))
        paths = Paths(mesh.axes, cluster.compute)
        for number, axis in enumerate(mesh.axes):
            summed = Layout(tuple(P if place == number else R for place in range(len(mesh.axes))))
            for nbytes in (4, 1 << 20, 1 << 30):
                path = paths.cheapest(summed, whole, (nbytes // 4,), nbytes, True)
                priced = paths.step(summed, whole, nbytes, True)
                assert priced.forward == axis.links["all_reduce"].seconds(nbytes) > 0
                assert path.seconds.total <= priced.total
        sharding = replicated(graph, len(mesh.axes))
        price = Workload(graph, profile_of("mlp"), cluster.on(mesh), 2.0).priced(sharding).step
        assert price.seconds > 0 and price.communication == 0


def test_a_mesh_of_other_devices_is_refused():
    cluster, larger = from_preset(described(devices=4)), from_preset(described(devices=8))
    with pytest.raises(ValueError, match=r"a mesh of \(8,\) does not hold 4 devices"):
        cluster.on(larger.meshes[0])


def test_groups_that_cross_a_host_at_once_share_its_uplink():
    """8 tensor-parallel ranks on each of 4 hosts behind one network card of 10 GB/s."""
    figures = {"network_gbytes_per_s": 10, "network_cards": 1}
    cluster = from_preset(described(devices=8, nodes=4, figures=figures))
    by_shape = {mesh.sizes: mesh.axes for mesh in cluster.mesh_candidates()}
    for sizes, crowd in (((4, 8), 8), ((8, 4), 4), ((16, 2), 2), ((32,), 1), ((4, 2, 4), 8), ((2, 16), 8)):
        assert by_shape[sizes][0].links[SEND].bandwidth == 10e9 / crowd, sizes
    assert by_shape[4, 8][0].links == group_links(4, LinkRates.alike(15e-6, 10e9 / 8))
    # all-to-all over all devices: of the 31 messages of each device 24 leave the host, through an eighth of its card
    out = by_shape[32,][0].links["all_to_all"]
    assert out.seconds(1e9) - out.latency == pytest.approx(24 * 1e9 / 32**2 / (10e9 / 8))
    # and submeshes of a pipeline: the 8 devices of a host send to the next host at once
    splits = {split.sizes: split for split in cluster.splits}
    assert splits[8, 8, 8, 8].link.bandwidth == 10e9 / 8 and splits[(1,) * 32].link.bandwidth == 10e9
    assert splits[16, 16].link.bandwidth == 10e9 / 8


def test_every_gpu_file_says_what_prices_of_kernels_need(project):
    for name in FILES:
        settings = choose(project, name)
        (project / "conf/config.yaml").write_text((ROOT / "conf/config.yaml").read_text())
        if settings.device is Device.cuda and settings.source is not ClusterSource.probe:
            card = card_of(describe_compute(settings))
            assert settings.preset.processors == card.processors, name
            assert card.rate("float16") > 1.5 * card.rate("float32"), name
    settings = choose(project, "v100")
    card = card_of(describe_compute(settings))
    assert card.rate("bfloat16") == card.rate("float32") < card.rate("float16")


def test_figures_are_reached_in_part():
    compute = from_preset(described(devices=1, figures={"efficiency": 0.5})).compute
    assert compute.matmul_of("float32").at(1e9) == 500e9 and compute.matmul_of("float16").at(1e9) == 4000e9
    assert compute.memory_rate == 250e9


def test_islands_of_a_host_and_what_is_left():
    cluster = from_preset(described(devices=5, figures={"island": 2, "cross_gbytes_per_s": 30}))
    assert [(m.kind, m.ranks) for m in cluster.group.members] == [
        ("island", (0, 1)), ("island", (2, 3)), ("device", (4,)),
    ]  # fmt: skip
    assert (cluster.group.kind, cluster.group.bandwidth, cluster.group.latency) == ("host", 30e9, 3e-6)


@pytest.mark.parametrize("per_host", [[1], [1, 1], [2, 1], [3], [6], [8, 4], [5, 3, 1]])
def test_hosts_of_any_sizes(per_host):
    cluster = from_preset(described(per_host=per_host))
    assert cluster.devices == sum(per_host) and cluster.meshes and set(cluster.axes[0].links) == {*COLLECTIVES, SEND}
    assert bool(cluster.splits) == (sum(per_host) > 1)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("per_host", [[4, 4], [8, 2, 6], [1, 3]])
def test_what_is_simulated_is_found_again(per_host, seed):
    settings = described(ClusterSource.simulate, per_host=per_host)
    settings.simulate.seed = seed
    found, exact = simulate(settings), from_preset(settings)
    assert partition_of(found.group) == partition_of(exact.group)
    assert found.group.bandwidth == pytest.approx(exact.group.bandwidth, rel=0.1)
    assert found.group.uplink == exact.group.uplink
    assert [mesh.sizes for mesh in found.meshes] and found.source == "simulate" and found.measured.spread == 0.1


def test_a_cluster_larger_than_pairs_can_be_drawn():
    cluster = simulate(described(ClusterSource.simulate, devices=8, nodes=512))
    assert cluster.devices == 4096 and len(cluster.group.members) == 512


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ("devices: 8\nnodes: 2\n", "'preset' needs preset.network_latency_us, preset.network_gbytes_per_s"),
        ("devices: 1\nper_host: [1, 1]\n", "'preset' needs preset.network_latency_us"),
        ("devices: 65536\nnodes: 2\n", "devices: got 131072 devices, expected at most 65536"),
        ("devices: 0\n", "devices: got 0, expected an integer from 1 to 65536"),
        ("devices: eight\n", "devices: got 'eight', expected an integer"),
        ("devices: 8\nhosts: 2\n", "hosts: unknown key; "),
        ("devices: 8\nper_host: []\n", "per_host: got nothing in it, expected a non-empty list of integers"),
        ("devices: 8\nper_host: [8, 0]\n", "per_host[1]: got 0, expected an integer from 1 to 65536"),
        ("devices: 8\nper_host: [4, 2]\n", "devices: got 8, and the largest host of `per_host` has 4; write 4"),
        ("devices: 8\nnodes: 3\nper_host: [8, 4]\n", "nodes: got 3, and `per_host` lists 2 hosts; leave it out"),
    ],
)
def test_a_file_that_is_wrong_is_refused_in_one_line(project, monkeypatch, capsys, changes, told):
    text = (project / "conf/cluster/p3_16xlarge.yaml").read_text()
    refuse(project, monkeypatch, capsys, text.replace("devices: 8\n", changes), told)


@pytest.mark.parametrize("figure", ["link_gbytes_per_s: -300", "link_gbytes_per_s: 0", "link_gbytes_per_s: fast"])
def test_a_bandwidth_that_is_none_is_refused_in_one_line(project, monkeypatch, capsys, figure):
    text = (project / "conf/cluster/dgx_a100.yaml").read_text().replace("link_gbytes_per_s: 300", figure)
    value = figure.split(": ")[1].replace("fast", "'fast'")
    told = f"preset.link_gbytes_per_s: got {value}, expected a number > 0 and <= 1000000 or null"
    refuse(project, monkeypatch, capsys, text, told)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("nodes: 2\n", "nodes: 'probe' counts the hosts that join; name them in `probe.hosts`"),
        ("per_host: [2, 2]\n", "per_host: 'probe' counts the hosts that join"),
        ("probe:\n  hosts: [a, b, a]\n", "probe.hosts: names a twice; name each host once"),
    ],
)
def test_hosts_that_are_measured_are_named_once(project, monkeypatch, capsys, more, told):
    refuse(project, monkeypatch, capsys, f"source: probe\ndevice: cpu\ndevices: 2\n{more}", told)


def refuse(project: Path, monkeypatch, capsys, text: str, told: str) -> None:
    (project / "conf/cluster/ours.yaml").write_text(text)
    path = project / "conf/config.yaml"
    path.write_text(path.read_text().replace("cluster: local_cpu", "cluster: ours"))
    monkeypatch.chdir(project)
    assert main(["cluster"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: conf/cluster/ours.yaml") and told in line
    assert not (project / "runs").exists()


@pytest.mark.parametrize(
    ("changes"),
    [{"devices": 1}, {"devices": 3}, {"per_host": [8, 4, 1]}, {"devices": 8, "nodes": 64}],
    ids=["one", "three", "uneven", "many"],
)
def test_a_picture_of_any_cluster(changes):
    png = draw_cluster(from_preset(described(**changes)), "ours")
    assert png.startswith(b"\x89PNG\r\n\x1a\n") and png[12:16] == b"IHDR" and len(png) > 5000
    assert draw_cluster(from_preset(described(**changes)), "ours") == png  # the same for the same cluster


def test_the_stage_writes_its_picture(project):
    choose(project, "simulated")
    made = run(Inputs(project, {}, SILENT, None), load_config(project))
    assert made.files == (project / "runs/cluster/topology.png",) and not made.files[0].exists()
    made.draw()
    assert made.files[0].stat().st_size > 5000
    assert (made.figures["devices"], made.figures["hosts"], made.figures["groups"]) == (20, 3, 14)
