"""Bytes and seconds by layout, as arrays that equal layers share."""

from __future__ import annotations

import numpy as np

from shardwright.pipeline.cost.step import Workload
from shardwright.pipeline.ir.graph import TensorType
from shardwright.pipeline.ir.layout import Layout, without_gradient
from shardwright.pipeline.ir.plan import Strategy
from shardwright.pipeline.rates.compute import shard_bytes
from shardwright.pipeline.sharding.path_tables import conversion_tables
from shardwright.pipeline.sharding.paths import Paths
from shardwright.stages.solve.problem.data import Array
from shardwright.stages.solve.problem.made_once import Listed, MadeOnce

Layouts = Listed[Layout]


class Arrays:
    def __init__(self, workload: Workload) -> None:
        cluster = workload.cluster
        self.axes, self.sizes, self._compute = cluster.axes, cluster.sizes, cluster.compute
        self.micro_batches = workload.micro_batches
        self.once = MadeOnce()
        self._listed: dict[tuple[Layout, ...], Layouts] = {}

    def listed(self, layouts: tuple[Layout, ...]) -> Layouts:
        """One object for equal tuples."""
        return self._listed.setdefault(layouts, Listed(layouts))

    def paths(self, share: float = 1.0) -> Paths:
        return self.once(self._paths, share)

    def _paths(self, share: float) -> Paths:
        return Paths(self.axes, self._compute, share)

    def outputs(self, options: Listed[Strategy], position: int) -> Layouts:
        return self.once(self._outputs, options, position)

    def _outputs(self, options: Listed[Strategy], position: int) -> Layouts:
        return self.listed(tuple(s.outputs[position] for s in options))

    def inputs(self, options: Listed[Strategy], position: int) -> Layouts:
        return self.once(self._inputs, options, position)

    def _inputs(self, options: Listed[Strategy], position: int) -> Layouts:
        return self.listed(tuple(s.inputs[position] for s in options))

    def split_bytes(self, layouts: Layouts, kind: TensorType) -> Array:
        """Bytes on one rank, per layout."""
        return self.once(self._split_bytes, layouts, kind)

    def _split_bytes(self, layouts: Layouts, kind: TensorType) -> Array:
        return np.array([shard_bytes(kind, x, self.sizes) for x in layouts], dtype=float)

    def copied_bytes(self, have: Layouts, forms: Layouts, kind: TensorType) -> Array:
        """Bytes of the copy that a conversion makes; none where it does nothing in the forward pass."""
        return self.once(self._copied_bytes, have, forms, kind)

    def _copied_bytes(self, have: Layouts, forms: Layouts, kind: TensorType) -> Array:
        number: dict[Layout, int] = {}
        made, read = (
            np.array([number.setdefault(without_gradient(x), len(number)) for x in found]) for found in (have, forms)
        )
        return np.where(made[:, None] == read[None, :], 0.0, self.split_bytes(forms, kind)[None, :])

    def conversions(self, have: Layouts, forms: Layouts, kind: TensorType, grad: bool) -> tuple[Array, Array]:
        """Seconds of a step, and bytes of what is made on the way."""
        return self.once(self._conversions, have, forms, kind, grad)

    def _conversions(self, have: Layouts, forms: Layouts, kind: TensorType, grad: bool) -> tuple[Array, Array]:
        seconds, between = conversion_tables(self.paths(), have, forms, kind.shape, kind.nbytes, grad)
        return seconds * self.micro_batches, between
