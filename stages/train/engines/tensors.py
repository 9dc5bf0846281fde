"""One rank's tensors of the user's module: drawn by its constructor or read from a file, and written to one.

Each is drawn, read or brought together when its turn comes: no rank ever holds the whole module, but one alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch import Tensor, nn

from pipeline.ir.layout import Layout, replicated
from pipeline.ir.names import look_up
from pipeline.runtime.programs.mesh import axis_of
from pipeline.runtime.programs.parameters import piece_of, runs_of, whole_of, with_padding
from pipeline.runtime.step.buckets import Row
from pipeline.runtime.step.initial_values import BuiltModule, Initial
from pipeline.user.weights import Shape, match_names, open_weights, read_piece, write_weights
from stages.train.ranks.watchdog import Beat, unwatched, with_beats


@dataclass(frozen=True)
class Stored:
    """How the module's tensors lie on the mesh: the rows of a program's PARAMETERS."""

    table: Mapping[str, Row]
    axes: list[str]

    def row(self, name: str) -> Row:
        """Of a parameter, its gradient and the optimizer's state; nothing for one that is not trained."""
        return look_up(self.table, name) or ("", "", "")

    def splits_state(self, name: str) -> bool:
        """Whether the optimizer is given a shard of a parameter."""
        state = self.row(name)[2]
        return bool(state) and any(one.kind == "S" for one in Layout.parse(state).states)

    def pads(self, name: str, shape: Shape) -> bool:
        """Whether a parameter or what the optimizer is given of it lies in uneven pieces."""
        sizes = tuple(axis_of(axis).size for axis in self.axes)
        layouts = (Layout.parse(text) for text in (self.row(name)[0], self.row(name)[2]) if text)
        return any(layout.uneven(shape, sizes) for layout in layouts)

    def is_trained(self, name: str, tensor: Tensor) -> bool:
        return bool(self.row(name)[0]) and isinstance(tensor, nn.Parameter) and tensor.requires_grad

    def layout(self, name: str, tensor: Tensor) -> Layout:
        return Layout.parse(self.row(name)[0]) if self.is_trained(name, tensor) else replicated(len(self.axes))


class OwnTensors:
    """By the names under which the module lists its buffers and parameters: tied ones once.

    `kept` puts a piece where it is trained, in the type it is trained in. `wanted` are the names that this rank has a
    piece of, where it has not one of all.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        stored: Stored,
        kept: Callable[[Tensor], Tensor],
        init_from: str | None,
        where: str,
        wanted: Callable[[str], bool] = lambda name: True,
    ) -> None:
        self.stored = stored
        initial = Initial(build) if dist.get_world_size() > 1 else BuiltModule(build)
        self.held_whole = initial.whole  # why this rank had to hold the whole module, or nothing
        named = {**dict(initial.module.named_buffers()), **dict(initial.module.named_parameters())}
        self.shapes: dict[str, Shape] = {name: tuple(tensor.shape) for name, tensor in named.items()}
        self.dtypes = {name: tensor.dtype for name, tensor in named.items()}  # before `kept`
        self.state = state_names(initial.module, named)
        named = {name: tensor for name, tensor in named.items() if wanted(name)}
        self.tensors: dict[str, Tensor] = dict.fromkeys(named)  # in this order; each is there when its piece is
        for name, piece in self._pieces(initial, named, init_from, where):
            own = kept(piece)
            self.tensors[name] = nn.Parameter(own) if stored.is_trained(name, named[name]) else own

    def _pieces(
        self, initial: Initial | BuiltModule, named: Mapping[str, Tensor], init_from: str | None, where: str
    ) -> Iterator[tuple[str, Tensor]]:
        if init_from:
            yield from self._read(Path(init_from), named, where)
        left = named.keys() - self.state.values() if init_from else named.keys()
        yield from self._drawn(initial, {name: tensor for name, tensor in named.items() if name in left})

    def _drawn(self, initial: Initial | BuiltModule, named: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for (name, tensor), value in zip(named.items(), initial.values(named.values()), strict=True):
            yield name, piece_of(value, self.stored.layout(name, tensor), self.stored.axes)

    def _read(self, path: Path, named: Mapping[str, Tensor], where: str) -> Iterator[tuple[str, Tensor]]:
        """All that the module's state dict has, in the module's types."""
        weights = open_weights(path, where)
        found = match_names(weights, self.state, self.shapes, where)
        for name, key in ((name, found[name]) for name in found if name in named):
            lies = self.shapes[name], self.stored.layout(name, named[name]), self.stored.axes
            piece = read_piece(weights, key, runs_of(*lies)).to(named[name].dtype)
            yield name, with_padding(piece, *lies)

    def export(self, path: Path, beat: Beat = unwatched) -> None:
        """A file of the whole tensors by the names of the module's state dict; all ranks do this together."""
        specs = {key: (self.tensors[name].dtype, self.shapes[name]) for key, name in self.state.items()}
        whole = with_beats(map(self.whole, self.state.values()), beat)
        if dist.get_rank() == 0:
            write_weights(path, specs, whole, {"format": "pt"})
        else:
            for _ in whole:
                pass

    def whole(self, name: str) -> Tensor:
        """On every rank of the mesh; all of them ask for it together."""
        tensor = self.tensors[name]
        return whole_of(tensor, self.shapes[name], self.stored.layout(name, tensor), self.stored.axes)


def state_names(module: nn.Module, named: Mapping[str, Tensor]) -> dict[str, str]:
    """Name in the state dict -> the name under which the module lists the tensor."""
    own = {id(tensor): name for name, tensor in named.items()}
    return {key: own[id(value)] for key, value in module.state_dict(keep_vars=True).items() if id(value) in own}
