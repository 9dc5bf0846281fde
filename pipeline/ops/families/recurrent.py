"""Recurrent layers and their cells: samples are separate, time and features stay whole.

Letters: b batch, t time, i features in, o features out, l layers (each direction is one), h hidden features.
Dropout between the layers is drawn apart where the batch is split.
"""

from __future__ import annotations

from shardwright.pipeline.ops.rule import OpRule, OpView, apart, call
from shardwright.pipeline.ops.shapes import nothing_split

_ALL = tuple(range(1024))  # inputs beyond those an op has are not looked at
# Numbers that a layer keeps for backward of each hidden feature at each step: gates and states.
_KEPT = {"lstm": 7, "gru": 7, "rnn_tanh": 1, "rnn_relu": 1}


def _line(view: OpView) -> str:
    """(input, states, weights, has_biases, num_layers, dropout, train, bidirectional, batch_first), or of a cell, which
    is one step, (input, states, weights)."""
    is_cell, states = _is_cell(view), _states(view)
    if len(view.inputs[0].shape) != (2 if is_cell else 3):
        return nothing_split(view)
    weights = [" ".join(f"w{n}d{i}^" for i in range(len(w.shape))) for n, w in enumerate(view.inputs[1 + states :])]
    if is_cell:
        hidden = [f"b h{n}^" for n in range(states)]
        return f"{', '.join(['b i^', *hidden, *weights])} -> {', '.join(hidden)}"
    given, made = (f"b t^ {x}^" if view.constant(8, "batch_first", False) else f"t^ b {x}^" for x in "io")
    hidden = [f"l^ b h{n}^" for n in range(states)]
    return f"{', '.join([given, *hidden, *weights])} -> {', '.join([made, *hidden])}"


def _kind(view: OpView) -> str:
    return view.op.target.split(".")[1].removesuffix("_cell")


def _is_cell(view: OpView) -> bool:
    return view.op.target.endswith("_cell.default")


def _states(view: OpView) -> int:
    return 2 if _kind(view) == "lstm" else 1


def _draws(view: OpView, letter: str) -> str:
    """Dropout lies between layers, in training."""
    layers, dropout, train = (view.constant(*at) for at in ((4, "num_layers", 1), (5, "dropout", 0.0), (6, "train", 0)))
    return "apart" if layers > 1 and dropout and train else ""


def _steps(view: OpView) -> int:
    """Rows that meet each matrix: samples, at every moment."""
    return view.inputs[0].numel // max(view.inputs[0].shape[-1], 1)


def _flops(view: OpView) -> float:
    """The matrices of all layers and directions."""
    matrices = (w for w in view.inputs[1 + _states(view) :] if len(w.shape) == 2)
    return 2.0 * _steps(view) * sum(w.numel for w in matrices)


def _kept(view: OpView) -> int:
    """Of every layer and direction, which is a row of the last states; and what goes from layer to layer."""
    state = view.outputs[-1]
    own = _KEPT[_kind(view)] * state.shape[-1]
    itemsize = state.nbytes // max(state.numel, 1)
    if len(state.shape) < 3:
        return _steps(view) * own * itemsize
    made = view.outputs[1].shape[-1]
    own += made if made != state.shape[-1] else 0
    between = (view.constant(4, "num_layers", 1) - 1) * view.output.shape[-1] * (2 if _draws(view, "b") else 1)
    return _steps(view) * (state.shape[0] * own + int(between)) * itemsize


def _rules(name: str) -> tuple[OpRule, OpRule]:
    """Of a layer and of its cell."""
    layer = OpRule(
        f"aten.{name}.input", _line, apart(call(f"torch.{name}")), saves_inputs=_ALL, extra_saved=_kept, flops=_flops,
        split_body=_draws, random=True,
    )  # fmt: skip
    cell = call(f"torch.{name}_cell")
    return layer, OpRule(f"aten.{name}_cell.default", _line, cell, saves_inputs=_ALL, extra_saved=_kept, flops=_flops)


RULES = [rule for name in _KEPT for rule in _rules(name)]
