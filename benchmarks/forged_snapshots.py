"""A small snapshot on the disk, and what somebody could change in it and make all digests right again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shardwright.stages.train.snapshots import manifest
from shardwright.stages.train.snapshots.boxes import (
    BoxedTensor,
    SavedTensor,
    Table,
    check_boxes,
    file_of,
    read_table,
    write_boxes,
    write_table,
)

FILES = ("rank-00000.safetensors", "rank-00001.safetensors", "tensors.json")
Body = dict[str, Any]


def about(step: int, **numbers: Any) -> Body:
    """The numbers beside the tensors of a snapshot, as the loop writes them."""
    series = {"losses": [1.0] * step, "seconds": [0.5] * step, "evaluated": [], "peak_bytes": [], "profiled_at": -1}
    here = {"program": "p", "ranks": 2, "engine": "planned"}
    return {"step": step, "samples": 8 * step, "settings": {}, **here, **series, **numbers}


def snapshot(folder: Path, step: int) -> Path:
    """Of two tensors, each in the file of a rank."""
    temporary = manifest.unfinished(folder, step)
    temporary.mkdir(parents=True)
    wholes = {"weights/a": torch.arange(12.0).view(3, 4), "optimizer/a/step": torch.tensor(4)}
    table = {}
    for rank, (name, tensor) in enumerate(wholes.items()):
        whole = BoxedTensor.whole(name, tensor)
        place = whole.boxes[0].place
        write_boxes(temporary / file_of(rank), [whole], {name: {place}})
        table[name] = SavedTensor(tensor.dtype, whole.shape, {place: file_of(rank)})
    write_table(temporary, table)
    manifest.write_manifest(
        temporary, about(step), {path.name: manifest.digest_of(path) for path in temporary.iterdir()}
    )
    return manifest.publish(temporary, step)


def read_all(path: Path) -> Table:
    """As a run does that goes on from it, up to its numbers."""
    found = manifest.read_manifest(path)
    manifest.check_files(path, found)
    table = read_table(path, found["files"])
    check_boxes(path, table)
    return table


def forge(path: Path, file: str, change: Callable[[Body], Any]) -> None:
    """Changes a JSON file of a snapshot, in place or for what is given back; digests are right again."""
    found = json.loads((path / file).read_text())
    changed = change(found)
    text = changed if isinstance(changed, str) else json.dumps(found if changed is None else changed)
    if file == manifest.MANIFEST:
        manifest.write_manifest(path, found["about"], found["files"])
    else:
        (path / file).write_text(text)
        sign(path, file)


def sign(path: Path, file: str) -> None:
    """Makes the digest of a file right, and that of the manifest."""
    body = json.loads((path / manifest.MANIFEST).read_text())
    if file in body["files"]:
        body["files"][file] = manifest.digest_of(path / file)
    manifest.write_manifest(path, body["about"], body["files"])


def _number(name: str, value: Any) -> Callable[[Body], None]:
    return lambda found: found["about"].__setitem__(name, value)


def _file(name: str, **changes: Any) -> Callable[[Body], None]:
    """One more file, or another size or digest of one."""
    return lambda found: found["files"].update({name: {**found["files"][FILES[0]], **changes}})


def _row(**changes: Any) -> Callable[[Body], None]:
    return lambda found: found["weights/a"].update(changes)


def _in(file: Any) -> Callable[[Body], None]:
    return _row(boxes=[[file, [0, 0], [3, 4]]])


def _boxes(*places: Any) -> Callable[[Body], None]:
    return _row(boxes=[[FILES[0], *place] for place in places])


_MANIFEST = {
    "a file above the folder": (_file("../x.json"), "'../x.json' is no file"),
    "a file of the system": (_file("/etc/x.json"), "'/etc/x.json' is no file"),
    "a hidden file": (_file(".metadata"), "'.metadata' is no file"),
    "a name of two lines": (_file("a\n.json"), "is no file"),
    "no files": (lambda found: found.update(files={}), "it lists no files"),
    "a negative size": (_file(FILES[0], bytes=-1), "has no size"),
    "a size that is true": (_file(FILES[0], bytes=True), "has no size"),
    "a digest of one letter": (_file(FILES[0], sha256="x"), "has no digest"),
    "no numbers": (lambda found: found.update(about=None), "no numbers of the run"),
    "another step": (_number("step", 5), "it is of step 5"),
    "a step that is a text": (_number("step", "4"), "it is of step '4'"),
    "too few losses": (_number("losses", [1.0] * 3), "its losses"),
    "losses that are texts": (_number("losses", ["x"] * 4), "its losses"),
    "a loss that is no number": (_number("losses", [float("nan")] * 4), "its losses"),
    "a loss of a thousand digits": (_number("losses", [10**999] * 4), "its losses"),
    "no time": (_number("seconds", [0.0]), "its seconds"),
    "no times": (_number("seconds", []), "its seconds"),
    "evaluations of one number": (_number("evaluated", [[1]]), "its evaluated"),
    "more memory than there is": (_number("peak_bytes", [10**400]), "its peak_bytes"),
    "settings that are a list": (_number("settings", []), "its settings"),
    "ranks that are true": (_number("ranks", True), "its ranks"),
    "an engine that is a number": (_number("engine", 3), "its engine"),
}
_TENSORS = {
    "a table that is a list": (lambda found: [], "no table"),
    "brackets without end": (lambda found: "[" * 100_000 + "]" * 100_000, "is not whole"),
    "a row that is a list": (lambda found: {**found, "x": []}, "'x' is no row"),
    "a row with a key more": (_row(load="os.system"), "is no row"),
    "a type that is code": (_row(dtype="os.system"), "has the type 'os.system'"),
    "a type that is no text": (_row(dtype=["float32"]), "has the type"),
    "a negative size of a dim": (_row(shape=[3, -4]), "no number of elements"),
    "a size with a point": (_row(shape=[3, 4.0]), "no number of elements"),
    "a shape of 2^122": (_row(shape=[2**61, 2**61]), "larger than any tensor"),
    "65 dims": (_row(shape=[1] * 65), "larger than any tensor"),
    "tensors above the folder": (_in("../rank-00000.safetensors"), "is no file of the snapshot"),
    "tensors of the system": (_in("/dev/zero"), "is no file of the snapshot"),
    "tensors in the manifest": (_in("manifest.json"), "is no file of the snapshot"),
    "tensors in a file that is not listed": (_in("rank-00009.safetensors"), "is no file of the snapshot"),
    "tensors in no file": (_in(None), "is no file of the snapshot"),
    "a box without sizes": (_boxes([[0, 0]]), "no file, offsets and sizes"),
    "a box of one dim": (_boxes([[0], [3]]), "a box of other dims"),
    "a box beyond the end": (_boxes([[1, 0], [3, 4]]), "a box outside of it"),
    "a box of no elements": (_boxes([[0, 0], [0, 4]]), "a box outside of it"),
    "the same box twice": (_boxes([[0, 0], [3, 4]], [[0, 0], [3, 4]]), "overlap or leave something out"),
    "boxes that overlap": (_boxes([[0, 0], [2, 4]], [[1, 0], [2, 4]]), "overlap or leave something out"),
    "boxes that overlap and leave as much out": (_boxes([[0, 0], [2, 4]], [[1, 0], [1, 4]]), "overlap or leave"),
    "no boxes": (_boxes(), "overlap or leave something out"),
    "boxes that the file has not": (_boxes([[0, 0], [2, 4]], [[2, 0], [1, 4]]), "has not the 'weights/a@0,0'"),
    "another type than the file's": (_row(dtype="float64"), "has not the 'weights/a@0,0'"),
    "another type of the same size": (_row(dtype="uint32"), "has not the 'weights/a@0,0'"),
}


FORGERIES = {  # what is forged -> the file, the change, and what is told of it
    what: (file, change, told)
    for file, changes in ((manifest.MANIFEST, _MANIFEST), (manifest.TENSORS, _TENSORS))
    for what, (change, told) in changes.items()
}
