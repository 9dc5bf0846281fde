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


def compiles_attention_in_float64() -> bool:
    """Torch 2.11 takes what attention keeps on a CPU for float32, and its kernels then refuse it."""
    q = torch.empty(1, 1, 2, 2, dtype=torch.float64, device="meta")
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)[1].dtype == torch.float64


def _as_graph(graph: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
    return graph.forward
