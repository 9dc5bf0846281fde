"""The plan as a value: what it says, and the one file that holds all of it."""

from __future__ import annotations

import argparse
import html
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from torch import nn

from shardwright.api.given import ArgumentError, Batch
from shardwright.pipeline.base import artifacts
from shardwright.pipeline.base.artifacts import KINDS, Artifact
from shardwright.pipeline.base.errors import ArtifactError
from shardwright.pipeline.base.files import write_atomic
from shardwright.pipeline.base.log import QUIET, get_log
from shardwright.pipeline.base.measured_runs import with_correction
from shardwright.pipeline.base.soundness import check_sound
from shardwright.pipeline.config import Config
from shardwright.pipeline.ir.cluster import Cluster
from shardwright.pipeline.ir.codec import CodecError, decode, encode
from shardwright.pipeline.ir.graph import OpGraph
from shardwright.pipeline.ir.plan import Frontier, Plan, Prediction
from shardwright.pipeline.ir.profile import Profile
from shardwright.pipeline.user.own_ops import know_own_ops
from shardwright.stages.checkpoint.choose import evaluate
from shardwright.stages.checkpoint.describe import axes_in_words, describe
from shardwright.stages.report.facts import facts_of
from shardwright.stages.report.page import page_of
from shardwright.stages.report.priced import Sources
from shardwright.stages.solve.explain.priced_run import KINDS as PRICED
from shardwright.stages.solve.explain.priced_run import planned
from shardwright.stages.solve.explain.run import explained, text_of

MADE = ("graph", "profile", "cluster", "frontier", "plan", "module")
FORMAT, VERSION = "shardwright plan", 1
PARTS = ("compute", "communication", "recompute", "optimizer", "bubble", "host")


class Told(str):
    """Text that a notebook and a prompt show as it is."""

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True, repr=False, eq=False)
class ModelPlan:
    """How a model is trained on a cluster: the layouts, the recompute schedule and the program, with what they cost.

    `model` and `batch` are those that it was planned with; a plan that was loaded has none.
    """

    made: Mapping[str, Artifact]  # by kind
    config: Config
    model: nn.Module | None = field(default=None)
    batch: Batch | None = field(default=None)

    @property
    def graph(self) -> OpGraph:
        """The model's ops."""
        return self.made["graph"].body  # type: ignore[no-any-return]

    @property
    def profile(self) -> Profile:
        """What each op costs, unsplit."""
        return self.made["profile"].body  # type: ignore[no-any-return]

    @property
    def cluster(self) -> Cluster:
        """The devices and links it is for."""
        return self.made["cluster"].body  # type: ignore[no-any-return]

    @property
    def frontier(self) -> Frontier:
        """The sharding plans from fastest to smallest, with their proofs."""
        return self.made["frontier"].body  # type: ignore[no-any-return]

    @property
    def decided(self) -> Plan:
        """All that was chosen."""
        return self.made["plan"].body  # type: ignore[no-any-return]

    @property
    def prediction(self) -> Prediction:
        """Seconds of a step and bytes of a device."""
        return self.decided.prediction

    @property
    def ranks(self) -> int:
        """Devices: the processes that torchrun has to start."""
        return self.decided.ranks

    @property
    def program(self) -> Told:
        """The parallel program, as source."""
        return Told(self.made["module"].body)

    @property
    def digest(self) -> str:
        """Of the program and all it was made from."""
        return self.made["module"].digest

    # ---- what it says

    def explain(self, name: str | None = None, *, most: int = 10) -> Told:
        """The plan in words; of a module, parameter, tensor or op what was chosen, what else there was, why not.

        At most `most` other options are priced in full.
        """
        asked = argparse.Namespace(name=name, solve=False, seconds=5, most=most)
        know_own_ops(self.config, self.graph)
        found = explained(planned(self._priced()), self.config, asked, evaluate, get_log("explain", QUIET))
        return Told(text_of(found))

    def report(self, path: str | Path) -> None:
        """Writes the page of the plan: model, time, memory, schedule, frontier."""
        _write(Path(path), self._page())

    def _page(self) -> str:
        know_own_ops(self.config, self.graph)
        bodies = {kind: artifact.body for kind, artifact in self._priced().items()}
        return page_of(facts_of(Sources(self.title, bodies.pop("plan"), **bodies, digest=self.made["plan"].digest)))

    def _priced(self) -> dict[str, Artifact]:
        """What prices are made of; the cluster as the frontier took it."""
        found = {kind: self.made[kind] for kind in PRICED}
        return found | {"cluster": with_correction(found["cluster"], self.frontier.correction)}

    @property
    def title(self) -> str:
        """Model and cluster."""
        return f"{self.config.choices['model']} on {self.config.choices['cluster']}"

    def __repr__(self) -> str:
        own, predicted = self.decided, self.prediction
        axes = "; ".join(dict.fromkeys(axes_in_words(part.axes) for part in own.partitions))
        parts = [(part, getattr(predicted, f"{part}_seconds") * 1e3) for part in PARTS]
        rows = [
            ("plan", describe(self.graph, own)),
            ("mesh", axes),
            ("step", f"{predicted.step_seconds * 1e3:.3f} ms: " + ", ".join(f"{p} {ms:.3f}" for p, ms in parts if ms)),
            ("memory", f"{predicted.peak_bytes / 1e9:.4g} GB of {own.budget_bytes / 1e9:.4g} GB on a device"),
        ]
        lines = [f"{self.title}, {self.ranks} device{'s' * (self.ranks > 1)}"]
        lines += [f"  {name:8}{text}" for name, text in rows]
        return "\n".join([*lines, *(_beside(own) if own.alternatives else ())])

    def _repr_html_(self) -> str:
        """The page of `report`, in a frame of its own."""
        frame = "width: 100%; height: 45em; border: 1px solid #ccc"
        return f'<iframe sandbox="allow-scripts" style="{frame}" srcdoc="{html.escape(self._page())}"></iframe>'

    # ---- its file

    def save(self, path: str | Path) -> None:
        """One JSON file that `load` reads, on other machines too."""
        made = {kind: artifacts.text_of(self.made[kind]) for kind in MADE}
        content = {"format": FORMAT, "version": VERSION, "config": encode(self.config), "made": made}
        _write(Path(path), json.dumps(content, indent=1, allow_nan=False) + "\n")


def _beside(plan: Plan) -> list[str]:
    """The plan and those that lost, with the reason."""
    rows = [("this plan", plan.prediction.step_seconds, plan.prediction.peak_bytes, "")]
    rows += [(o.what, o.seconds, o.peak_bytes, o.lost) for o in plan.alternatives if o.seconds is not None]
    lines = [
        f"  {seconds * 1e3:>12.3f}{peak / 1e9:>10.4g}  {what}{f': {lost}' if lost else ''}"
        for what, seconds, peak, lost in rows
    ]
    return [f"  {'ms':>12}{'GB':>10}  ", *lines]


def load(path: str | Path) -> ModelPlan:
    """A plan that `save` wrote: whole and unchanged, or an error."""
    refuse = partial(ArtifactError, where=str(path), remedy="save the plan again")
    try:
        content = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise ArgumentError(f"{path} cannot be read: {error.strerror or error}", where="sw.load: path") from error
    except (ValueError, RecursionError) as error:
        raise refuse(f"it is not whole JSON ({error})") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT or not isinstance(content.get("made"), dict):
        raise refuse("it is not a saved plan")
    if content.get("version") != VERSION:
        raise refuse(f"it has version {content.get('version')}, this program reads version {VERSION}")
    texts = {kind: content["made"].get(kind) for kind in MADE}
    if not all(isinstance(text, str) for text in texts.values()):
        raise refuse("it is not whole")
    made = {kind: artifacts.parse(text, kind, refuse) for kind, text in texts.items()}
    try:
        config = decode(Config, content.get("config"), "config")
    except CodecError as error:
        raise refuse(f"its settings are not valid ({error})") from error
    artifacts.check_together(made.values(), {})
    know_own_ops(config, made["graph"].body)
    check_sound(made)
    return ModelPlan(made, config)


def _write(path: Path, text: str) -> None:
    try:
        write_atomic(path, text.encode())
    except OSError as error:
        raise ArgumentError(f"{path} cannot be written: {error.strerror or error}", where="path") from error


assert set(MADE) < set(KINDS)
