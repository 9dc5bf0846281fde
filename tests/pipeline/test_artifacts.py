"""Artifacts: whole and unchanged, or refused with one line that says what to run."""

from __future__ import annotations

import json
import os
import pickletools
import random
from dataclasses import replace
from pathlib import Path

import pytest

from shardwright.pipeline.base import artifacts
from shardwright.pipeline.base.artifacts import KINDS, Artifact, check_together, load, make, save
from shardwright.pipeline.base.errors import ArtifactError
from shardwright.pipeline.base.files import write_atomic
from shardwright.pipeline.base.soundness import check_sound
from shardwright.pipeline.ir.report import Report
from tests.graphs import frontier_of, mlp_graph, plan_of, preset, profile_of

CONFIG = {"model": "m0", "cluster": "c0", "solve": "s0"}
SOURCE = '"""A program."""\n\nimport torch\n\n# shardwright is not only in the header\nX = "ü"\n'


def report() -> Report:
    return Report(2, 2, (1.5, 1.25), (0.1, 0.2), 0.2, 40.0, (10, 11), 0.1, 12, False)


def family(config: dict[str, str] | None = None, devices: int = 2) -> dict[str, Artifact]:
    """One artifact of every kind, made from one another as the stages do."""
    settings = config or CONFIG
    made: dict[str, Artifact] = {}

    def add(kind, body, parents, keys):
        made[kind] = make(kind, body, [made[p] for p in parents], {k: settings[k] for k in keys})

    add("graph", mlp_graph(), (), ("model",))
    add("profile", profile_of("mlp"), ("graph",), ())
    add("cluster", preset(devices), (), ("cluster",))
    add("frontier", frontier_of("mlp", devices), ("graph", "profile", "cluster"), ("solve",))
    add("plan", plan_of("mlp", devices), ("graph", "profile", "cluster", "frontier"), ())
    add("module", SOURCE, ("graph", "plan"), ())
    add("report", report(), ("graph", "plan", "module"), ())
    return made


@pytest.fixture(scope="module")
def made() -> dict[str, Artifact]:
    return family()


def one_line(refusal) -> str:
    line = refusal.value.line()
    assert "\n" not in line
    assert refusal.value.remedy and "dvc repro" in line
    assert refusal.value.where and refusal.value.where.startswith("runs/")
    return line


def refused(kind: str, root: Path, **options) -> str:
    with pytest.raises(ArtifactError) as refusal:
        load(kind, root, **options)
    return one_line(refusal)


def edit(root: Path, kind: str, change) -> None:
    path = KINDS[kind].path(root)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip(made, tmp_path, kind):
    path = save(made[kind], tmp_path)
    assert path == KINDS[kind].path(tmp_path)
    assert load(kind, tmp_path) == made[kind]
    before = path.read_bytes()
    save(load(kind, tmp_path), tmp_path)
    assert path.read_bytes() == before


def test_inputs_are_those_above_not_just_the_nearest(made):
    assert set(made["report"].inputs) == set(KINDS) - {"report"}
    assert set(made["report"].config) == set(CONFIG)
    assert made["report"].inputs["graph"] == made["graph"].digest
    assert made["graph"].inputs == {}


def test_no_pickles(made, tmp_path):
    for artifact in made.values():
        path = save(artifact, tmp_path)
        text = path.read_bytes().decode()
        json.loads(text) if path.suffix == ".json" else compile(text, str(path), "exec")
        with pytest.raises((ValueError, IndexError)):
            list(pickletools.genops(path.read_bytes()))
    assert list(tmp_path.glob("**/*.pkl")) == list(tmp_path.glob("**/*.pt")) == []


def test_nothing_of_the_project_reads_pickles():
    root = Path(__file__).parents[2]
    for path in (*root.glob("pipeline/**/*.py"), *root.glob("stages/**/*.py")):
        text = path.read_text()
        for name in ("import pickle", "torch.save(", "import shelve", "import marshal"):
            assert name not in text, path
        for call in text.split("torch.load(")[1:]:  # a user's weights, tensors alone
            assert "weights_only=True" in call.partition("\n")[0], path


# ----------------------------------------------------------------------------------------------------- writing


def test_a_failing_write_leaves_the_old_file(made, tmp_path, monkeypatch):
    path = save(made["cluster"], tmp_path)
    before = path.read_bytes()

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    for name in ("fsync", "replace"):
        with monkeypatch.context() as patched:
            patched.setattr(os, name, fail)
            with pytest.raises(OSError, match="No space left"):
                save(make("cluster", preset(3), [], {}), tmp_path)
        assert path.read_bytes() == before
        assert os.listdir(path.parent) == [path.name]
    assert load("cluster", tmp_path) == made["cluster"]


def test_a_body_that_cannot_be_encoded_leaves_the_old_file(made, tmp_path):
    path = save(made["report"], tmp_path)
    before = path.read_bytes()
    with pytest.raises(ValueError):
        make("report", replace(report(), losses=(float("nan"),)), [], {})
    with pytest.raises(ValueError):
        save(replace(made["report"], body=replace(report(), losses=(float("inf"),))), tmp_path)
    assert path.read_bytes() == before


def test_a_killed_writer_leaves_nothing_that_is_read(made, tmp_path):
    path = KINDS["cluster"].path(tmp_path)
    path.parent.mkdir(parents=True)
    (path.parent / ".cluster.json.1234.tmp").write_text("{")
    assert "no such file" in refused("cluster", tmp_path)
    save(made["cluster"], tmp_path)
    assert os.listdir(path.parent) == ["cluster.json"]


def test_write_atomic_makes_folders_and_replaces(tmp_path):
    path = tmp_path / "a" / "b" / "c.json"
    write_atomic(path, b"1")
    write_atomic(path, b"22")
    assert path.read_bytes() == b"22"


# ----------------------------------------------------------------------------------------------------- damage


@pytest.mark.parametrize("kind", ["cluster", "report", "plan"])
def test_truncated_json_is_refused_at_every_length(made, tmp_path, kind):
    path = save(made[kind], tmp_path)
    whole = path.read_bytes()
    lengths = {*range(0, len(whole) - 1, max(1, len(whole) // 150)), len(whole) - 2}
    for length in lengths:  # the last byte is the newline at the end
        path.write_bytes(whole[:length])
        refused(kind, tmp_path)


def test_a_truncated_module_is_refused_at_every_length(made, tmp_path):
    path = save(made["module"], tmp_path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        refused("module", tmp_path)


@pytest.mark.parametrize("kind", ["cluster", "report", "module", "plan"])
def test_flipped_bytes_are_refused_or_mean_the_same(made, tmp_path, kind):
    """White space between JSON tokens may change without changing the artifact; nothing else may."""
    path = save(made[kind], tmp_path)
    whole = path.read_bytes()
    chosen = random.Random(7)
    refusals = 0
    for _ in range(250):
        place, bit = chosen.randrange(len(whole)), 1 << chosen.randrange(8)
        path.write_bytes(whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :])
        try:
            found = load(kind, tmp_path)
        except ArtifactError as error:
            assert "\n" not in error.line() and "dvc repro" in error.line()
            refusals += 1
        else:
            assert found == made[kind], (place, bit)
    assert refusals > 200


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["body"].update(devices=3),
        lambda d: d["body"].pop("devices"),
        lambda d: d["body"].update(devices="2"),
        lambda d: d["body"].update(memory_bytes=float("nan")),
        lambda d: d["body"].update(memory_bytes=float("inf")),
        lambda d: d["body"]["compute"].update(launch=None),
        lambda d: d.update(body=None),
        lambda d: d.update(body=[]),
        lambda d: d.update(digest="sha256:" + "0" * 64),
        lambda d: d.update(digest=""),
        lambda d: d.update(digest=None),
        lambda d: d.update(inputs={"graph": "sha256:" + "0" * 64}),
        lambda d: d.update(inputs=[]),
        lambda d: d.update(inputs={"graph": float("nan")}),
        lambda d: d.update(config={"cluster": "other"}),
        lambda d: d.update(config=None),
        lambda d: d.pop("inputs"),
        lambda d: d.pop("body"),
        lambda d: d.pop("digest"),
        lambda d: d.update(kind="graph"),
        lambda d: d.update(kind=7),
    ],
)
def test_edited_json_is_refused(made, tmp_path, change):
    save(made["cluster"], tmp_path)
    edit(tmp_path, "cluster", change)
    refused("cluster", tmp_path)


def sealed(data) -> None:
    """Gives edited content a digest that fits: what is left to catch it is its meaning."""
    data["digest"] = artifacts._digest(data, data["body"])


@pytest.mark.parametrize(
    ("kind", "change", "told"),
    [
        ("cluster", lambda b: b.update(devices="2"), "body.devices: expected int, found '2'"),
        ("cluster", lambda b: b.update(devices=True), "body.devices"),
        ("cluster", lambda b: b["compute"].update(matmul={"sizes": [2, 1], "rates": [1, 1]}), "ascending sizes"),
        ("cluster", lambda b: b.update(colour="red"), "unknown ['colour']"),
        ("cluster", lambda b: b["axes"].append(7), "body.axes[1]: expected an object"),
        ("graph", lambda b: b["ops"].reverse(), "read after written"),
        ("graph", lambda b: b.update(output="nothing"), "is never written"),
        ("graph", lambda b: b["chain"][0]["ops"].pop(), "chain covers the ops"),
        ("graph", lambda b: b["chain"][0]["common"].append("nothing"), "common values are carried"),
        ("graph", lambda b: b["chain"][0].pop("common"), "missing ['common']"),
        ("graph", lambda b: b["values"].pop(), "writes"),
        ("graph", lambda b: b["values"][0]["type"].update(dtype="float3"), "unsupported dtype"),
        ("graph", lambda b: b.pop("values"), "values"),
        ("graph", lambda b: b.update(values=7), "values"),
        ("graph", lambda b: b.update(prologue=3), "prologue"),
        ("graph", lambda b: b.update(output=[]), "output"),
        ("graph", lambda b: b["ops"][0]["args"]["positional"].append({"what": 1}), "unknown argument"),
        ("graph", lambda b: b["ops"][0].update(args=3), "args"),
        ("graph", lambda b: b["ops"][0]["args"]["positional"].append({}), "args"),
        ("graph", lambda b: b["ops"][0]["args"]["positional"].append({"ref": 7}), "unknown argument"),
        (
            "plan",
            lambda b: b["partitions"][0]["sharding"]["storage"].update({"out.weight": "Q"}),
            "cannot read the state 'Q'",
        ),
        ("plan", lambda b: b.update(partitions="all"), "body.partitions: expected a list"),
    ],
)
def test_a_body_of_another_form_is_refused_though_its_digest_fits(made, tmp_path, kind, change, told):
    save(made[kind], tmp_path)

    def both(data):
        change(data["body"])
        sealed(data)

    edit(tmp_path, kind, both)
    assert told in refused(kind, tmp_path)


def test_another_version_is_told_as_such(made, tmp_path):
    save(made["cluster"], tmp_path)
    known = KINDS["cluster"].version
    edit(tmp_path, "cluster", lambda d: d.update(version=known + 1))
    assert f"it has version {known + 1}, this program reads version {known}" in refused("cluster", tmp_path)
    edit(tmp_path, "cluster", lambda d: d.update(version=True))
    refused("cluster", tmp_path)


def test_the_artifact_of_another_kind_in_its_place(made, tmp_path):
    source = save(made["cluster"], tmp_path)
    target = KINDS["report"].path(tmp_path)
    target.parent.mkdir(parents=True)
    target.write_bytes(source.read_bytes())
    assert "it is not a report artifact" in refused("report", tmp_path)
    module = KINDS["module"].path(tmp_path)
    module.parent.mkdir(parents=True)
    module.write_bytes(source.read_bytes())
    assert "it is not a module artifact" in refused("module", tmp_path)


@pytest.mark.parametrize("kind", ["cluster", "module"])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        b"\xff\xfe\x00",
        b"null",
        b"7",
        b"[]",
        b'"text"',
        b"{}",
        b'{"body": 1}',
        b"[" * 100_000,
        b"\x80\x04N.",
        b"1" * 5000,
        b'{"body": 1' + b"0" * 5000 + b"}",
    ],
    ids=lambda content: repr(content[:12]),
)
def test_something_else_in_its_place(tmp_path, kind, content):
    path = KINDS[kind].path(tmp_path)
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    refused(kind, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_missing_and_folder(tmp_path, kind):
    line = refused(kind, tmp_path)
    assert "there is no such file" in line and f"dvc repro {KINDS[kind].stage}" in line
    KINDS[kind].path(tmp_path).mkdir(parents=True)
    assert "cannot be read" in refused(kind, tmp_path)


# --------------------------------------------------------------------------------------------------- belonging


def test_artifacts_of_one_run_belong_together(made):
    check_together(made.values(), CONFIG)
    check_together([], {})
    check_together(made.values(), {})  # settings that are not asked about do not matter


def test_artifacts_of_two_runs_are_refused(made):
    other = family(devices=3)
    assert other["graph"] == made["graph"]  # made from the same settings: the same artifact
    for mixed in (
        [made["graph"], made["profile"], made["cluster"], other["frontier"]],
        [made["plan"], other["module"]],
        [made["plan"], other["cluster"]],
        [other["graph"], other["plan"], made["module"]],
    ):
        with pytest.raises(ArtifactError, match="belong to different runs") as refusal:
            check_together(mixed, CONFIG)
        one_line(refusal)
    check_together([made["graph"], other["profile"], other["cluster"], other["frontier"]], CONFIG)


@pytest.mark.parametrize("key", CONFIG)
def test_other_settings_than_conf_has_now_are_refused(made, key):
    with pytest.raises(ArtifactError, match=f"other settings of {key} than conf/ has now") as refusal:
        check_together(made.values(), {**CONFIG, key: "other"})
    one_line(refusal)


# ------------------------------------------------------------------------------------------------- module.py


def test_an_edited_module_is_refused_unless_accepted(made, tmp_path):
    path = save(made["module"], tmp_path)
    path.write_text(path.read_text().replace("import torch", "import torch  # mine"))
    line = refused("module", tmp_path)
    assert "accept_edited_module: true" in line and "edited or damaged" in line
    found = load("module", tmp_path, accept_edited=True)
    assert found.edited and "# mine" in found.body
    assert found.digest != made["module"].digest and found.inputs == made["module"].inputs
    check_together([made["graph"], made["plan"], found], CONFIG)
    with pytest.raises(ArtifactError, match="belong to different runs"):
        check_together([family(devices=3)["plan"], found], CONFIG)


def test_only_source_may_be_edited(made, tmp_path):
    save(made["plan"], tmp_path)
    edit(tmp_path, "plan", lambda d: d["body"].update(device="cuda"))
    refused("plan", tmp_path, accept_edited=True)


def test_an_untouched_module_is_not_called_edited(made, tmp_path):
    save(made["module"], tmp_path)
    assert not load("module", tmp_path, accept_edited=True).edited


@pytest.mark.parametrize("line", range(3))
def test_a_missing_header_line_of_a_module(made, tmp_path, line):
    path = save(made["module"], tmp_path)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:line] + lines[line + 1 :]))
    for accept in (False, True):
        assert "it is not a module artifact" in refused("module", tmp_path, accept_edited=accept)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("version 4", "version 1"),
        ("version 4", "version one"),
        ("version 4", "version"),
        ("version 4", "version 1 2 3 4"),
        ("kind module", "kind plan"),
        ("input plan", "input"),
        ("kind module", "inputs 7"),
        ("kind module", "config 7"),
    ],
)
def test_a_damaged_header_of_a_module(made, tmp_path, old, new):
    path = save(made["module"], tmp_path)
    path.write_text(path.read_text().replace(f"# shardwright {old}", f"# shardwright {new}", 1))
    if old.startswith("input"):
        refused("module", tmp_path)
    else:
        for accept in (False, True):
            refused("module", tmp_path, accept_edited=accept)


def test_other_inputs_in_the_header_of_a_module(made, tmp_path):
    path = save(made["module"], tmp_path)
    path.write_text(path.read_text().replace(made["plan"].digest, "sha256:" + "0" * 64))
    refused("module", tmp_path)
    found = load("module", tmp_path, accept_edited=True)
    with pytest.raises(ArtifactError, match="belong to different runs"):
        check_together([made["plan"], found], CONFIG)


def test_a_module_with_other_line_ends_is_edited(made, tmp_path):
    path = save(made["module"], tmp_path)
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    refused("module", tmp_path)


# ----------------------------------------------------------------------------------------------------- forged


def forged(root: Path, made: dict[str, Artifact], kind: str, change) -> Artifact:
    """Edited, with a digest that fits."""
    save(made[kind], root)
    path = KINDS[kind].path(root)
    data = json.loads(path.read_text())
    change(data["body"])
    data["digest"] = artifacts._digest(data, data["body"])
    path.write_text(json.dumps(data))
    return load(kind, root)


def put(*path):
    """An edit: the last word is what is put there."""

    def change(body):
        for key in path[:-2]:
            body = body[key]
        body[path[-2]] = path[-1]

    return change


KERNELS = dict(prologue=[], links=[], chain=[], optimizer=[], joined=[], runs=[], slices=1)
FORGED = {
    "graph": [
        put("values", 0, "type", "shape", [-1]),
        put("values", 0, "type", "shape", [10**30]),
        put("values", 0, "name", "\ud800"),
        put("ops", 0, "target", "os.system"),
        put("ops", 0, "target", 'aten.mm.default(x); print("")'),
        put("ops", 0, "args", "named", {"a, b": 1}),
        put("ops", 0, "args", "positional", [{"torch": ["dtype", "os"]}]),
        put("ops", 0, "args", "positional", [{"float": "1"}]),
        lambda body: body["values"].append(body["values"][0]),
        lambda body: body.update(more=1),
        put("ops", 0, "args", "positional", json.loads("[" * 900 + "]" * 900)),
        put("ops", 0, "args", "positional", json.loads("[" * 67 + "]" * 67)),  # whatever Python's own limit is
    ],
    "profile": [
        put("kernels", {**KERNELS, "chain": [99]}),
        put("kernels", {**KERNELS, "slices": 0}),
        put("types", {"x": "no_dtype"}),
        put("parameters", -1),
    ],
    "cluster": [
        put("devices", 0),
        put("devices", 10**12),
        put("device", 'cpu"); print("'),
        put("axes", 0, "name", 'x"'),
        put("axes", 0, "links", {}),
        put("axes", 0, "size", 0),
        put("order", [0, 0]),
        put("compute", "memory_rate", 0.0),
        put("compute", "launch", -1.0),
    ],
    "frontier": [
        put("points", 0, "mesh", 7),
        put("micro_batches", 0),
        put("micro_batches", 10**9),
        put("meshes", []),
        lambda body: body.update(points=[], shards=[]),
        put("points", 0, "sharding", "storage", {"x": "R,R"}),
    ],
    "plan": [
        put("partitions", []),
        put("device", "tpu"),
        put("schedule", "1f1b"),
        put("chunks", 0),
        put("micro_batches", -3),
        put("slices", [0]),
        put("partitions", 0, "first", 1),
        put("partitions", 0, "regions", []),
        put("partitions", 0, "regions", 0, "recompute", True),
        put("partitions", 0, "axes", [['d0"""', 2]]),
        put("partitions", 0, "axes", [["d0", 0]]),
        put("timeline", {"events": [], "totals": [{"partition": 3, "what": "x", "seconds": 1.0}], "note": ""}),
    ],
    "report": [put("losses", []), put("steps", 7), put("peak_bytes", []), put("ranks", 0)],
}


@pytest.mark.parametrize(("kind", "number"), [(kind, n) for kind, cases in FORGED.items() for n in range(len(cases))])
def test_a_digest_that_fits_does_not_make_a_body_valid(made, tmp_path, kind, number):
    with pytest.raises(ArtifactError) as refusal:
        forged(tmp_path, made, kind, FORGED[kind][number])
    assert f"runs/{KINDS[kind].stage}/{KINDS[kind].file}" in one_line(refusal)


BESIDE = {
    "profile": [lambda body: body["ops"].popitem(), lambda body: body["storage"].popitem()],
    "frontier": [
        lambda body: body["points"][0]["sharding"]["strategies"].popitem(),
        lambda body: body["points"][0]["sharding"]["storage"].update(x="R"),
    ],
    "plan": [
        put("released", ["nothing"]),
        put("slices", [3]),
        put("partitions", 0, "axes", [["d0", 4]]),
        put("partitions", 0, "sharding", "storage", {}),
        lambda body: body["partitions"][0]["sharding"]["inputs"].update(x="P"),
        lambda body: body["partitions"][0].update(
            last=99, regions=[{**body["partitions"][0]["regions"][0], "last": 99}]
        ),
    ],
}


@pytest.mark.parametrize(("kind", "number"), [(kind, n) for kind, cases in BESIDE.items() for n in range(len(cases))])
def test_artifacts_name_what_the_others_have(made, tmp_path, kind, number):
    """`InvalidSharding` was no error of ours."""
    body = forged(tmp_path, made, kind, BESIDE[kind][number])
    with pytest.raises(ArtifactError) as refusal:
        check_sound({**made, kind: body})
    assert one_line(refusal).startswith(f"runs/{KINDS[kind].stage}/{KINDS[kind].file}: its body is not valid")


def test_artifacts_of_one_run_are_sound(made):
    check_sound(made)


def test_an_op_whose_tensors_its_rule_does_not_know(made, tmp_path):
    body = forged(tmp_path, made, "graph", lambda body: body["values"][-1]["type"].update(shape=[3, 1, 4]))
    with pytest.raises(ArtifactError, match=" is no aten"):
        check_sound({"graph": body})


@pytest.mark.parametrize(
    "target", ["no.such.op", "load_library.__call__.__call__", "import_module.__call__.__call__", "aten.add.__class__"]
)
def test_an_op_that_torch_does_not_have(made, tmp_path, target):
    """`torch.ops` also has functions that import modules and load libraries."""
    body = forged(tmp_path, made, "graph", put("ops", 0, "target", target))
    with pytest.raises(ArtifactError, match="torch has no such op"):
        check_sound({"graph": body})


@pytest.mark.parametrize("target", ["aten.from_file.default", "aten.save.default"])
def test_an_op_that_writes_files(made, tmp_path, target):
    body = forged(tmp_path, made, "graph", put("ops", 0, "target", target))
    with pytest.raises(ArtifactError, match="does not compute with tensors alone"):
        check_sound({"graph": body})
