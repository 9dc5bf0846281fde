"""Compiled blocks without their kernels: what torch would write kernels for is run as it is, op by op."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._functorch import config as functorch


@contextmanager
def without_kernels() -> Iterator[None]:
    """Blocks compiled meanwhile are traced, decomposed and parted into forward and backward, and then run as graphs.

    The C++ of a kernel takes seconds to compile. Whether kernels compute what the graphs do is torch's affair.
    """
    from torch._inductor import compile_fx  # slow to import, and it warns

    torch._dynamo.reset()
    as_graphs = partial(compile_fx.compile_fx, inner_compile=_as_graph)
    with mock.patch.object(compile_fx, "compile_fx", as_graphs), functorch.patch(enable_autograd_cache=False):
        yield
    torch._dynamo.reset()


def _as_graph(graph: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
    return graph.forward
