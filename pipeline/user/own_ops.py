"""Ops of the user's own: their rules, from YAML or registered in the user's package, made known to a stage."""

from __future__ import annotations

from shardwright.pipeline.base.errors import ConfigError
from shardwright.pipeline.base.instantiate import locate
from shardwright.pipeline.config import Config
from shardwright.pipeline.ir.graph import OpGraph
from shardwright.pipeline.ops.dims import read_line
from shardwright.pipeline.ops.rule import plain_view
from shardwright.pipeline.ops.table import own_rules, register, rule_of, table

_OURS = ("aten", "prims", "shardwright")


def know_own_ops(config: Config, graph: OpGraph | None) -> None:
    """Registers the rules that conf/model names, and imports the user's package where the graph has ops of its own."""
    where = f"conf/model/{config.choices['model']}.yaml"
    given = config.model.ops or {}
    for target, line in given.items():
        if target in table():
            raise ConfigError("has a rule already, in pipeline/ops", where=f"{where}: ops.{target}", remedy="remove it")
        register(target, line)
    if graph is None:
        return
    if any(op.target.split(".")[0] not in _OURS for op in graph.ops):
        module = config.model.module["_target_"]
        if not callable(module):  # else its package is imported
            locate(str(module), f"{where}: module")  # defines the ops, and may register rules
        for target, line in given.items():  # the file is the last word
            register(target, line)
    own = own_rules()
    for op in graph.ops:
        rule = rule_of(op) if op.target in own else None
        try:
            if rule is not None:
                read_line(rule.line(view := plain_view(graph, op)), view)
        except ValueError as error:
            place = f"{where}: ops.{op.target}" if op.target in given else f"register({op.target!r})"
            raise ConfigError(str(error), where=place, remedy="one name per dim of every tensor") from error
