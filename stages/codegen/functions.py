"""Functions of the generated module: blocks of equal text, in whichever class, are one."""

from __future__ import annotations

import string
from dataclasses import dataclass

from stages.codegen.block import RESERVED, FunctionBody, free_name, statement
from stages.codegen.part import Caller, Written

# What else a module has by name.
GLOBALS = {"Program", "Tensor", "ONEDNN", "CUDA_GRAPHS", "MESH", "MICRO_BATCHES", "SLICES", "INPUTS", "PARAMETERS"}
OF_PIPELINES = {"SCHEDULE", "DEVICES", "SENT", "TIED", "PARTITIONS", "SMALLER"}


@dataclass(frozen=True)
class Functions:
    names: dict[str, str]  # text of a block -> the function's name
    texts: list[str]  # definitions; then how they are compiled, where they are


def functions_of(parts: list[Written]) -> Functions:
    blocks = [block for part in parts for block in part.blocks]
    variables = set().union(*(part.variables for part in parts))
    names = _names(blocks, variables | {part.part.name for part in parts})
    callers = [caller for part in parts for caller in part.callers(names)]
    texts = [_text(name, block) for name, block in _distinct(blocks, names).items()]
    return Functions(names, [*texts, *_compiled(callers)])


def _names(blocks: list[FunctionBody], variables: set[str]) -> dict[str, str]:
    """Block text -> name: the module's, without numbers; with a letter where one module has several functions."""
    taken = RESERVED | variables | GLOBALS | OF_PIPELINES
    by_base: dict[str, list[str]] = {}
    for block in blocks:
        base = "_".join(part for part in block.prefix.split(".") if part and not part.isdigit()) or "model"
        base = f"{base}_block" if base in taken else base
        texts = by_base.setdefault(base, [])
        if block.text not in texts:
            texts.append(block.text)
    names = {}
    for base, texts in by_base.items():
        for number, text in enumerate(texts):
            names[text] = free_name(base if len(texts) == 1 else f"{base}_{_letters(number)}", taken)
    return names


def _letters(number: int) -> str:
    letter = string.ascii_lowercase[number % 26]
    return letter if number < 26 else _letters(number // 26 - 1) + letter


def _distinct(blocks: list[FunctionBody], functions: dict[str, str]) -> dict[str, FunctionBody]:
    found: dict[str, FunctionBody] = {}
    for block in blocks:
        found.setdefault(functions[block.text], block)
    return found


def _compiled(callers: list[Caller]) -> list[str]:
    """Each function as it is compiled: in as many ways as it is called."""
    ways = {c.called: c.compiled for c in callers if c.leaf.compiled is not None}
    told = [
        "# Compiled when first called. Of what a block has for backward it keeps this part, the rest is made again."
    ]
    if any(c.leaf.after_relu for c in callers):
        told += ["# The gradient of a relu's result that one block gives to the next is masked by the latter."]
    lines = [line for name, text in ways.items() for line in statement(f"{name} = {text}")]
    return ["\n".join([*told, *lines])] if ways else []


def _text(name: str, block: FunctionBody) -> str:
    body = (f"    {line}" for line in (*block.lines, f"return {', '.join(block.result)}"))
    return "\n".join([*statement(f"def {name}{block.signature}:"), *body])
