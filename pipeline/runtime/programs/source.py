"""A generated program, loaded from its source: as it trains, or as its model is when it evaluates.

A program is written for training. The lines that `model.eval()` would change are these:

| in the program                                        | evaluating                                  |
|-------------------------------------------------------|---------------------------------------------|
| `F.dropout(x, p, True)`, other dropouts, `F.rrelu`    | the same with `False`                       |
| `torch.lstm(.., True, ..)` and other layers of RNNs   | the same with `False`                       |
| `F.scaled_dot_product_attention(.., dropout)`         | no dropout                                  |
| `drawn_apart(lambda: <one of these>, axis=..)`        | what it would draw, which draws nothing now |
| `batch_norm(.., True, ..)` with running statistics    | by these                                    |
| `kept(f, x)`                                          | `f(x)`: there is no backward pass           |

What else draws random numbers (`torch.rand` in the model's own code) has no evaluating form that is known here.
"""

from __future__ import annotations

import ast
import sys
from itertools import count
from pathlib import Path
from types import ModuleType

from shardwright.pipeline.runtime.context import setting, step

_NUMBERS = count()
# The place and the name of the argument that says whether the model is in training.
_TRAINING = {
    **{f"F.{name}": (2, "training") for name in ("dropout", "alpha_dropout", "feature_alpha_dropout")},
    **{
        f"{space}.{name}": (2, "train")
        for space in ("torch", "aten")
        for name in ("feature_dropout", "alpha_dropout", "feature_alpha_dropout")
    },
    **{f"torch.{name}": (6, "train") for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
    **{f"{space}.rrelu": (3, "training") for space in ("F", "torch", "aten")},
}
_RANDOM = {
    *("rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "randperm", "bernoulli", "multinomial"),
    *("normal", "uniform", "exponential", "poisson", "binomial", "native_dropout", "rrelu_with_noise", "random"),
    *("log_normal", "cauchy", "geometric"),
}


class CannotEvaluate(Exception):
    """A line at `where` draws numbers, and what it does instead when the model evaluates is not known."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__(what)
        self.where = where


def load_program(
    path: str, *, compiles: bool = True, evaluates: bool = False, source: bytes | None = None
) -> ModuleType:
    """Always from its source: no bytecode beside it under runs/ that could be older than the plan.

    `evaluates`: as its model is after `model.eval()`, not to be trained with. `source`: what was read of the file.
    """
    module = ModuleType(f"shardwright_program_{next(_NUMBERS)}")
    module.__file__ = path
    sys.modules[module.__name__] = module  # where torch.compile looks for what a block's functions call
    source = Path(path).read_bytes() if source is None else source
    written = ast.fix_missing_locations(_Evaluating(path).visit(ast.parse(source, path))) if evaluates else source
    with setting(step, as_written=step.as_written or evaluates or not compiles):
        exec(compile(written, path, "exec", dont_inherit=True), module.__dict__)
    return module


class _Evaluating(ast.NodeTransformer):
    def __init__(self, path: str) -> None:
        self.path = path

    def visit_Call(self, call: ast.Call) -> ast.expr:
        if _name(call.func) == "kept":
            call = ast.copy_location(ast.Call(call.args[0], call.args[1:], call.keywords), call)
        self.generic_visit(call)
        name = _name(call.func)
        if name == "drawn_apart":  # what it draws draws no longer, or it was refused
            draw = call.args[0]
            return draw.body if isinstance(draw, ast.Lambda) else ast.copy_location(ast.Call(draw, [], []), call)
        if name in _TRAINING:
            _put(call, *_TRAINING[name], value=False)
        elif name == "F.scaled_dot_product_attention":
            _put(call, 4, "dropout_p", value=0.0)
        elif name == "batch_norm" and not all(isinstance(a, ast.Constant) and a.value is None for a in call.args[3:5]):
            _put(call, 5, "training", value=False)
        elif "." in name and name.rpartition(".")[2].removesuffix("_") in _RANDOM:  # of torch, or a tensor's method
            what = f"the model draws numbers with {name}, and what it does instead when it evaluates is not known"
            raise CannotEvaluate(what, f"{self.path}:{call.lineno}")
        return call


def _name(function: ast.expr) -> str:
    """`F.dropout`, `batch_norm`, and `aten.rrelu` of `torch.ops.aten.rrelu.default`."""
    whole = ast.unparse(function) if isinstance(function, ast.Name | ast.Attribute) else ""
    return "aten." + whole.split(".")[3] if whole.startswith("torch.ops.aten.") else whole


def _put(call: ast.Call, place: int, keyword: str, value: bool | float) -> None:
    if len(call.args) > place:
        call.args[place] = ast.Constant(value)
    else:
        others = [named for named in call.keywords if named.arg != keyword]
        call.keywords = [*others, ast.keyword(keyword, ast.Constant(value))]
