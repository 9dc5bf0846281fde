"""A C++ compiler that is there and cannot build torch's headers: blocks are compiled with calls from Python instead."""

from __future__ import annotations

import logging
from pathlib import Path
from subprocess import CalledProcessError

import pytest
import torch
from torch import Tensor
from torch._inductor import config as inductor
from torch._inductor.exc import CppCompileError, InductorError, InvalidCxxCompiler

from shardwright.pipeline.runtime import compiled
from shardwright.pipeline.runtime.compiler import host_calls
from shardwright.stages.train import loop

TOO_OLD = """#!/bin/sh
if grep -qs -e csrc/inductor/cpp_wrapper -- "$@"; then
    echo "tried" >> "$0.log"
    echo "In file included from here:"
    echo "common.h:3:10: fatal error: optional: No such file or directory"
    exit 1
fi
exec g++ "$@"
"""


@pytest.fixture(autouse=True)
def undecided(monkeypatch):
    monkeypatch.setattr(host_calls._CppCalls, "failure", "")
    monkeypatch.delenv("CXX", raising=False)


@pytest.fixture
def too_old(tmp_path, monkeypatch):
    """A compiler that fails at what includes torch's headers for calls of kernels; inputs count as those of a GPU."""
    path = tmp_path / "g++-4"
    path.write_text(TOO_OLD)
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    monkeypatch.setattr(host_calls, "on_card", lambda inputs: True)
    torch._dynamo.reset()
    with inductor.patch({"cpp.cxx": (None, str(path))}):  # torch has read CXX already
        yield path


def first(x: Tensor, w: Tensor) -> Tensor:
    return x @ w  # called, not compiled: nothing but the calls is for the compiler


def second(x: Tensor, w: Tensor) -> Tensor:
    return w @ x


@pytest.mark.filterwarnings("ignore")  # torch's own, when it compiles
def test_blocks_are_compiled_all_the_same_and_it_is_said_once(too_old: Path, caplog):
    x, w = (torch.randn(3, 3, requires_grad=True) for _ in range(2))
    with caplog.at_level(logging.WARNING, "shardwright"):
        for block in (first, second):
            ours, plain = compiled(block, 1.0)(x, w), block(x, w)
            torch.testing.assert_close(ours, plain)
            wanted = torch.autograd.grad(plain.sum(), (x, w))
            torch.testing.assert_close(torch.autograd.grad(ours.sum(), (x, w)), wanted)
    assert Path(f"{too_old}.log").read_text() == "tried\n"  # for the first block, and never again
    (line,) = [record.getMessage() for record in caplog.records if record.name == "shardwright.runtime"]
    assert line == host_calls.why_python() and "\n" not in line
    assert line.startswith(f"{too_old} cannot build the calls of kernels (common.h:3:10: fatal error: optional:")
    assert "from Python" in line and "CXX" in line


@pytest.mark.filterwarnings("ignore")
def test_backward_is_compiled_with_forward_while_it_is_known_how_calls_are_made(monkeypatch):
    def late(*_: object, **__: object) -> None:
        raise AssertionError("compiled when it ran")

    torch._dynamo.reset()
    x, w = (torch.randn(3, 3, requires_grad=True) for _ in range(2))
    ours = compiled(first, 1.0)(x, w)
    monkeypatch.setattr("torch._inductor.compile_fx._compile_fx_inner", late)
    torch.testing.assert_close(torch.autograd.grad(ours.sum(), (x, w)), torch.autograd.grad(first(x, w).sum(), (x, w)))


@pytest.mark.filterwarnings("ignore")
def test_autograd_knows_the_card_before_calls_in_cpp_are_made_from_its_thread(monkeypatch):
    order = []
    monkeypatch.setattr(host_calls, "in_cpp", lambda inputs: True)
    monkeypatch.setattr(host_calls, "wake_backward", lambda inputs: order.append("woken"))
    monkeypatch.setattr(host_calls, "or_from_python", lambda one, other: (order.append("built"), other())[1])
    torch._dynamo.reset()
    compiled(first, 1.0)(*(torch.randn(3, 3, requires_grad=True) for _ in range(2)))
    assert order == ["woken", "built"]


def fails(error: Exception):
    def attempt() -> str:
        raise error

    return attempt


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (InductorError(CppCompileError(["g++"], "note\nx.h: error: no concepts\n"), None), "(x.h: error: no concepts)"),
        (InductorError(InvalidCxxCompiler(), None), "(No working C++ compiler found in"),
        (FileNotFoundError(2, "No such file or directory", "openssl"), "'openssl')"),
        (ImportError("libstdc++.so.6: version `GLIBCXX_3.4.32' not found"), "GLIBCXX_3.4.32"),
        (CalledProcessError(1, ["g++"]), "non-zero exit status 1"),
        (CppCompileError(["g++"], ""), "(CppCompileError)"),
    ],
)
def test_failures_of_the_compiler(error, told):
    assert host_calls.or_from_python(fails(error), lambda: "from python") == "from python"
    assert told in host_calls.why_python()


def test_what_is_not_for_the_compiler_stays_an_error():
    with pytest.raises(InductorError, match="a bug"):
        host_calls.or_from_python(fails(InductorError(ValueError("a bug"), None)), lambda: "from python")
    with pytest.raises(OSError, match="disk is full"):
        host_calls.or_from_python(fails(OSError("disk is full")), fails(OSError("disk is full")))
    assert host_calls.why_python() == ""


def test_after_a_failure_the_compiler_is_not_asked(monkeypatch):
    monkeypatch.setattr(host_calls, "on_card", lambda inputs: True)
    monkeypatch.setattr(host_calls.shutil, "which", lambda name: f"/bin/{name}")
    assert host_calls.in_cpp([])
    assert host_calls.or_from_python(lambda: "c++", lambda: "from python") == "c++" and host_calls.in_cpp([])
    host_calls.or_from_python(fails(ImportError("no")), lambda: "from python")
    assert not host_calls.in_cpp([])
    monkeypatch.setattr(host_calls._CppCalls, "failure", "")
    monkeypatch.setattr(host_calls.shutil, "which", lambda name: None)
    assert not host_calls.in_cpp([])


def test_training_tells_it_of_any_rank(monkeypatch):
    """Ranks write to a log that nobody sees when all goes well."""
    monkeypatch.setattr(loop, "gathered", lambda own: ["", own, own])
    assert loop._python_calls() == []
    monkeypatch.setattr(host_calls._CppCalls, "failure", "g++ cannot")
    assert loop._python_calls() == [{"python_calls": "g++ cannot", "failed": 2, "ranks": 3}]
